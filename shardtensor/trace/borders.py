"""The values that enter and leave the modules of a model: recorded while it runs, and compared with the dense ones."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

import shardtensor
from shardtensor.mesh import Mesh
from shardtensor.plan.match.patterns import unwrapped
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of
from shardtensor.tensor.trees import tensors_in

Border = tuple[str, str, int, int]
"""A module's path, ``"in"`` or ``"out"``, the number of the call, and the position among the tensors of that call."""


@attrs.define(eq=False)
class Value:
    """A value at a border.

    Attributes:
        tensor: a copy; the local tensor of a ShardedTensor.
        grad: its gradient, after backward; None if it has none.
    """

    tensor: torch.Tensor
    grad: torch.Tensor | None = None


class Recorder:
    """Records the values at the borders of all modules, outside of what a plan adds to them.

    Attributes:
        values: in the order in which the modules were entered and left.
        sites: for each module, the place of its last call in the user's code, ``file.py:12: y = self.mlp(x)``.
    """

    def __init__(self) -> None:
        self.values: dict[Border, Value] = {}
        self.sites: dict[str, str] = {}
        self._calls: dict[tuple[str, str], int] = {}

    def watching(self, module: nn.Module) -> AbstractContextManager[None]:
        """Record while the block runs."""

        def enter(path: str, owner: nn.Module, inputs: Any) -> None:
            self.sites[path] = _site()
            self._record(path, "in", inputs)

        return calling_around(module, enter, lambda path, output: self._record(path, "out", output))

    def _record(self, path: str, side: str, value: Any) -> None:
        call = self._calls.get((path, side), 0)
        self._calls[path, side] = call + 1
        for i, tensor in enumerate(tensors_in(value)):
            if tensor.is_floating_point():
                kept = Value(local_of(tensor).detach().clone())
                self.values[path, side, call, i] = kept
                if tensor.requires_grad and not isinstance(tensor, ShardedTensor):
                    tensor.register_hook(lambda grad, kept=kept: setattr(kept, "grad", grad.detach().clone()))


