"""Texts in rules made in Python that are no layouts: ``dispatch(ep, top_k=2)``, ``flat(dp) by layers.*``, a mesh."""

from __future__ import annotations

import re
from typing import Any

from shardtensor.errors import PlanError
from shardtensor.mesh import Mesh, read_mesh
from shardtensor.plan.axes import Axes
from shardtensor.plan.line import Hook
from shardtensor.spec.nodes import Replicate, Spec
from shardtensor.spec.parse import as_spec
from shardtensor.spec.parts import Flat

_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\(\s*(.*?)\s*,?\s*\)\s*", re.DOTALL)
_ARGUMENT = re.compile(r"(?:([A-Za-z_]\w*)\s*=\s*)?(?:(-?\d+)|(true|false)|([A-Za-z_]\w*(?:\s*\*\s*[A-Za-z_]\w*)*))")
_FACTORS = re.compile(r"([A-Za-z_]\w*)\s*\(([^()]*)\)")


def read_call(text: str) -> Hook:
    """Read the call of a hook; axes stay names, a product of axes is a tuple of names.

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
    for part in filter(None, (part.strip() for part in found[2].split(","))):
        argument = _ARGUMENT.fullmatch(part)
        if argument is None or (kwargs and not argument[1]):
            raise PlanError(
                f"`{part}` is no argument of a hook",
                {"found": text},
                "write axes, numbers, `true` or `false`; those with a name last",
            )
        name, number, truth, axes = argument.groups()
        value: Any = int(number) if number else truth == "true" if truth else _axes(axes)
        if name:
            kwargs[name] = value
        else:
            args.append(value)
    return Hook(found[1], tuple(args), kwargs)


def _axes(text: str) -> str | tuple[str, ...]:
    names = tuple(name.strip() for name in text.split("*"))
    return names[0] if len(names) == 1 else names


def read_store(text: Any) -> tuple[Flat | None, tuple[str, ...]]:
    """Read how parameters are kept: over which axes, and the patterns of gather units.

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
    """Read the mesh of a plan, in which an axis may be made of factors.

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
