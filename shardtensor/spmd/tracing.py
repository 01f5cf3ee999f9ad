"""The graph of a train step: forward, loss, backward and optimizer steps, traced on tensors without memory.

The user's function runs once for each batch size on fake tensors, in place of parameters, buffers and batch. Autograd
runs inside, so the graph has the operations of backward, too. An optimizer is not run: its step is one node, and the
class itself runs when the graph does, with the hyperparameters of that time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from shardtensor.comm.call_site import call_site
from shardtensor.errors import RuleError, ShardTensorError
from shardtensor.spmd.arguments import Arguments, leaves_of, rebuilt
from shardtensor.spmd.markers import gradient, stepped

aten: Any = torch.ops.aten
_DECOMPOSED = get_decompositions(
    [
        aten.native_batch_norm,
        aten.cudnn_batch_norm,
        aten.cudnn_batch_norm_backward,
        aten.miopen_batch_norm,
        aten._native_batch_norm_legit,
        aten._native_batch_norm_legit_functional,
        aten._native_batch_norm_legit_no_training,
        aten.native_batch_norm_backward,
        aten._batch_norm_with_update,
        aten._batch_norm_with_update_functional,
        aten.batch_norm_backward,
    ]
)
"""Training statistics of a batch are those of all samples: they are computed by operations that have rules."""


@attrs.frozen(eq=False)
class Trace:
    """A traced step.

    Attributes:
        graph: without in-place operations, but for final ``copy_`` to inputs. Inputs: parameters, buffers, the batch.
        result: what the step returned, with an `Output` for each tensor.
        count: how many results the graph returns before the gradients.
        grads: numbers of the parameters that have a gradient at the end; the graph returns these after the results.
        clears: whether the step drops earlier gradients before it adds new ones.
    """

    graph: torch.fx.GraphModule
    result: Any
    count: int
    grads: list[int]


@attrs.frozen
class Output:
    """Output number `index` of the graph, in a result."""

    index: int


def trace_step(step: Callable[..., Any], arguments: Arguments, batch_dim: int, factor: tuple[int, int]) -> Trace:
    """Trace a step with `factor` (numerator, denominator) times as many samples as the batch has.

    Raises:
        RuleError: the step reads values of tensors (control flow on data), steps an optimizer that is no argument, or
            changes hyperparameters. The module and the optimizers are as before.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = [_like(held.tensor) for held in arguments.held]
        inputs += [_resized(x, batch_dim, factor) for x in arguments.tensors]
    tracer = _Tracer(step, arguments)
    sites = _Sites()
    try:
        with _restored(arguments), fx_traceback.preserve_node_meta(), mode, sites:
            first = make_fx(tracer.run, decomposition_table=_DECOMPOSED, _allow_non_fake_inputs=True)(*inputs)
    except ShardTensorError:
        raise
    except Exception as error:
        raise _untraceable(error, sites.site) from error
    _mark(first.graph, tracer.backward_ranges)

    def replay(*flat: torch.Tensor) -> Any:
        return torch.fx.Interpreter(first).run(*flat)

    with fx_traceback.preserve_node_meta(), mode, torch.no_grad():
        functional = make_fx(torch.func.functionalize(replay, remove="mutations"), _allow_non_fake_inputs=True)(*inputs)
    functional.graph.eliminate_dead_code()
    return Trace(functional, tracer.result, tracer.count, tracer.grads)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor like this one; a sharded one is whole."""
    if hasattr(tensor, "_layout"):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _resized(x: torch.Tensor, dim: int, factor: tuple[int, int]) -> torch.Tensor:
    if x.dim() <= dim:
        return _like(x)
    shape = list(x.shape)
    shape[dim] = shape[dim] * factor[0] // factor[1]
    return torch.empty(shape, dtype=x.dtype, device=x.device)


class _Sites(TorchFunctionMode):
    """Records the user's line for each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.site = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.site = call_site(sys._getframe(1))
        custom = {"where": self.site}
        fx_traceback.current_meta["custom"] = custom
        return func(*args, **(kwargs or {}))


