"""`trace_step`: what one rank of a sharded module sends, computes and keeps in a training step, counted in a run.

The module is sharded and runs forward and backward on meta tensors, as one rank of a world whose other ranks are not
there. Nothing is guessed: what is counted is what the module's own code, and the layers that the plan makes, call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardtensor.mesh import Ranks
from shardtensor.plan.match.patterns import starred, unwrapped
from shardtensor.plan.outlook.estimate import Collective, TracedStep
from shardtensor.plan.plan import Plan
from shardtensor.sharding.shard_module import shard_module
from shardtensor.sim.counting_group import CountingGroup
from shardtensor.sim.group_names import axes_along
from shardtensor.sim.traffic import counting_world
from shardtensor.tensor.sharded_tensor import local_of
from shardtensor.tensor.trees import tensors_in
from shardtensor.trace.attention import FusedAttention
from shardtensor.trace.layers import few_layers

Step = Callable[[nn.Module], torch.Tensor]

_AGREEMENTS = ("exchange", "exchange_objects", "barrier")
"""Calls in which ranks compare a few bytes; the first step makes some that later ones do not."""


def trace_step(module: nn.Module, plan: Plan, step: Step, *, rank: int = 0) -> TracedStep:
    """Run one training step of a module as one rank of a plan, and count.

    Of layers that are alike a few are run, and what one more adds is multiplied by how many there are. Rows of experts
    are counted as if each expert were chosen equally often.

    Args:
        module: dense; it is left as it is. Its tensors may be on any device: copies on the meta device run.
        step: returns the loss of a module; it makes inputs on the meta device.
        rank: of the plan's mesh.

    Raises:
        PlanError, LayoutError: as of `shard_module`. What the module's own code raises on meta tensors, too: code that
            reads values, such as ``x.item()``, cannot be traced.

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
    base, others = few_layers(module)
    few = _run(base, plan, step, rank)
    calls, flops, kept = few.calls, few.flops, float(few.kept)
    for more, times in others:
        found = _run(more, plan, step, rank)
        calls = _with_layers(calls, few.calls, found.calls, times)
        flops += times * (found.flops - few.flops)
        kept += times * (found.kept - few.kept)
    collectives = tuple(attrs.evolve(each, calls=count) for each, count in calls.items() if count > 0)
    return TracedStep(collectives, flops, int(kept))


def _with_layers(
    calls: Counter[Collective], few: Counter[Collective], more: Counter[Collective], times: int
) -> Counter[Collective]:
    """Add so many times what one more layer adds: calls, or bytes of a call that grows with each layer."""
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


class _Counted:
    """What is counted while one rank runs.

    Attributes:
        calls: how often each collective is called, in the order in which each came first.
        kept: bytes that autograd keeps.
    """

    def __init__(self, plan: Plan) -> None:
        self.calls: Counter[Collective] = Counter()
        self.flops = 0.0
        self.kept = 0
        self.phase: Any = ""
        self.inside: list[tuple[str, nn.Module | None]] = [("", None)]
        self._plan = plan
        self._axes: dict[Ranks, tuple[str, ...]] = {}
        self._storages: list[Any] = []
        self._known: set[int] = set()

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
        if self.phase == "forward":
            return self.inside[-1][0]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        variable = getattr(node, "variable", None)  # of a parameter whose gradient is complete
        known: Any = node.metadata if variable is None else vars(variable)
        return str(known.get(_WHERE, ""))

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count what autograd saves, once for each storage; those of parameters, gathered ones too, are left out."""
        if self.phase == "forward" and type(tensor) is torch.Tensor:
            self._leave_out(self.inside[-1][1])
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self._storages.append(storage)  # whose address no other takes meanwhile
                self.kept += storage.nbytes()
        return tensor

    def _leave_out(self, owner: nn.Module | None) -> None:
        for tensor in (*owner._parameters.values(), *owner._buffers.values()) if owner is not None else ():
            if tensor is not None:
                storage = local_of(tensor).untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self._storages.append(storage)

    def own(self, module: nn.Module) -> None:
        """Leave out the storages of a sharded module, and note the names of its parameters."""
        for each in module.modules():
            self._leave_out(each)
        for name, param in module.named_parameters():
            vars(local_of(param))[_WHERE] = unwrapped(name)


_WHERE = "_traced_in"
"""Where an autograd node, or a parameter, keeps which module it is of."""


def _run(module: nn.Module, plan: Plan, step: Step, rank: int) -> _Counted:
    counted = _Counted(plan)
    mesh = plan.axes.mesh
    with counting_world(CountingGroup(rank, mesh.ranks, counted.count, "meta")):
        shard_module(module, plan)
        counted.own(module)
        with _paths(module, counted), FlopCounterMode(display=False) as flops:
            with FusedAttention(), torch.autograd.graph.saved_tensors_hooks(counted.keep, lambda tensor: tensor):
                counted.phase = "forward"
                loss = step(module)
            counted.phase = "backward"
            loss.backward()
        counted.phase = ""
    counted.flops = float(flops.get_total_flops())
    return counted


@contextmanager
def _paths(module: nn.Module, counted: _Counted) -> Iterator[None]:
    """Note which module runs, and of which one each node of autograd is."""
    handles = []
    for name, each in module.named_modules():
        path = unwrapped(name)

        def enter(owner: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            counted.inside.append((path, owner))

        def leave(owner: nn.Module, args: Any, output: Any, path: str = path) -> None:
            _mark(output, path)
            counted.inside.pop()

        handles.append(each.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        handles.append(each.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mark(output: Any, path: str) -> None:
    """Tell the nodes that made a module's results which module they are of, where no module inside has."""
    nodes = [local_of(tensor).grad_fn for tensor in tensors_in(output)]
    while nodes:
        node = nodes.pop()
        if node is None or hasattr(node, "variable"):
            continue
        known: Any = node.metadata
        if _WHERE in known:
            continue
        known[_WHERE] = path
        nodes += [following for following, _ in node.next_functions]
