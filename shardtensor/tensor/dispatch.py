"""The table from torch functions to handlers, and errors for what works below it, as transforms and tracers in C++ do.

Handlers register with `implements`. An operation without one is done by `tensor.fallback`, which gathers its operands,
with one warning; under `strict` it is a `RuleError` instead.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from shardtensor.comm.collectives import FORWARD_MODE_FIX
from shardtensor.errors import RuleError, ShardTensorError
from shardtensor.rules.table import ROWS

HANDLERS: dict[Any, Callable[..., Any]] = {}
"""From a torch function, method or property getter to what does its work on ShardedTensors."""

ANY_OTHER = "any other function"
"""The key of the handler of functions without one of their own; it is called with the function first."""

_STRICT: contextvars.ContextVar[bool] = contextvars.ContextVar("strict", default=False)


def implements(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a handler for torch functions; it is called with the very arguments of the call."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return register


def spellings(name: str) -> list[Any]:
    """All that torch calls an operation: ``torch.add``, ``Tensor.add``, ``Tensor.__add__``, ``F.add``, if there."""
    places = [(torch, name), (torch.Tensor, name), (torch.Tensor, f"__{name}__"), (F, name), (torch.special, name)]
    return [getattr(place, spelled) for place, spelled in places if hasattr(place, spelled)]


def resolve(name: str) -> list[Any]:
    """What a name of the rule table means: one function where it says whose (``F.embedding``), else all `spellings`."""
    owner, dot, last = name.rpartition(".")
    if not dot:
        return spellings(name)
    place = {"F": F, "Tensor": torch.Tensor}.get(owner) or getattr(torch, owner)
    return [getattr(place, last)] if hasattr(place, last) else []


@contextlib.contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Make every operation that would gather or move a sharded operand by itself an error.

    Example:
        >>> with strict():
        ...     is_strict()
        True
    """
    token = _STRICT.set(enabled)
    try:
        yield
    finally:
        _STRICT.reset(token)


def is_strict() -> bool:
    """Whether the caller is inside `strict`."""
    return _STRICT.get()


class GatherWarning(UserWarning):
    """An operation without a sharding rule gathered its operands."""


_WARNED: set[str] = set()


def name_of(func: Any) -> str:
    """The name of a torch function as people write it."""
    is_method = getattr(func, "__objclass__", None) is not None or getattr(func, "__name__", "") == "__get__"
    return f"Tensor.{bare_name(func)}" if is_method else bare_name(func)


def bare_name(func: Any) -> str:
    """The name of a torch function, or of the attribute that a getter reads, without whose it is."""
    name: str = getattr(func, "__name__", None) or str(func)
    if name != "__get__":
        return name
    read = func.__self__
    return getattr(read, "__name__", None) or read.fget.__name__  # a property has no name before Python 3.13


def warn_of_gather(func: Any, size_bytes: int, layouts: Sequence[str] = ()) -> None:
    """Say once for each operation that it gathered; an error under `strict`. `layouts` of the operands are the cause
    where the operation has a row in the table of rules."""
    name = name_of(func)
    bare = (getattr(func, "__name__", None) or "").strip("_")  # of its form in place, and its operator, too
    row = ROWS.get(bare) or ROWS.get(bare.removeprefix("i"))
    has_rule = bool(layouts) and row is not None and not row.reason
    if is_strict():
        facts = {"operands": "\n".join(layouts)} if has_rule else {}
        raise RuleError(
            f"{name}: no sharding rule" + (" for operands laid out like this" if has_rule else ""),
            facts | {"it would": f"gather {size_bytes / 2**20:.2f} MiB on every rank"},
            [*([_BY_DIMS] if has_rule else []), "call full_tensor() on its operands where you mean to",
             "leave strict() to let it gather"],
        )  # fmt: skip
    if name not in _WARNED:
        why = f" for operands laid out as {', '.join(layouts)}" if has_rule else ""
        warnings.warn(
            f"{name} has no sharding rule{why}: it gathers its operands ({size_bytes / 2**20:.2f} MiB on every rank), "
            "computes on the whole and lays the result out again. "
            + (f"To keep it from that, {_BY_DIMS}. " if has_rule else "")
            + "This is said once for each operation.",
            GatherWarning,
            stacklevel=_level_of_caller(),
        )
        _WARNED.add(name)  # not where it was raised: then every rank raises, and raises again


