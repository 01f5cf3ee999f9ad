"""The graph of a train step: forward, loss, backward and optimizer steps, traced on tensors without memory.

The user's function runs once for each batch size on fake tensors, in place of parameters, buffers and batch. Autograd
runs inside, so the graph has the operations of backward, too. An optimizer is not run: its step is one node, and the
class itself runs when the graph does, with the hyperparameters of that time.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.fx.traceback as fx_traceback
from torch import fx, nn
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardtensor.comm.call_site import call_site
from shardtensor.errors import RuleError, ShardTensorError
from shardtensor.fsdp.data_parallel import reducer_of
from shardtensor.spmd.arguments import Held, StepArguments, rebuilt
from shardtensor.spmd.markers import Node, gradient, stepped
from shardtensor.spmd.restored import compiling, computed_with, is_sharded_inside, restored, shown_over
from shardtensor.spmd.sites import Sites, draw_again, mark_sites, site_of
from shardtensor.tensor.sharded_tensor import local_of

aten: Any = torch.ops.aten
_DECOMPOSED: Any = get_decompositions(
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
        adds_to: numbers of the parameters whose gradients from before the step it does not drop.
    """

    graph: fx.GraphModule
    result: Any
    count: int
    grads: list[int]
    adds_to: list[int]


@attrs.frozen
class Output:
    """In a result: output number `index` of the graph, or the gradient of parameter number `gradient_of`."""

    index: int
    gradient_of: int | None = None


