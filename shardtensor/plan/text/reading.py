"""A plan's text to a `Plan`: every number known, every style spelled out, and every fault of the text at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from shardtensor.errors import SpecError
from shardtensor.plan.axes import Axes
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.origin import Origin
from shardtensor.plan.flows.flow import Flow
from shardtensor.plan.plan import Plan
from shardtensor.plan.text.definitions import Definitions, MeshReader, TensorStatements
from shardtensor.plan.text.entries import Above, Body, Entries, data_axis_fault, flow_axes
from shardtensor.plan.text.evaluate import Evaluator
from shardtensor.plan.text.scope import (
    AxisValue,
    Node,
    Poisoned,
    Scope,
    finding_of,
    known_values,
    other_values,
    params_in,
)
from shardtensor.plan.text.sources import File, Files
from shardtensor.spec.diagnostics import Source
from shardtensor.spec.reader import span

MAX_FINDINGS = 100
MAX_WORLD = 2**31
MAX_INCLUDES = 16
"""Files that include one another, one in the other."""


def read_plan(
    plan: str | Path | Source,
    *,
    config: Mapping[str, Any] | None = None,
    world: int = 1,
    params: Mapping[str, Any] | None = None,
    config_source: str = "config.json",
) -> Plan:
    """Read a plan for one configuration and world. Pure: needs no torch and no processes.

    Args:
        plan: the path of a file, the name of a packaged plan, or a text that begins with ``shard 1``.
        config: the keys of the model's config.json.
        world: the number of ranks.
        params: values of parameters: whole numbers, booleans, layouts; a text is read as an expression of the language.
        config_source: where `config` is from, for messages.

    Raises:
        SpecError: its text is every error that was found, and `findings` holds them.

    Example:
        >>> text = '''shard 1
        ... param tp = world
        ... mesh (dp = world / tp, tp)
        ... mlp.up.weight: [tp unit(config.head_dim), -]
        ... '''
        >>> plan = read_plan(text, config={"head_dim": 64}, world=8, params={"tp": 4})
        >>> str(plan.axes.mesh), plan.lines[0].pattern, str(plan.lines[0].value)
        ('(dp=2, tp=4)', 'mlp.up.weight', '[tp unit(64), -]')
    """
    if isinstance(world, bool) or not isinstance(world, int) or not 1 <= world <= MAX_WORLD:
        raise SpecError(f"the world has {world!r} ranks", fix=f"give a whole number from 1 to {MAX_WORLD}", code="E105")
    files = Files()
    reader = PlanReader(files, Scope(config or {}, world, config_source), dict(params or {}))
    reader.read(files.main(plan))
    errors = [finding for finding in reader.findings if finding.severity == "error"]
    if errors:
        error = refused(reader.findings)
        error.sources = tuple(file.source for file in files.opened.values())
        raise error
    return reader.plan()


def refused(findings: Iterable[Finding]) -> SpecError:
    """The error that findings are, of which some are errors."""
    findings = tuple(findings)
    errors = [finding for finding in findings if finding.severity == "error"]
    first = errors[0].origin
    error = SpecError("\n\n".join(map(str, errors)), code=errors[0].code)
    if first is not None:
        error.file, error.line, error.col = first.source.file, first.line, first.col
    error.findings = findings
    return error


class _TooMany(Exception):
    """So many findings that reading stops."""


class PlanReader:
    """Reads the statements of a plan and of the files that it includes.

    Args:
        given: the values of parameters from outside.
        only_head: read what says numbers (param, let, mesh, require) and nothing of tensors.
    """

    def __init__(self, files: Files, scope: Scope, given: Mapping[str, Any], only_head: bool = False) -> None:
        self.files = files
        self.scope = scope
        self.given = given
        self.only_head = only_head
        self.findings: list[Finding] = []
        self.entries = Entries(self.find, lambda: self.scope.leaves(self.data))
        self.definitions = Definitions(self, given)
        self.tensors = TensorStatements(self)
        self.axes: Axes | None = None
        self.data: tuple[str, ...] = ()
        self.evaluator = Evaluator(Source(""), scope)
        self._open: list[File] = []
        self._done: set[str] = set()
        self._seen: set[Any] = set()
        self._main: File | None = None

    # ---------- files ----------

    def read(self, file: File) -> None:
        """Read the plan's own file, and all that it includes."""
        self._main = file
        try:
            self._read_file(file)
            for name, value in self.given.items():
                if name not in self.scope.names or not self.scope.names[name].is_param:
                    self.definitions.unknown_param(name, value)
        except _TooMany:
            pass
        for note, _ in self.scope.notes:
            self.find(note)

    def again(self, given: Mapping[str, Any]) -> PlanReader:
        """Read the numbers of the same plan for other values of parameters."""
        assert self._main is not None
        scope = Scope(self.scope.config, self.scope.world, self.scope.config_source)
        other = PlanReader(self.files, scope, given, only_head=True)
        other.read(self._main)
        return other

    def _read_file(self, file: File) -> None:
        self._done.add(file.key)
        if isinstance(file.tree, SpecError):
            self.scope.is_whole = False
            self.find(finding_of(file.tree))
            return
        kept = self.evaluator, self.scope.below, self.entries.depth
        statements = file.tree.children[1:]
        self.evaluator = Evaluator(file.source, self.scope)
        self.scope.below = frozenset(name for node in statements for name in _defined(node))
        self.entries.depth = len(self._open)
        self._open.append(file)
        for node in statements:
            with self.caught():
                self._statement(node)
        self._open.pop()
        self.evaluator, self.scope.below, self.entries.depth = kept

    def _statement(self, node: Node) -> None:
        kind = str(node.data)
        if kind in ("param", "let", "style"):
            getattr(self.definitions, kind)(node)
        elif kind in ("include", "mesh", "data", "require"):
            getattr(self, f"_{kind}")(node)
        elif self.only_head:
            return
        elif kind in ("dims", "tie", "store", "unmatched"):
            getattr(self.tensors, kind)(node)
        else:
            Body(self.entries, self.evaluator, Above()).read(node)

    def find(self, finding: Finding) -> None:
        """Keep a finding, once for each place."""
        origin = finding.origin
        place = finding.fault if origin is None else (origin.source.file, origin.span)
        if (finding.code, place) in self._seen:
            return
        self._seen.add((finding.code, place))
        self.findings.append(finding)
        if len(self.findings) >= MAX_FINDINGS and finding.severity == "error":
            raise _TooMany

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Faults of a text become findings."""
        try:
            yield
        except Poisoned:
            pass
        except SpecError as error:
            self.find(finding_of(error))

    def origin(self, node: Node) -> Origin:
        return Origin(self.evaluator.source, span(node))

    def fault(self, code: str, node: Node, fault: str, why: str = "", fix: str = "") -> SpecError:
        return self.evaluator.fault(code, node, fault, why, fix)

    def _include(self, node: Node) -> None:
        (token,) = node.children

        def refused(fault: str, why: str, fix: str) -> SpecError:
            return self.fault("E003", token, fault, why, fix)

        name = self.evaluator.string(token)
        try:
            file = self.files.include(name, self._open[-1], refused)
        except SpecError:
            self.scope.is_whole = False
            raise
        chain = [*self._open, file]
        if file in self._open or len(chain) > MAX_INCLUDES:
            self.scope.is_whole = False
            names = " -> ".join(file.source.file for file in chain[-MAX_INCLUDES:])
            fault = (
                "these files include one another in a circle" if file in self._open else "includes are nested too deep"
            )
            raise refused(fault, names, "take this line out")
        if file.key not in self._done:
            self._read_file(file)

    # ---------- numbers ----------

    def _mesh(self, node: Node) -> None:
        if self.scope.mesh is not None:
            raise self.fault("E105", node.children[0], "a plan has one mesh, and this is another", fix="keep one")
        with self.caught():
            self.axes = MeshReader(self).read(node.children[0])

    def _data(self, node: Node) -> None:
        if self.data:
            raise self.fault("E105", node.children[0], "the axes of the data are said twice", fix="keep one line")
        with self.evaluator.apart("the data"):
            self.data = self.evaluator.axes(node.children[0])
        for line in self.entries.lines:
            if isinstance(line.value, Flow):
                leaves = set(self.scope.leaves(flow_axes(line.value))) & set(self.scope.leaves(self.data))
                if leaves:
                    fault, why, fix = data_axis_fault(sorted(leaves))
                    self.find(Finding("E204", fault, line.origin, why, fix))

    def _require(self, node: Node) -> None:
        condition, token = node.children
        reason = self.evaluator.string(token)
        if self.evaluator.truth(condition):
            return
        finding = finding_of(self.fault("E106", condition, f"requirement not met: {reason}"))
        names = params_in(self.scope, condition)
        given = [binding.given for name in names if (binding := self.scope.names[name]).given]
        why = known_values(self.evaluator, condition)
        self.find(attrs.evolve(finding, why=why, fix=other_values(names), notes=tuple(given)))

    # ---------- the plan ----------

    def plan(self) -> Plan:
        """The plan, when no error was found."""
        from shardtensor.mesh import Mesh

        scope = self.scope
        axes = self.axes if self.axes is not None else Axes(Mesh((("world", scope.world),)))
        params = {name: _public(binding.value) for name, binding in scope.names.items() if binding.is_param}
        return Plan(
            attrs.evolve(axes, data=self.data),
            tuple(self.entries.lines),
            tuple(self.tensors.stores),
            tuple(self.tensors.ties),
            tuple(self.tensors.all_dims),
            self.tensors.rest,
            params,
            scope.config,
            scope.world,
            tuple(file.source for file in self.files.opened.values()),
            tuple(self.findings),
        )


def _public(value: Any) -> Any:
    return value.size if isinstance(value, AxisValue) else value


def _defined(node: Node) -> Iterator[str]:
    """The names that a statement defines."""
    if node.data in ("param", "let", "style"):
        yield str(node.children[0])
    elif node.data == "mesh":
        for tree in node.iter_subtrees():
            if tree.data == "axis":
                yield str(tree.children[0])
