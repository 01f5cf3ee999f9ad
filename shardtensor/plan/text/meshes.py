"""The ``mesh`` statement to the axes of a plan."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs

from shardtensor.errors import SpecError
from shardtensor.mesh import Mesh
from shardtensor.plan.axes import Axes
from shardtensor.plan.text.names import other_values, params_in
from shardtensor.plan.text.scope import POISON, AxisValue, Binding, MeshNames, Node, Poisoned, finding_of, kind_of

if TYPE_CHECKING:
    from shardtensor.plan.text.reading import PlanReader


class MeshReader:
    """Reads ``(dp = world / tp, tp (kvg = gcd(tp, kv), kvr = tp / kvg))``."""

    def __init__(self, plan: PlanReader) -> None:
        self.plan = plan
        self.leaves: list[tuple[str, int | None]] = []
        self.made_of: dict[str, tuple[str, ...]] = {}

    def read(self, sizes: Node) -> Axes | None:
        """Return the axes; None where a size is not known. The names are known from here on in any case.

        Raises:
            SpecError: E105, the sizes do not make the world.
        """
        tops = tuple(self._axis(axis) for axis in sizes.children)
        self.plan.scope.mesh = MeshNames(tuple(name for name, _ in tops), self.made_of)
        known = [(name, size) for name, size in self.leaves if size is not None]
        is_twice = len({name for name, _ in known}) < len(known)
        if len(known) < len(self.leaves) or is_twice or any(size is None for _, size in tops):
            return None
        total = math.prod(size for _, size in known)
        world = self.plan.scope.world
        if total != world:
            product = " x ".join(f"{name}={size}" for name, size in tops)
            fault = f"the mesh has {total} ranks ({product}), but --world is {world}"
            why = "every rank of the world has one place in the mesh"
            raise self.plan.fault("E105", sizes, fault, why, self._ways(sizes, total))
        return Axes(Mesh(tuple(known)), dict(self.made_of))

    def _axis(self, node: Node) -> tuple[str, int | None]:
        token, *said = node.children
        first = len(self.leaves)
        size: int | None = None
        with self.plan.caught():
            if said and getattr(said[0], "data", "") == "sizes":
                size = self._composed(token, said[0], first)
            else:
                size = self._size(token, said)
        if len(self.leaves) == first and str(token) not in self.made_of:
            self.leaves.append((str(token), size))
        self._define(token, size)
        return str(token), size

    def _composed(self, token: Node, sizes: Node, first: int) -> int | None:
        for factor in sizes.children:
            self._axis(factor)
        leaves = self.leaves[first:]
        self.made_of[str(token)] = tuple(name for name, _ in leaves)
        known = [size for _, size in leaves if size is not None]
        if len(known) < len(leaves):
            return None
        size = math.prod(known)
        wanted = self.plan.scope.names.get(str(token), Binding(size)).value
        if wanted is not POISON and wanted != size:
            product = " x ".join(f"{name}={size}" for name, size in leaves)
            fault = f"the factors of `{token}` make {size} ({product}), and {token}={wanted}"
            if not isinstance(wanted, int):
                fault = f"`{token}` is {kind_of(wanted)}, and the size of an axis is needed here"
            raise self.plan.fault("E105", sizes, fault, fix=f"write the last one as `{token}` divided by the others")
        return size

    def _size(self, token: Node, said: list[Node]) -> int:
        evaluator = self.plan.evaluator
        binding = self.plan.scope.names.get(str(token))
        if said:
            try:
                size = evaluator.number(said[0])
            except SpecError as error:
                finding = finding_of(error)
                if finding.code == "E107":  # a division that is not exact: rounded down it would not make the world
                    ways = other_values(params_in(self.plan.scope, said[0]))
                    finding = attrs.evolve(finding, fix=ways or finding.fix)
                self.plan.find(finding)
                raise Poisoned from None
            node = said[0]
            if binding is not None and isinstance(binding.value, int) and binding.value != size:
                fault = f"the axis `{token}` has {size} ranks, and {token}={binding.value}"
                raise self.plan.fault("E105", node, fault, fix=f"write `{token}` alone, or name the axis otherwise")
        else:
            if binding is None:
                if not self.plan.scope.is_whole:
                    raise Poisoned
                fix = f"write `{token} = 2`, or `param {token} = 2` further up"
                raise self.plan.fault(
                    "E105", token, f"the axis `{token}` has no size", "no parameter is called so", fix
                )
            if binding.value is POISON:
                raise Poisoned
            size, node = binding.value, token
            if isinstance(size, bool) or not isinstance(size, int):
                fault = f"`{token}` is {kind_of(size)}, and the size of an axis is needed here"
                raise self.plan.fault("E107", token, fault)
        if size < 1:
            fix = "" if node is token else other_values(params_in(self.plan.scope, node))
            fault = f"the axis `{token}` has {size} ranks"
            raise self.plan.fault("E105", node, fault, "an axis has at least one rank", fix)
        return size

    def _define(self, token: Node, size: int | None) -> None:
        """An axis may have the name of the number that is its size."""
        plan, name = self.plan, str(token)
        value: Any = AxisValue((name,), size)
        binding = plan.scope.names.get(name)
        if binding is not None and not isinstance(binding.value, AxisValue):
            plan.scope.names[name] = attrs.evolve(binding, value=value)
            return
        with plan.caught():
            plan.definitions.define(token, Binding(value))

    def _ways(self, sizes: Node, total: int) -> str:
        """What would make the mesh as large as the world."""
        tops = [str(axis.children[0]) for axis in sizes.children]
        ways = []
        for axis in sizes.children:
            rest = [name for name in tops if name != axis.children[0]]
            is_number = len(axis.children) > 1 and getattr(axis.children[1], "type", "") == "INT"
            if is_number and rest:
                divisor = rest[0] if len(rest) == 1 else f"({' * '.join(rest)})"
                ways.append(f"write `{axis.children[0]} = world / {divisor}`")
                break
        return ", or ".join([*ways, f"run with --world {total}"])
