"""Statements on tensors by name: their dims, how they are stored, which are one, what holds for the rest."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lark import Token

from shardtensor.plan.findings.origin import Origin
from shardtensor.plan.line import Dims, Store, Tie, Unmatched
from shardtensor.plan.text.entries import pattern_of
from shardtensor.plan.text.expressions import is_kind
from shardtensor.plan.text.scope import POISON, Node, Poisoned, kind_of
from shardtensor.spec.diagnostics import nearest
from shardtensor.spec.nodes import Spec
from shardtensor.spec.reader import span

if TYPE_CHECKING:
    from shardtensor.plan.text.reading import PlanReader


class TensorStatements:
    """Reads ``dims``, ``tie``, ``store`` and ``unmatched``, and keeps what they say."""

    def __init__(self, plan: PlanReader) -> None:
        self.plan = plan
        self.stores: list[Store] = []
        self.ties: list[Tie] = []
        self.all_dims: list[Dims] = []
        self.rest: Unmatched | None = None

    def dims(self, node: Node) -> None:
        glob, *args = node.children
        if args[-1].data == "condition" and not self.plan.evaluator.truth(args.pop().children[0]):
            return
        found: dict[str, tuple[int, ...]] = {}
        for arg in args:
            name, said = arg.children
            lengths = tuple(map(self._length, said.children if is_kind(said, "tuple") else [said]))
            if name in found:
                raise self.plan.fault("E204", name, f"the dim `{name}` is named twice", fix="keep one")
            found[str(name)] = lengths
        pattern = self._counted(pattern_of(glob, self.plan.evaluator, names=False), glob)
        blocks = tuple((name, lengths) for name, lengths in found.items() if len(lengths) > 1)
        sizes = tuple(map(sum, found.values()))
        self.all_dims.append(Dims(pattern, tuple(found), sizes, self.plan.origin(glob), blocks))

    def _length(self, said: Node) -> int:
        """Of a dim, or of one of the blocks that it is made of."""
        length = self.plan.evaluator.number(said)
        if length < 0:
            raise self.plan.fault("E107", said, f"a dim has {length} elements")
        return length

    def _counted(self, pattern: str, glob: Node) -> str:
        """`pattern` with the numbers that its ``<L>`` are: ``layers.<32>``."""

        def number(found: re.Match[str]) -> str:
            if found[1].isdigit():
                return found[0]
            start = span(glob)[0] + (glob.children[0].type == "STRING")
            name = Token("NAME", found[1], start + found.start(1), end_pos=start + found.end(1))
            binding = self.plan.scope.names.get(found[1])
            if binding is None or binding.value is POISON:
                if binding is None and self.plan.scope.is_whole:
                    why = f"`<{found[1]}>` stands for as many numbers as `{found[1]}` says"
                    fix = nearest(found[1], self.plan.scope.names) or f"write `let {found[1]} = config...` further up"
                    raise self.plan.fault("E103", name, f"nothing is called `{found[1]}`", why, fix)
                raise Poisoned
            if isinstance(binding.value, bool) or not isinstance(binding.value, int) or binding.value < 0:
                raise self.plan.fault("E107", name, f"`{found[1]}` is {kind_of(binding.value)}, and counts nothing")
            return f"<{binding.value}>"

        return re.sub(r"<([A-Za-z0-9_]+)>", number, pattern)

    def tie(self, node: Node) -> None:
        one, other, *condition = node.children
        if condition and not self.plan.evaluator.truth(condition[0].children[0]):
            return
        pattern, to = (pattern_of(glob, self.plan.evaluator) for glob in (one, other))
        origin = Origin(self.plan.evaluator.source, (span(one)[0], span(other)[1]))
        self.ties.append(Tie(pattern, to, origin))

    def store(self, node: Node) -> None:
        glob, said, *by = node.children
        spec = self.plan.evaluator.layout_value(said)
        is_flat = isinstance(spec, Spec) and not (spec.dims or spec.named or spec.only_part or spec.partial_parts)
        if not is_flat:
            why = "what is stored is the layout of the rule, flattened"
            raise self.plan.fault(
                "E107", said, f"`{spec}` cannot be stored", why, "write such as `flat(dp)` or `replicate`"
            )
        assert isinstance(spec, Spec)
        patterns = [pattern_of(glob, self.plan.evaluator, names=False) for glob in (glob, *by)]
        places = self.plan.origin(said), self.plan.origin(glob)
        self.stores.append(Store(patterns[0], spec.flat_part, tuple(patterns[1:]), *places))

    def unmatched(self, node: Node) -> None:
        (said,) = node.children
        spec = self.plan.evaluator.layout_value(said)
        if not isinstance(spec, Spec):
            why = "tensors of many shapes may fall to it"
            raise self.plan.fault("E107", said, f"`{spec}` names devices", why, "write `replicate`")
        found = Unmatched(spec, self.plan.entries.depth, self.plan.origin(said))
        before = self.rest
        if before is not None and before.depth == found.depth and before.spec != spec:
            raise self.plan.fault("E302", said, "`unmatched` is said twice", f"also in {before.origin}", "keep one")
        if before is None or found.depth < before.depth:
            self.rest = found
