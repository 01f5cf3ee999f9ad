"""Which values of its parameters a plan takes: found by reading its numbers again for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, islice, product
from typing import TYPE_CHECKING

from shardtensor.plan.text.explain import subtrees
from shardtensor.plan.text.scope import Binding, Node

if TYPE_CHECKING:
    from shardtensor.plan.text.reading import PlanReader

MOST_VALUES = 64
"""Of one parameter that are tried."""
MOST_STATEMENTS = 300
"""Plans with more than so many are not read again."""

_POWERS = (1, 2, 4, 8, 16, 32, 64)  # numbers of ranks, and values of two parameters, where no value of one passes
_MOST_PAIRS = 10


class Fitting:
    """Finds values of parameters that pass.

    Args:
        plan: the reader of the plan; what it was given for other parameters holds.
    """

    def __init__(self, plan: PlanReader) -> None:
        self.plan = plan
        self._found: dict[str, tuple[int | bool, ...]] = {}

    def params_in(self, node: Node) -> tuple[str, ...]:
        """The parameters that the value of an expression comes from, through the names in it."""
        found: dict[str, None] = {}
        seen: set[str] = set()
        todo = [node]
        while todo:
            for tree in subtrees(todo.pop()):
                name = str(tree.children[0]) if tree.data in ("word", "axis") else ""
                if not name or name in seen:
                    continue
                seen.add(name)
                binding = self.plan.scope.names.get(name, Binding(None))
                if binding.is_param:
                    found[name] = None
                elif binding.node is not None:
                    todo.append(binding.node)
        return tuple(found)

    def passing(self, names: Iterable[str]) -> dict[str, tuple[int | bool, ...]]:
        """For each parameter, the values with which the numbers of the plan have no error, all else being as it is."""
        if self.plan.only_head or sum(len(file.source.text) for file in self.plan.files.opened.values()) > 2**16:
            return {}
        return {name: self._passing(name) for name in names}

    def advice(self, names: Iterable[str]) -> str:
        """The values that pass, as a way out."""
        model = f"this model and --world {self.plan.scope.world}"
        passing = self.passing(names)
        if passing and not any(passing.values()):
            return self._other_ways(tuple(passing)) or "; ".join(f"no {name} fits {model}" for name in passing)
        ways = []
        for name, values in passing.items():
            shown = ", ".join(str(value).lower() for value in values)
            ways.append(f"{name} that fit {model}: {shown}" if values else f"no {name} fits {model}")
        return "; ".join(ways)

    def _other_ways(self, names: tuple[str, ...]) -> str:
        """What passes where no value of one parameter does: another number of ranks, or values of two parameters."""
        worlds = [n for n in _POWERS if self._passes({}, n)]
        pairs = (
            {one: first, other: second}
            for one, other in combinations(names, 2)
            for first, second in product(_POWERS, _POWERS)
            if first * second <= self.plan.scope.world
        )
        pair = next((pair for pair in islice(pairs, _MOST_PAIRS) if self._passes(pair)), None)
        ways = [f"run with --world {', '.join(map(str, worlds[:3]))}" + ", ..." * (len(worlds) > 3)] if worlds else []
        if pair is not None:
            ways.append("with " + " ".join(f"--set {name}={str(value).lower()}" for name, value in pair.items()))
        return ", or ".join(ways)

    def _passing(self, name: str) -> tuple[int | bool, ...]:
        if name not in self._found:
            self._found[name] = ()
            self._found[name] = tuple(value for value in self._candidates(name) if self._passes({name: value}))
        return self._found[name]

    def _passes(self, values: Mapping[str, int | bool], world: int | None = None) -> bool:
        other = self.plan.again({**self.plan.given, **values}, world)
        return not [finding for finding in other.findings if finding.severity == "error"]

    def _candidates(self, name: str) -> list[int] | list[bool]:
        value = self.plan.scope.names[name].value
        if isinstance(value, bool):
            return [False, True]
        world = self.plan.scope.world
        small = [n for n in range(1, min(world, 2**16) + 1) if world % n == 0 or n <= 16]
        return sorted({*small[:MOST_VALUES], world})
