"""The dense oracle: one function on whole tensors and on sharded ones, values and gradients compared.

A table is a list of `Case`. `check_table` runs it on every rank of a world, each case under many layouts; operands are
integer-valued, so that sums are exact in any order and most comparisons are equality.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
from harness import FULL, device

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.mesh import Mesh
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from shardtensor.tensor import dispatch


@attrs.frozen
class Case:
    """One operation.

    Attributes:
        name: for messages.
        function: of as many tensors as there are shapes; returns a tensor or a tuple of tensors.
        shapes: of the operands.
        exact: compare with equality, with allclose (False), or with this absolute tolerance.
        make: how values are made, by operand: "int", "positive", "unit", "ids:N", "places:N" (ids, no two alike),
            "bool", or "long".
        gathers: a layout cut along one of these dims of the first operand may warn that it gathers ("all": any;
            "into whole": where the first operand, written into, is plain or replicated).
        refuses: boxes written out and flat ranges may raise instead.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    exact: bool | float = True
    make: tuple[str, ...] = ()
    gathers: Any = ()
    refuses: bool = False


def values(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind.startswith("ids:"):
        return torch.randint(0, int(kind[4:]), shape, generator=generator).to(device())
    if kind.startswith("places:"):  # no two alike
        return torch.randperm(int(kind[7:]), generator=generator)[: torch.Size(shape).numel()].view(shape).to(device())
    if kind == "bool":
        return (torch.rand(shape, generator=generator) > 0.5).to(device())
    if kind == "unit":
        return torch.rand(shape, generator=generator).mul_(0.8).add_(0.1).to(device())
    low, high = (1, 6) if kind == "positive" else (-4, 5)
    whole = torch.randint(low, high, shape, generator=generator)
    return (whole if kind == "long" else whole.float()).to(device())


def specs(shape: tuple[int, ...]) -> Iterator[tuple[str, Any, Any]]:
    """Names, specs and process groups of layouts for a shape, in this world."""
    size = as_group().size
    where = [f"rank:{r}/{device(r)}" for r in range(size)]
    for dim in range(len(shape)):
        yield f"chunk{dim}", ChunkShardingSpec(dim, where), None
    if not shape:
        return
    matrix = len(shape) > 1
    if size == 1:
        yield "copy", "replicate", None
    if size < 3:
        yield "flat", "flat(tp)", None
    if size == 3:
        yield "back", ChunkShardingSpec(len(shape) - 1, where[::-1]), None
        yield "two", ChunkShardingSpec(0, [where[2], where[1]]), None  # rank 0 is outside
    if size == 4 and matrix:
        yield "grid", "[dp balanced, " + "-, " * (len(shape) - 2) + "tp balanced]", mesh()
        yield "part", "[tp balanced" + ", -" * (len(shape) - 1) + "]", mesh()
        yield "copy", "replicate", mesh()
    if size == 2 and len(shape) == 2 and shape[0] > 2 and shape[1] > 2:
        rows, cols = shape
        boxes = [((0, 0), (2, cols), 1), ((2, 0), (rows - 2, 2), 0), ((2, 2), (rows - 2, cols - 2), 1)]
        shards = [ShardMetadata(list(o), list(s), where[r]) for o, s, r in boxes]
        yield "boxes", EnumerableShardingSpec(shards), None


_GRIDS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def mesh() -> Any:
    """The ranks as a grid of two by two."""
    group = as_group()
    if group not in _GRIDS:
        _GRIDS[group] = group.on_mesh(Mesh((("dp", 2), ("tp", 2))), {})
    return _GRIDS[group]


def combinations(shapes: tuple[tuple[int, ...], ...]) -> Iterator[list[tuple[str, Any, Any] | None]]:
    """The first sharded and the others plain; each other one alone; all by one kind; all, each by another kind."""
    first = list(specs(shapes[0]))
    for spec in first:
        yield [spec, *[None] * (len(shapes) - 1)]
    if len(shapes) == 1:
        return
    for i, shape in enumerate(shapes[1:], 1):
        for spec in specs(shape):
            row: list[Any] = [None] * len(shapes)
            row[i] = spec
            yield row
    lists = [[s for s in specs(shape) if s[2] is None] for shape in shapes]
    for k in range(max(map(len, lists))):
        yield [options[k % len(options)] if options else None for options in lists]
        yield [options[(k + i) % len(options)] if options else None for i, options in enumerate(lists)]
    lists = [[s for s in specs(shape) if s[2] is not None] for shape in shapes]
    for k in range(max(map(len, lists))):
        yield [options[(k + i) % len(options)] if options else None for i, options in enumerate(lists)]


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def check_table(cases: list[Case]) -> int:
    """Run the cases and fail with all that differ; else return the number of combinations that were compared.

    All of them in worlds of three, where sizes come out most uneven; elsewhere every fifth one, others for each case.
    """
    count, failures = 0, []
    every = 1 if FULL or as_group().size == 3 else 5
    for place, case in enumerate(cases):
        for row in itertools.islice(combinations(case.shapes), place % every, None, every):
            names = [None if spec is None else spec[0] for spec in row]
            try:
                check(case, row)
            except Exception as error:
                failures.append(f"{case.name} of {case.shapes} as {names}: {type(error).__name__}: {error}")
            count += 1
    assert not failures, f"{len(failures)} of {count} differ\n" + "\n".join(failures[:12])
    return count


def check(case: Case, row: list[tuple[str, Any, Any] | None]) -> None:
    kinds = case.make or ("int",) * len(case.shapes)
    inputs = [values(kind, shape, i + 1) for i, (kind, shape) in enumerate(zip(kinds, case.shapes, strict=True))]
    dense = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    sharded = [
        x.clone().requires_grad_(x.is_floating_point())
        if spec is None
        else st.distribute(x, spec[1], process_group=spec[2], requires_grad=x.is_floating_point())
        for x, spec in zip(inputs, row, strict=True)
    ]
    expected = as_tuple(case.function(*dense))
    strange = any(spec is not None and spec[0] in ("boxes", "flat", "two") for spec in row)
    with warnings.catch_warnings():
        dispatch._WARNED.clear()  # what one rank said in another world, it would not say here
        warnings.simplefilter("ignore" if strange or may_gather(case, row) else "error", st.GatherWarning)
        try:
            found = as_tuple(case.function(*sharded))
        except st.RuleError:
            if strange and case.refuses:
                return
            raise
        assert len(found) == len(expected)
        for y, want in zip(found, expected, strict=True):
            same(whole(y), want, case.exact, "value")
        if not any(y.requires_grad for y in expected):
            return
        total, want_total = sharded_loss(found, expected), sharded_loss(expected, expected)
        total.backward()
        want_total.backward()
    for i, (x, d) in enumerate(zip(sharded, dense, strict=True)):
        if d.grad is None:
            continue
        assert x.grad is not None, f"operand {i} has no gradient"
        same(whole(x.grad), d.grad, case.exact, f"gradient of operand {i}")


def may_gather(case: Case, row: list[Any]) -> bool:
    if case.gathers == "all" or (case.gathers == "into whole" and (row[0] is None or row[0][0] == "copy")):
        return True
    names = {"back", "grid", "part", *(f"chunk{dim}" for dim in case.gathers)}
    return case.gathers not in ((), "into whole") and any(spec is not None and spec[0] in names for spec in row)


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def sharded_loss(results: tuple[torch.Tensor, ...], like: tuple[torch.Tensor, ...]) -> torch.Tensor:
    total: Any = 0
    for k, (y, shape) in enumerate(zip(results, like, strict=True)):
        if shape.requires_grad:
            total = total + (y * values("int", tuple(shape.shape), 90 + k)).sum()
    return total


def same(found: torch.Tensor, want: torch.Tensor, exact: bool | float, what: str) -> None:
    assert found.shape == want.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(want.shape)}"
    assert found.dtype == want.dtype, f"{what}: {found.dtype}, not {want.dtype}"
    if exact is True:
        if torch.equal(
            found.nan_to_num(12345.0) if found.is_floating_point() else found,
            want.nan_to_num(12345.0) if want.is_floating_point() else want,
        ):
            return
    elif torch.allclose(found, want, rtol=1e-4, atol=exact or 1e-5, equal_nan=True):
        return
    raise AssertionError(f"{what}:\n{found}\nnot\n{want}")
