"""`CompiledStep`: a train step that compiles itself at its first call with arguments of a kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardtensor.comm.agree import agree
from shardtensor.errors import RuleError, ShardTensorError
from shardtensor.fsdp.data_mesh import DataMesh
from shardtensor.optim.graphs import graphed_step
from shardtensor.parallel.shard_module import PlanLike
from shardtensor.spmd.arguments import Call, Tree
from shardtensor.spmd.building import Builder
from shardtensor.spmd.explain import Explanation
from shardtensor.spmd.parallel_mode import DataParallel
from shardtensor.spmd.program import Program


class CompiledStep:
    """A train step that each rank calls on its part of the batch. Made by `compile`.

    Attributes:
        compiles: how many programs were made: one for each kind of arguments.
        lowered: how many graphs were compiled by Inductor; a program whose graphs are in `cache_dir` compiles none.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        mode: DataParallel | PlanLike,
        backend: str,
        graphed: bool,
        cache_dir: Path | None,
    ) -> None:
        self._step, self._graphed = step, graphed
        self._builder = Builder(step, mode, backend, cache_dir)
        self._programs: dict[Any, list[tuple[Tree, Program, Callable[..., Any]]]] = {}

    @property
    def compiles(self) -> int:
        """How many programs were made."""
        return sum(map(len, self._programs.values()))

    @property
    def lowered(self) -> int:
        """How many graphs Inductor has compiled, not counting those loaded from `cache_dir`."""
        return self._builder.lowered

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on this rank's part of the batch. All ranks call it.

        Raises:
            StaleParameterError: a module has other parameters or submodules than when the step was compiled.
        """
        call = Call.of(args, kwargs)
        programs = self._programs.setdefault(call.key, [])
        for tree, _, run in programs:
            if tree.is_current():
                return run(*call.tensors)
        tree, program = self._compile(call)
        run = graphed_step(program) if self._graphed else program
        programs.append((tree, program, run))
        return run(*call.tensors)

    def _compile(self, call: Call) -> tuple[Tree, Program]:
        self._builder.apply_plan(call)
        data = DataMesh.of(self._builder.mode.mesh)
        fault: ShardTensorError | None = None
        tree, samples = None, 0
        try:
            tree, samples = Tree(call), self._builder.samples(call)
        except ShardTensorError as error:
            fault = error
        held = (
            ""
            if tree is None
            else "\n".join(
                f"{h.name} {tuple(h.tensor.shape)} {h.tensor.dtype} {h.tensor.requires_grad}" for h in tree.held
            )
        )
        facts = {"arguments": call.text(self._builder.mode.input_batch_dim), "parameters": held}
        agree(data.whole, self._builder.name, facts | {"mode": self._builder.text}, fault)
        assert tree is not None, "it has no fault"
        return tree, self._builder.program(call, tree, samples, data)

    def reset(self) -> None:
        """Forget all programs; the next call compiles. All ranks call it."""
        self._programs = {}

    def explain(self) -> Explanation:
        """Describe the program that was compiled last.

        Raises:
            RuleError: nothing was compiled yet.
        """
        if self._builder.last is None:
            raise RuleError("the train step was not compiled yet", fix="call it once, then explain it")
        return self._builder.last.explanation()
