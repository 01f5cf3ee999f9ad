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

import attrs

import shardtensor
from shardtensor import errors
from shardtensor.errors import ShardTensorError
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.flows.layer_flows import Contradiction

PACKAGE = Path(shardtensor.__file__).parent
BY_HAND = {"spec/diagnostics.py": {"error": 4}}
"""Helpers that put the fix into the text by themselves: by file, the name, and which argument is the fix."""
NAMES = ("fix", "way", "ways", "way_out")
"""What a helper calls the fix that it hands on."""
FINDINGS = {"Finding": 4, "Contradiction": 4, "evolve": 99}
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
    calls = [call for path in sorted(PACKAGE.rglob("*.py")) if path.name != "errors.py" for call in _calls(path)]
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
        for call in calls:
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


def _calls(path: Path) -> Iterator[_Call]:
    file, tree = str(path.relative_to(PACKAGE)), _tree(path)
    imported = _imported(tree)
    everything = [*chain(*imported.values())]
    todo: list[tuple[ast.AST, str, Any]] = [(tree, "", None)]
    while todo:
        node, within, function = todo.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            within = f"{within}.{node.name}".lstrip(".")
            function = node if isinstance(node, ast.FunctionDef) else None
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            place = Place(file, node.lineno, node.end_lineno or node.lineno, within)
            origins = imported.get(name, []) if isinstance(node.func, ast.Name) else everything
            yield _Call(place, name, node, _parameters(function), name in _kinds(function), origins)
        todo += [(child, within, function) for child in ast.iter_child_nodes(node)]


def _imported(tree: ast.Module) -> dict[str, list[str]]:
    """The file of the package that each imported name is from; a method may be of any class among them."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardtensor."):
            file = "/".join((node.module or "").split(".")[1:]) + ".py"
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, []).append(file)
    return found


@cache
def _tree(path: Path) -> ast.Module:
    """What a file says; nothing where it speaks of no error."""
    text = path.read_text()
    return ast.parse(text if re.search(r"Error|Finding|refused|fault\(|\.error\(", text) else "")


@cache
def _parameters(function: ast.FunctionDef | None) -> list[str]:
    if function is None:
        return []
    names = [arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


@cache
def _kinds(function: ast.FunctionDef | None) -> set[str]:
    """Names of a function that hold a class of errors."""
    if function is None:
        return set()
    args = (*function.args.args, *function.args.kwonlyargs)
    names = {arg.arg for arg in args if arg.annotation is not None and "type[" in ast.unparse(arg.annotation)}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            said = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
            if not said.isdisjoint(_error_classes()):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@cache
def _error_classes() -> frozenset[str]:
    """Names of the classes of errors.py, and of those that other files derive from them."""
    known = {name for name, value in vars(errors).items() if isinstance(value, type)}
    for path in PACKAGE.rglob("*.py"):
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and {getattr(base, "id", "") for base in node.bases} & known:
                known.add(node.name)
    return frozenset(known)


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

    inits: dict[type, Any] = {kind: kind.__init__ for kind in (Finding, Contradiction)}
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
        path = Path(frame.f_code.co_filename)
        if Path(attrs.__file__).parent.parent / "attr" in path.parents:  # attrs.evolve
            frame = frame.f_back
            continue
        if not path.is_relative_to(PACKAGE):
            return None
        file, name = str(path.relative_to(PACKAGE)), frame.f_code.co_name
        if file != "errors.py" and (file, name) not in _found()[1]:
            return Place(file, frame.f_lineno, frame.f_lineno, name), by_hand
        by_hand = by_hand or file in BY_HAND
        frame = frame.f_back
    return None


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
