"""The statement ``mesh (dp = world / tp, tp (kvg = gcd(tp, kv), kvr = tp / kvg))``."""

from __future__ import annotations

import math
from typing import Any

import attrs

from shardtensor.errors import SpecError
from shardtensor.mesh import Mesh
from shardtensor.plan.axes import Axes
from shardtensor.plan.text.evaluate import is_kind
from shardtensor.plan.text.scope import (
    POISON,
    AxisValue,
    Binding,
    Node,
    Poisoned,
    finding_of,
    kind_of,
    other_values,
    params_in,
)
from shardtensor.plan.text.statements import Statements


class MeshReader:
    """Reads the axes of a mesh, which have their names from there on, also where a size is not known."""

    def __init__(self, plan: Statements) -> None:
        self.plan = plan
        self.leaves: list[tuple[str, int | None]] = []

    def read(self, sizes: Node) -> Axes | None:
        """Return the axes; None where a size is not known.

        Raises:
            SpecError: E105, the sizes do not make the world.
        """
        scope = self.plan.scope
        tops = [self._axis(axis) for axis in sizes.children]
        scope.axes = tuple(name for name, _ in tops)
        known = {name: size for name, size in self.leaves if size is not None}
        if len(known) < len(self.leaves) or any(size is None for _, size in tops):
            return None
        total = math.prod(known.values())
        if total != scope.world:
            fault = f"the mesh has {total} ranks ({_product(tops)}), but --world is {scope.world}"
            why = "every rank of the world has one place in the mesh"
            raise self.plan.fault("E105", sizes, fault, why, self._ways(sizes, total))
        return Axes(Mesh(tuple(known.items())), dict(scope.made_of))

    def _axis(self, node: Node) -> tuple[str, int | None]:
        token, *said = node.children
        name, first = str(token), len(self.leaves)
        size: int | None = None
        with self.plan.caught():
            is_made = bool(said) and is_kind(said[0], "sizes")
            size = self._composed(token, said[0], first) if is_made else self._size(token, said)
        if len(self.leaves) == first and name not in self.plan.scope.made_of:
            self.leaves.append((name, size))
        self._define(token, size)
        return name, size

    def _composed(self, token: Node, sizes: Node, first: int) -> int | None:
        for factor in sizes.children:
            self._axis(factor)
        leaves = self.leaves[first:]
        self.plan.scope.made_of[str(token)] = tuple(name for name, _ in leaves)
        known = [size for _, size in leaves if size is not None]
        if len(known) < len(leaves):
            return None
        size = math.prod(known)
        wanted = self.plan.scope.names.get(str(token), Binding(size)).value
        if wanted is not POISON and wanted != size:
            fault = f"the factors of `{token}` make {size} ({_product(leaves)}), and {token}={wanted}"
            if not isinstance(wanted, int):
                fault = f"`{token}` is {kind_of(wanted)}, and the size of an axis is needed here"
            raise self.plan.fault("E105", sizes, fault, fix=f"write the last one as `{token}` divided by the others")
        return size

    def _size(self, token: Node, said: list[Node]) -> int:
        plan, node = self.plan, said[0] if said else token
        value = plan.scope.names.get(str(token), Binding(None)).value
        size: Any = value
        if said:
            try:
                size = plan.evaluator.number(node)
            except SpecError as error:
                finding = finding_of(error)
                if finding.code == "E107":  # a division that is not exact: rounded down it would not make the world
                    ways = other_values(params_in(plan.scope, node))
                    finding = attrs.evolve(finding, fix=ways or finding.fix)
                plan.find(finding)
                raise Poisoned from None
            if isinstance(value, int) and value != size:
                fault = f"the axis `{token}` has {size} ranks, and {token}={value}"
                raise plan.fault("E105", node, fault, fix=f"write `{token}` alone, or name the axis otherwise")
        elif value is None:
            fix = f"write `{token} = 2`, or `param {token} = 2` further up"
            raise plan.fault("E105", token, f"the axis `{token}` has no size", "no parameter is called so", fix)
        if size is POISON:
            raise Poisoned
        if isinstance(size, bool) or not isinstance(size, int):
            raise plan.fault("E107", token, f"`{token}` is {kind_of(size)}, and the size of an axis is needed here")
        if size < 1:
            fix = other_values(params_in(plan.scope, node)) if said else ""
            raise plan.fault("E105", node, f"the axis `{token}` has {size} ranks", "an axis has at least one rank", fix)
        return size

    def _define(self, token: Node, size: int | None) -> None:
        """An axis may have the name of the number that is its size."""
        names, name, value = self.plan.scope.names, str(token), AxisValue((str(token),), size)
        if name in names and not isinstance(names[name].value, AxisValue):
            names[name] = attrs.evolve(names[name], value=value)
            return
        with self.plan.caught():
            self.plan.define(token, Binding(value))

    def _ways(self, sizes: Node, total: int) -> str:
        """What would make the mesh as large as the world."""
        run = f"run with --world {total}"
        for axis in sizes.children:
            rest = [str(other.children[0]) for other in sizes.children if other is not axis]
            if rest and len(axis.children) > 1 and is_kind(axis.children[1], "INT"):
                divisor = rest[0] if len(rest) == 1 else f"({' * '.join(rest)})"
                return f"write `{axis.children[0]} = world / {divisor}`, or {run}"
        return run


def _product(sizes: list[tuple[str, int | None]]) -> str:
    return " x ".join(f"{name}={size}" for name, size in sizes)
