"""Statements of a plan beside its rules: parameters, names, styles, the mesh; dims, ties, what is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from shardtensor.errors import SpecError
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.origin import Origin
from shardtensor.plan.text.evaluate import FUNCTIONS, RESERVED, Evaluator
from shardtensor.plan.text.scope import POISON, AxisValue, Binding, Node, Poisoned, Style, finding_of, kind_of, shown
from shardtensor.plan.text.syntax import parse_value
from shardtensor.spec.diagnostics import Source, nearest
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.reader import WORDS, Word

if TYPE_CHECKING:
    from shardtensor.plan.text.reading import PlanReader
import math
import re
from typing import TYPE_CHECKING

from lark import Token

from shardtensor.mesh import Mesh
from shardtensor.plan.axes import Axes
from shardtensor.plan.line import Dims, Store, Tie, Unmatched
from shardtensor.plan.text.entries import pattern_of
from shardtensor.plan.text.expressions import is_kind
from shardtensor.plan.text.scope import MeshNames, other_values, params_in
from shardtensor.spec.nodes import Spec
from shardtensor.spec.reader import span


class Definitions:
    """Gives names their values.

    Args:
        plan: the reader of the plan.
        given: the values of parameters from outside.
    """

    def __init__(self, plan: PlanReader, given: Mapping[str, Any]) -> None:
        self.plan = plan
        self.given = given
        self._places: dict[str, Origin] = {}

    def define(self, token: Node, binding: Binding) -> None:
        """Give a name its value.

        Raises:
            SpecError: E103, the name means something else already.
        """
        name = str(token)
        if name in RESERVED:
            raise self.plan.fault("E103", token, f"`{name}` is a word of the language", fix="choose another name")
        before = self._places.get(name)
        if before is not None:
            fault = f"`{name}` is defined twice"
            raise self.plan.fault("E103", token, fault, f"it is also defined in {before}", "choose another name")
        self._places[name] = self.plan.origin(token)
        self.plan.scope.names[name] = binding

    @contextmanager
    def _defining(self, token: Node) -> Iterator[None]:
        """A definition that fails leaves a name of which nothing is known, rather than none."""
        try:
            yield
        except (SpecError, Poisoned):
            self.plan.scope.names.setdefault(str(token), Binding(POISON))
            raise

    def param(self, node: Node) -> None:
        token, *defaults = node.children
        name = str(token)
        binding = self.plan.scope.names.get(name)
        if binding is not None and binding.is_param and self._places[name].source is not self.plan.evaluator.source:
            return  # the including file has set it
        with self._defining(token):
            try:
                value, given = self._param_value(token, defaults)
            except (SpecError, Poisoned):
                self.define(token, Binding(POISON, is_param=True))
                raise
            default = defaults[0] if defaults else None
            self.define(token, Binding(value, default, self.plan.evaluator.source, True, given))

    def _param_value(self, token: Node, defaults: list[Node]) -> tuple[Any, str]:
        name = str(token)
        if name in self.given:
            value, given = self.given[name], f"from {_asked(name, self.given[name])}"
            if isinstance(value, str):
                source = Source(value, f"--set {name}")
                value = Evaluator(source, self.plan.scope).value(parse_value(source))
        elif defaults:
            return self.plan.evaluator.value(defaults[0]), ""
        else:
            why = "it has no default"
            raise self.plan.fault(
                "E101", token, f"the parameter `{name}` has no value", why, f"give one: --set {name}=VALUE"
            )
        if not isinstance(value, int | ShardingSpec | AxisValue | str):
            fault = f"{value!r} is no value of the parameter `{name}`"
            raise self.plan.fault(
                "E107", token, fault, "a parameter is a whole number, true or false, a layout or a word"
            )
        if defaults:
            self._check_kind(token, value, defaults[0], given)
        return value, given

    def _check_kind(self, token: Node, value: Any, default: Node, given: str) -> None:
        """What a parameter is given has to be of the kind of its default."""
        kinds: tuple[str, ...] = ()
        with self.plan.caught():
            kinds = (kind_of(value), kind_of(self.plan.evaluator.value(default)))
        if len({*kinds}) == 2 and kinds not in _ALIKE:
            fault = f"the parameter `{token}` is {kinds[1]} by default, and it is given {kinds[0]}"
            finding = finding_of(self.plan.fault("E107", token, fault))
            self.plan.find(attrs.evolve(finding, notes=(given,)))
            raise Poisoned

    def let(self, node: Node) -> None:
        """Define a name; files that are read together may each define one, as long as its value is the same."""
        token, said = node.children
        source = self.plan.evaluator.source
        with self._defining(token):
            value = self.plan.evaluator.value(said)
            before = self.plan.scope.names.get(str(token))
            if before is not None and before.node is not None and not before.is_param:
                is_other_file = self._places[str(token)].source is not source
                if is_other_file and type(before.value) is type(value) and before.value == value:
                    return
            self.define(token, Binding(value, said, source))

    def style(self, node: Node) -> None:
        token, *needed, block = node.children
        name = str(token)
        if name in WORDS or name in FUNCTIONS:
            raise self.plan.fault("E103", token, f"`{name}` is a word of the language", fix="choose another name")
        if name in self.plan.scope.styles:
            raise self.plan.fault("E103", token, f"the style `{name}` is defined twice", fix="choose another name")
        above = dict(self.plan.scope.styles)
        self.plan.scope.styles[name] = None
        params: dict[str, str] = {}
        defaults: dict[str, Node] = {}
        for param in needed:
            key, *default = param.children
            if key in params or key in RESERVED:
                raise self.plan.fault("E103", key, f"`{key}` cannot be a parameter here", fix="choose another name")
            if defaults and not default:
                fault = f"`{key}` needs a default, for a parameter before it has one"
                raise self.plan.fault("E102", key, fault, fix=f"write `{key}=1`, or move it to the front")
            params[str(key)] = "value"
            if default:
                defaults[str(key)] = default[0]
        shown_params = [self.plan.evaluator.text(param).replace(" ", "") for param in needed]
        word = Word(name, "style", f"{name}({', '.join(shown_params)})", params, len(params) - len(defaults))
        body = tuple(block.children)
        self.plan.scope.styles[name] = Style(word, defaults, body, self.plan.evaluator.source, above)

    def unknown_param(self, name: str, value: Any) -> None:
        if not self.plan.scope.is_whole:
            return
        params = sorted(name for name, binding in self.plan.scope.names.items() if binding.is_param)
        why = f"the parameters are {', '.join(params)}" if params else "the plan has no parameters"
        notes = (f"from {_asked(name, value)}",)
        self.plan.find(Finding("E101", f"no parameter is called `{name}`", None, why, nearest(name, params), notes))


_ALIKE = {("an axis", "a number"), ("a number", "an axis"), ("a word", "a number"), ("a number", "a word")}
"""Kinds of values that may stand for one another: ``grain = row``."""


def _asked(name: str, value: Any) -> str:
    """How a parameter was given from outside."""
    if isinstance(value, str):
        return f"--set {name}={value} on the command line"
    return f"{name}={shown(value)}, given by the caller"


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
