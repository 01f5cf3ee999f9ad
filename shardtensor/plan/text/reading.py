"""Read a plan's text into a `Plan`: compute all numbers, expand all styles, and report all errors of the text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from shardtensor.errors import SpecError
from shardtensor.mesh import Mesh
from shardtensor.plan.axes import Axes
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.flows.flow import Flow
from shardtensor.plan.plan import Plan
from shardtensor.plan.text.entries import Above, Body
from shardtensor.plan.text.evaluate import Evaluator, is_kind
from shardtensor.plan.text.scope import (
    POISON,
    AxisValue,
    Binding,
    Node,
    Poisoned,
    Scope,
    finding_of,
    kind_of,
    other_values,
    params_in,
)
from shardtensor.plan.text.sources import File, Files
from shardtensor.plan.text.statements import Statements, Stop
from shardtensor.spec.diagnostics import Source

MAX_WORLD = 2**31


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
        params: values of parameters: whole numbers, booleans, layouts; a text is parsed as an expression.
        config_source: the name of `config` in messages.

    Raises:
        SpecError: the plan has errors; the text lists all of them, and `findings` has them.

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
        error = plan_error(reader.findings)
        error.sources = tuple(file.source for file in files.opened.values())
        raise error
    return reader.plan()


def plan_error(findings: Iterable[Finding]) -> SpecError:
    """Return the error with the text of all errors among findings."""
    findings = tuple(findings)
    errors = [finding for finding in findings if finding.severity == "error"]
    first = errors[0].origin
    error = SpecError("\n\n".join(map(str, errors)), code=errors[0].code)
    if first is not None:
        error.file, error.line, error.col = first.source.file, first.line, first.col
    error.findings = findings
    return error


class PlanReader(Statements):
    """Reads the statements of a plan and of the files that it includes.

    Args:
        given: the values of parameters from outside.

    Attributes:
        mesh_params: the parameters that the mesh depends on.
    """

    def __init__(self, files: Files, scope: Scope, given: Mapping[str, Any]) -> None:
        super().__init__(scope, given)
        self.files = files
        self.mesh_params: tuple[str, ...] = ()
        self._open: list[File] = []
        self._done: set[str] = set()

    def read(self, file: File) -> None:
        """Read the plan's own file, and all files that it includes."""
        try:
            self._read_file(file)
            self.unknown_params()
            self._check_data()
        except Stop:
            pass
        for note in self.scope.notes:
            self.find(note)

    def _read_file(self, file: File) -> None:
        self._done.add(file.key)
        if isinstance(file.tree, SpecError):
            self.find(finding_of(file.tree))
            raise Stop
        kept = self.evaluator, self.scope.below, self.depth
        statements = file.tree.children[1:]
        self.evaluator = Evaluator(file.source, self.scope)
        self.scope.below = frozenset(name for node in statements for name in _defined(node))
        self.depth = len(self._open)
        self._open.append(file)
        for node in statements:
            with self.caught():
                self._statement(node)
        self._open.pop()
        self.evaluator, self.scope.below, self.depth = kept

    def _statement(self, node: Node) -> None:
        kind = str(node.data)
        if kind in ("rule", "in", "out", "use", "local"):
            Body(self, self.evaluator, Above()).read(node)
        else:
            getattr(self, f"_{kind}")(node)

    def _include(self, node: Node) -> None:
        (token,) = node.children

        def include_error(fault: str, why: str = "", fix: str = "") -> SpecError:
            return self.fault("E003", token, fault, why, fix)

        name = self.evaluator.string(token)
        try:
            file = self.files.include(name, self._open[-1], include_error)
            if file in self._open:
                names = " -> ".join(each.source.file for each in [*self._open, file])
                raise include_error("these files include one another in a circle", names, "take this line out")
        except SpecError as error:
            self.find(finding_of(error))
            raise Stop from None
        if file.key not in self._done:
            self._read_file(file)

    def _mesh(self, node: Node) -> None:
        if self.scope.axes is not None:
            raise self.fault("E105", node.children[0], "a plan has one mesh, and this is another", fix="keep one")
        self.mesh_params = params_in(self.scope, node)
        self.axes = MeshReader(self).read(node.children[0])

    def _check_data(self) -> None:
        """Find E204: a flow names data axes."""
        for line in self.lines:
            if isinstance(line.value, Flow):
                flow = line.value
                named = flow.before.axis_names.union(flow.after.axis_names, flow.partials)
                wrong = set(self.scope.leaves(tuple(named))) & set(self.scope.leaves(self.data))
                if wrong:
                    axis = min(wrong)
                    why = "a flow says what ranks of one data coordinate see; along data axes samples differ"
                    fault = f"`{axis}` is a data axis, and a flow names it"
                    self.find(Finding("E204", fault, line.origin, why, f"drop `{axis}`"))

    def plan(self) -> Plan:
        """Return the plan, if no error was found."""
        scope = self.scope
        axes = self.axes if self.axes is not None else Axes(Mesh((("world", scope.world),)))
        params = {name: _public(binding.value) for name, binding in scope.names.items() if binding.is_param}
        return Plan(
            attrs.evolve(axes, data=self.data),
            tuple(self.lines),
            tuple(self.stores),
            tuple(self.ties),
            tuple(self.all_dims),
            self.rest,
            params,
            scope.config,
            scope.world,
            tuple(file.source for file in self.files.opened.values()),
            tuple(self.findings),
        )


