"""Convert rules in Python, ``{"layers.*": {"mlp.up": colwise("tp")}}``, and the texts in them to lines of a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from shardtensor.errors import PlanError
from shardtensor.mesh import Mesh, read_mesh
from shardtensor.plan.axes import Axes
from shardtensor.plan.flows.flow import read_flow
from shardtensor.plan.line import Hook, Line, Store, Tie, Unmatched
from shardtensor.spec.nodes import Replicate, Spec
from shardtensor.spec.parse import as_spec
from shardtensor.spec.parts import Flat

_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\(\s*(.*?)\s*,?\s*\)\s*", re.DOTALL)
_ARGUMENT = re.compile(r"(?:([A-Za-z_]\w*)\s*=\s*)?(?:(-?\d+)|(true|false)|([A-Za-z_]\w*(?:\s*\*\s*[A-Za-z_]\w*)*))")
_FACTORS = re.compile(r"([A-Za-z_]\w*)\s*\(([^()]*)\)")


def read_call(text: str) -> Hook:
    """Parse the call of a hook; axes stay names, a product of axes is a tuple of names.

    Raises:
        PlanError: it is no call, or an argument is neither a number, nor true or false, nor axes.

    Example:
        >>> read_call("dispatch(ep, top_k=2)")
        Hook(name='dispatch', args=('ep',), kwargs={'top_k': 2})
    """
    found = _CALL.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise PlanError("`use` stands before a call", {"found": repr(text)}, "write such as `dispatch(ep, top_k=2)`")
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for part in filter(None, map(str.strip, found[2].split(","))):
        argument = _ARGUMENT.fullmatch(part)
        if argument is None or (kwargs and not argument[1]):
            fix = "write axes, numbers, `true` or `false`; those with a name last"
            raise PlanError(f"`{part}` is no argument of a hook", {"found": text}, fix)
        name, number, truth, axes = argument.groups()
        names = tuple(axis.strip() for axis in axes.split("*")) if axes else ()
        value = int(number) if number else truth == "true" if truth else names[0] if len(names) == 1 else names
        if name:
            kwargs[name] = value
        else:
            args.append(value)
    return Hook(found[1], tuple(args), kwargs)


def read_store(text: Any) -> tuple[Flat | None, tuple[str, ...]]:
    """Parse how parameters are stored: the axes and the grain, and the patterns of gather units.

    Example:
        >>> read_store("flat(dp, unit=row) by layers.*, head")
        (Flat(axes=('dp',), unit='row', sizes=None), ('layers.*', 'head'))
    """
    form, _, by = text.partition(" by ") if isinstance(text, str) else (text, "", "")
    spec = as_spec(form)
    flat = spec.flat_part if isinstance(spec, Spec) else None
    others = not isinstance(spec, Spec) or spec.dims or spec.named or spec.only_part or spec.partial_parts
    if others or (flat is None and not isinstance(spec, Replicate)):
        raise PlanError(
            "`store` takes `flat(...)` or `replicate`", {"found": str(text)}, "write `flat(dp) by layers.*`"
        )
    return flat, tuple(filter(None, (part.strip() for part in by.split(","))))


def read_axes(mesh: str | Mesh, data: tuple[str, ...] | str = ()) -> Axes:
    """Parse the mesh of a plan, in which an axis may be made of factors.

    Args:
        mesh: names and sizes, major first.
        data: the axes along which samples differ: names, or a product of them.

    Example:
        >>> axes = read_axes("dp=2, tp(kvg=2, kvr=2)", "dp")
        >>> str(axes.mesh), axes.made_of, axes.data
        ('(dp=2, kvg=2, kvr=2)', {'tp': ('kvg', 'kvr')}, ('dp',))
    """
    made_of: dict[str, tuple[str, ...]] = {}
    if isinstance(mesh, str):
        text = mesh.strip()
        text = text[1:-1] if text.startswith("(") and text.endswith(")") else text
        for name, factors in _FACTORS.findall(text):
            made_of[name] = read_mesh(factors).names
        mesh = read_mesh(_FACTORS.sub(r"\2", text))
    data = tuple(name.strip() for name in data.split("*")) if isinstance(data, str) else tuple(data)
    known = (*mesh.names, *made_of)
    for name in data:
        if name not in known:
            raise PlanError(f"no mesh axis is called `{name}`", {"mesh": str(mesh)}, f"use one of {', '.join(known)}")
    return Axes(mesh, made_of, data)


_SIDES = {"in": 2, "out": 2, "local": 2, "use": 1}
"""Words that begin a key which is no pattern, and the largest number of words of such a key."""


def statements(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the rules of a whole plan: its lines, and ``"store **"``, ``"tie A"`` and ``"unmatched"``.

    Example:
        >>> found = statements({"store **": "flat(dp) by layers.*", "tie head.weight": "embed.weight"})
        >>> found["stores"][0].by, found["ties"][0].to
        (('layers.*',), 'embed.weight')
    """
    rest: dict[str, Any] = {}
    stores, ties, unmatched = [], [], None
    for key, value in rules.items():
        words = key.split() if isinstance(key, str) and not isinstance(value, Mapping) else []
        if words[:1] == ["store"] and len(words) == 2:
            stores.append(Store(words[1], *read_store(value)))
        elif words[:1] == ["tie"] and len(words) == 2:
            ties.append(Tie(words[1], value))
        elif words == ["unmatched"]:
            unmatched = Unmatched(_in_axes(as_spec(value)))
        else:
            rest[key] = value
    return {"lines": tuple(lines(rest)), "stores": tuple(stores), "ties": tuple(ties), "unmatched": unmatched}


