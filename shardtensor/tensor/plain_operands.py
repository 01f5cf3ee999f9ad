"""A plain tensor that meets a sharded one is a copy on every rank: under `check_collectives` its checksum says so."""

from __future__ import annotations

from contextvars import ContextVar
from hashlib import sha256
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from shardtensor.comm.call_site import call_site
from shardtensor.comm.checked import WHEN_CHECKED, CheckedGroup
from shardtensor.comm.torch_group import bytes_of
from shardtensor.tensor import dispatch
from shardtensor.tensor.sharded_tensor import ShardedTensor

_inside: ContextVar[bool] = ContextVar("inside", default=False)
_OVERWRITTEN = ("copy_", "set_", "out", "__set__", "__get__")  # what they write into need not be equal before


def compare_plain_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise DisagreementError on every rank where a plain operand is not the same on all; all ranks call it."""
    name = dispatch.name_of(func)
    leaves = tree_flatten_with_path((args, {key: value for key, value in kwargs.items() if key != "out"}))[0]
    group = next((x._group for _, x in leaves if isinstance(x, ShardedTensor)), None)
    if not isinstance(group, CheckedGroup) or group.index < 0 or name.rpartition(".")[2] in _OVERWRITTEN:
        return
    plain = {
        _say(path): f"{' x '.join(map(str, x.shape)) or 'a number'} {x.dtype}, checksum {_checksum(x)}"
        for path, x in leaves
        if type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided and x.device.type != "meta"
    }
    if plain:
        group.compare(f"{name} in {call_site()}", plain)


def _say(path: Any) -> str:
    where, *rest = path
    if where.idx == 1:
        return f"operand {rest[0].key}{keystr(tuple(rest[1:]))}"
    return f"operand {rest[0].idx + 1}{keystr(tuple(rest[1:]))}"


def _checksum(x: torch.Tensor) -> str:
    """A checksum of the bytes of a tensor in their order."""
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return sha256(bytes_of(flat)).hexdigest()[:16]


def _watch() -> None:
    """Have every operation of sharded tensors compare its plain operands first."""
    inner: Any = ShardedTensor.__torch_function__

    def __torch_function__(cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if _inside.get() or torch.compiler.is_compiling():
            return inner(func, types, args, kwargs)
        mark = _inside.set(True)
        try:
            compare_plain_operands(func, args, kwargs or {})
            return inner(func, types, args, kwargs)
        finally:
            _inside.reset(mark)

    ShardedTensor.__torch_function__ = classmethod(__torch_function__)  # type: ignore[method-assign, assignment]


WHEN_CHECKED.append(_watch)
