"""`Load`: the gradients of one flat, or of small ones that travel together, from packing to their sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs
import torch

from shardtensor.comm.group import Pending
from shardtensor.fsdp.flat import Flat
from shardtensor.fsdp.side_by_side import SideBySide


@attrs.frozen(eq=False)
class Packing:
    """Where gradients are packed: each flat's, this rank's ranges of the sum, parameters' parts, what is between.

    Flats that travel together are packed end to end, and their ranges then laid side by side in what is sent.
    """

    flats: list[torch.Tensor]
    sent: torch.Tensor
    own: torch.Tensor
    own_parts: Sequence[torch.Tensor]
    parts: list[torch.Tensor]
    padding: list[torch.Tensor]
    order: SideBySide | None


class Load:
    """Flats whose gradients are summed in one message, and are as good as one: of one group, and of one dtype.

    Args:
        flats: in the order in which they are reduced.
    """

    def __init__(self, flats: Sequence[Flat]) -> None:
        self.flats = tuple(flats)
        self.numbers = tuple(flat.position for flat in flats)
        self._chunks = [flat.ranges.chunk for flat in flats]

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that its gradients are packed in."""
        packed = sum(flat.gradient_bytes for flat in self.flats)
        return packed if len(self.flats) == 1 else 2 * packed

    @property
    def apart_bytes(self) -> int:
        """Bytes behind those that its sum takes; NCCL alone can reduce in place."""
        return 0 if self.flats[0].device.type == "cuda" else sum(self._chunks) * self.flats[0].reduce_dtype.itemsize

    def are_there(self, is_without: Callable[[int], bool]) -> bool:
        """Whether nothing is waited for.

        Args:
            is_without: whether the flat of a number has no gradient here, and none is to come.
        """
        return all([flat.held is not None or not flat.syncs or is_without(flat.position) for flat in self.flats])

    def packing_in(self, memory: torch.Tensor) -> Packing:
        """Where gradients can be packed in `memory`, bytes."""
        first = self.flats[0]
        count = sum(flat.gradient_bytes for flat in self.flats)
        packed = memory[:count].view(first.reduce_dtype)
        wholes = list(packed.split([flat.ranges.total for flat in self.flats]))
        sent, order = packed, None
        if len(wholes) > 1:
            sent = memory[count : 2 * count].view(first.reduce_dtype)
            order = SideBySide(self._chunks, packed, sent)
        own = sent.narrow(0, first.index * sum(self._chunks), sum(self._chunks))
        if self.apart_bytes:
            own = memory[self.size_bytes :][: self.apart_bytes].view(first.reduce_dtype)
        cuts = [flat.cut_up(whole) for flat, whole in zip(self.flats, wholes, strict=True)]
        return Packing(
            flats=wholes,
            sent=sent,
            own=own,
            own_parts=own.split(self._chunks),
            parts=[part for parts, _ in cuts for part in parts],
            padding=[gap for _, gaps in cuts for gap in gaps],
            order=order,
        )

    def pack(self, packing: Packing) -> list[list[bool]]:
        """Lay the gradients that are held where they are sent from, zeros for parameters that have none.

        Returns:
            for each flat, which of its parameters have one.
        """
        held = [flat.let_go() for flat in self.flats]
        used = [[grad is not None for grad in grads] for grads in held]
        grads = [grad for of_flat in held for grad in of_flat]
        parts, zeros = packing.parts, packing.padding
        if not all(map(all, used)):
            zeros = zeros + [part for part, grad in zip(parts, grads, strict=True) if grad is None]
            parts = [part for part, grad in zip(parts, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if zeros:
            torch._foreach_zero_(zeros)
        if parts:
            torch._foreach_copy_(parts, grads)  # type: ignore[arg-type]
        for flat, whole in zip(self.flats, packing.flats, strict=True):
            if flat.prescale:
                whole.mul_(flat.prescale)
        if packing.order is not None:
            packing.order.collect()
        return used

    def reduce(self, packing: Packing) -> Pending:
        """Start to sum packed gradients over the ranks of one copy: this rank's ranges of them."""
        return self.flats[0].domain.reduce.reduce_scatter_into(packing.own, packing.sent)

    def receive(self, packing: Packing, used: list[list[bool]]) -> list[torch.Tensor | None]:
        """Take this rank's ranges of the sum as `Flat.receive` does; what is plain, in one call."""
        flats, scale = self.flats, self.flats[0].scale
        if len(flats) > 1 and all([flat.scale == scale and flat.takes_as_is for flat in flats]):
            averaged = packing.own * scale
            return [part.data for part in averaged.split(self._chunks)]  # each the base of its parameters' gradients
        return [flat.receive(part, mask) for flat, part, mask in zip(flats, packing.own_parts, used, strict=True)]


def loads_of(flats: Iterable[Flat]) -> list[Load]:
    """Put together what travels together; each goes when its last one does."""
    companies: dict[int, list[Flat]] = {}
    for flat in flats:
        key = id(flat if flat.convoy is None else flat.convoy)
        before = companies.pop(key, [])
        companies[key] = [*before, flat]
    return [Load(members) for members in companies.values()]
