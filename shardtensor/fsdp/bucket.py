"""`GradientBucket`: the gradients of one group, or of small ones that are reduced together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs
import torch

from shardtensor.comm.group import Pending
from shardtensor.fsdp.buffers import CopyOrder
from shardtensor.fsdp.param_group import ParamGroup


@attrs.frozen(eq=False)
class InputBuffer:
    """Where gradients are packed: each group's, this rank's ranges of the sum, parameters' parts, what is between.

    Groups that are coalesced are packed end to end, and their ranges then laid side by side in what is sent.
    """

    param_groups: list[torch.Tensor]
    sent: torch.Tensor
    own: torch.Tensor
    own_parts: Sequence[torch.Tensor]
    parts: list[torch.Tensor]
    padding: list[torch.Tensor]
    order: CopyOrder | None


class GradientBucket:
    """Groups whose gradients are summed in one message, and are as good as one: of one group, and of one dtype.

    Args:
        param_groups: in the order in which they are reduced.
    """

    def __init__(self, param_groups: Sequence[ParamGroup]) -> None:
        self.param_groups = tuple(param_groups)
        self.numbers = tuple(group.position for group in param_groups)
        self._chunks = [group.ranges.chunk for group in param_groups]

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that its gradients are packed in."""
        packed = sum(group.gradient_bytes for group in self.param_groups)
        return packed if len(self.param_groups) == 1 else 2 * packed

    @property
    def apart_bytes(self) -> int:
        """Bytes behind those that its sum takes; NCCL alone can reduce in place."""
        return (
            0
            if self.param_groups[0].device.type == "cuda"
            else sum(self._chunks) * self.param_groups[0].reduce_dtype.itemsize
        )

    def are_there(self, is_without: Callable[[int], bool]) -> bool:
        """Whether nothing is waited for.

        Args:
            is_without: whether the group of a number has no gradient here, and none is to come.
        """
        return all(
            [group.held is not None or not group.syncs or is_without(group.position) for group in self.param_groups]
        )

    def input_buffer_in(self, memory: torch.Tensor) -> InputBuffer:
        """Where gradients can be packed in `memory`, bytes."""
        first = self.param_groups[0]
        count = sum(group.gradient_bytes for group in self.param_groups)
        packed = memory[:count].view(first.reduce_dtype)
        wholes = list(packed.split([group.ranges.total for group in self.param_groups]))
        sent, order = packed, None
        if len(wholes) > 1:
            sent = memory[count : 2 * count].view(first.reduce_dtype)
            order = CopyOrder(self._chunks, packed, sent)
        own = sent.narrow(0, first.index * sum(self._chunks), sum(self._chunks))
        if self.apart_bytes:
            own = memory[self.size_bytes :][: self.apart_bytes].view(first.reduce_dtype)
        cuts = [group.cut_up(whole) for group, whole in zip(self.param_groups, wholes, strict=True)]
        return InputBuffer(
            param_groups=wholes,
            sent=sent,
            own=own,
            own_parts=own.split(self._chunks),
            parts=[part for parts, _ in cuts for part in parts],
            padding=[gap for _, gaps in cuts for gap in gaps],
            order=order,
        )

    def pack(self, input_buffer: InputBuffer) -> list[list[bool]]:
        """Lay the gradients that are held where they are sent from, zeros for parameters that have none.

        Returns:
            for each group, which of its parameters have one.
        """
        held = [group.take_held() for group in self.param_groups]
        used = [[grad is not None for grad in grads] for grads in held]
        grads = [grad for of_flat in held for grad in of_flat]
        parts, zeros = input_buffer.parts, input_buffer.padding
        if not all(map(all, used)):
            zeros = zeros + [part for part, grad in zip(parts, grads, strict=True) if grad is None]
            parts = [part for part, grad in zip(parts, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if zeros:
            torch._foreach_zero_(zeros)
        if parts:
            torch._foreach_copy_(parts, grads)  # type: ignore[arg-type]
        for group, whole in zip(self.param_groups, input_buffer.param_groups, strict=True):
            if group.prescale:
                whole.mul_(group.prescale)
        if input_buffer.order is not None:
            input_buffer.order.copy_in()
        return used

    def reduce(self, input_buffer: InputBuffer) -> Pending:
        """Start to sum packed gradients over the ranks of one copy: this rank's ranges of them."""
        return self.param_groups[0].data_mesh.reduce.reduce_scatter_into(input_buffer.own, input_buffer.sent)

    def receive(self, input_buffer: InputBuffer, used: list[list[bool]]) -> list[torch.Tensor | None]:
        """Take this rank's ranges of the sum as `Flat.receive` does; what is plain, in one call."""
        param_groups, scale = self.param_groups, self.param_groups[0].scale
        if len(param_groups) > 1 and all([group.scale == scale and group.takes_as_is for group in param_groups]):
            averaged = input_buffer.own * scale
            return [part.data for part in averaged.split(self._chunks)]  # each the base of its parameters' gradients
        return [
            group.receive(part, mask)
            for group, part, mask in zip(param_groups, input_buffer.own_parts, used, strict=True)
        ]


def buckets_of(param_groups: Iterable[ParamGroup]) -> list[GradientBucket]:
    """Put groups that are coalesced into one bucket, which is sent when the last of them is there."""
    companies: dict[int, list[ParamGroup]] = {}
    for group in param_groups:
        key = id(group if group.coalesced is None else group.coalesced)
        before = companies.pop(key, [])
        companies[key] = [*before, group]
    return [GradientBucket(members) for members in companies.values()]