@contextmanager
def calling_around(
    module: nn.Module, enter: Callable[[str, nn.Module, Any], None], leave: Callable[[str, Any], None]
) -> Iterator[None]:
    """Call a function before and after each forward of each module, outside of what a plan adds to them.

    Args:
        enter: of the path, the module, and its positional and named arguments.
        leave: of the path and the result.
    """
    handles: list[Any] = []
    for name, part in module.named_modules():
        path = unwrapped(name)

        def before(owner: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            enter(path, owner, (args, kwargs))

        def after(owner: nn.Module, args: Any, output: Any, path: str = path) -> None:
            leave(path, output)

        handles.append(part.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        handles.append(part.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


TORCH = str(Path(torch.__file__).parent)
_OWN = (TORCH, str(Path(shardtensor.__file__).parent))


def _site() -> str:
    """Return the innermost line of a running function outside of torch and this library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    name, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(name).name}:{line}: {linecache.getline(name, line).strip()}".rstrip(": ")


@attrs.frozen
class Relation:
    """How the values of some ranks relate to the dense value.

    Attributes:
        kind: ``"equal"``; ``"partial"``, their sum along `axes` is the dense value; ``"sharded"`` along `dim`;
            ``"wrong"``.
        ratio: of a wrong value: that to the dense one if it is a multiple of it, else 0.
        off: of a wrong value: the norm of the difference, relative to the dense one; infinite if its shape is another.
    """

    kind: str
    axes: tuple[str, ...] = ()
    dim: int = 0
    ratio: float = 0.0
    off: float = 0.0

    def __str__(self) -> str:
        if self.kind == "partial":
            return f"a partial sum along {'*'.join(self.axes)}"
        if self.kind == "sharded":
            return f"sharded along dim {self.dim}"
        if self.kind == "equal":
            return "equal on all ranks"
        if self.ratio:
            return f"{self.ratio:.4g} times too large" if self.ratio > 1 else f"{1 / self.ratio:.4g} times too small"
        return "of another shape" if self.off == float("inf") else f"off by {100 * self.off:.0f} %"


TOLERANCE = 1e-4
"""Relative; models that compute in float64 agree to 1e-12, but some of their code rounds to float32 on the way."""


def relation(values: Sequence[torch.Tensor], dense: torch.Tensor, mesh: Mesh) -> Relation:
    """Return how the values of the ranks of a mesh, in its order, relate to the dense value.

    Example:
        >>> from shardtensor.mesh import read_mesh
        >>> x = torch.arange(1.0, 5.0)
        >>> mesh = read_mesh("tp=2")
        >>> for values in ([x, x], [x - 3, torch.full((4,), 3.0)], [x[:2], x[2:]], [2 * x, 2 * x], [x, x * x]):
        ...     print(relation(values, x, mesh))
        equal on all ranks
        a partial sum along tp
        sharded along dim 0
        2 times too large
        off by 248 %
    """
    scale = max(dense.norm().item(), 1e-30)

    def is_equal(value: torch.Tensor) -> bool:
        return value.shape == dense.shape and (value - dense).norm().item() <= TOLERANCE * scale

    if all(map(is_equal, values)):
        return Relation("equal")
    axes = [i for i, size in enumerate(mesh.sizes) if size > 1]
    for count in range(1, len(axes) + 1):
        for some in combinations(axes, count):
            sums = _summed(values, mesh, some)
            names = tuple(mesh.names[axis] for axis in some)
            if sums is not None and all(map(is_equal, sums)):
                return Relation("partial", names)
    dim = _sharded_dim(values, dense, scale)
    if dim is not None:
        return Relation("sharded", dim=dim)
    first = values[0]
    if first.shape != dense.shape:
        return Relation("wrong", off=float("inf"))
    ratio = (first.flatten() @ dense.flatten()).item() / scale**2
    is_multiple = all(
        value.shape == dense.shape and (value - ratio * dense).norm().item() <= TOLERANCE * abs(ratio) * scale
        for value in values
    )
    worst = max((value - dense).norm().item() for value in values if value.shape == dense.shape)
    return Relation("wrong", ratio=ratio if is_multiple and abs(ratio) > TOLERANCE else 0.0, off=worst / scale)


def _summed(values: Sequence[torch.Tensor], mesh: Mesh, axes: tuple[int, ...]) -> list[torch.Tensor] | None:
    """Return the sum along some axes, for each coordinate along the others; None if shapes differ."""
    groups: dict[tuple[int, ...], torch.Tensor] = {}
    for rank, value in zip(mesh.ranks, values, strict=True):
        place = mesh.coordinate(rank) or ()
        key = tuple(i for axis, i in enumerate(place) if axis not in axes)
        if key in groups and groups[key].shape != value.shape:
            return None
        groups[key] = groups[key] + value if key in groups else value
    return [*groups.values()]


def _sharded_dim(values: Sequence[torch.Tensor], dense: torch.Tensor, scale: float) -> int | None:
    """Return the dim along which each value is a part of the dense one; None if there is none."""
    dims = {
        dim
        for value in values if value.dim() == dense.dim()
        for dim in range(dense.dim()) if value.shape[dim] < dense.shape[dim]
    }  # fmt: skip
    if len(dims) != 1:
        return None
    (dim,) = dims
    rest = [size for i, size in enumerate(dense.shape) if i != dim]
    if any(v.dim() != dense.dim() or [n for i, n in enumerate(v.shape) if i != dim] != rest for v in values):
        return None
    rows = dense.movedim(dim, 0).reshape(dense.shape[dim], -1)
    for value in values:
        own = value.movedim(dim, 0).reshape(value.shape[dim], -1)
        if own.numel() and torch.cdist(own, rows).min(1).values.max().item() > TOLERANCE * scale:
            return None
    return dim


def relations(
    ranks: Sequence[Mapping[Border, Value]], dense: Mapping[Border, Value], mesh: Mesh, times: float = 1.0
) -> tuple[dict[Border, Relation], dict[Border, Relation]]:
    """Return how values and gradients at each border relate to the dense ones, where all ranks have them.

    Args:
        ranks: the values of the ranks of `mesh`, in its order.
        times: of the dense gradients, before they are compared.
    """
    values, grads = {}, {}
    for border, ref in dense.items():
        found = [each[border] for each in ranks if border in each]
        if len(found) < len(ranks):
            continue
        values[border] = relation([each.tensor for each in found], ref.tensor, mesh)
        parts = [each.grad for each in found if each.grad is not None]
        if ref.grad is not None and len(parts) == len(ranks):
            grads[border] = relation(parts, ref.grad * times, mesh)
    return values, grads
