"""`Program`: a compiled train step, and how a rank runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from shardtensor.errors import RuleError
from shardtensor.spmd.arguments import rebuilt
from shardtensor.spmd.comparison import Comparison, OtherProgram
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
    grads: Gradients | None = None
    step: Callable[[], Any] | None = None

    def run(self, slots: list[Any]) -> None:
        """Run this part of the graph, without the step."""
        for i, x in zip(self.outputs, self.function(*[slots[i] for i in self.inputs]), strict=True):
            slots[i] = x


@attrs.frozen(eq=False)
class ProgramStart:
    """The beginning of a program on CPU ranks, which compare what they run.

    Attributes:
        counted: computes this rank's parts of the sums that are sent with the comparison.
        local: computes what needs nothing from other ranks, meanwhile.
        sums: slots of the parts, and of the sums.
    """

    comparison: Comparison
    counted: ProgramPart
    local: ProgramPart
    sums: Sequence[tuple[int, int]]

    def run(self, slots: list[Any]) -> None:
        """Run it. Raises OtherProgram, with the random numbers as before, if other ranks run another program."""
        self.counted.run(slots)
        numbers = [slots[i] for i, _ in self.sums]
        pending, random_state = self.comparison.start(numbers), torch.get_rng_state()
        self.local.run(slots)
        try:
            sums = self.comparison.wait(pending, numbers)
        except OtherProgram:
            torch.set_rng_state(random_state)
            raise
        for (_, i), x in zip(self.sums, sums, strict=True):
            slots[i] = x


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
        start: where ranks compare their programs: what they run first.
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
    start: ProgramStart | None
    blocks: Sequence[ProgramPart]
    result: Any
    outputs: Sequence[int]
    grads: Gradients
    adds_to: Sequence[int]

    @torch.no_grad()
    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run the step on a batch; return what the user's function returns.

        Raises:
            OtherProgram: other ranks run another program; nothing has changed.
        """
        slots: list[Any] = [None] * self.slots
        for i, x in self.static.items():
            slots[i] = x
        batch, shards = self.starts
        slots[batch : batch + len(tensors)] = tensors
        for i, unit in enumerate(self.units):
            slots[shards + i] = unit.group.shard
        if self.start is not None:
            self.start.run(slots)
        self._drop_gradients()
        present = None
        for block in self.blocks:
            block.run(slots)
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
