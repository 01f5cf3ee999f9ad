"""Definitions in a plan: parameters, names, styles."""

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
from shardtensor.spec.words import WORDS, Word

if TYPE_CHECKING:
    from shardtensor.plan.text.reading import PlanReader


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
