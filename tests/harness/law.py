"""The law that every operation is held to: sharded equals dense, forward and backward, whatever the layouts.

`sweep` takes one sample call through layouts of its operands in the world it is run in: each way to cut each dim, even
and uneven, with empty parts, reversed, in blocks, over a grid; copies, plain tensors, partial sums. Where the product
of these is large, a sample of it is drawn, the same every time. `tests/rules` holds each row of the rule table to it,
`tests/ops` the ways to call an operation that a row does not show; `check_table` runs a list of those.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch

import shardtensor as st
from harness import FULL, device
from shardtensor.comm.process_group import as_group
from shardtensor.mesh import Mesh
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from shardtensor.tensor import dispatch


@attrs.frozen
class Sample:
    """One way to call an operation.

    Attributes:
        call: of the function and as many tensors as there are shapes; returns a tensor or several.
        kinds: how values are made, by operand: "int" (mixed signs and ties; now and then "distinct" in its place),
            "mixed" (such integers always), "distinct", "positive", "unit", "bool", "long" (integers from 1), "ids:N"
            (integers below N), "places:N" (the same, no two alike), "index:N" (no two alike along the last dim).
        exact: compare with equality; else within rounding, or within this absolute tolerance.
        gathers: what may make it gather, which rows with letters must not otherwise: any layout (True), one that cuts
            one of these dims, or ("into whole") a first operand, written into, that is plain or a copy.
        grads: compare gradients, too.
        refuses: flat ranges, boxes and partial sums may raise instead.
        name: for messages.
    """

    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...] = ()
    exact: bool | float = False
    gathers: bool | str | tuple[int, ...] = False
    grads: bool = True
    refuses: bool = False
    name: str = ""


def case(
    name: str,
    function: Callable[..., Any],
    shapes: tuple[tuple[int, ...], ...],
    exact: bool | float = True,
    make: tuple[str, ...] = (),
    gathers: bool | str | tuple[int, ...] = False,
    refuses: bool = False,
) -> Sample:
    """A row of a table: `function` is called with the operands alone."""
    return Sample(lambda _, *xs: function(*xs), shapes, make, exact, gathers, refuses=refuses, name=name)


def values(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Values that a wrong rule cannot pass by luck."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    name, _, number = kind.partition(":")
    if name == "ids":
        out = torch.randint(0, int(number), shape, generator=generator)
    elif name == "places":
        out = torch.randperm(int(number), generator=generator)[:count].view(shape)
    elif name == "index":
        out = torch.rand((*shape[:-1], int(number)), generator=generator).argsort(-1)[..., : shape[-1]]
    elif name == "bool":
        out = torch.rand(shape, generator=generator) > 0.5
    elif name == "unit":
        out = torch.rand(shape, generator=generator).mul_(0.8).add_(0.1)
    elif name == "distinct":
        out = (torch.randperm(count, generator=generator) - count // 2).view(shape).float()
    elif name in ("positive", "long"):
        out = torch.randint(1, 6, shape, generator=generator)
        out = out if name == "long" else out.float()
    else:
        out = torch.randint(-3, 4, shape, generator=generator).float()
    return out.to(device())


# -- layouts -----------------------------------------------------------------------------------------------------------

Make = Callable[[torch.Tensor], torch.Tensor]


def specs(shape: tuple[int, ...]) -> list[tuple[str, Any, Any]]:
    """Names, specs and groups of layouts of a shape in this world; the strange ones have a ``~``."""
    size = as_group().size
    where = [f"rank:{r}/{device(r)}" for r in range(size)]
    found: list[tuple[str, Any]] = []
    for d, n in enumerate(shape):
        dims = ["-"] * len(shape)
        found.append((f"chunk{d}", ChunkShardingSpec(d, where)))
        dims[d] = "tp balanced"
        found.append((f"balanced{d}", f"[{', '.join(dims)}]"))
        if size > 1:
            dims[d] = f"tp sizes({', '.join(map(str, _uneven(n, size)))})"
            found.append((f"uneven{d}", f"[{', '.join(dims)}]"))
            found.append((f"back{d}", ChunkShardingSpec(d, where[::-1])))
        if size == 2 and n % 4 == 0 and n:
            dims[d] = "tp blocks(2)"
            found.append((f"blocks{d}", f"[{', '.join(dims)}]"))
    if size > 1:
        found.append(("replicate", "replicate"))
    if size == 2 and shape and 0 not in shape:
        found.append(("~flat", "flat(tp)"))
        boxes = [
            ((0,) * len(shape), (1, *shape[1:]), 1),
            ((1, *(0,) * (len(shape) - 1)), (shape[0] - 1, *shape[1:]), 0),
        ]
        shards = [ShardMetadata(list(offsets), list(sizes), where[r]) for offsets, sizes, r in boxes if 0 not in sizes]
        found.append(("~boxes", EnumerableShardingSpec(shards)))
    if size == 3:
        found += [(f"~outside{d}", ChunkShardingSpec(d, [where[2], where[1]])) for d in range(len(shape))]
    return [(name, spec, None) for name, spec in found]


def layouts(shape: tuple[int, ...]) -> list[tuple[str, Make]]:
    """Names of layouts of a shape in this world, and what lays a tensor out so."""
    made = [("plain", _plain), *((name, _cut(spec, group)) for name, spec, group in specs(shape))]
    return [*made, ("partial", _partials)] if as_group().size > 1 else made


def grids(shape: tuple[int, ...]) -> list[tuple[str, Make]]:
    """The same over the ranks as a grid of two by two."""
    found: list[tuple[str, Any]] = [("copy", "replicate")]
    dims = range(len(shape))
    for d in dims:
        for text in ("tp balanced", "dp balanced", "tp*dp balanced"):
            found.append((f"{text.split()[0]}{d}", _spec(shape, {d: text})))
    for d, e in itertools.permutations(dims, 2):
        found.append((f"dp{d}tp{e}", _spec(shape, {d: "dp balanced", e: "tp balanced"})))
    return [("plain", _plain), *((name, _cut(spec, grid_group())) for name, spec in found)]


def _spec(shape: tuple[int, ...], cuts: dict[int, str]) -> str:
    return "[" + ", ".join(cuts.get(d, "-") for d in range(len(shape))) + "]"


def _uneven(n: int, count: int) -> list[int]:
    """All but one on the last rank, one on the first, none between."""
    first = min(1, n)
    return [first, *[0] * (count - 2), n - first]


_GRIDS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def grid_group() -> Any:
    """This world as a grid, the same one each time."""
    group = as_group()
    if group not in _GRIDS:
        _GRIDS[group] = group.on_mesh(Mesh((("dp", 2), ("tp", 2))), {})
    return _GRIDS[group]


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_(x.is_floating_point())


def _cut(spec: Any, group: Any = None) -> Make:
    return lambda x: st.distribute(x, spec, process_group=group, requires_grad=x.is_floating_point())


def _partials(x: torch.Tensor) -> torch.Tensor:
    """Uneven partial sums of mixed signs that sum to `x`."""
    group = as_group()
    if x.dtype == torch.bool:
        return _cut("replicate")(x)
    mine = x * 0 + (group.rank + 1) * (-1) ** group.rank
    if group.rank == group.size - 1:
        mine = x - sum((r + 1) * (-1) ** r for r in range(group.size - 1))
    spec = f"[{', '.join('-' * x.dim())}] partial(tp)" if x.dim() else "replicate partial(tp)"
    local = mine.clone().requires_grad_(x.is_floating_point())
    return st.init_from_local_tensor(local, spec, *x.shape)


# -- the sweep ---------------------------------------------------------------------------------------------------------


def combinations(sample: Sample, most: int, seed: int) -> Iterator[list[tuple[str, Make]]]:
    """Layouts of the operands, not all of them plain: of four ranks those over a grid, of others those in a row."""
    most = most * 3 if FULL else most
    kinds = []
    if FULL or as_group().size != 4:
        kinds.append(([layouts(shape) for shape in sample.shapes], most))
    if as_group().size == 4:
        kinds.append(([grids(shape) for shape in sample.shapes], (most + 1) // 2))
    for options, count in kinds:
        total = 1
        for option in options:
            total *= len(option)
        every = itertools.product(*options)
        if total <= count:
            chosen = list(every)
        else:
            generator = random.Random(seed)
            chosen = [[generator.choice(option) for option in options] for _ in range(count)]
            for i, option in enumerate(options):  # one operand alone, the others plain
                uneven = [o for o in option if o[0].startswith("uneven")]
                alone = uneven + generator.sample(option[1:], min(len(option) - 1, count // 3))
                chosen += [[o[0] if k != i else pick for k, o in enumerate(options)] for pick in alone]
        for row in chosen:
            if any(name != "plain" for name, _ in row):
                yield list(row)


def check_table(cases: list[Sample], most: int = 3) -> None:
    """Take the cases through layouts of this world, other ones for each, and fail with all that differ."""
    failures = []
    for place, sample in enumerate(cases):
        _, found = sweep(None, sample, most, False, seed=place)
        failures += [f"{sample.name} of {text}" for text in found]
    assert not failures, f"{len(failures)} differ\n" + "\n".join(failures[:12])


def sweep(func: Any, sample: Sample, most: int, may_gather: bool, seed: int = 0) -> tuple[int, list[str]]:
    """Take one call through the layouts; return how many were compared, and what differed."""
    count, failures = 0, []
    for i, row in enumerate(combinations(sample, most, seed)):
        names = [name for name, _ in row]
        try:
            compare(func, sample, row, i % 2 == 1, may_gather or _may_gather(sample.gathers, names))
        except Exception as error:
            failures.append(f"{sample.shapes} as {names}: {type(error).__name__}: {error}")
            if len(failures) > 3:
                break
        count += 1
    return count, failures


def _may_gather(gathers: bool | str | tuple[int, ...], names: list[str]) -> bool:
    if isinstance(gathers, tuple):
        return any(str(dim) in name for dim in gathers for name in names)
    return gathers is True or (gathers == "into whole" and names[0] in ("plain", "copy", "replicate", "partial"))


def compare(func: Any, sample: Sample, row: list[tuple[str, Make]], distinct: bool, may_gather: bool) -> None:
    """One call on dense and on sharded operands."""
    kinds = sample.kinds or ("int",) * len(sample.shapes)
    kinds = tuple("distinct" if kind == "int" and distinct else kind for kind in kinds)
    inputs = [values(kind, shape, i + 1) for i, (kind, shape) in enumerate(zip(kinds, sample.shapes, strict=True))]
    dense = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    strange = any(name.startswith("~") for name, _ in row)
    sharded = [make(x) for x, (_, make) in zip(inputs, row, strict=True)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is in beta")
        expected = as_tuple(sample.call(func, *dense))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is in beta")
        dispatch._WARNED.clear()
        if strange or may_gather:
            warnings.simplefilter("ignore", st.GatherWarning)
        else:
            warnings.simplefilter("error", st.GatherWarning)
        try:
            found = as_tuple(sample.call(func, *sharded))
        except st.RuleError:
            may_refuse = ("~", "partial") if sample.refuses else ("~outside",)
            if any(name.startswith(may_refuse) for name, _ in row):
                return  # said by all ranks alike: the others go on to the next call
            raise
        assert len(found) == len(expected)
        wholes = [whole(y) for y in found]
        want = [y for y in expected if y.requires_grad]
        if sample.grads and want:
            sharded_loss(found, expected).backward()
            sharded_loss(expected, expected).backward()
        grads = [
            None if d.grad is None or x.grad is None else whole(x.grad) for x, d in zip(sharded, dense, strict=True)
        ]
    for y, z in zip(wholes, expected, strict=True):
        same(y, z, sample.exact, "value")
    if not (sample.grads and want):
        return
    for i, (x, d, g) in enumerate(zip(sharded, dense, grads, strict=True)):
        if d.grad is None:
            continue
        assert x.grad is not None, f"operand {i} has no gradient"
        same(g, d.grad, sample.exact, f"gradient of operand {i}")


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, bool):
        return (torch.tensor(value),)
    return tuple(value)


def sharded_loss(results: tuple[torch.Tensor, ...], like: tuple[torch.Tensor, ...]) -> torch.Tensor:
    total: Any = 0
    for k, (y, shape) in enumerate(zip(results, like, strict=True)):
        if shape.requires_grad:
            total = total + (y * values("int", tuple(shape.shape), 90 + k)).sum()
    return total


def same(found: torch.Tensor, want: torch.Tensor, exact: bool | float, what: str) -> None:
    assert found.shape == want.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(want.shape)}"
    assert found.dtype == want.dtype, f"{what}: {found.dtype}, not {want.dtype}"
    if exact is True or not (want.is_floating_point() or want.is_complex()):
        if torch.equal(found, want) or (
            want.is_floating_point() and torch.equal(found.nan_to_num(12345.0), want.nan_to_num(12345.0))
        ):
            return
    elif torch.allclose(found, want, rtol=1e-4, atol=exact or 1e-4, equal_nan=True):
        return
    raise AssertionError(f"{what}:\n{found.detach()}\nnot\n{want.detach()}")
