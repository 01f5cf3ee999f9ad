"""`compile`: makes a train step that was written for one device run on many."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from shardtensor.errors import RuleError
from shardtensor.parallel.shard_module import PlanLike
from shardtensor.spmd.compiled import CompiledStep
from shardtensor.spmd.explain import Explanation
from shardtensor.spmd.parallel_mode import DataParallel

_BACKENDS = ("inductor", "eager")


def compile(
    step: Callable[..., Any] | None = None,
    *,
    parallel_mode: DataParallel | PlanLike | None = None,
    backend: Literal["inductor", "eager"] = "inductor",
    graphed: bool = False,
    cache_dir: str | Path | None = None,
) -> Any:
    """Compile a whole train step for one device (forward, loss, backward, optimizer step) into one graph per rank.

    Use it as a decorator, or call it with the step. All ranks call the result, each with its part of the batch. The
    first call traces the step on tensors without memory, finds for each value whether it is replicated, sharded along
    the samples or partial, puts collectives where they are needed, and compiles. Later calls with arguments of the same
    kind run the program; other shapes, or another mode of the modules, make another one.

    The program computes what the step computes for the whole batch, which is the ranks' parts end to end. What it
    returns is the value for the whole batch; what has the samples in a dim is this rank's part. Gradients are those
    that `data_parallel` and `fully_shard` compute, and stay on parameters as the step leaves them. An operation that
    needs several samples at once is reduced over the ranks first (a mean over the batch, batch norm), or refused.

    The step may call any of the modules and optimizers among its arguments, in nested lists, tuples and mappings.
    Optimizers run as they are: their hyperparameters may change between calls, as schedulers do. Dropout draws from
    each rank's own generator. Checkpoints (`torch.utils.checkpoint`) are kept. Python code of the step runs only when
    it is traced.

    Args:
        step: takes modules, optimizers, tensors and other values; tensors with more than ``input_batch_dim`` dims are
            parts of the batch, others are equal on all ranks. Other values are constants.
        parallel_mode: a `DataParallel`; None for its defaults. Or a plan, as `shard_module` takes it: the first call
            shards the module by it; samples differ along its data axes, and what it stores is fully sharded.
        backend: ``"inductor"``, torch's compiler, or ``"eager"``, which runs the graph operation by operation and gives
            the bits of the eager library.
        graphed: replay each program as a CUDA graph, as `graphed_step` does.
        cache_dir: keeps compiled graphs, so that a second process compiles none.

    Returns:
        the step as a `CompiledStep`.

    Raises:
        RuleError: (a RuntimeError) by a call: the step's course depends on values of tensors, an operation does not
            keep its meaning on a part of the batch, or the step uses an optimizer that is no argument; with the user's
            file and line. On all ranks, before anything has changed.
        LayoutError: (a ValueError) by a call: tensors of the batch have different numbers of samples, or a module is
            missing among the arguments.
        DisagreementError: (a ValueError) by a call: ranks pass different modules, optimizers or kinds of tensors.
        StaleParameterError: by a call: a module has changed since it was compiled.

    Example:
        >>> import torch
        >>> import shardtensor as st
        >>> def train_step(model, optimizer, x):
        ...     optimizer.zero_grad()
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> def train():
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.ones_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ...     rank = st.comm.process_group.as_group().rank
        ...     compiled = compile(train_step, backend="eager")
        ...     return compiled(model, optimizer, torch.full((1, 1), 1.0 + rank)).item(), model.weight.item()
        >>> st.simulate(2, train)
        [(2.5, -1.5), (2.5, -1.5)]

    References:
        ``torch.distributed._spmd``, which torch has removed; Xu et al., GSPMD (arXiv:2105.04663).
    """
    if backend not in _BACKENDS:
        raise RuleError(f"there is no backend {backend!r}", {"known": ", ".join(_BACKENDS)}, 'backend="inductor"')
    mode = DataParallel() if parallel_mode is None else parallel_mode

    def decorate(function: Callable[..., Any]) -> CompiledStep:
        compiled = CompiledStep(function, mode, backend, graphed, None if cache_dir is None else Path(cache_dir))
        return functools.update_wrapper(compiled, function)  # type: ignore[return-value]

    return decorate if step is None else decorate(step)


def explain(compiled: CompiledStep) -> Explanation:
    """Describe the program that a compiled step has compiled last: print it, or price what it sends.

    Sends nothing. ``str()`` of the result has a line for each operation: what its value is on a rank (replicated,
    sharded along the samples, partial) and the user's line. ``priced(profile)`` adds up the collectives.

    Raises:
        RuleError: it was not called yet.

    Example:
        >>> import torch
        >>> from shardtensor.cost.profile import read_profile
        >>> def step(model, x):
        ...     return model(x).sum()
        >>> compiled = compile(step, backend="eager")
        >>> _ = compiled(torch.nn.Linear(2, 1), torch.ones(3, 2))
        >>> print(str(explain(compiled)).splitlines()[-1].split("  ")[0])
        sum.default
        >>> print(explain(compiled).priced(read_profile("h100")))
           0 collectives
    """
    return compiled.explain()
