"""Rules that are made from equations, dims and index tensors: their letters say what torch does with the operands."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from shardtensor.rules.indexing import first_of, reading, writing
from shardtensor.rules.rule import Letters, Rule, einsum_rule, one_dim, several_dims


def numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double()


def along(x: torch.Tensor, letters: Letters, letter: str, start: int, stop: int) -> torch.Tensor:
    """The stretch of a tensor along a letter; all of it where it lacks the letter."""
    index = tuple(slice(start, stop) if each == letter else slice(None) for each in letters)
    return x[index]


def obeys(
    rule: Rule, operands: list[torch.Tensor], compute: Callable[..., torch.Tensor], but: Sequence[str | None] = ()
) -> None:
    """Along each letter that may be cut, parts of the operands give the part of the result, or partial sums of it."""
    want = compute(*operands)
    sizes: dict[str, int] = {}
    for letters, x in zip(rule.inputs, operands, strict=True):
        assert len(letters) == x.dim()
        for letter, size in zip(letters, x.shape, strict=True):
            assert (letter is None and size == 1) or sizes.setdefault(letter, size) == size
    assert want.shape == tuple(1 if letter is None else sizes[letter] for letter in rule.output)
    for letter, size in sizes.items():
        if letter in rule.whole or letter in but:
            continue
        for start, stop in ((0, 1), (1, size)):
            parts = [along(x, letters, letter, start, stop) for letters, x in zip(rule.inputs, operands, strict=True)]
            if letter in rule.output:
                assert torch.equal(compute(*parts), along(want, rule.output, letter, start, stop)), letter
        if letter not in rule.output:
            partials = []
            for start, stop in ((0, 1), (1, size)):
                zeroed = [x.clone() for x in operands]
                for letters, x in zip(rule.inputs, zeroed, strict=True):
                    if letter in letters:
                        along(x, letters, letter, 0, start).zero_()
                        along(x, letters, letter, stop, size).zero_()
                partials.append(compute(*zeroed))
            assert torch.equal(sum(partials), want), letter


# -- equations ---------------------------------------------------------------------------------------------------------


def product(rule: Rule, operands: list[torch.Tensor]) -> torch.Tensor:
    """What the rule's letters alone say: the sum of products over the letters that the output lacks."""
    names = {
        letter: chr(97 + i) for i, letter in enumerate(dict.fromkeys(x for side in rule.inputs for x in side if x))
    }
    kept = [
        x.reshape([n for n, letter in zip(x.shape, side, strict=True) if letter])
        for x, side in zip(operands, rule.inputs, strict=True)
    ]
    left = ",".join("".join(names[x] for x in side if x) for side in rule.inputs)
    return torch.einsum(f"{left}->{''.join(names[x] for x in rule.output if x)}", kept)


def random_equation(draw: random.Random) -> tuple[str, list[tuple[int, ...]]]:
    """An equation and shapes that fit it, mostly."""
    sizes = {"i": 2, "j": 3, "k": 4, "l": 1}
    sides, shapes = [], []
    for _ in range(draw.choice((1, 2, 2, 3))):
        letters = draw.choices("ijkl", k=draw.randrange(4))
        if len(letters) > 2 and draw.random() < 0.3:
            letters[1] = letters[0]
        shape = [sizes[x] for x in letters]
        if draw.random() < 0.5:
            at = draw.randrange(len(letters) + 1)
            letters.insert(at, "...")
            shape[at:at] = draw.choice(((), (5,), (1,), (6, 5), (6, 1), (1, 5)))
        if shape and draw.random() < 0.15:
            shape[draw.randrange(len(shape))] = draw.choice((1, 7))
        if draw.random() < 0.1:
            shape.append(2)
        sides.append("".join(letters))
        shapes.append(tuple(shape))
    equation = ",".join(sides)
    if draw.random() < 0.7:
        used = sorted({x for x in equation if x.isalpha()}) + (["z"] if draw.random() < 0.05 else [])
        out = draw.sample(used, draw.randrange(len(used) + 1))
        if "..." in equation or draw.random() < 0.1:
            out.insert(draw.randrange(len(out) + 1), "...")
        if out and draw.random() < 0.05:
            out.append(out[0])
        equation += "->" + "".join(out)
    return equation.replace(",", draw.choice((",", ", "))), shapes


def test_the_letters_of_an_equation_are_its_rule():
    draw = random.Random(0)
    fitted = refused = 0
    for seed in range(600):
        equation, shapes = random_equation(draw)
        operands = [numbers(shape, seed + i) for i, shape in enumerate(shapes)]
        rule = einsum_rule(equation, tuple(shapes))
        try:
            want = torch.einsum(equation, *operands)
        except (RuntimeError, ValueError):  # of opt_einsum, where it is installed
            assert rule is None, (equation, shapes)
            refused += 1
            continue
        if "..." in equation and "->" in equation and "..." not in equation.partition("->")[2]:
            continue  # torch sums what the output leaves out
        assert rule is not None, (equation, shapes)
        assert torch.equal(product(rule, operands).reshape(want.shape), want), (equation, shapes, rule)
        assert len(rule.output) == want.dim()
        sizes = {
            pair for side, shape in zip(rule.inputs, shapes, strict=True) for pair in zip(side, shape, strict=True)
        }
        lettered = [letter for letter, _ in sizes if letter is not None]
        assert len(set(lettered)) == len(lettered), "one letter, two sizes"
        repeated = {x for side in rule.inputs for x in side if side.count(x) > 1 and x}
        assert repeated <= rule.whole
        assert all(any(side.count(x) > 1 for side in _named(equation, shapes)) for x in rule.whole)
        fitted += 1
    assert fitted > 200 and refused > 50


