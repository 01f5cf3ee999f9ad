"""Many names as one short text: ``model.layers.{0..31}.mlp.{gate_proj,up_proj}.weight``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardtensor.plan.match.patterns import starred


def brief_names(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return patterns for names that differ in numbers, or in one word; each with its names.

    Example:
        >>> list(brief_names(["l.0.k.weight", "l.0.v.weight", "l.1.k.weight", "l.1.v.weight", "norm.weight"]))
        ['l.{0..1}.{k,v}.weight', 'norm.weight']
    """
    return {".".join(map(_braced, words)): members for words, members in _folded(names)}


def listed_briefly(names: Iterable[str], most: int = 4) -> str:
    """Return the first patterns of `brief_names` as text, and how many more there are."""
    brief = [*brief_names(names)]
    return ", ".join(brief[:most]) + f" and {len(brief) - most} patterns more" * (len(brief) > most)


_Words = list[tuple[str, ...]]


def _folded(names: Iterable[str]) -> list[tuple[_Words, tuple[str, ...]]]:
    """Return for each pattern the words of every segment, and the names."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(starred(name), []).append(name)
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
        return "{" + _ranges(options) + "}"
    return "{" + ",".join(options) + "}"


def _ranges(options: Sequence[str]) -> str:
    numbers = sorted(map(int, options))
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}..{last}" if last > first else str(first) for first, last in ranges)
