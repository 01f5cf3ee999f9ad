"""Write a random program while running it densely, so that it is mostly legal and its numbers stay small."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import attrs
import torch

from programs.layouts import random_spec
from programs.program import Input, Program, Step, Var, function, substitute, values
from shardtensor.mesh import Mesh

MESHES = (
    *(((("tp", 2),), 3), ((("tp", 3),), 3), ((("tp", 4),), 3), ((("tp", 1),), 1)),
    *(((("dp", 2), ("tp", 2)), 4), ((("dp", 1), ("tp", 3)), 1), ((("dp", 2), ("tp", 1)), 1)),
)
BIG = 1e4
DENSE = {"reshard": lambda x, spec: x.clone(), "reshard_": lambda x, spec: None, "put": lambda x, at, v: put(x, at, v)}

Choice = "tuple[str, tuple[Any, ...], dict[str, Any]] | None"
CHOICES: list[Callable[[Any], Any]] = []


HALVES = 1_000_000
"""Programs of seeds from here on have tensors of half precision, and flat ranges over several axes, too."""
OF_HALVES: list[Callable[[Any], Any]] = []


def put(x: Any, at: Any, value: Any) -> None:
    """``x[at] = value``."""
    x[at] = value


def generate(seed: int, steps: int | None = None) -> Program:
    """The program of a seed."""
    from programs import choices, halves  # noqa: F401  (they fill CHOICES and OF_HALVES)
    from programs.run import run_dense

    rng = Random(seed)
    mesh = rng.choices([mesh for mesh, _ in MESHES], [weight for _, weight in MESHES])[0]
    writer = Writer(rng, mesh, joined=seed >= HALVES)
    wanted = rng.randint(2, 8) if steps is None else steps
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(60):
            if len(writer.steps) >= wanted or writer.is_over:
                break
            choice = rng.choice(OF_HALVES if seed >= HALVES and rng.random() < 0.4 else CHOICES)(writer)
            if choice is not None:
                writer.emit(*choice)
    torch.set_rng_state(state)
    program = Program(seed, mesh, tuple(writer.inputs), tuple(writer.steps))
    return attrs.evolve(program, has_backward=not run_dense(program).backward)


class Writer:
    """A program in the making: what was written, and the dense value of every variable."""

    def __init__(self, rng: Random, mesh: tuple[tuple[str, int], ...], joined: bool) -> None:
        self.rng = rng
        self.joined = joined  # whether flat ranges go over several axes; recorded seeds are of programs without
        self.mesh = Mesh((("*", mesh[0][1]),)) if len(mesh) == 1 else Mesh(mesh)
        self.float = rng.choice([torch.float64, torch.float64, torch.float32])
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.env: dict[str, Any] = {}
        self.frozen: set[str] = set()  # may share memory or not, so nobody writes into them
        self.viewed: set[str] = set()  # share memory with another
        self.is_over = False

    # -- tensors ------------------------------------------------------------------------------------------------

    def shape(self, low: int = 0, high: int = 3) -> tuple[int, ...]:
        ndim = self.rng.choice([n for n in (0, 1, 1, 2, 2, 2, 3, 3, 4) if low <= n <= high])
        return tuple(
            self.rng.choice([0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6]) if self.rng.random() < 0.9 else 7 for _ in range(ndim)
        )

    def input(
        self, shape: tuple[int, ...], kind: str = "int", dtype: torch.dtype | None = None, grad: bool | None = None
    ) -> Var:
        """A new input of some layout."""
        name = f"x{len(self.inputs)}"
        if dtype is None:
            dtype = {"bool": torch.bool}.get(kind) or (torch.int64 if kind.startswith("ids") else self.float)
        spec = (
            ""
            if self.rng.random() < 0.2
            else self.spec(shape, partial=kind in ("int", "positive") and dtype.is_floating_point)
        )
        if grad is None:
            grad = self.rng.random() < 0.5
        grad = grad and dtype.is_floating_point and "op=" not in spec
        made = Input(name, shape, kind, dtype, self.rng.randrange(1000), spec, grad)
        self.inputs.append(made)
        self.env[name] = values(made).requires_grad_(grad)
        return Var(name)

    def spec(self, shape: tuple[int, ...], partial: bool) -> str:
        """A random spec that fits."""
        return random_spec(self.rng, shape, self.mesh, partial, self.joined)

    def value(self, var: Var) -> torch.Tensor:
        return self.env[var.name]

    def pick(self, fits: Callable[[torch.Tensor], bool]) -> Var | None:
        """A variable that fits, most often a late one."""
        found = [name for name, x in self.env.items() if isinstance(x, torch.Tensor) and _lives(x) and fits(x)]
        if not found:
            return None
        return Var(found[-1] if self.rng.random() < 0.5 else self.rng.choice(found))

    def any(
        self, fits: Callable[[torch.Tensor], bool] = lambda x: True, low: int = 0, high: int = 3, kind: str = "int"
    ) -> Var:
        """A variable that fits, or a new input."""
        var = None if self.rng.random() < 0.3 else self.pick(lambda x: low <= x.dim() <= high and fits(x))
        while var is None:
            made = self.input(self.shape(low, high), kind)
            var = (
                made
                if fits(self.value(made)) or kind != "int"
                else self.pick(lambda x: low <= x.dim() <= high and fits(x)) or made
            )
        return var

    def floats(self, low: int = 0, high: int = 3) -> Var:
        """A float variable."""
        return self.any(lambda x: x.dtype in (torch.float32, torch.float64), low, high)

    def exact(self, low: int = 0, high: int = 3) -> Var:
        """A variable of small integers, for operations with jumps."""
        return self.any(is_integral, low, high)

    def like(self, shape: tuple[int, ...], kind: str = "int", dtype: torch.dtype | None = None) -> Var:
        """A variable of this very shape, or a new input."""
        wanted = dtype or (torch.bool if kind == "bool" else None)
        if kind in ("int", "bool") and self.rng.random() < 0.4:
            found = self.pick(
                lambda x: tuple(x.shape) == shape and (x.dtype == wanted if wanted else x.dtype == self.float)
            )
            if found is not None:
                return found
        return self.input(shape, kind, dtype)

    def broadcastable(self, x: Var, kind: str = "int", dtype: torch.dtype | None = None, inside: bool = False) -> Var:
        """A variable that broadcasts with `x`; `inside` that does not widen it."""
        shape = list(self.value(x).shape)
        for i in range(len(shape)):
            if self.rng.random() < 0.2:
                shape[i] = 1
        shape = shape[self.rng.choice([0, 0, 0, min(1, len(shape)), len(shape)]) :]
        if not inside and shape and self.rng.random() < 0.1:
            shape = [2, *shape] if len(shape) < 3 else shape
        return self.like(tuple(shape), kind, dtype)

    def writable(self) -> Var | None:
        """A variable to write into."""
        return self.pick(
            lambda x: (
                x.is_floating_point()
                and not (x.is_leaf and x.requires_grad)
                and not any(self.env[name] is x for name in self.frozen)
            )
        )

    def dim(self, x: Var) -> int:
        n = max(1, self.value(x).dim())
        return self.rng.randrange(-n, n)

    def flag(self) -> bool:
        return self.rng.random() < 0.5

    # -- steps --------------------------------------------------------------------------------------------------

    def emit(self, func: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write a call if densely it works and keeps numbers small; now and then also one that errs, as the last."""
        args_, kwargs_ = substitute(args, self.env), substitute(kwargs, self.env)
        try:
            result = function(func, DENSE)(*args_, **kwargs_)
        except Exception:
            if self.rng.random() < 0.25:
                self.steps.append(Step((), func, args, kwargs))
                self.is_over = True
            return
        made = list(result) if isinstance(result, tuple | list) and not isinstance(result, torch.Size) else [result]
        if any(isinstance(x, torch.Tensor) and not _is_small(x) for x in made):
            if _writes(func, kwargs):
                self.steps.append(Step((), func, args, kwargs))
                self.is_over = True
            return
        known = {id(x) for x in self.env.values()}
        if result is None or any(id(x) in known for x in made):
            self.steps.append(Step((), func, args, kwargs))
            return
        outs = tuple(f"v{len(self.steps)}{'abcdefgh'[i] if len(made) > 1 else ''}" for i in range(min(8, len(made))))
        if len(made) > 8:
            return
        self.env.update(zip(outs, made, strict=True))
        read = Step((), func, args, kwargs).reads()
        if func in AMBIGUOUS:
            self.frozen |= {*outs, *read}
        memory = {
            name: x.untyped_storage().data_ptr()
            for name, x in self.env.items()
            if isinstance(x, torch.Tensor) and x.layout == torch.strided
        }
        if any(memory.get(out) == memory.get(name) for out in outs for name in read):
            self.viewed |= {*outs, *read}
            if read & self.frozen:
                self.frozen |= set(outs)
        self.steps.append(Step(outs, func, args, kwargs))


