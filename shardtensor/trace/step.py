"""`trace_step`: count what one rank of a sharded module sends, computes and keeps in a training step, by a run.

The module is sharded and runs forward and backward on meta tensors, as one rank of a world without its other ranks.
Nothing is guessed: the counts are those of the calls by the module's own code and by the layers that the plan makes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from shardtensor.errors import NotTraced
from shardtensor.mesh import Ranks, axes_along
from shardtensor.parallel.shard_module import shard_module
from shardtensor.plan.estimates.estimate import Collective, TracedStep
from shardtensor.plan.match.patterns import matches, starred, unwrapped
from shardtensor.plan.plan import Plan
from shardtensor.sim.traffic import CountingGroup, counting_world
from shardtensor.tensor.sharded_tensor import local_of
from shardtensor.tensor.trees import tensors_in
from shardtensor.trace.borders import calling_around
from shardtensor.trace.kernels import FusedKernels
from shardtensor.trace.layers import CHECKPOINTED, KEPT, few_layers, lists_of_layers
from shardtensor.trace.live import LiveBytes

Step = Callable[[nn.Module], torch.Tensor]

_AGREEMENTS = ("exchange", "exchange_objects", "barrier")
"""Calls in which ranks compare a few bytes; the first step makes some that later ones do not."""


def trace_step(
    module: nn.Module, plan: Plan, step: Step, *, rank: int = 0, checkpointed: str | None = None
) -> TracedStep:
    """Run one training step of a module as one rank of a plan; count its collectives, FLOPs and kept bytes.

    Of layers of one kind only a few run; the difference that one more makes is multiplied by the number of the others.
    Rows of experts are counted as if each expert were chosen equally often.

    Args:
        module: dense; it does not change. Its tensors may be on any device: copies on the meta device run.
        step: returns the loss of a module; it makes inputs on the meta device.
        rank: of the plan's mesh.
        checkpointed: a pattern of the modules that run under `torch.utils.checkpoint`; "" for each layer of a list.

    Raises:
        NotTraced: no module matches `checkpointed`.
        PlanError, LayoutError: as in `shard_module`. Errors of the module's own code on meta tensors pass through: code
            that reads values, such as ``x.item()``, cannot be traced.

    Example:
        >>> from collections import OrderedDict
        >>> rules = {"up": {"weight": "[tp, -]", "in": "replicate", "out": "[..., tp]"},
        ...          "down": {"weight": "[-, tp]", "in": "[..., tp]", "out": "partial(tp) -> replicate"}}
        >>> up, down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
        >>> mlp = nn.Sequential(OrderedDict(up=up, act=nn.GELU(), down=down))
        >>> loss = lambda mlp: mlp(torch.empty(8, 64, device="meta")).sum()
        >>> for each in trace_step(mlp, Plan.from_rules(rules, "tp=4"), loss).collectives:
        ...     print(each.phase, each.kind, each.axes, each.received_bytes, each.where)
        forward all_reduce ('tp',) 3072 down
    """
    with _marked(module, checkpointed):
        base, others = few_layers(module)
    few = _run(base, plan, step, rank)
    calls, kept, flops, recomputed = few.calls.copy(), few.kept.copy(), few.flops, few.recomputed
    peaks = few.live.peaks.copy()
    for more, times in others:
        found = _run(more, plan, step, rank)
        calls = _with_layers(calls, few.calls, found.calls, times)
        flops += times * (found.flops - few.flops)
        recomputed += times * (found.recomputed - few.recomputed)
        for moment, size in found.live.peaks.items():
            peaks[moment] = peaks.get(moment, size) + times * (size - few.live.peaks.get(moment, size))
        for where, size in found.kept.items():
            kept[where] += times * (size - few.kept[where])
    collectives = tuple(attrs.evolve(each, calls=count) for each, count in calls.items() if count > 0)
    by_module = tuple((where, size) for where, size in kept.most_common() if size)
    return TracedStep(collectives, flops, kept.total() + few.restored, recomputed, by_module, max(peaks.values()))


@contextmanager
def _marked(module: nn.Module, checkpointed: str | None) -> Iterator[None]:
    """Mark the modules that are checkpointed, so that their copies are, too."""
    if checkpointed:
        chosen = [each for name, each in module.named_modules() if name and matches(checkpointed, unwrapped(name))]
    else:
        chosen = [layer for _, layers in lists_of_layers(module) for layer in layers if checkpointed is not None]
    if checkpointed is not None and not chosen:
        raise NotTraced(f"no module matches `{checkpointed}`" if checkpointed else "it has no list of layers")
    for each in chosen:
        vars(each)[CHECKPOINTED] = True
    try:
        yield
    finally:
        for each in chosen:
            vars(each).pop(CHECKPOINTED, None)


def _with_layers(
    calls: Counter[Collective], few: Counter[Collective], more: Counter[Collective], times: int
) -> Counter[Collective]:
    """Add the difference that one more layer makes, `times` times: calls, or bytes of a call that grows per layer."""
    gone, new = few - more, more - few
    for each in gone:
        grown = next((other for other in new if _unsized(other) == _unsized(each) and new[other] == gone[each]), None)
        if grown is not None:
            del new[grown]
            sent, received = (
                getattr(each, name) + times * (getattr(grown, name) - getattr(each, name))
                for name in ("sent_bytes", "received_bytes")
            )
            calls = Counter({
                attrs.evolve(key, sent_bytes=sent, received_bytes=received) if key == each else key: count
                for key, count in calls.items()
            })  # fmt: skip
        else:
            calls[each] -= times * gone[each]
    for each, count in new.items():
        calls[each] += times * count
    return calls


def _unsized(collective: Collective) -> Collective:
    return attrs.evolve(collective, sent_bytes=0, received_bytes=0)


def _addmm_flops(total: Sequence[int], a: Sequence[int], b: Sequence[int], **rest: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


class _NoModules(ModuleTracker):
    """Tracks no module: a FlopCounterMode with it counts for the model as a whole."""

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *args: Any) -> None:
        pass


class _Counted:
    """The counts of one rank's run.

    Attributes:
        calls: how often each collective is called, in the order of their first calls.
        kept: bytes that autograd saves, by the path of the module that runs.
        restored: the most bytes that backward saves to recompute one checkpointed module.
        live: the bytes of all tensors, by moment.

    Args:
        layers: the lengths of lists of layers, by path.
    """

    def __init__(self, plan: Plan, layers: Mapping[str, int]) -> None:
        self.calls: Counter[Collective] = Counter()
        self.flops = self.recomputed = 0.0
        self.kept: Counter[str] = Counter()
        self.restored = 0
        self.live = LiveBytes(self._moment)
        self.flop_counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_flops})
        self.flop_counter.mod_tracker = _NoModules()  # the tracker's hooks keep recomputed values until a collection
        self.phase: Any = ""
        self.inside: list[tuple[str, nn.Module | None]] = [("", None)]
        self._plan, self._layers = plan, layers
        self._axes: dict[Ranks, tuple[str, ...]] = {}
        self._storages: dict[int, Any] = {}

    def count(self, kind: str, ranks: Ranks, sent: int, received: int) -> None:
        if not self.phase or kind in _AGREEMENTS:
            return
        if ranks not in self._axes:
            mesh = self._plan.axes.mesh
            names = tuple(mesh.names[axis] for axis in axes_along(mesh, ranks) if mesh.sizes[axis] > 1)
            self._axes[ranks] = self._plan.axes.named(names)
        axes, where = self._axes[ranks], starred(self._where())
        self.calls[Collective(self.phase, kind, axes, len(ranks), sent, received, where)] += 1

    def _where(self) -> str:
        if self.phase == "forward" or len(self.inside) > 1:  # it is recomputed
            return self.inside[-1][0]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        variable = getattr(node, "variable", None)  # of a parameter whose gradient is complete
        marks: Any = node.metadata if variable is None else vars(variable)
        return str(marks.get(_WHERE, ""))

    def _moment(self) -> tuple[str, str]:
        """Return the phase and the place, with layers of the second half numbered from the end.

        The bytes there grow by the same for each further layer; at layers between these they are between theirs.
        """
        where = self._where()
        for path, count in self._layers.items():
            if where.startswith(f"{path}."):
                number, dot, below = where.removeprefix(f"{path}.").partition(".")
                place = int(number) if int(number) < KEPT // 2 else int(number) - count
                return self.phase, f"{path}.{place}{dot}{below}"
        return self.phase, where

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count what autograd saves, once for each storage; those of parameters, gathered ones too, are left out."""
        if self.phase == "forward":
            self.kept[starred(self.inside[-1][0])] += self._saved(tensor)
        return tensor

    def _saved(self, tensor: torch.Tensor) -> int:
        self._leave_out(self.inside[-1][1])
        return self._new(tensor) if type(tensor) is torch.Tensor else 0

    def _leave_out(self, owner: nn.Module | None) -> None:
        for tensor in (*owner._parameters.values(), *owner._buffers.values()) if owner is not None else ():
            if tensor is not None:
                self._new(local_of(tensor))

    def _new(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a tensor's storage the first time."""
        storage = tensor.untyped_storage()
        seen = self._storages.get(storage._cdata)
        if seen is not None and seen() is storage:  # another one may have its address
            return 0
        self._storages[storage._cdata] = weakref.ref(storage)
        return storage.nbytes()

    def own(self, module: nn.Module) -> None:
        """Leave out the storages of a sharded module, and record the names of its parameters."""
        for each in module.modules():
            self._leave_out(each)
        for name, param in module.named_parameters():
            vars(local_of(param))[_WHERE] = unwrapped(name)

    def checkpoint(self, module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a module under `torch.utils.checkpoint`; count what backward computes and saves once more."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.phase == "backward" and len(self.inside) == 1:
                with self._recomputing():
                    return module(*args, **kwargs)
            return module(*args, **kwargs)

        kwargs |= dict.fromkeys(kwargs.keys() & {"past_key_values", "past_key_value"})  # as transformers does
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)  # those of the checkpoint
        flops, before, saved = self.flop_counter.get_total_flops(), dict(self._storages), 0

        def save(tensor: torch.Tensor) -> Any:
            nonlocal saved
            saved += self._saved(tensor)
            return pack(tensor)

        try:
            with FusedKernels(), torch.autograd.graph.saved_tensors_hooks(save, unpack):
                yield
        finally:  # backward stops it at the last value that it needs
            del self.inside[1:]
            self.recomputed += self.flop_counter.get_total_flops() - flops
            self.restored, self._storages = max(self.restored, saved), before


_WHERE = "_traced_in"
"""The key under which an autograd node stores the path of its module, and a parameter its own name."""


def _run(module: nn.Module, plan: Plan, step: Step, rank: int) -> _Counted:
    counted = _Counted(plan, {path: len(layers) for path, layers in lists_of_layers(module)})
    mesh = plan.axes.mesh
    checkpointed = [name for name, each in module.named_modules() if vars(each).pop(CHECKPOINTED, False)]
    with counting_world(CountingGroup(rank, mesh.ranks, counted.count, "meta")):
        shard_module(module, plan)
        for path in reversed(checkpointed):  # modules in others first
            above, _, name = path.rpartition(".")
            wrapper = checkpoint_wrapper(module.get_submodule(path), checkpoint_fn=counted.checkpoint)
            module.get_submodule(above).register_module(name, wrapper)
        counted.own(module)
        with _paths(module, counted), counted.flop_counter, counted.live:
            with FusedKernels(), torch.autograd.graph.saved_tensors_hooks(counted.keep, lambda tensor: tensor):
                counted.phase = "forward"
                loss = step(module)
            counted.phase = "backward"
            loss.backward()
        counted.phase = ""
    counted.flops = float(counted.flop_counter.get_total_flops())
    return counted


def _paths(module: nn.Module, counted: _Counted) -> AbstractContextManager[None]:
    """Record which module runs, and the module of each autograd node."""

    def enter(path: str, owner: nn.Module, inputs: Any) -> None:
        counted.inside.append((path, owner))

    def leave(path: str, output: Any) -> None:
        _mark(output, path)
        counted.inside.pop()

    return calling_around(module, enter, leave)


def _mark(output: Any, path: str) -> None:
    """Store a module's path in the autograd nodes of its results, except in those that an inner module has marked."""
    nodes = [local_of(tensor).grad_fn for tensor in tensors_in(output)]
    while nodes:
        node = nodes.pop()
        if node is None or hasattr(node, "variable"):
            continue
        marks: Any = node.metadata
        if _WHERE in marks:
            continue
        marks[_WHERE] = path
        nodes += [following for following, _ in node.next_functions]
