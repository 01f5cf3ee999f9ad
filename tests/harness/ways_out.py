"""Where the package makes an error that names a way out, and which of these places a test came by.

A place is a call, in the text of the package, that gives an error class, or a finding of a plan, a `fix`; or that gives
it to a function which hands it on (a *helper*: a function whose own parameter is the `fix` of an error that it makes).
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import attr
import attrs

from harness.house import PACKAGE, tree_of
from shardtensor import errors
from shardtensor.errors import ShardTensorError
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.flows.flow import FlowError

BY_HAND = {"spec/diagnostics.py": {"error": 4}}
"""Helpers that put the fix into the text by themselves: by file, the name, and which argument is the fix."""
NAMES = ("fix", "way", "ways", "way_out")
"""What a helper calls the fix that it hands on."""
FINDINGS = {"Finding": 4, "FlowError": 4, "evolve": 99}
"""What makes findings of plans, and which argument is the fix; `evolve` takes it by name."""


@attrs.frozen(order=True)
class Place:
    """Attributes: the file, from the folder of the package; the lines of the call; the function that it stands in."""

    file: str
    first: int
    last: int
    within: str = attrs.field(eq=False, order=False)

    def __str__(self) -> str:
        return f"shardtensor/{self.file}:{self.first} ({self.within})"


@cache
def places() -> tuple[Place, ...]:
    """Every place of the package, in order."""
    return _found()[0]


@cache
def _found() -> tuple[tuple[Place, ...], frozenset[tuple[str, str]]]:
    """The places, and the helpers as file and qualified name."""
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "errors.py"}
    calls: list[_Call] = []
    # By the file that has it ("" for any), the name of what makes errors, and which argument is the fix.
    makes: dict[str, dict[str, int]] = {}
    makes[""] = dict.fromkeys(_error_classes(), 2) | FINDINGS
    helpers = set()
    for file, names in BY_HAND.items():
        makes[""] |= names
        helpers |= {(file, name) for name in names} | {(file, "_error")}
    found: dict[Place, bool] = {}
    while True:
        before = len(helpers)
        found = {}
        names = set(chain(*makes.values()))
        called = re.compile(rf"\b({'|'.join(names)})\(|{_HOLDS_KINDS.pattern}")
        for path in [path for path, text in texts.items() if called.search(text)]:
            calls += _calls(path, texts.pop(path))
        for call in calls:
            if call.name not in names and not call.is_kind:
                continue
            known = (makes.get(file, {}).get(call.name) for file in (call.place.file, *call.origins, ""))
            number = 2 if call.is_kind else next((number for number in known if number is not None), None)
            fix = None if number is None else call.argument(number)
            if fix is None or _hands_on(fix):
                continue
            is_parameter = isinstance(fix, ast.Name) and fix.id in call.parameters and fix.id in NAMES
            own = call.parameters.index(fix.id) if is_parameter else None
            if own is None:
                found[call.place] = True
                continue
            name = call.place.within.rpartition(".")[2]
            helpers.add((call.place.file, name))
            makes.setdefault(call.place.file, {})[name] = own
        if len(helpers) == before:
            return tuple(sorted(found)), frozenset(helpers)


def _hands_on(fix: ast.expr) -> bool:
    """Whether it is the way out of an error or a finding that was made before, or none."""
    if isinstance(fix, ast.Constant) and not fix.value:
        return True
    is_of_other = isinstance(fix, ast.Attribute) and fix.attr == "fix"
    return is_of_other or any(isinstance(node, ast.Constant) and node.value == "fix" for node in ast.walk(fix))


@attrs.frozen
class _Call:
    place: Place
    name: str
    node: ast.Call
    parameters: list[str]
    is_kind: bool
    origins: list[str]

    def argument(self, number: int) -> ast.expr | None:
        """The fix that this call gives."""
        named = [key.value for key in self.node.keywords if key.arg in NAMES]
        if named:
            return named[0]
        return self.node.args[number] if len(self.node.args) > number else None


_HOLDS_KINDS = re.compile(r"type\[|= .*Error\b")


def _calls(path: Path, text: str) -> Iterator[_Call]:
    file = str(path.relative_to(PACKAGE))
    imported = _imported(text)
    has_kinds = _HOLDS_KINDS.search(text) is not None
    anywhere = [*chain(*imported.values())]

    def walk(node: ast.AST, within: str, parameters: list[str], kinds: set[str]) -> Iterator[_Call]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{within}.{child.name}".lstrip("."), [], set())
                continue
            if isinstance(child, ast.FunctionDef):
                yield from walk(
                    child,
                    f"{within}.{child.name}".lstrip("."),
                    _parameters(child),
                    _kinds(child) if has_kinds else kinds,
                )
                continue
            if isinstance(child, ast.Call):
                name = getattr(child.func, "id", getattr(child.func, "attr", ""))
                place = Place(file, child.lineno, child.end_lineno or child.lineno, within)
                origins = imported.get(name, []) if isinstance(child.func, ast.Name) else anywhere
                yield _Call(place, name, child, parameters, name in kinds, origins)
            yield from walk(child, within, parameters, kinds)

    return walk(tree_of(path), "", [], set())


_IMPORT = re.compile(r"from shardtensor\.([\w.]+) import (?:\(([^)]*)\)|([^\n]*))")


def _imported(text: str) -> dict[str, list[str]]:
    """The file of the package that each imported name is from; a method may be of any class among them."""
    found: dict[str, list[str]] = {}
    for module, several, one in _IMPORT.findall(text):
        for part in (several or one).split(","):
            if words := part.split():
                found.setdefault(words[-1], []).append(module.replace(".", "/") + ".py")
    return found


def _parameters(function: ast.FunctionDef) -> list[str]:
    names = [arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _kinds(function: ast.FunctionDef) -> set[str]:
    """Names of a function that hold a class of errors."""
    args = (*function.args.args, *function.args.kwonlyargs)
    names = {arg.arg for arg in args if arg.annotation is not None and "type[" in ast.unparse(arg.annotation)}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)} & set(
            _error_classes()
        ):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@cache
def _error_classes() -> tuple[str, ...]:
    """Names of the classes of errors.py, and of those that other files derive from them."""
    known = {name for name, value in vars(errors).items() if isinstance(value, type)}
    for path in PACKAGE.rglob("*.py"):
        for name, bases in re.findall(r"^class (\w+)\(([^)]*)\)", path.read_text(), re.MULTILINE):
            if {base.strip() for base in bases.split(",")} & known:
                known.add(name)
    return tuple(sorted(known))


@attrs.frozen
class Made:
    """An error that was made: the place, and its text."""

    place: Place
    text: str


@contextlib.contextmanager
def recording() -> Iterator[list[Made]]:
    """Yield a list that gets every error with a way out which is made meanwhile, on any simulated rank."""
    made: list[Made] = []
    init = ShardTensorError.__init__

    def noting(self: ShardTensorError, fault: str, facts: Any = None, fix: str | Iterable[str] = ()) -> None:
        fix = fix if isinstance(fix, str) else list(fix)
        init(self, fault, facts, fix)
        place = _place_of(sys._getframe(1))
        if place is not None and (fix or place[1]):
            made.append(Made(place[0], str(self)))

    def noting_finding(self: Any, *args: Any, **kwargs: Any) -> None:
        inits[type(self)](self, *args, **kwargs)
        place = _place_of(sys._getframe(1))
        if place is not None and self.fix:
            made.append(Made(place[0], f"fix: {self.fix}"))

    inits: dict[type, Any] = {kind: kind.__init__ for kind in (Finding, FlowError)}
    ShardTensorError.__init__ = noting  # type: ignore[method-assign]
    for kind in inits:
        kind.__init__ = noting_finding
    try:
        yield made
    finally:
        ShardTensorError.__init__ = init  # type: ignore[method-assign]
        for kind, before in inits.items():
            kind.__init__ = before


def _place_of(frame: Any) -> tuple[Place, bool] | None:
    """Where the error that is made was asked for, and whether a helper writes its fix by hand."""
    by_hand = False
    while frame is not None:
        file, name = _file_of(frame.f_code.co_filename), frame.f_code.co_name
        if file == _OF_ATTRS:
            frame = frame.f_back
            continue
        if file is None:
            return None
        if file != "errors.py" and (file, name) not in _found()[1]:
            return Place(file, frame.f_lineno, frame.f_lineno, name), by_hand
        by_hand = by_hand or file in BY_HAND
        frame = frame.f_back
    return None


_OF_ATTRS = "(attrs)"


@cache
def _file_of(path: str) -> str | None:
    """The file from the folder of the package; None outside of it, but that attrs makes findings for it."""
    if Path(path).is_relative_to(PACKAGE):
        return str(Path(path).relative_to(PACKAGE))
    return _OF_ATTRS if Path(attr.__file__).parent in Path(path).parents else None


def came_by(made: Iterable[Made], text: str) -> set[Place]:
    """Of the errors that were made, the places of those whose text, or whose ways out, the error `text` shows.

    What says the ways out of one that was made before, such as a finding of an error, is passed over.
    """
    lines = {line.strip() for line in text.splitlines()}
    seen, before = set(), ""
    for one in made:
        ways = _ways(one.text)
        if ways and all(any(way in line for line in lines) for way in ways):
            within = [
                place
                for place in places()
                if place.file == one.place.file and place.first <= one.place.first <= place.last
            ]
            if within or not all(way in before for way in ways):
                seen.add(max(within, default=one.place))
        before += one.text
    return seen


def _ways(text: str) -> list[str]:
    rows = [line.strip().partition(" ") for line in text.splitlines()]
    return [way.strip() for key, _, way in rows if key.rstrip(":") in ("fix", "either", "or")]


def main() -> None:
    """Print every place."""
    for place in places():
        print(place)
    print(len(places()))


if __name__ == "__main__":
    main()