def trace_train_step(
    step: Callable[..., Any], call: StepArguments, held: Sequence[Held], batch_dim: int, factor: tuple[int, int]
) -> Trace:
    """Trace a step with `factor` (numerator, denominator) times as many samples as the batch has.

    Raises:
        RuleError: the step reads values of tensors (control flow on data), steps an optimizer that is no argument, or
            changes hyperparameters. The module and the optimizers are as before.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = [_like(computed_with(each.tensor)) for each in held]
        inputs += [_resized(x, batch_dim, factor) for x in call.tensors]
    sites = Sites()
    tracer = _Tracer(step, call, held, sites)
    try:
        is_parallel = any(is_sharded_inside(each.tensor) for each in held) or any(
            reducer_of(module) is not None for root in call.modules for module in root.modules()
        )
        with (
            restored(call, held),
            compiling(is_parallel),
            sites.random_states(),
            fx_traceback.preserve_node_meta(),
            mode,
            sites,
        ):
            first = make_fx(tracer.run, decomposition_table=_DECOMPOSED, _allow_non_fake_inputs=True)(*inputs)
    except ShardTensorError:
        raise
    except Exception as error:
        raise _untraceable(error) from error
    for node, earlier in sites.again.items():
        draw_again(first.graph, node, earlier)
    mark_sites(first.graph, tracer.in_backward)

    def replay(*flat: torch.Tensor) -> Any:
        return fx.Interpreter(first).run(*flat)

    with fx_traceback.preserve_node_meta(), mode, torch.no_grad():
        functional = make_fx(torch.func.functionalize(replay, remove="mutations"), _allow_non_fake_inputs=True)(*inputs)
    functional.graph.eliminate_dead_code()
    return Trace(functional, tracer.result, tracer.count, tracer.grads, tracer.adds_to)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _resized(x: torch.Tensor, dim: int, factor: tuple[int, int]) -> torch.Tensor:
    if x.dim() <= dim:
        return _like(x)
    shape = list(x.shape)
    shape[dim] = shape[dim] * factor[0] // factor[1]
    return torch.empty(shape, dtype=x.dtype, device=x.device)


class _Tracer:
    def __init__(self, step: Callable[..., Any], call: StepArguments, held: Sequence[Held], sites: Sites) -> None:
        self.step, self.call, self.held, self.sites = step, call, held, sites
        self.in_backward: set[Node] = set()
        self.result: Any = None
        self.count = 0
        self.grads: list[int] = []
        self.earlier: dict[int, torch.Tensor] = {}  # by parameter: stands for a gradient from before the step
        self.marked: dict[int, tuple[int, torch.Tensor]] = {}  # gradients, and how many steps there were before them
        self.steps = 0
        self.adds_to: list[int] = []

    def run(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        held = self.held
        given, batch = flat[: len(held)], flat[len(held) :]
        own: list[torch.Tensor] = []
        shown: list[torch.Tensor] = []  # what modules and optimizers hold: ShardedTensors over some of them
        for each, fake in zip(held, given, strict=True):
            x = nn.Parameter(fake, each.tensor.requires_grad) if each.is_param else fake
            own.append(x)
            shown.append(shown_over(each.tensor, x))
            for place, key in each.places:
                place[key] = shown[-1]
            if each.is_param and x.requires_grad:
                x.grad = self.earlier[id(x)] = torch.empty_like(fake)
        self.params = own
        by_id = {id(each.tensor): x for each, x in zip(held, shown, strict=True)}
        by_id.update((id(x), fake) for x, fake in zip(self.call.leaves, batch, strict=True))
        for optimizer in self.call.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [by_id[id(param)] for param in group["params"]]
        args, kwargs = rebuilt((self.call.args, self.call.kwargs), lambda x: by_id.get(id(x), x))
        with self._patched():
            returned = self.step(*args, **kwargs)
        code = getattr(inspect.unwrap(self.step), "__code__", None)
        site = "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno} in {code.co_name}"
        outputs: list[torch.Tensor] = []
        grads = {id(x.grad): i for i, x in enumerate(own) if x.grad is not None}

        def output(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in grads:
                return Output(-1, grads[id(leaf)])
            outputs.append(leaf.detach())
            return Output(len(outputs) - 1)

        for i, x in enumerate(own):
            if x.grad is not None and x.grad is self.earlier.get(id(x)):
                x.grad = None
                self.adds_to.append(i)  # it is left as it is, or used
        self.result = rebuilt(returned, output)
        self.count = len(outputs)
        with torch.no_grad():
            for i, (each, x) in enumerate(zip(held, own, strict=True)):
                now = each.places[0][0].get(each.places[0][1])
                if now is not shown[i]:
                    self._replaced(i, x, now, site)
                if x.grad is not None:
                    self.grads.append(i)
                    outputs.append(x.grad)
        return outputs

    def _replaced(self, i: int, was: torch.Tensor, now: Any, site: str) -> None:
        held = self.held[i]
        if held.is_param or not isinstance(now, torch.Tensor) or now.shape != was.shape:
            raise RuleError(
                f"the train step replaces `{held.name}`",
                {"at": site},
                "change its values in place, as with copy_()",
            )
        was.copy_(now)

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """Let backward and optimizer steps leave nodes in the graph."""
        run_backward = torch.autograd._engine_run_backward
        depth = 0

        def marked(*args: Any, accumulate_grad: bool = False, **kwargs: Any) -> Any:
            nonlocal depth
            if not accumulate_grad:  # torch.autograd.grad: a part of the forward
                with self.sites:
                    return run_backward(*args, accumulate_grad=False, **kwargs)
            nodes, depth = self._nodes(), depth + 1
            start = len(nodes)
            while start and nodes[start - 1].target is aten.ones_like.default:  # the gradients of the losses
                start -= 1
            before = [(self._before_backward(x), None if x.grad is None else x.grad._version) for x in self.params]
            try:
                with self.sites:  # autograd calls functions of checkpoints, which are the user's
                    run_backward(*args, accumulate_grad=True, **kwargs)
            finally:
                depth -= 1
            if not depth:
                self.in_backward.update(self._nodes()[start:])
                with torch.no_grad():
                    for i, (was, version) in enumerate(before):
                        self._after_backward(i, was, version)
            return None

        torch.autograd._engine_run_backward = marked
        own = [{key: vars(o)[key] for key in ("step", "zero_grad") if key in vars(o)} for o in self.call.optimizers]
        for i, optimizer in enumerate(self.call.optimizers):
            vars(optimizer)["step"] = self._stepping(i, optimizer)
            vars(optimizer)["zero_grad"] = partial(_zero_grad, optimizer)
        handle = register_optimizer_step_pre_hook(self._foreign)
        try:
            yield
        finally:
            handle.remove()
            torch.autograd._engine_run_backward = run_backward
            for optimizer, before in zip(self.call.optimizers, own, strict=True):
                del optimizer.step, optimizer.zero_grad
                for key, value in before.items():
                    vars(optimizer)[key] = value

    def _before_backward(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient that a backward adds to; None in place of one that was there before the step.

        One from before an optimizer step is reduced already: the new gradient is added to it after its own reduction.
        """
        was = x.grad
        if was is not None and (was is self.earlier.get(id(x)) or self._is_reduced(was)):
            x.grad = None
        return was

    def _is_reduced(self, grad: torch.Tensor) -> bool:
        return self.marked.get(id(grad), (self.steps, grad))[0] < self.steps

    def _after_backward(self, number: int, was: torch.Tensor | None, version: int | None) -> None:
        """Mark the gradient of a parameter where a backward has ended; `version` is of the one that it added to."""
        x = self.params[number]
        earlier = self.earlier.get(id(x))
        if x.grad is None:
            x.grad = was
        elif x.grad is was and x.grad._version == version:  # this backward has not reached the parameter
            return
        elif was is not None and was is earlier:
            self.adds_to.append(number)
            x.grad = gradient(x.grad, number)
        elif was is not None and self._is_reduced(was):
            x.grad = was + gradient(x.grad, number)
        else:
            x.grad = gradient(x.grad, number)
        if x.grad is not None and x.grad is not earlier:
            self.marked[id(x.grad)] = self.steps, x.grad

    def _nodes(self) -> list[Node]:
        proxies = get_proxy_mode()
        assert proxies is not None, "the step runs under make_fx"
        return list(proxies.tracer.graph.nodes)

    def _stepping(self, number: int, optimizer: Optimizer) -> Callable[..., Any]:
        def step(closure: Any = None, **kwargs: Any) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if isinstance(optimizer, torch.optim.LBFGS):
                raise RuleError(
                    "LBFGS evaluates the loss several times in a step, which is not compiled",
                    {"at": self.sites.site},
                    "train with data_parallel and LBFGS, without compile",
                )
            listed = [local_of(x) for group in optimizer.param_groups for x in group["params"]]
            params = [x for x in listed if x.grad is not None and x.grad is not self.earlier.get(id(x))]
            if params:
                with torch.no_grad():
                    self.steps += 1
                    grads = [x.grad for x in params]
                    made = stepped(params, grads, number)
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


def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    for x in [local_of(x) for group in optimizer.param_groups for x in group["params"]]:
        if set_to_none:
            x.grad = None
        elif x.grad is not None:
            x.grad = torch.zeros_like(x.grad)


def _untraceable(error: Exception) -> RuleError:
    site = site_of(error)
    text = (str(error).splitlines() or [""])[0]
    if "DataDependent" in type(error).__name__ or "item()" in text:
        return RuleError(
            "the train step reads the value of a tensor, on which its further course depends",
            {"at": site, "found": text[:200]},
            "compute with tensors (torch.where), or read values from what the compiled step returns",
        )
    return RuleError(
        "the train step cannot be traced",
        {"at": site, "found": f"{type(error).__name__}: {text[:300]}"},
        "run it once without compile(): the error is the same, or it needs values of tensors",
    )