def _public(value: Any) -> Any:
    return value.size if isinstance(value, AxisValue) else value


def _defined(node: Node) -> Iterator[str]:
    """Yield the names that a statement defines."""
    if node.data in ("param", "let", "style"):
        yield str(node.children[0])
    elif node.data == "mesh":
        for tree in node.iter_subtrees():
            if tree.data == "axis":
                yield str(tree.children[0])


class MeshReader:
    """Reads ``(dp = world / tp, tp (kvg = gcd(tp, kv), kvr = tp / kvg))``.

    The names of the axes are defined from there on, even if a size is not known.
    """

    def __init__(self, plan: Statements) -> None:
        self.plan = plan
        self.leaves: list[tuple[str, int | None]] = []

    def read(self, sizes: Node) -> Axes | None:
        """Return the axes; None if a size is not known.

        Raises:
            SpecError: E105, the product of the sizes is not the world.
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
        token, *exprs = node.children
        name, first = str(token), len(self.leaves)
        size: int | None = None
        with self.plan.caught():
            is_made = bool(exprs) and is_kind(exprs[0], "sizes")
            size = self._composed(token, exprs[0], first) if is_made else self._size(token, exprs)
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
        declared = self.plan.scope.names.get(str(token), Binding(size)).value
        if declared is not POISON and declared != size:
            fault = f"the factors of `{token}` make {size} ({_product(leaves)}), and {token}={declared}"
            if not isinstance(declared, int):
                fault = f"`{token}` is {kind_of(declared)}, and the size of an axis is needed here"
            raise self.plan.fault("E105", sizes, fault, fix=f"write the last one as `{token}` divided by the others")
        return size

    def _size(self, token: Node, exprs: list[Node]) -> int:
        plan, node = self.plan, exprs[0] if exprs else token
        value = plan.scope.names.get(str(token), Binding(None)).value
        size: Any = value
        if exprs:
            try:
                size = plan.evaluator.number(node)
            except SpecError as error:
                finding = finding_of(error)
                if finding.code == "E107":  # a division that is not exact
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
            fix = other_values(params_in(plan.scope, node)) if exprs else ""
            raise plan.fault("E105", node, f"the axis `{token}` has {size} ranks", "an axis has at least one rank", fix)
        return size

    def _define(self, token: Node, size: int | None) -> None:
        """Define the name of an axis; the number that is its size may have the same name."""
        names, name, value = self.plan.scope.names, str(token), AxisValue((str(token),), size)
        if name in names and not isinstance(names[name].value, AxisValue):
            names[name] = attrs.evolve(names[name], value=value)
            return
        with self.plan.caught():
            self.plan.define(token, Binding(value))

    def _ways(self, sizes: Node, total: int) -> str:
        """Return fixes that make the mesh as large as the world."""
        run = f"run with --world {total}"
        for axis in sizes.children:
            rest = [str(other.children[0]) for other in sizes.children if other is not axis]
            if rest and len(axis.children) > 1 and is_kind(axis.children[1], "INT"):
                divisor = rest[0] if len(rest) == 1 else f"({' * '.join(rest)})"
                return f"write `{axis.children[0]} = world / {divisor}`, or {run}"
        return run


def _product(sizes: list[tuple[str, int | None]]) -> str:
    return " x ".join(f"{name}={size}" for name, size in sizes)
