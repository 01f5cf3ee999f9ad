"""The result of a plan's step beside that of the dense step: the values that differ, the modules with wrong rules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

import attrs

from shardtensor.errors import ShardTensorError
from shardtensor.mesh import Mesh
from shardtensor.plan.findings.finding import Finding, Origin
from shardtensor.plan.line import Line
from shardtensor.plan.match.patterns import starred
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Resolved, layout_text
from shardtensor.trace.borders import TOLERANCE, Border, Recorder, Relation, relations
from shardtensor.trace.edits import Edit


class DenseStep(Protocol):
    """The step of the dense module, which every plan's step is compared with."""

    @property
    def recorder(self) -> Recorder: ...
    @property
    def loss(self) -> float: ...
    @property
    def samples(self) -> int: ...


@attrs.define(eq=False, slots=False)
class StepResult:
    """What the step of a plan gave.

    Attributes:
        errors: those found without running; then nothing ran.
        recorders: by rank.
        error, path: what stopped a rank, and the module whose code was running.
        faults: by parameter, what is wrong with its gradient.
    """

    dense: DenseStep
    resolved: Resolved
    errors: tuple[Finding, ...]
    recorders: dict[int, Recorder]
    error: Exception | None = None
    path: str = ""
    loss: float = 0.0
    faults: dict[str, str] = attrs.field(factory=dict)

    @property
    def is_right(self) -> bool:
        return not (self.errors or self.error or self.faults or self.is_loss_wrong)

    @property
    def is_loss_wrong(self) -> bool:
        ref = self.dense.loss
        return not abs(self.loss - ref) <= TOLERANCE * max(abs(ref), 1e-6)

    @property
    def score(self) -> tuple[int, ...]:
        """Larger for a step that is right further on."""
        if self.errors:
            return (0, -len(self.errors))
        first = next(iter(self.recorders.values()))
        wrong = sum(found.kind == "wrong" for found in self.values.values())
        return (1, self.error is None, -wrong if self.error is None else len(first.values), -len(self.faults))

    # -- values -----------------------------------------------------------------------------------------------------

    @cached_property
    def mesh(self) -> Mesh:
        """The ranks that share the work of sample 0."""
        mesh, data = self.resolved.plan.axes.mesh, data_axes(self.resolved.plan)
        axes = [i for i in range(len(mesh.sizes)) if i not in data]
        return Mesh(tuple(mesh.axes[i] for i in axes), mesh.ranks_along(mesh.ranks[0], axes))

    @cached_property
    def _relations(self) -> tuple[dict[Border, Relation], dict[Border, Relation]]:
        ranks = [self.recorders[rank].values for rank in self.mesh.ranks]
        return relations(ranks, self.dense.recorder.values, self.mesh, self.dense.samples)

    @property
    def values(self) -> dict[Border, Relation]:
        """How the values at borders relate to the dense ones, in the order of the run."""
        return self._relations[0]

    @property
    def grads(self) -> dict[Border, Relation]:
        return self._relations[1]

    @cached_property
    def first_wrong(self) -> Border | None:
        """The first value that is neither the dense one, nor a partial sum or a shard of it."""
        return next((border for border, found in self.values.items() if found.kind == "wrong"), None)

    @cached_property
    def first_fault(self) -> str:
        """The parameter with a wrong gradient that backward reaches first; empty if there is none."""
        return next(reversed(self.faults), "")

    def suspects(self) -> list[str]:
        """Return the modules whose rules may be wrong, the most likely ones first; of equal layers, one."""
        wrong = self.first_wrong
        if self.errors:
            names = dict.fromkeys(each.tensor for each in self.errors)
            found = [name.rpartition(".")[0] if name in self.resolved.tensors else name for name in names]
            found += [path.rpartition(".")[0] for path in found]
        elif self.error is not None or wrong is not None or self.is_loss_wrong:
            found = self._before(wrong)
        else:
            found = self._around_gradient(self.first_fault.rpartition(".")[0])
        ruled = {*self.resolved.modules, *(name.rpartition(".")[0] for name in self.resolved.tensors)}
        first: dict[str, str] = {}
        for path in found:
            if path in ruled:
                first.setdefault(starred(path), path)
        return [*first.values()]

    def _before(self, wrong: Border | None) -> list[str]:
        """Return the modules whose results reached the first wrong value, or the one that stopped."""
        earlier: list[Border] = []
        for border in self.values:
            if border == wrong:
                break
            earlier.append(border)
        outs = [border[0] for border in reversed(earlier) if border[1] == "out"]
        kinds = {border[0]: self.values[border].kind for border in earlier if border[1] == "out"}
        stopped = [self.path] if self.error is not None else []
        here = [wrong[0]] if wrong is not None else []
        inside = [path for path in outs if here and path.startswith(f"{here[0]}.")] if here else []
        partial = [path for path in outs if kinds[path] == "partial"]
        sharded = [path for path in outs if kinds[path] == "sharded"]
        above = [each.rpartition(".")[0] for each in (*stopped, *here)]
        return [*stopped, *partial[:2], *here, *sharded[:4], *partial[2:4], *inside[:4], *outs[:4], *above]

    def _around_gradient(self, path: str) -> list[str]:
        """Return the modules that use what a module with a wrong gradient returns, with those inside; and itself."""
        order = list(self.values)
        start = next((i for i, border in enumerate(order) if border[:2] == (path, "out")), 0)
        after = [border for border in order[start:] if border[1] == "in"]
        users = [b[0] for b in after if self.grads.get(b, _EQUAL).kind in ("partial", "wrong")] or [b[0] for b in after]
        inside = [b[0] for b in after if users and b[0].startswith(f"{users[0]}.")]
        enters = self.values.get((path, "in", 0, 0), _EQUAL)
        own = [path] if enters.kind == "sharded" else []
        above = path.rpartition(".")[0]
        return [*own, *users[:1], *inside[:6], path, *users[1:4], above]

    # -- findings -----------------------------------------------------------------------------------------------------

    def finding(self, edit: Edit, path: str, after: StepResult) -> Finding:
        """Return the finding for a mistake that an edit mends."""
        verdict = "the step gives the dense loss and gradients" if after.is_right else "the step is right further on"
        if self.errors:
            own = [each for each in self.errors if each.tensor == path or each.tensor.rpartition(".")[0] == path]
            first = (own or list(self.errors))[0]
            return attrs.evolve(first, fix=edit.text, notes=(*first.notes, f"with this change {verdict}"))
        notes = [f"`{starred(path)}` is called at {site}" for site in (self._site(path),) if site]
        notes.append(f"with this change {verdict}")
        fault, why = self._symptom(path)
        origin = edit.origin or _origin_of(self.resolved, path, counts_first=False)
        return Finding("E405", fault, origin, why, edit.text, tuple(notes), path)

    def _site(self, path: str) -> str:
        return next((each.sites[path] for each in self.recorders.values() if path in each.sites), "")

    def _symptom(self, path: str) -> tuple[str, str]:
        """Return what is wrong, and where it shows."""
        name, wrong = f"`{starred(path) or 'the model'}`", self.first_wrong
        leaves = next((found for (of, side, *_), found in self.values.items() if (of, side) == (path, "out")), None)
        shows = self._where_it_shows()
        if self.error is None and wrong is None and not self.is_loss_wrong:
            users = [found for (of, side, *_), found in self.grads.items() if (of, side) == (path, "in")]
            what = f"the gradient of what enters {name} is {users[0]}" if users else f"{name} returns wrong gradients"
            if users and users[0].kind in ("equal", "sharded"):
                what = f"gradients around {name} are not summed as they should be"
            return what, shows
        if leaves is not None and leaves.kind != "equal":
            return f"{name} returns what is {leaves}, and what follows does not expect that", shows
        enters = next((found for (of, side, *_), found in self.values.items() if (of, side) == (path, "in")), None)
        if enters is not None and enters.kind != "equal":
            return f"{name} gets what is {enters}, and does not expect that", shows
        return f"the rules for {name} do not give the dense result", shows

    def _where_it_shows(self) -> str:
        if self.error is not None:
            where = f"`{self.path}` stops" if self.path else "the step stops"
            text = str(self.error).partition("\n")[0]
            return f"{where}: {type(self.error).__name__}: {text}"
        if self.first_wrong is not None:
            path, side, *_ = self.first_wrong
            verb = "enters" if side == "in" else "leaves"
            return f"the first wrong value {verb} `{path or 'the model'}`: it is {self.values[self.first_wrong]}"
        if self.is_loss_wrong:
            return f"one rank computes the loss {self.dense.loss:.6g}, the mean over ranks is {self.loss:.6g}"
        rest = len(self.faults) - 1
        more = f"; {rest} more gradients are wrong" if rest else ""
        return f"the gradient of `{self.first_fault}` is {self.faults[self.first_fault]}{more}"

    def findings(self) -> Iterator[Finding]:
        """Yield the errors found without running, what stopped a rank, a wrong loss, and each wrong gradient."""
        yield from self.errors
        if self.error is not None:
            yield _not_run(self.error, self.path, self.resolved)
            return
        count = len(self.recorders)
        if self.is_loss_wrong:
            why = f"one rank computes {self.dense.loss:.6g}, the mean over {count} ranks is {self.loss:.6g}"
            fix = "a value is counted twice, or a part is taken for the whole: look at the flows of the last layers"
            if self.first_wrong is not None:
                fix = f"{self._where_it_shows()}: look at the flows of the modules before it"
            yield Finding("E405", "the loss is not the dense one", _origin_of(self.resolved, ""), why, fix)
        for i, (name, fault) in enumerate(reversed(self.faults.items())):
            placed = self.resolved.tensors[name]
            why = f"{name} is placed as `{layout_text(placed, self.resolved)}`; one step on {count} ranks"
            notes = ("backward comes here first: what is wrong before it in the model may follow from it",)
            origin = placed.line.origin if placed.line is not None else None
            fault = f"the gradient of `{name}` is {fault}"
            yield Finding("E405", fault, origin, why, _FIX, notes if len(self.faults) > 1 and not i else (), name)


