"""`Program`: a train step compiled for arguments of one kind, and how a rank runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from shardtensor.spmd.arguments import Arguments, rebuilt
from shardtensor.spmd.gathers import Unit
from shardtensor.spmd.tracing import Output


@attrs.frozen(eq=False)
class StepCall:
    """An optimizer step between two parts of a program.

    Attributes:
        grads: for each parameter, by number, the slot of its gradient.
        flats: for units: their number, the slot of the flat gradient, and which parameters have one.
    """

    step: Callable[[], Any]
    grads: list[tuple[int, int]]
    flats: list[tuple[int, int, list[bool]]]


@attrs.frozen(eq=False)
class Block:
    """A compiled part: what it reads and writes, by slot, and the optimizer step behind it."""

    function: Callable[..., Sequence[torch.Tensor]]
    inputs: list[int]
    outputs: list[int]
    step: StepCall | None


@attrs.define(eq=False)
class Program:
    """A compiled step.

    Attributes:
        held: parameters and buffers, in slots 0, 1, ...; None for those in units.
        units: whose shards have slots `first_shard` and following.
        batch: the first slot of the batch's tensors.
        blocks: in order.
        slots: how many there are.
        result: what the user's function returned, with `Output`s; `outputs` are their slots.
        grads, flats: of the gradients that parameters have at the end, as in `StepCall`.
    """

    held: list[torch.Tensor]
    in_unit: list[bool]
    units: Sequence[Unit]
    batch: int
    first_shard: int
    blocks: list[Block]
    slots: int
    result: Any
    outputs: list[int]
    grads: list[tuple[int, int]]
    flats: list[tuple[int, int, list[bool]]]
    trained: list[int]
    keeps_grads: bool = True

    @torch.no_grad()
    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run the step on a batch; return what the user's function returns."""
        self.drop_gradients()
        slots: list[Any] = [None] * self.slots
        slots[: len(self.held)] = self.held
        slots[self.batch : self.batch + len(tensors)] = tensors
        for i, unit in enumerate(self.units):
            slots[self.first_shard + i] = unit.group.shard
        for block in self.blocks:
            made = block.function(*[slots[i] for i in block.inputs])
            for i, x in zip(block.outputs, made, strict=True):
                slots[i] = x
            del made
            if block.step is not None:
                self._set_gradients(slots, block.step.grads, block.step.flats)
                block.step.step()
        self.drop_gradients()
        self._set_gradients(slots, self.grads, self.flats)
        return rebuilt(self.result, lambda x: slots[self.outputs[x.index]] if isinstance(x, Output) else x)

    def drop_gradients(self) -> None:
        """Set the gradients of all parameters to None."""
        for i in self.trained:
            param: Any = self.held[i]
            if self.in_unit[i]:
                param._local.grad, param._grad_wrapper = None, None
            else:
                param.grad = None

    def _set_gradients(
        self, slots: list[Any], grads: list[tuple[int, int]], flats: list[tuple[int, int, list[bool]]]
    ) -> None:
        for number, slot in grads:
            param: Any = self.held[number]
            if self.in_unit[number]:
                param._local.grad = slots[slot].view(param._local.shape)
            else:
                param.grad = slots[slot]
        for number, slot, used in flats:
            self.units[number].group.gradients.attach(slots[slot], used)


def described(arguments: Arguments) -> str:
    """Return the structure of the arguments as text, without the batch size: equal on all ranks."""
    lines = [f"{i}: {type(optimizer).__name__}" for i, optimizer in enumerate(arguments.optimizers)]
    lines += [f"{h.name} {tuple(h.tensor.shape)} {h.tensor.dtype} {h.tensor.requires_grad}" for h in arguments.held]
    return "\n".join([*lines, *arguments.constants])