def _named(equation: str, shapes: list[tuple[int, ...]]) -> list[str]:
    return equation.replace(" ", "").partition("->")[0].replace("...", "").split(",")


def test_an_equation_for_another_number_of_operands_has_no_rule():
    assert einsum_rule("ij,jk->ik", ((2, 3),)) is None
    assert einsum_rule("ij->ij", ((2, 3), (2, 3))) is None


# -- index tensors -----------------------------------------------------------------------------------------------------

READ = [
    ((5, 6), (0,), ((3,),)),
    ((5, 6), (1,), ((2, 3),)),
    ((5, 6), (0, 1), ((3,), (3,))),
    ((5, 6), (0, 1), ((3, 1), (2,))),
    ((4, 5, 6), (0, 2), ((3,), (2, 3))),
    ((4, 5, 6), (1, 2), ((3,), (2, 1))),
    ((4, 5, 6), (1,), ((),)),
    ((4, 5, 6), (0, 1, 2), ((1,), (2,), (2,))),
    ((4, 5, 3, 2), (1, 2), ((2,), (2,))),
    ((4, 5, 3, 2), (1, 3), ((3, 1, 2), (1, 2))),
    ((5, 6), (0,), ((1,),)),
]


def index_of(shape: tuple[int, ...], at: tuple[int, ...], indices: list[torch.Tensor]) -> tuple[object, ...]:
    places = dict(zip(at, indices, strict=True))
    return tuple(places.get(dim, slice(None)) for dim in range(len(shape)))


def ids(shape: tuple[int, ...], at: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    """Indices of which none is read twice at one place."""
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(0, shape[dim], n, generator=draw) for dim, n in zip(at, shapes, strict=True)]


@pytest.mark.parametrize(("shape", "at", "shapes"), READ, ids=str)
def test_reading_by_tensors_obeys_its_rule(shape, at, shapes):
    x, indices = numbers(shape, 1), ids(shape, at, shapes)
    broad = torch.broadcast_shapes(*shapes)
    rule = reading(shape, at, shapes, tuple(broad))
    assert rule.whole == frozenset() and rule.combine == ()
    assert [letter for dim, letter in enumerate(rule.inputs[0]) if letter not in rule.output] == [
        rule.inputs[0][dim] for dim in at
    ]

    def read(x: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
        return x[index_of(shape, at, list(indices))]

    obeys(rule, [x, *indices], read)


@pytest.mark.parametrize(("shape", "at", "shapes"), READ, ids=str)
def test_writing_by_tensors_obeys_its_rule(shape, at, shapes):
    x, indices = numbers(shape, 1), ids(shape, at, shapes)
    broad = tuple(torch.broadcast_shapes(*shapes))
    full = x[index_of(shape, at, indices)].shape
    for kept in itertools.product((True, False), repeat=len(full)):
        for skip in range(len(full) + 1):
            values = tuple(n if keep else 1 for n, keep in zip(full, kept, strict=True))[skip:]
            rule = writing(shape, at, shapes, broad, values)
            assert rule.output == rule.inputs[0]
            assert rule.whole == {f"i{j}" for j in range(len(broad))}
            assert rule.inputs[:-1] == reading(shape, at, shapes, broad).inputs
            value = numbers(values, 2)

            def write(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
                x = x.clone()
                x[index_of(shape, at, list(rest[:-1]))] = rest[-1]
                return x

            written = [rule.output[dim] for dim in at]  # each rank writes what it has of it
            obeys(rule, [x, *indices, value], write, but=written)


def test_what_indices_give_stands_where_torch_puts_it():
    x = torch.zeros(2, 3, 4, 5)
    for count in range(1, 5):
        for at in itertools.combinations(range(4), count):
            found = x[index_of((2, 3, 4, 5), at, [torch.zeros(7, dtype=torch.long)] * count)]
            assert found.shape[first_of(at)] == 7


# -- dims --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ndim", range(4))
def test_dims_are_counted_as_torch_counts_them(ndim):
    x = torch.zeros((2, 3, 4)[:ndim])

    def left(dims: object) -> tuple[int, ...]:
        """The dims that a sum makes of size 1."""
        sizes = x.sum(dims, keepdim=True).shape
        return tuple(dim for dim, (a, b) in enumerate(zip(sizes, x.shape, strict=True)) if a != b)

    assert several_dims(ndim, None) == several_dims(ndim, ()) == tuple(range(ndim))
    for dim in range(-5, 5):
        if not -max(ndim, 1) <= dim < max(ndim, 1):
            errors = []
            for call in (x.sum, lambda dim: one_dim(ndim, dim), lambda dim: several_dims(ndim, (dim,))):
                with pytest.raises(IndexError) as caught:
                    call(dim)
                errors.append(str(caught.value))
            assert len(set(errors)) == 1
            continue
        assert several_dims(ndim, dim) == several_dims(ndim, (dim,)) == (one_dim(ndim, dim),)
        assert not ndim or left(dim) == (one_dim(ndim, dim),)
    for dims in itertools.product(range(-ndim, ndim), repeat=2):
        if dims[0] % ndim == dims[1] % ndim:
            with pytest.raises(RuntimeError, match=f"dim {dims[0] % ndim} appears multiple times"):
                several_dims(ndim, dims)
        else:
            assert several_dims(ndim, dims) == left(dims)
