"""`OffloadedFlat`: parameters whose shards and gradients lie on the CPU, while modules compute on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtensor.comm.group import Pending
from shardtensor.fsdp.domain import Domain
from shardtensor.fsdp.entry import Entry
from shardtensor.fsdp.flat import Flat
from shardtensor.fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy


class OffloadedFlat(Flat):
    """A flat whose shard is copied to the device to be gathered, and whose summed gradient is copied back."""

    is_offloaded = True

    def __init__(
        self, entries: Sequence[Entry], domain: Domain, device: torch.device, policy: MixedPrecisionPolicy, pin: bool
    ) -> None:
        self._pin = pin
        super().__init__(entries, domain, device, policy)

    def _empty_shard(self) -> torch.Tensor:
        return torch.zeros(self.ranges.chunk, dtype=self.dtype, pin_memory=self._pin)

    def gather(self) -> Pending:
        assert self.whole is not None, "memory is lent before anything is gathered"
        self._own.copy_(self.shard, non_blocking=self._pin)
        return self.domain.shard.all_gather_into(self.whole, self._own)

    def is_as_gathered(self) -> bool:
        return torch.equal(self._own.cpu(), self.shard.to(self.compute_dtype))

    def _accept(self, summed: torch.Tensor, scale: float) -> torch.Tensor:
        averaged = summed.mul_(scale).to(self.grad_dtype)
        grad = self._kept_gradient()
        if grad is not None:
            return grad.add_(averaged.cpu())
        grad = torch.zeros(self.ranges.chunk, dtype=self.grad_dtype, pin_memory=self._pin)
        grad.copy_(averaged, non_blocking=self._pin)
        return grad


def flat_of(
    entries: Sequence[Entry],
    domain: Domain,
    device: torch.device,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
) -> Flat:
    """The flat of these parameters; on the CPU there is nothing to offload."""
    if isinstance(offload_policy, CPUOffloadPolicy) and device.type != "cpu":
        return OffloadedFlat(entries, domain, device, mp_policy, offload_policy.pin_memory)
    return Flat(entries, domain, device, mp_policy)
