"""Many names as one short text: ``model.layers.{0..31}.mlp.{gate_proj,up_proj}.weight``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def skeleton(name: str) -> str:
    """Return a name without its numbers: equal for the same tensor of every layer.

    Example:
        >>> skeleton("layers.3.q.weight")
        'layers.#.q.weight'
    """
    return ".".join("#" if segment.isdecimal() else segment for segment in name.split("."))


def brief_names(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return patterns for names that differ in numbers, or in one word; each with its names.

    Example:
        >>> list(brief_names(["l.0.k.weight", "l.0.v.weight", "l.1.k.weight", "l.1.v.weight", "norm.weight"]))
        ['l.{0..1}.{k,v}.weight', 'norm.weight']
    """
    return {".".join(map(_braced, words)): members for words, members in _folded(names)}


def where(names: Iterable[str], form: str = "{numbers}, {words}") -> str:
    """Return as text where names are in a model: the layers, and the words in which they differ.

    Example:
        >>> names = ["l.0.attn.k.weight", "l.0.attn.v.weight", "l.1.attn.k.weight", "l.1.attn.v.weight"]
        >>> where(names), where(names, "{words} of {numbers}")
        ('l 0-1, k and v', 'k and v of l 0-1')
    """
    folded = _folded(names)
    if len(folded) > 1:
        shown = [".".join(map(_braced, words)) for words, _ in folded]
        return ", ".join(shown[:2]) + (f" and {len(shown) - 2} patterns more" if len(shown) > 2 else "")
    (columns, _), numbers, words = folded[0], [], []
    for i, options in enumerate(columns):
        if len(options) > 1 and all(option.isdecimal() for option in options):
            numbers.append(f"{columns[i - 1][0] if i else ''} {_ranges(options)}".strip())
        elif len(options) > 1:
            words.append(f"{', '.join(options[:-1])} and {options[-1]}")
    parts = {"numbers": ", ".join(numbers), "words": ", ".join(words)}
    return form.format(**parts) if numbers and words else parts["numbers"] or parts["words"]


_Words = list[tuple[str, ...]]


def _folded(names: Iterable[str]) -> list[tuple[_Words, tuple[str, ...]]]:
    """Return for each pattern the words of every segment, and the names."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(skeleton(name), []).append(name)
    folds = [(_words(members), tuple(members)) for members in kinds.values()]
    merged: list[tuple[_Words, tuple[str, ...]]] = []
    for words, members in folds:
        for i, (others, held) in enumerate(merged):
            differing = _differing(words, others)
            if differing is not None:
                joined = list(others)
                joined[differing] = (*others[differing], *words[differing])
                merged[i] = joined, (*held, *members)
                break
        else:
            merged.append((words, members))
    return merged


def _words(members: Sequence[str]) -> _Words:
    return [tuple(dict.fromkeys(column)) for column in zip(*(member.split(".") for member in members), strict=True)]


def _differing(one: _Words, other: _Words) -> int | None:
    """Return the one segment of words, not of numbers, in which two patterns differ; None if there is none."""
    if len(one) != len(other):
        return None
    found = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if len(found) != 1 or any(word.isdecimal() for word in (*one[found[0]], *other[found[0]])):
        return None
    return found[0]


def _braced(options: tuple[str, ...]) -> str:
    if len(options) == 1:
        return options[0]
    if all(option.isdecimal() for option in options):
        return "{" + _ranges(options).replace("-", "..") + "}"
    return "{" + ",".join(options) + "}"


def _ranges(options: Sequence[str]) -> str:
    numbers = sorted(map(int, options))
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)
