"""`OffloadedParamGroup`: parameters whose shards and gradients lie on the CPU, while modules compute on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtensor.comm.group import Pending
from shardtensor.fsdp.data_mesh import DataMesh
from shardtensor.fsdp.param_group import ParamGroup
from shardtensor.fsdp.param_info import ParamInfo
from shardtensor.fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy


class OffloadedParamGroup(ParamGroup):
    """A group whose shard is copied to the device to be gathered, and whose summed gradient is copied back."""

    is_offloaded = True

    def __init__(
        self,
        params_info: Sequence[ParamInfo],
        data_mesh: DataMesh,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        pin: bool,
    ) -> None:
        self._pin = pin
        super().__init__(params_info, data_mesh, device, policy)

    def _empty_shard(self) -> torch.Tensor:
        return torch.zeros(self.ranges.chunk, dtype=self.dtype, pin_memory=self._pin)

    def gather(self) -> Pending:
        assert self.whole is not None, "a buffer is assigned before anything is gathered"
        self._own.copy_(self.shard, non_blocking=self._pin)
        return self.data_mesh.shard.all_gather_into(self.whole, self._own)

    def _accept(self, summed: torch.Tensor, scale: float) -> torch.Tensor:
        averaged = summed.mul_(scale).to(self.grad_dtype)
        grad = self._kept_gradient()
        if grad is not None:
            return grad.add_(averaged.cpu())
        grad = torch.zeros(self.ranges.chunk, dtype=self.grad_dtype, pin_memory=self._pin)
        grad.copy_(averaged, non_blocking=self._pin)
        return grad


def param_group_of(
    params_info: Sequence[ParamInfo],
    data_mesh: DataMesh,
    device: torch.device,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
) -> ParamGroup:
    """The group of these parameters; on the CPU there is nothing to offload."""
    if isinstance(offload_policy, CPUOffloadPolicy) and device.type != "cpu":
        return OffloadedParamGroup(params_info, data_mesh, device, mp_policy, offload_policy.pin_memory)
    return ParamGroup(params_info, data_mesh, device, mp_policy)
