"""Find values that modules return sharded or as partial sums, and that no module of the plan takes so (E403, E404).

Only the model's code determines which module calls which, and nothing is guessed: a value counts as taken if any other
module takes such a value. A shard that reaches the wrong module does not fit it, and torch raises at the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.flows.flow import Flow, as_written, cut_axes, cuts, last_cut, partial_axes
from shardtensor.plan.flows.layer_flows import LayerWork
from shardtensor.plan.flows.modules import REPLICATE, Modules, around, flow_finding, is_inside
from shardtensor.spec.nodes import Spec

Parts = tuple[frozenset[str], frozenset[str]]
"""The axes over which a value is sharded, and those along which it is a partial sum."""

TOO_LARGE = "copies would be summed: the value comes out as many times too large as there are ranks"


class Takers:
    """The sharded and partial values that modules return, and those that they take.

    Args:
        works: of the known layers that have flows.
        broken: layers that contradict themselves.
        is_whole: whether the plan has rules for the whole model.
    """

    def __init__(
        self, modules: Modules, works: Mapping[str, LayerWork], broken: frozenset[str], is_whole: bool = True
    ) -> None:
        self._modules, self._broken, self._is_whole = modules, broken, is_whole
        self._outs = {path: dict(stated.outs) for path, stated in modules.stated.items()}
        for path, work in works.items():  # also a default result
            self._outs[path].setdefault("", work.leaves)
        self._hooks = {
            path: [hook.name for hook, _ in stated.module_flows.uses]
            for path, stated in modules.stated.items() if stated.module_flows.uses
        }  # fmt: skip

    def findings(self) -> Iterator[Finding]:
        """Yield E403 and E404."""
        for path, name, is_hooked in self._left:
            if not is_hooked and path not in self._broken:
                yield self._not_taken(path, name)
        yield from self._without_heads()
        yield from self._not_given()

    @cached_property
    def to_hooks(self) -> Mapping[str, Finding]:
        """Modules whose result no module takes, but a hook may; and the finding if none does."""
        return {path: self._not_taken(path, name) for path, name, is_hooked in self._left if is_hooked}

    # -- losses that take cut logits ----------------------------------------------------------------------------------

    @cached_property
    def logits(self) -> list[str]:
        """The linear layers whose sharded logits a loss takes: those with ``use cross_entropy()`` in their block, else
        those below such a block that return results sharded along the last dim, with no module after them that takes
        such values. Layers in numbered modules count only if there are no others."""
        losses = {path for path, hooks in self._hooks.items() if "cross_entropy" in hooks}
        if not losses:
            return []
        stated, layers = self._modules.stated, self._modules.layers
        heads = [path for path in layers if self._leaves_logits(path)]
        below = [path for path in heads if path not in losses and not losses.isdisjoint(around(path))]
        takers = [path for path, each in stated.items() if any(last_cut(f.before) for f in each.ins.values())]
        takers += [path for path, layer in layers.items() if layer.cut("weight", "in")]
        found = self._last(below, takers, _is_outer) or self._last(below, takers, lambda path: True)
        return [path for path in heads if path in losses] + found

    def _leaves_logits(self, path: str) -> bool:
        layer = self._modules.layers[path]
        flow = layer.stated.out
        return layer.kind.name == "linear" and flow is not None and (
            list(cuts(flow.after)) == [-1] and not partial_axes(flow.after)
        )  # fmt: skip

    def _last(self, paths: list[str], takers: list[str], counts: Callable[[str], bool]) -> list[str]:
        """Return those of `paths` that come after all of `takers` in the order of the model."""
        places = self._modules.places
        last = max((places.get(path, 0) for path in takers if counts(path)), default=-1)
        return [path for path in paths if counts(path) and places.get(path, 0) > last]

    def _without_heads(self) -> Iterator[Finding]:
        """Yield findings for losses that take sharded logits if no layer returns such."""
        modules = self._modules
        for at in (path for path, hooks in self._hooks.items() if "cross_entropy" in hooks):
            below = [
                path for path, layer in modules.layers.items()
                if layer.kind.name == "linear" and (path == at or is_inside(path, at))
            ]  # fmt: skip
            stated = [modules.stated[path] for path in below if path in modules.stated]
            is_written = any(last_cut(flow.after) for each in stated for flow, _ in each.module_flows.outs.values())
            is_cut = any(each.out is not None and last_cut(each.out.after) for each in stated)
            if is_written and (not is_cut or not set(below).isdisjoint(self.logits)):
                continue  # in this world they may be full, over axes of one rank
            line = next(line for hook, line in modules.stated[at].module_flows.uses if hook.name == "cross_entropy")
            why = "it takes logits whose classes are cut over ranks, from a linear layer "
            why += ("that is" if at in modules.layers else "below") + " here with such an `out`"
            fix = "cut the head, `vocab_head(tp)`; or drop `use cross_entropy()`: whole logits need no hook"
            yield Finding("E403", "this loss finds no head that leaves its logits cut", line.origin, why, fix, (), at)

    # -- returned, not taken ------------------------------------------------------------------------------------------

    @cached_property
    def _takes(self) -> dict[Parts, list[str]]:
        stated, layers = self._modules.stated.items(), self._modules.layers.items()
        found = [(path, _parts(flow.before)) for path, each in stated for flow in each.ins.values()]
        return _by_parts(
            found
            + [
                (path, (frozenset(layer.cut("weight", "in")), frozenset()))
                for path, layer in layers
                if layer.kind.name == "linear" and (not layer.stated.ins or path in self._broken)
            ]
        )  # one that contradicts itself may take the value of its flow, or of its weight

    @cached_property
    def _left(self) -> list[tuple[str, str, bool]]:
        """The results that are sharded or partial and that no module takes; and whether a hook may take them."""
        return [
            (path, name, self._may_go_to_a_hook(path))
            for path, outs in self._outs.items() for name, flow in outs.items() if path
            if any(parts := _parts(flow.after)) and not _any(self._takes, path, parts) and not self._passes(path, parts)
        ]  # fmt: skip

    def _passes(self, path: str, parts: Parts) -> bool:
        """Whether a module around returns such a value; or, in a plan for one block, takes such a value at the root,
        which then returns it in the same layout."""
        for above in around(path):
            stated = self._modules.stated.get(above)
            flows = [] if stated is None else [*stated.outs.values(), *(stated.ins.values() if not above else ())]
            if any(_holds(_parts(flow.before), parts) for flow in flows):
                return True
        return False

    def _may_go_to_a_hook(self, path: str) -> bool:
        own = any(hook not in ("dispatch", "cross_entropy") for hook in self._hooks.get(path, ()))
        return own or path in self.logits or self._is_in_a_hook(path)

    def _is_in_a_hook(self, path: str) -> bool:
        return any(hook != "cross_entropy" for above in around(path) for hook in self._hooks.get(above, ()))

    def _not_taken(self, path: str, name: str) -> Finding:
        stated, named = self._modules.stated[path], self._modules.named
        flow, line = self._outs[path][name], stated.line("out", name)
        written = stated.module_flows.outs[name][0] if line is not None else flow
        line = line or self._modules.layers[path].params["weight"].line
        if partials := partial_axes(flow.after):
            return flow_finding(
                "E404", f"this value leaves as partial sums along {named(partials)}, and nobody sums them", line,
                f"`{as_written(written)}` has no arrow that sums: "
                "what meets it takes one rank's partial sum for the value",
                f"write `{as_written(written.before)} -> replicate` (one all_reduce), or say who sums: `in: partial("
                f"{named(partials)}) -> replicate` there", path,
            )  # fmt: skip
        fix = f"say who takes it: `in: {written.after}` there, or such an `out` on the module around; or gather it: "
        fix += f"`out: {'' if written.before == REPLICATE.before else f'{as_written(written.before)} -> '}replicate`"
        fix += "; for logits: `use cross_entropy()`" * (set(cuts(flow.after)) == {-1})
        return flow_finding(
            "E403", f"this value leaves cut along {named(cut_axes(flow.after))}, and no module takes it so", line,
            "what meets it next would take one rank's part for the whole", fix, path,
        )  # fmt: skip

    # -- partial sums that are summed, and that no module returns -----------------------------------------------------

    def _not_given(self) -> Iterator[Finding]:
        """Yield findings for modules that sum partial sums at their `in` or `out` if no module returns such."""
        modules, named = self._modules, self._modules.named
        flows = [(path, flow) for path, stated in modules.stated.items() for flow in stated.outs.values()]
        gives = _by_parts((path, _parts(flow.after)) for path, flow in flows)
        for path, stated in modules.stated.items():
            for name, flow in stated.ins.items() if self._is_whole and path and path not in self._broken else ():
                axes = partial_axes(flow.before)
                if axes and not _any(gives, path, (frozenset(), frozenset(axes))) and not self._is_fed(path, flow):
                    yield flow_finding(
                        "E403", f"`{path}` takes partial sums along {named(axes)}, and no module leaves such",
                        stated.line("in", name), TOO_LARGE,
                        f"drop `partial({named(axes)})` here, or the arrow that sums them where they are made", path,
                    )  # fmt: skip
            if path in modules.layers or modules.owned.get(path) or stated.module_flows.uses:
                continue
            for name, flow in stated.outs.items():
                axes = partial_axes(flow.before)
                inside = [(other, each) for other, each in flows if axes and is_inside(other, path)]
                if not axes or any(set(axes) <= set(partial_axes(each.after)) for _, each in inside):
                    continue
                summing = next((other for other, each in inside if set(axes) <= set(partial_axes(each.before))), None)
                if summing is not None or self._is_whole:
                    yield flow_finding(
                        "E403", f"nothing in `{path}` leaves partial sums along {named(axes)}",
                        stated.line("out", name),
                        TOO_LARGE if summing is None else f"`{summing}` sums them already; summed again they are as "
                        f"many times too large as there are ranks along {named(axes)}",
                        "drop this `out`, or the arrow inside", path,
                    )  # fmt: skip

    def _is_fed(self, path: str, flow: Flow) -> bool:
        """Whether a module around passes such partial sums on, or one with a hook may make them."""
        needed = frozenset[str](), frozenset(partial_axes(flow.before))
        stated = [self._modules.stated[above] for above in around(path) if above in self._modules.stated]
        return self._is_in_a_hook(path) or any(
            _holds(_parts(each.after), needed) for above in stated for each in above.ins.values()
        )


def _is_outer(path: str) -> bool:
    """Whether a module has no number in its path, so is neither one of several equal modules nor inside one."""
    return not any(each.rpartition(".")[2].isdecimal() for each in (path, *around(path)))


def _parts(spec: Spec) -> Parts:
    return frozenset(cut_axes(spec)), frozenset(partial_axes(spec))


def _holds(parts: Parts, needed: Parts) -> bool:
    return needed[0] <= parts[0] and needed[1] <= parts[1]


def _by_parts(found: Iterable[tuple[str, Parts]]) -> dict[Parts, list[str]]:
    """Return the modules by their parts: layers are alike, so there are few different ones."""
    of: dict[Parts, list[str]] = {}
    for path, parts in found:
        if any(parts):
            of.setdefault(parts, []).append(path)
    return of


def _any(of: Mapping[Parts, list[str]], path: str, needed: Parts) -> bool:
    """Whether a module has all these parts, other than the one of this path and those around it."""
    return any(
        other != path and not is_inside(path, other)
        for parts, others in of.items() if _holds(parts, needed) for other in others
    )  # fmt: skip