class _Tracer:
    def __init__(self, step: Callable[..., Any], arguments: Arguments) -> None:
        self.step, self.arguments = step, arguments
        self.backward_ranges: list[tuple[int, int]] = []
        self.result: Any = None
        self.count = 0
        self.grads: list[int] = []

    def run(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        held, tensors = self.arguments.held, self.arguments.tensors
        given, batch = flat[: len(held)], flat[len(held) :]
        own: list[torch.Tensor] = []
        for each, fake in zip(held, given, strict=True):
            x = nn.Parameter(fake, each.tensor.requires_grad) if each.is_param else fake
            own.append(x)
            for place, key in each.places:
                place[key] = x
        self.params = own
        by_id = {id(each.tensor): x for each, x in zip(held, own, strict=True)}
        by_id.update((id(x), fake) for x, fake in zip(tensors, batch, strict=True))
        for optimizer in self.arguments.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [by_id[id(param)] for param in group["params"]]
        args, kwargs = rebuilt((self.arguments.args, self.arguments.kwargs), lambda x: by_id.get(id(x), x))
        with self._patched():
            returned = self.step(*args, **kwargs)
        outputs: list[torch.Tensor] = []

        def output(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            outputs.append(leaf.detach())
            return Output(len(outputs) - 1)

        self.result = rebuilt(returned, output)
        self.count = len(outputs)
        with torch.no_grad():
            for i, (each, x) in enumerate(zip(held, own, strict=True)):
                now = each.places[0][0].get(each.places[0][1])
                if now is not x:
                    self._replaced(i, x, now)
                if x.grad is not None:
                    self.grads.append(i)
                    outputs.append(x.grad)
        return outputs

    def _replaced(self, i: int, was: torch.Tensor, now: Any) -> None:
        held = self.arguments.held[i]
        if held.is_param or not isinstance(now, torch.Tensor) or now.shape != was.shape:
            raise RuleError(
                f"the train step replaces `{held.name}`",
                fix="change its values in place, as with copy_()",
            )
        was.copy_(now)

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """Let backward and optimizer steps leave nodes in the graph."""
        backward, free_backward = torch.Tensor.backward, torch.autograd.backward
        depth = 0

        def marked(function: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal depth
            start, depth = self._length(), depth + 1
            before = [x.grad for x in self.params]
            try:
                function(*args, **kwargs)
            finally:
                depth -= 1
            if not depth:
                self.backward_ranges.append((start, self._length()))
                with torch.no_grad():
                    for i, (x, was) in enumerate(zip(self.params, before, strict=True)):
                        if x.grad is not None and x.grad is not was or (x.grad is was and was is not None):
                            x.grad = gradient(x.grad, i)

        torch.Tensor.backward = lambda *a, **k: marked(backward, *a, **k)  # type: ignore[method-assign]
        torch.autograd.backward = lambda *a, **k: marked(free_backward, *a, **k)
        steps = [vars(optimizer).get("step") for optimizer in self.arguments.optimizers]
        for i, optimizer in enumerate(self.arguments.optimizers):
            optimizer.step = self._stepping(i, optimizer)  # type: ignore[method-assign]
        handle = register_optimizer_step_pre_hook(self._foreign)
        try:
            yield
        finally:
            handle.remove()
            torch.Tensor.backward, torch.autograd.backward = backward, free_backward  # type: ignore[method-assign]
            for optimizer, step in zip(self.arguments.optimizers, steps, strict=True):
                if step is None:
                    vars(optimizer).pop("step", None)
                else:
                    optimizer.step = step  # type: ignore[method-assign]

    def _length(self) -> int:
        proxies = get_proxy_mode()
        assert proxies is not None, "the step runs under make_fx"
        return len(proxies.tracer.graph.nodes)

    def _stepping(self, number: int, optimizer: Optimizer) -> Callable[..., Any]:
        def step(closure: Any = None, **kwargs: Any) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            params = [x for group in optimizer.param_groups for x in group["params"] if x.grad is not None]
            if params:
                with torch.no_grad():
                    grads = [x.grad for x in params]
                    made = stepped(params, grads, number)  # type: ignore[arg-type]
                    for x, new in zip(params, made, strict=True):
                        x.copy_(new)
            return loss

        return step

    def _foreign(self, optimizer: Optimizer, *_: Any) -> None:
        raise RuleError(
            f"the train step steps an optimizer that is not among its arguments: {type(optimizer).__name__}",
            {"at": call_site(sys._getframe(1))},
            "pass it to the compiled function: compiled(model, optimizer, batch)",
        )


@contextlib.contextmanager
def _restored(arguments: Arguments) -> Iterator[None]:
    """Put the user's tensors, gradients, hyperparameters and random states back; raise if the step changed any."""
    places = [(place, key, each.tensor) for each in arguments.held for place, key in each.places]
    groups = [(o, [(group, dict(group), list(group["params"])) for group in o.param_groups]) for o in arguments.optimizers]
    classes = [(m, type(m)) for module in arguments.modules.values() for m in module.modules()]
    training = [(m, m.training) for module in arguments.modules.values() for m in module.modules()]
    states = {id(o): o.state for o in arguments.optimizers}
    for module, kind in classes:
        if hasattr(module, "_fsdp_state"):
            module.__class__ = kind.__mro__[2]
    changed: list[str] = []
    try:
        yield
    finally:
        for place, key, tensor in places:
            place[key] = tensor
        for module, kind in classes:
            module.__class__ = kind
        for module, was in training:
            module.training = was
        for optimizer, listed in groups:
            optimizer.state = states[id(optimizer)]
            for group, before, params in listed:
                now = {key: value for key, value in group.items() if key != "params"}
                changed += [key for key, value in now.items() if value is not before.get(key)]
                group.clear()
                group.update(before)
                group["params"] = params
    if changed:
        raise RuleError(
            f"the train step changes hyperparameters of an optimizer: {', '.join(sorted(set(changed)))}",
            {"because": "it is traced once, so later steps would not change them"},
            "call the scheduler after the compiled step: its new values are used without compiling again",
        )


def _mark(graph: torch.fx.Graph, backward_ranges: Sequence[tuple[int, int]]) -> None:
    """Give each node the user's line, and those of backward the line of the forward that they belong to."""
    nodes = list(graph.nodes)
    sites: dict[Any, str] = {}
    for i, node in enumerate(nodes):
        in_backward = any(start <= i < stop for start, stop in backward_ranges)
        where = (node.meta.get("custom") or {}).get("where", "")
        number = node.meta.get("seq_nr")
        if in_backward:
            where = sites.get(number, where)
        elif number is not None and where:
            sites[number] = where
        node.meta["custom"] = {"where": where, "backward": in_backward}


def _untraceable(error: Exception, site: str) -> RuleError:
    name = type(error).__name__
    if "DataDependent" in name or "GuardOnDataDependent" in name or "item()" in str(error):
        return RuleError(
            "the train step reads the value of a tensor, on which its further course depends",
            {"at": site, "found": str(error).splitlines()[0][:200]},
            "compute with tensors (torch.where), or read values from what the compiled step returns",
        )
    return RuleError(
        "the train step cannot be traced",
        {"at": site, "found": f"{name}: {(str(error).splitlines() or [''])[0][:300]}"},
        "run it once without compile(): the error is the same, or it needs values of tensors",
    )


def outputs_in(result: Any) -> list[Output]:
    """Return the outputs of the graph in a result."""
    return [leaf for leaf in leaves_of(result) if isinstance(leaf, Output)]
