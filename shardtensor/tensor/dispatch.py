"""The table from torch functions to handlers, and errors for transforms and tracers that work below it, in C++.

Handlers register with `implements`. `tensor.fallback` runs an operation without one: it gathers the operands and warns
once; under `strict` it raises `RuleError`.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from shardtensor.comm.collectives import FORWARD_MODE_FIX
from shardtensor.errors import RuleError, ShardTensorError
from shardtensor.rules.table import ROWS

HANDLERS: dict[Any, Callable[..., Any]] = {}
"""Maps a torch function, method or property getter to its handler for ShardedTensors."""

ANY_OTHER = "any other function"
"""The key of the handler for functions without one of their own; its first argument is the function."""

_STRICT: contextvars.ContextVar[bool] = contextvars.ContextVar("strict", default=False)


def implements(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a handler for torch functions; it is called with the arguments of the call."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return register


def implements_each(functions: str | Iterable[Any], make: Callable[[Any], Callable[..., Any]]) -> None:
    """Register ``make(function)`` as the handler of each function; a text has names, see `resolve`."""
    if isinstance(functions, str):
        functions = [function for name in functions.split() for function in resolve(name)]
    for function in functions:
        HANDLERS[function] = make(function)


def _never(*_: Any) -> bool:
    return False


_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_UNCHECKED = dict.fromkeys(_CHECKS, _never)
# what torch.nn.init asks is an attribute of torch
_TORCH = SimpleNamespace(**{**vars(torch), "overrides": SimpleNamespace(**_UNCHECKED)})


def own_body(func: Any) -> Callable[..., Any]:
    """Return a copy of a Python function of torch that does not look for a handler of its operands."""
    copy = FunctionType(
        func.__code__, {**func.__globals__, **_UNCHECKED, "torch": _TORCH}, func.__name__, func.__defaults__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def resolve(name: str) -> list[Any]:
    """Return torch's functions, methods and getters of a name: one if it has an owner (``F.embedding``), else all that
    exist: ``torch.add``, ``Tensor.add``, ``Tensor.__add__``, ``F.add``, ``torch.special.add``."""
    owner, _, last = name.rpartition(".")
    places: list[Any] = [{"F": F, "Tensor": torch.Tensor}.get(owner) or getattr(torch, owner)] if owner else [
        torch, torch.Tensor, F, torch.special
    ]  # fmt: skip
    found = [getattr(place, last, None) for place in places]
    found += [] if owner else [getattr(torch.Tensor, f"__{name}__", None)]
    found = [getattr(each, "__get__", None) if inspect.isdatadescriptor(each) else each for each in found]
    return [each for each in found if callable(each)]


@contextlib.contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Raise an error for every operation that would gather or redistribute a sharded operand implicitly.

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
    """Return whether the caller is inside `strict`."""
    return _STRICT.get()


class GatherWarning(UserWarning):
    """An operation without a sharding rule gathered its operands."""


_WARNED: set[str] = set()


def name_of(func: Any) -> str:
    """Return the name of a torch function as users write it."""
    is_method = getattr(func, "__objclass__", None) is not None or getattr(func, "__name__", "") == "__get__"
    return f"Tensor.{bare_name(func)}" if is_method else bare_name(func)


def bare_name(func: Any) -> str:
    """Return the name of a torch function, or of the attribute that a getter reads, without its owner."""
    name: str = getattr(func, "__name__", None) or str(func)
    if name != "__get__":
        return name
    read = func.__self__
    return getattr(read, "__name__", None) or read.fget.__name__  # a property has no name before Python 3.13


def warn_of_gather(func: Any, size_bytes: int, layouts: Sequence[str] = ()) -> None:
    """Warn once for each operation that it gathers; raise RuleError under `strict`. The `layouts` of the operands are
    the cause if the operation has a row in the rule table."""
    name = name_of(func)
    bare = (getattr(func, "__name__", None) or "").strip("_")  # also for its in-place form and its operator
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
        _WARNED.add(name)  # not reached if the warning raises: every rank then raises, each time


_BY_DIMS = "lay the operands out by dims, all alike: shardtensor.distribute(x, spec), shardtensor.reshard(x, spec)"


def _level_of_caller() -> int:
    """Return the stack level, counted from the caller of this function, of the code that called torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(("shardtensor.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level


def is_dtensor(x: Any) -> bool:
    """Return whether `x` is torch's DTensor, without importing it, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def refuse_partial_write(target: Any, name: str) -> None:
    """Raise RuleError if `target` is partial: partial sums cannot be changed in place."""
    if target._layout.partial:
        raise RuleError(
            f"{name}: in place on a tensor that is still to be reduced",
            {"spec": str(target.sharding_spec())},
            "reduce it first: x = distribute(x, spec) with a spec that is not partial",
        )


def explain_error(error: Exception, func: Any, operands: Any) -> None:
    """Raise RuleError in place of `error` if its cause is known: an active transform or tracer, or a DTensor."""
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
    active = None if isinstance(error, ShardTensorError) else _active_transform()
    if active is not None:
        what, fix = active
        raise RuleError(f"{name_of(func)}: {what} does not see through ShardedTensors", fix=fix) from error


def refusal_below(func: Any) -> RuleError:
    """Return the error for an operation that reached the wrapper itself, which has no elements."""
    active = _active_transform()  # torch hides a running transform here, so transforms are among the usual causes
    cause = {"cause": active[0]} if active else {"usual causes": "\n".join(_USUAL_CAUSES)}
    fix = active[1] if active else ["call full_tensor() first and work on the plain tensor", _UNSHARD]
    return RuleError(f"{func} reached a ShardedTensor below the level where operations are sharded", cause, fix)


_USUAL_CAUSES = (
    "torch.func transforms (grad, vjp, jvp, vmap, ...) over sharded operands,",
    "torch.compile over sharded operands, wrappers of modules that broadcast or flatten parameters,",
    "a sharded gradient for a plain tensor: y.backward(gradient) needs gradient.full_tensor(),",
    "code that disables __torch_function__",
)
_UNSHARD = "unshard_module(module) makes its parameters plain"


def _active_transform() -> tuple[str, list[str]] | None:
    """Return the transform or tracer that is active, and what to do instead."""
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
    """Raise RuleError: torch calls this before it makes a fake tensor."""
    raise RuleError(
        "a fake tensor of a ShardedTensor would not know how it is sharded",
        {"usual causes": "torch.export, FakeTensorMode"},
        "unshard_module(module) first",
    )