_EQUAL = Relation("equal")

_FIX = (
    "drop a `grad partial(...)` where it is too large, say `in` or `grad partial(...)` where it is too small: "
    "see how values enter and leave the modules around it"
)


def _origin_of(resolved: Resolved, path: str, counts_first: bool = True) -> Origin | None:
    """Return the place in the plan for a module: in its block, at its tensors, or at a module around it."""
    module_flows = resolved.modules.get(path)
    lines: list[Line | None] = [] if path else list(resolved.plan.lines)
    if path and module_flows is not None:
        flows = [line for side in (module_flows.ins, module_flows.outs) for _, line in side.values()]
        counts = [line for _, line in module_flows.locals.values()]
        lines = [*counts, *flows] if counts_first else [*flows, *counts]
        lines += [line for _, line in module_flows.uses]
    lines += [placed.line for name, placed in resolved.tensors.items() if name.rpartition(".")[0] == path]
    found = next((line.origin for line in lines if line is not None and line.origin is not None), None)
    return found if found is not None or not path else _origin_of(resolved, path.rpartition(".")[0], counts_first)


def _not_run(error: Exception, path: str, resolved: Resolved) -> Finding:
    """Return the finding for what stopped a rank: an error of this library, or of the module's code on shards."""
    fault, *facts = str(error).splitlines() or [""]
    if isinstance(error, ShardTensorError):
        origin = _origin_of(resolved, path, counts_first=False)
        return Finding("E405", fault, origin, "\n       ".join(line.strip() for line in facts), tensor=path)
    where = f"`{path}` does not run so" if path else "the module does not run so"
    fix = "an attribute that counts may want a `local`, or a value an `in` or `out`"
    fault = f"{where}: {type(error).__name__}: {fault}"
    return Finding("E405", fault, _origin_of(resolved, path), "its code meets parts of values", fix, tensor=path)


def data_axes(plan: Plan) -> list[int]:
    """Return the numbers of the mesh axes along which samples differ."""
    return [i for i, name in enumerate(plan.axes.mesh.names) if name in plan.axes.leaves(plan.axes.data)]
