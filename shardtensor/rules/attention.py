"""The letters of attention: ``b h !l !e, b h !s !e, b h !s !f, b h !l !s -> b h l f``."""

from __future__ import annotations

from shardtensor.layout.layout import CutLayout, Shape
from shardtensor.rules.rule import Letters, Rule
from shardtensor.rules.views import scaled


def attention_rule(shapes: tuple[Shape, ...], grouped: bool) -> Rule:
    """The rule of query, key, value and perhaps a mask, of these shapes; with grouped queries the heads are whole.

    Example:
        >>> str(attention_rule(((2, 4, 3, 5), (2, 4, 6, 5), (2, 4, 6, 7), (3, 6)), False))
        'b0 b1 !l !e, b0 b1 !s !e, b0 b1 !s !f, !l !s -> b0 b1 !l !f'
    """
    batch = [f"b{i}" for i in range(len(shapes[0]) - 2)]
    sizes = {letter: max(shape[i] for shape in shapes[:3]) for i, letter in enumerate(batch)}
    sizes.update(l=shapes[0][-2], s=shapes[1][-2])
    heads = "g" if grouped else batch[-1]

    def side(shape: Shape, *letters: str) -> Letters:
        names = letters[len(letters) - len(shape) :]
        return tuple(None if n == 1 and sizes.get(x, 1) != 1 else x for n, x in zip(shape, names, strict=True))

    inputs = [
        side(shapes[0], *batch, "l", "e"),
        side(shapes[1], *batch[:-1], heads, "s", "e"),
        side(shapes[2], *batch[:-1], heads, "s", "f"),
        *(side(shape, *batch, "l", "s") for shape in shapes[3:]),
    ]
    whole = frozenset({"l", "s", "e", "f"} | ({"g", batch[-1]} if grouped else set()))
    return Rule(tuple(inputs), (*batch, "l", "f"), whole)


def heads_fit(query: CutLayout, key: CutLayout, value: CutLayout, groups: int) -> bool:
    """Whether every rank's query heads, `groups` to a key head, are those of its keys and values, all else alike."""
    if query.partial or key.partial or value.partial:
        return False
    if not (query.grid == key.grid == value.grid and query.ranks == key.ranks == value.ranks):
        return False
    if key.dims != value.dims or any((*query.dims[-2:], *key.dims[-2:])) or query.dims[:-3] != key.dims[:-3]:
        return False
    heads, fewer = query.dims[-3], key.dims[-3]
    if heads is None or fewer is None:
        return heads is fewer
    return heads.axes == fewer.axes and heads.pieces == scaled(fewer.pieces, groups)
