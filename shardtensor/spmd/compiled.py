"""`CompiledStep`: a train step that compiles itself at its first call with arguments of a kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from shardtensor.comm.agree import agree
from shardtensor.errors import RuleError, ShardTensorError
from shardtensor.fsdp.data_mesh import DataMesh
from shardtensor.optim.graphs import graphed_step
from shardtensor.parallel.shard_module import PlanLike
from shardtensor.spmd.arguments import StepArguments, Tree
from shardtensor.spmd.building import Builder
from shardtensor.spmd.comparison import NO_PROGRAM, Comparison, OtherProgram, compares_programs
from shardtensor.spmd.explain import Explanation
from shardtensor.spmd.parallel_mode import DataParallel
from shardtensor.spmd.program import Program


@attrs.frozen(eq=False)
class _Compiled:
    """A program, the modules that it was compiled for, and the function that runs it."""

    tree: Tree
    program: Program
    run: Callable[..., Any]


class CompiledStep:
    """A train step that each rank calls on its part of the batch. Made by `compile`.

    Ranks may call it with kinds of arguments that differ from call to call, as in a last batch of other sizes, and from
    rank to rank. On the CPU they compare in each call which program each runs, while they compute what needs no other
    rank. On GPUs, where that would wait for the device, a rank that needs another program compiles it together with all
    other ranks: if these do not, all fail within the timeout of the group.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        mode: DataParallel | PlanLike,
        backend: str,
        graphed: bool,
        cache_dir: Path | None,
    ) -> None:
        self._graphed = graphed
        self._builder = Builder(step, mode, backend, cache_dir)
        self._kinds: dict[Any, int] = {}  # numbers of the kinds of arguments that this rank has had
        self._programs: dict[tuple[int, ...], _Compiled] = {}  # by the kinds of all ranks
        self._last: dict[int, _Compiled] = {}  # by the kind of this rank: what it ran with it last
        self._trees: dict[Any, Tree] = {}
        self._data: DataMesh | None = None

    @property
    def compiles(self) -> int:
        """How many programs were made: one for each kind of arguments."""
        return len(self._programs)

    @property
    def lowered(self) -> int:
        """How many graphs Inductor has compiled, not counting those loaded from `cache_dir`."""
        return self._builder.lowered

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on this rank's part of the batch. All ranks call it.

        Raises:
            StaleParameterError: a module has other parameters or submodules than when the step was compiled.
        """
        call = StepArguments.of(args, kwargs)
        fault: ShardTensorError | None = None
        kind, found = -1, None
        kinds: tuple[int, ...]
        try:
            kind = self._kind(call)
            found = self._last.get(kind)
            if found is not None:
                found.program.check()
        except ShardTensorError as error:
            fault, found = error, None
        try:
            if found is not None:
                return found.run(*call.tensors)
            if self._data is not None and compares_programs(self._data.whole):
                comparison = Comparison(self._data.whole, NO_PROGRAM)
                comparison.wait(comparison.start())
            kinds = (kind,)
        except OtherProgram:
            kinds = self._kinds_of_all(kind if fault is None else -1)
            found = self._programs.get(kinds) if min(kinds) >= 0 else None
        if found is None:
            found = self._programs[kinds] = self._compile(call, fault)
        self._last[kind] = found
        return found.run(*call.tensors)

    def _kinds_of_all(self, kind: int) -> tuple[int, ...]:
        assert self._data is not None, "ranks have compared programs"
        sent = kind.to_bytes(8, "little", signed=True)
        kinds = tuple(int.from_bytes(x, "little", signed=True) for x in self._data.whole.exchange(sent))
        return kinds if len(set(kinds)) > 1 else kinds[:1]

    def _kind(self, call: StepArguments) -> int:
        """Return the number of the kind of arguments of a call.

        Raises:
            StaleParameterError: as `__call__`.
        """
        tree = self._trees.get(call.key)
        if tree is None:
            return self._kinds.setdefault((call.key, None), len(self._kinds))
        flags = None if tree.is_current() else tuple(tree.flags_now())
        return self._kinds.setdefault((call.key, flags), len(self._kinds))

    def _compile(self, call: StepArguments, fault: ShardTensorError | None) -> _Compiled:
        builder = self._builder
        if fault is None:
            builder.apply_plan(call)
        data = self._data = DataMesh.of(builder.mode.mesh)
        tree, samples = None, 0
        try:
            if fault is None:
                tree, samples = Tree(call), builder.samples(call)
                builder.check(tree, data)
        except ShardTensorError as error:
            fault = error
        held = [
            f"{h.name} {tuple(h.tensor.shape)} {h.tensor.dtype} {h.tensor.requires_grad}"
            for h in ([] if tree is None else tree.held)
        ]
        facts = {"arguments": call.text(builder.mode.input_batch_dim), "parameters": "\n".join(held)}
        agree(data.whole, builder.name, facts | {"mode": builder.text}, fault)
        assert tree is not None, "it has no fault"
        program = builder.program(call, tree, samples, data)
        self._trees.setdefault(call.key, tree)
        return _Compiled(tree, program, graphed_step(program) if self._graphed else program)

    def reset(self) -> None:
        """Forget all programs; the next call compiles. All ranks call it."""
        self._kinds, self._programs, self._last, self._trees = {}, {}, {}, {}

    def explain(self) -> Explanation:
        """Describe the program that was compiled last.

        Raises:
            RuleError: nothing was compiled yet.
        """
        if self._builder.last is None:
            raise RuleError("the train step was not compiled yet", fix="call it once, then explain it")
        return self._builder.last.explanation()