AMBIGUOUS = {
    *("Tensor.reshape", "Tensor.contiguous", "Tensor.to", "Tensor.flatten", "torch.flatten", "Tensor.type_as"),
    *("Tensor.float", "Tensor.double", "Tensor.expand", "torch.broadcast_to", "Tensor.expand_as", "torch.ravel"),
    *("torch.tensor_split", "torch.atleast_2d", "torch.broadcast_tensors", "torch.positive", "torch.einsum"),
}
"""They return a view or a copy, as it happens, or a view whose elements share memory."""


def _writes(func: str, kwargs: dict[str, Any]) -> bool:
    return func.endswith("_") or func == "put" or "out" in kwargs


def is_integral(x: torch.Tensor) -> bool:
    """Whether all values are small integers, so that sums of them are exact."""
    if not x.is_floating_point():
        return True
    x = x.detach()
    big = BIG if x.element_size() > 2 else 8
    return bool(torch.isfinite(x).all()) and torch.equal(x, x.round()) and (not x.numel() or x.abs().max() <= big)


def _is_small(x: torch.Tensor) -> bool:
    if x.numel() > 400 or x.dim() > 5:
        return False
    if x.dtype == torch.bool or not x.numel():
        return True
    x = x.detach().double()
    return bool(torch.isfinite(x).all()) and x.abs().max().item() <= BIG


def volume(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _lives(x: torch.Tensor) -> bool:
    """Whether torch still answers for `x`: not for one of several views whose base was written."""
    try:
        return x.is_leaf is not None
    except RuntimeError:
        return False