def lines(rules: Mapping[str, Any], above: str = "", is_optional: bool = False) -> Iterator[Line]:
    """Yield the lines of the rules of a block.

    Example:
        >>> for line in lines({"mlp": {"in": "replicate", "optional up.bias": "[tp]", "local width": "[tp]"}}):
        ...     print(line.pattern, line.kind, line.name, line.value, line.is_optional)
        mlp in  replicate False
        mlp.up.bias tensor  [tp] True
        mlp local width [tp] False
    """
    for key, value in rules.items():
        if not isinstance(key, str):
            raise PlanError("a rule starts with a pattern", {"found": repr(key)}, "write text: `layers.*.weight`")
        words = key.split()
        optional = is_optional or words[:1] == ["optional"]
        words = words[words[:1] == ["optional"] :]
        if words and words[0] in _SIDES and not isinstance(value, Mapping):
            yield from _side(key, words, value, Line(above, module=above, is_optional=optional))
            continue
        if len(words) > 1:
            fix = "write dotted names, after `optional` where they may be missing"
            raise PlanError(f"`{key}` is no pattern", fix=fix)
        pattern = ".".join(filter(None, (above, *words)))
        if isinstance(value, Mapping):
            yield from lines(value, pattern, optional)
        else:
            value = as_spec(value) if isinstance(value, str) else value
            yield Line(pattern, value=value, module=above, is_optional=optional)


def _side(key: str, words: list[str], value: Any, line: Line) -> Iterator[Line]:
    """Yield the lines of a key for a module itself: a flow, an attribute that counts, or hooks."""
    kind: Any = words[0]
    name = words[1] if len(words) > 1 else ""
    if len(words) > _SIDES[kind] or (kind == "local" and not name):
        ways = "write `in`, `in NAME`, `out`, `out NAME`, `local NAME` or `use`"
        raise PlanError(f"`{key}` is no side of a module", fix=ways)
    if kind == "use":
        for call in (value,) if isinstance(value, str | Hook) else value:
            yield attrs.evolve(line, kind=kind, value=call if isinstance(call, Hook) else read_call(call))
    elif kind == "local":
        yield attrs.evolve(line, kind=kind, name=name, value=_in_axes(as_spec(value)))
    else:
        try:
            yield attrs.evolve(line, kind=kind, name=name, value=read_flow(value))
        except PlanError as error:
            raise error.of(f"{line.pattern}.{key}" if line.pattern else key) from None


def _in_axes(spec: Any) -> Spec:
    if not isinstance(spec, Spec):
        raise PlanError("this is said in mesh axes", {"found": str(spec)}, "write such as `[tp]` or `replicate`")
    return spec
