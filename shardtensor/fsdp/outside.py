"""Parameters of units outside of their unit's forward, where a plain tensor differs between ranks.

In other operations on ShardedTensors a plain tensor is replicated. In data parallel training it is this rank's part of
the batch, so an operation that treats it as replicated would mix the ranks' values and gradients. It raises instead,
for an operand that is a parameter or a ShardedTensor that was computed from one. If every rank has the full result of
an operation, as a plain tensor, its gradient is averaged over the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch.utils._pytree import tree_leaves, tree_map

from shardtensor.comm.collectives import sum_gradient
from shardtensor.comm.untraced import untraced
from shardtensor.errors import RuleError
from shardtensor.tensor.dispatch import HANDLERS, is_dtensor, name_of
from shardtensor.tensor.fallback import is_in_place
from shardtensor.tensor.sharded_tensor import WRAPPER_CLASSES, ShardedTensor

UNCOMPILED = (
    "parameters are gathered around a fully sharded module, not in a graph: compile it by itself, `block.compile()`"
)

_MIXES_NOTHING = frozenset("grad backward result_type __set__ _has_compatible_shallow_copy_type".split())
_FREE: set[Any] = set()
"""Functions with a handler that do not compute with the values of their operands."""
_TAKES_FORM = frozenset("to type_as view_as expand_as reshape_as".split())

Source = tuple["ref[Any]", str]
"""A parameter: a reference to its group, and its name there."""

_inside: ContextVar[bool] = ContextVar("inside", default=False)  # an operation of the library itself


class FSDPParameter(ShardedTensor):
    """The sharded parameter of a unit, or a ShardedTensor that was computed from one."""

    @classmethod
    @untraced(UNCOMPILED)
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _FREE:  # optimizers call these for each parameter in each step
            return HANDLERS[func](*args, **kwargs) if kwargs else HANDLERS[func](*args)
        if _inside.get():
            return super().__torch_function__(func, types, args, kwargs)
        name, is_write = _read(func)
        if name in _MIXES_NOTHING or name.startswith("is_"):
            if func in HANDLERS:
                _FREE.add(func)
            return super().__torch_function__(func, types, args, kwargs)
        takes_all = is_write and _takes_values(args)  # a plain tensor holds the new values on every rank
        operands = [] if takes_all else tree_leaves((args, kwargs))
        source = _source(operands)
        if source is not None and name not in _TAKES_FORM:
            _refuse_own(name_of(func), source, operands)
        mark = _inside.set(True)
        try:
            result = super().__torch_function__(func, types, args, kwargs)
        finally:
            _inside.reset(mark)
        if source is None or name.endswith("_like") or name[:4] == "new_":
            return result
        return tree_map(lambda x: _computed(x, source), result)

    @property
    def data(self) -> ShardedTensor:
        return _computed(ShardedTensor.data.fget(self), self._unit)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        ShardedTensor.data.fset(self, value)  # type: ignore[attr-defined]

    def to(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        return _computed(super().to(*args, **kwargs), self._unit)

    def full_tensor(self) -> torch.Tensor:
        """Return the full tensor on every rank, as any ShardedTensor does; its gradient is averaged over data ranks."""
        return _computed(super().full_tensor(), self._unit)


WRAPPER_CLASSES.add(FSDPParameter)


def join_group(sharded: ShardedTensor, group: Any, number: int) -> None:
    """Make a ShardedTensor the sharded parameter with this number in a group."""
    sharded._param_group, sharded._unit = group, (ref(group), group.params_info[number].name)
    sharded.__class__ = FSDPParameter


def leave_group(sharded: ShardedTensor) -> None:
    """Make a parameter an ordinary ShardedTensor again, of no unit."""
    sharded._param_group = sharded._unit = None
    sharded.__class__ = ShardedTensor


@lru_cache(maxsize=4096)
def _read(func: Any) -> tuple[str, bool]:
    """Return the name of a torch function, and whether it writes to its first operand.

    Example:
        >>> _read(torch.Tensor.mul_), _read(torch.mul)
        (('mul_', True), ('mul', False))
    """
    name = name_of(func).rpartition(".")[2]
    return name, name == "module_load" or is_in_place(name)


def _takes_values(args: Any) -> bool:
    """Whether the first of these arguments is a ShardedTensor, and autograd does not record a write to it."""
    while isinstance(args, tuple | list):
        args = args[0] if args else None
    return isinstance(args, ShardedTensor) and not (torch.is_grad_enabled() and args.requires_grad)


def _unit_of(source: Source | None) -> Any:
    """Return the unit of a parameter; None if it is gone or has a single rank, which has the full batch."""
    group = None if source is None else source[0]()
    unit = None if group is None else group.state()
    return None if unit is None or unit.data_mesh.whole.size == 1 else unit


def _source(operands: Iterable[Any]) -> Source | None:
    """Return the first parameter that is among the operands, or that one was computed from."""
    sources = [x._unit for x in operands if isinstance(x, FSDPParameter)]
    return next((source for source in sources if _unit_of(source) is not None), sources[0] if sources else None)


def _computed(x: Any, source: Source | None) -> Any:
    """Return the result `x` of an operation on a parameter; if it is plain, average its gradient over data ranks."""
    if type(x) is ShardedTensor:  # also if the unit is gone: detach() keeps a tensor's class
        x.__class__ = FSDPParameter
        x._unit = source
        return x
    unit = _unit_of(source)
    if unit is None:
        return x
    if isinstance(x, torch.Tensor) and not isinstance(x, ShardedTensor) and x.requires_grad:
        size = unit.data_mesh.whole.size
        x = sum_gradient(x, unit.data_mesh.whole)
        x.register_hook(lambda grad: grad / size)
    return x


def _refuse_own(name: str, source: Source, operands: Iterable[Any]) -> None:
    """Check that no plain tensor is among `operands`, except 0-d ones without a gradient, such as a step size.

    Raises:
        RuleError: there is one.
    """
    unit = _unit_of(source)
    for x in operands if unit is not None else ():
        is_plain = isinstance(x, torch.Tensor) and not isinstance(x, ShardedTensor) and not is_dtensor(x)
        if is_plain and (x.dim() or (x.requires_grad and torch.is_grad_enabled())):
            raise _refusal(name, unit, source[1], x)


def _refusal(name: str, unit: Any, parameter: str, x: torch.Tensor) -> RuleError:
    method = _method_of(unit.modules)
    return RuleError(
        f"{name}: a parameter of a fully sharded module met a plain tensor outside of the module's forward",
        {
            "module": unit.title,
            "parameter": parameter,
            "plain tensor": f"{tuple(x.shape)} {x.dtype}, this rank's own",
        },
        [
            f'register_fsdp_forward_method(module, "{method or "method"}") gathers the parameters around that method',
            "call the module itself, or compute with parameter.full_tensor()",
        ],
    )


def _method_of(modules: Iterable[Any]) -> str | None:
    """Return the name of the outermost running method of one of `modules`."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        if any(frame.f_locals.get("self") is module for module in modules):
            found = frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return found
