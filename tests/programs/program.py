"""A program as a value: inputs with layouts, then steps; it prints as the Python code that it is."""

from __future__ import annotations

import operator
from typing import Any

import attrs
import torch
import torch.nn.functional as F


@attrs.frozen
class Var:
    """A tensor of the program, by name."""

    name: str

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


@attrs.frozen
class Input:
    """A tensor that the program starts with.

    Attributes:
        kind: how its values are made, see `values`.
        spec: its layout as text; "" for a plain tensor, a copy on every rank.
        noise: whether the partial sums of a partial layout differ on all ranks.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    dtype: torch.dtype
    seed: int
    spec: str = ""
    requires_grad: bool = False

    def __str__(self) -> str:
        grad = ", requires_grad" if self.requires_grad else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name} = input({self.shape}, {self.kind!r}, {dtype}, seed={self.seed}, spec={self.spec!r}{grad})"


@attrs.frozen
class Step:
    """A call: `func` is text, looked up by `function`; it makes the variables `outs`."""

    outs: tuple[str, ...]
    func: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        args = [repr(arg) for arg in self.args] + [f"{key}={value!r}" for key, value in self.kwargs.items()]
        call = f"{self.func}({', '.join(args)})"
        return f"{', '.join(self.outs)} = {call}" if self.outs else call

    def reads(self) -> set[str]:
        return {leaf.name for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, Var)}


@attrs.frozen
class Program:
    """Inputs, steps, and the mesh they run on. At the end all variables are compared, and all leaves' gradients.

    Attributes:
        has_backward: False where the dense program has none, for an operation without a derivative.
    """

    seed: int
    mesh: tuple[tuple[str, int], ...]
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    has_backward: bool = True

    @property
    def size(self) -> int:
        size = 1
        for _, n in self.mesh:
            size *= n
        return size

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={n}" for name, n in self.mesh)
        return "\n".join([f"mesh {mesh}  # seed {self.seed}", *map(str, self.inputs), *map(str, self.steps)])


def values(made: Input) -> torch.Tensor:
    """The whole values of an input."""
    generator = torch.Generator().manual_seed(made.seed)
    shape, kind = made.shape, made.kind
    if kind == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    if kind == "distinct":
        return (torch.randperm(torch.Size(shape).numel(), generator=generator) - 2).reshape(shape).to(made.dtype)
    if kind == "unit":
        return (torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1).to(made.dtype)
    low, high = {"int": (-3, 4), "positive": (1, 5)}.get(kind) or (0, int(kind.removeprefix("ids:")))
    return torch.randint(low, high, shape, generator=generator).to(made.dtype)


def substitute(tree: Any, env: dict[str, Any]) -> Any:
    """Arguments with variables replaced by tensors."""
    if isinstance(tree, Var):
        return env[tree.name]
    if isinstance(tree, tuple | list):
        return type(tree)(substitute(leaf, env) for leaf in tree)
    if isinstance(tree, dict):
        return {key: substitute(leaf, env) for key, leaf in tree.items()}
    return tree


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, tuple | list):
        return [leaf for branch in tree for leaf in _leaves(branch)]
    if isinstance(tree, dict):
        return _leaves(tuple(tree.values()))
    return [tree]


_NAMES = {"torch": torch, "F": F, "Tensor": torch.Tensor, "operator": operator}


def function(name: str, own: dict[str, Any]) -> Any:
    """The function that a step names: of torch, or one of the program's `own`."""
    if name in own:
        return own[name]
    head, *rest = name.split(".")
    found = _NAMES[head]
    for part in rest:
        found = getattr(found, part)
    return found
