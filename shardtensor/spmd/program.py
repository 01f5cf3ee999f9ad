"""`Program`: a compiled train step, and how a rank runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from shardtensor.errors import RuleError
from shardtensor.spmd.arguments import rebuilt
from shardtensor.spmd.gathers import FlatGradient, Unit
from shardtensor.spmd.tracing import Output


@attrs.frozen
class Gradients:
    """Where gradients of parameters are, by slot.

    Attributes:
        alone: number of the parameter, slot.
        flats: slot of the flat gradient of a unit, and its parts.
    """

    alone: tuple[tuple[int, int], ...]
    flats: tuple[tuple[int, FlatGradient], ...]


@attrs.frozen(eq=False)
class ProgramPart:
    """A part of the graph: what it reads and writes, by slot, and the optimizer step behind it, with its gradients."""

    function: Callable[..., Sequence[torch.Tensor]]
    inputs: list[int]
    outputs: list[int]
    grads: Gradients | None
    step: Callable[[], Any] | None


@attrs.frozen(eq=False)
class Program:
    """A compiled step. Values that parts of the graph exchange have slots.

    Attributes:
        held: parameters and buffers.
        params: the numbers of the parameters among them.
        units: of fully sharded parameters.
        static: what is in the first slots: held tensors that are in no unit.
        starts: the first slots of the batch, and of the shards of units.
        slots: how many there are.
        blocks: in order.
        result: what the user's function returned, with `Output`s for tensors; `outputs` are their slots.
        grads: of parameters when the step has ended.
        adds_to: numbers of the parameters whose gradients from before the step it does not drop.
    """

    held: Sequence[torch.Tensor]
    params: Sequence[int]
    units: Sequence[Unit]
    static: Mapping[int, torch.Tensor]
    starts: tuple[int, int]
    slots: int
    blocks: Sequence[ProgramPart]
    result: Any
    outputs: Sequence[int]
    grads: Gradients
    adds_to: Sequence[int]

    @torch.no_grad()
    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run the step on a batch; return what the user's function returns."""
        self._drop_gradients()
        slots: list[Any] = [None] * self.slots
        for i, x in self.static.items():
            slots[i] = x
        batch, shards = self.starts
        slots[batch : batch + len(tensors)] = tensors
        for i, unit in enumerate(self.units):
            slots[shards + i] = unit.group.shard
        present = None
        for block in self.blocks:
            for i, x in zip(block.outputs, block.function(*[slots[i] for i in block.inputs]), strict=True):
                slots[i] = x
            if block.step is not None:
                assert block.grads is not None
                self._replace_gradients(slots, present, block.grads)
                present = block.grads
                block.step()
        if present != self.grads:
            self._replace_gradients(slots, present, self.grads)

        def value(x: Any) -> Any:
            if not isinstance(x, Output):
                return x
            return slots[self.outputs[x.index]] if x.gradient_of is None else self.held[x.gradient_of].grad

        return rebuilt(self.result, value)

    def _drop_gradients(self) -> None:
        for i in self.params:
            param: Any = self.held[i]
            local = getattr(param, "_local", None)
            if local is None:
                param.grad = None
            else:
                local.grad, param._grad_wrapper = None, None

    def _replace_gradients(self, slots: list[Any], present: Gradients | None, grads: Gradients) -> None:
        if present is not None:  # else they were dropped when the step began
            self._drop_gradients()
        for number, slot in grads.alone:
            param: Any = self.held[number]
            local = getattr(param, "_local", param)
            local.grad = slots[slot].view(local.shape)
        for slot, flat in grads.flats:
            self.units[flat.unit].group.gradients.attach(slots[slot], flat.used)

    def check(self) -> None:
        """Raise RuleError if parameters have gradients that the step would add to."""
        if any(self.held[i].grad is not None for i in self.adds_to):
            raise RuleError(
                "the train step adds to gradients that are there before it, which is not compiled",
                fix="call optimizer.zero_grad() in the step before backward, or before each call",
            )