_BY_DIMS = "lay the operands out by dims, all alike: shardtensor.distribute(x, spec), shardtensor.reshard(x, spec)"


def _level_of_caller() -> int:
    """The stack level, seen from the function that calls this, of the code that called torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(("shardtensor.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level


def is_dtensor(x: Any) -> bool:
    """Whether `x` is torch's DTensor; does not import it, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def refuse_partial_write(target: Any, name: str) -> None:
    """Raise RuleError if `target` is partial: no partial sum could take a change in place."""
    if target._layout.partial:
        raise RuleError(
            f"{name}: in place on a tensor that is still to be reduced",
            {"spec": str(target.sharding_spec())},
            "reduce it first: x = distribute(x, spec) with a spec that is not partial",
        )


def explain(error: Exception, func: Any, operands: Any) -> None:
    """Raise RuleError in place of `error`, where its cause is known: a transform or a tracer at work, or a DTensor."""
    found = next((x for x in tree_leaves(operands) if is_dtensor(x)), None)
    if found is not None:
        raise RuleError(
            f"{name_of(func)}: a DTensor beside a ShardedTensor",
            {"DTensor": f"{' x '.join(map(str, found.shape))} as {', '.join(map(repr, found.placements))}"},
            [
                "shardtensor.from_dtensor(dtensor) is a ShardedTensor on the same memory",
                "tensor.to_dtensor(dtensor.device_mesh) is a DTensor on the same memory",
            ],
        ) from error
    known = None if isinstance(error, ShardTensorError) else _at_work()
    if known is not None:
        what, fix = known
        raise RuleError(f"{name_of(func)}: {what} does not see through ShardedTensors", fix=fix) from error


def refusal_below(func: Any) -> RuleError:
    """The error for an operation that reached a ShardedTensor where it has no elements."""
    known = _at_work()  # within a transform torch hides it, so that it is one of the usual causes too
    cause = {"cause": known[0]} if known else {"usual causes": "\n".join(_USUAL_CAUSES)}
    fix = known[1] if known else ["call full_tensor() first and work on the plain tensor", _UNSHARD]
    return RuleError(f"{func} reached a ShardedTensor below the level where operations are sharded", cause, fix)


_USUAL_CAUSES = (
    "torch.func transforms (grad, vjp, jvp, vmap, ...) over sharded operands,",
    "torch.compile over sharded operands, wrappers of modules that broadcast or flatten parameters,",
    "a sharded gradient for a plain tensor: y.backward(gradient) needs gradient.full_tensor(),",
    "code that disables __torch_function__",
)
_UNSHARD = "unshard_module(module) makes its parameters plain"


def _at_work() -> tuple[str, list[str]] | None:
    """What transforms or records at this moment, and what to do instead."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform (grad, vjp, jvp, vmap, functionalize, ...)", [
            "unshard_module(module), or full_tensor(), and transform the function of plain tensors",
            "torch.autograd.grad and torch.autograd.functional (vectorize=False) take sharded parameters",
        ]
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation", FORWARD_MODE_FIX
    if torch.compiler.is_exporting():
        return "torch.export", ["unshard_module(module) first; shard what is loaded again"]
    if torch.jit.is_tracing():
        return "torch.jit.trace", ["unshard_module(module) first"]
    return None


@implements(torch.Tensor._is_view)
def _refuse_fake(tensor: torch.Tensor) -> NoReturn:
    """Torch asks this of what it is about to make a fake tensor of."""
    raise RuleError(
        "a fake tensor of a ShardedTensor would not know how it is sharded",
        {"usual causes": "torch.export, FakeTensorMode"},
        "unshard_module(module) first",
    )
