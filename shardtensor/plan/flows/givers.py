"""Who gives a value in parts and who takes it so: parts and addends that nobody expects (E403, E404).

Which module hears from which is the model's own code, and no plan says it. So a part counts as expected where, going
outward from the module that leaves it, some module is found that takes such parts; what is refused nobody can take.
Parts of features do not go far: a module takes them from the innermost module around it in which another leaves such
parts before it, and leaves them to the innermost one in which another takes such after it. So `mlp.down_proj` does not
take what the attention leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache

import attrs

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.places import origin_of, style_note
from shardtensor.plan.flows.flow import Flow, as_written, cut_axes, cuts, last_cut, partial_axes
from shardtensor.plan.flows.layer_flows import natural
from shardtensor.plan.flows.meetings import Meetings
from shardtensor.plan.flows.modules import Modules, Names, around, is_below
from shardtensor.plan.line import Line
from shardtensor.spec.nodes import Spec

Parts = frozenset[tuple[str, str]]
"""Axes along which ranks hold parts of a value, each with what it cuts: ``features``, or ``tokens`` of some dim."""


@attrs.define(eq=False)
class _Speakers:
    """A few of those that speak of some parts, and the places of the first and the last of all."""

    few: list[str]
    first: int
    last: int


class _Index:
    """By each module, sets of what modules in it speak of: a few of those, and the places of the first and the last."""

    def __init__(self, places: Mapping[str, int], everywhere: Iterable[tuple[str, Parts]] = ()) -> None:
        self._places = places
        self._found: dict[str, dict[Parts, _Speakers]] = {}
        for path, parts in everywhere:
            self.add(path, parts)

    def add(self, path: str, parts: Parts, scope: str = "") -> None:
        """Register a module with those around it, up to the one that is its `scope`."""
        if parts:
            place = self._places.get(path, 0)
            for above in around(path):
                of_it = self._found.setdefault(above, {})
                found = of_it.get(parts)
                if found is None:
                    found = of_it[parts] = _Speakers([], place, place)
                if len(found.few) < 4 and path not in found.few:
                    found.few.append(path)
                found.first, found.last = min(found.first, place), max(found.last, place)
                if above == scope:
                    break

    def has(self, above: str, parts: Parts, besides: str, after: int = -1, before: int | None = None) -> bool:
        """Whether some module in `above`, not `besides` itself nor one around it, speaks of all these parts.

        Args:
            after, before: one that stands after this place, or before it, in the order of the model.
        """
        return any(
            parts <= key
            and found.last > after
            and (before is None or found.first < before)
            and any(path != besides and not is_below(besides, path) for path in found.few)
            for key, found in self._found.get(above, {}).items()
        )


class Givers:
    """What modules give and take."""

    def __init__(self, modules: Modules, meetings: Meetings, broken: frozenset[str] = frozenset()) -> None:
        self._modules, self._meetings, self._broken = modules, meetings, broken
        self._known: dict[Spec, Parts] = {}
        self._hooked = {
            path: [hook.name for hook, _ in stated.passing.uses]
            for path, stated in modules.stated.items() if stated.passing.uses
        }  # fmt: skip
        self._heads = self._heads_of_losses()

    @cached_property
    def _escaped(self) -> list[tuple[str, str, bool]]:
        return list(self._escapes(self._modules.stated))

    @cached_property
    def to_hooks(self) -> frozenset[str]:
        """Modules whose cut result a hook takes, and no module."""
        return frozenset(path for path, _, is_hooked in self._escaped if is_hooked)

    def findings(self) -> Iterator[Finding]:
        """E403 and E404."""
        for path, name, is_hooked in self._escaped:
            if not is_hooked and path not in self._broken:
                yield self._told(path, name)
        yield from self._without_heads()
        yield from self._not_given()
        yield from self._not_made()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _parts(self, spec: Spec) -> Parts:
        """How a value is cut. A view may turn features into heads: so a part of any dim is one of features, but for
        those dims along which some module deals values out."""
        if spec not in self._known:
            last = last_cut(spec)
            self._known[spec] = frozenset(
                (axis, f"tokens {dim}" if cut != last and (axis, dim) in self._meetings.dealt else "features")
                for dim, cut in cuts(spec).items()
                for axis in cut.axes
            )
        return self._known[spec]

    @cached_property
    def _all_takes(self) -> list[tuple[str, Parts]]:
        stated, layers = self._modules.stated.items(), self._modules.layers.items()
        takes = [(path, self._parts(flow.before)) for path, each in stated for flow in each.ins.values()]
        return takes + [
            (path, _features(layer.cut("weight", "in")))
            for path, layer in layers if not layer.stated.ins and layer.kind.name == "linear"
        ]  # fmt: skip

    @cached_property
    def _all_gives(self) -> list[tuple[str, Parts]]:
        stated = self._modules.stated.items()
        return [(path, self._parts(flow.after)) for path, each in stated for flow in each.outs.values()]

    @cached_property
    def _gives_anywhere(self) -> _Index:
        return _Index(self._modules.places, self._all_gives)

    @cached_property
    def _takes(self) -> _Index:
        """Who takes parts, known as far as these come from."""
        index, givers = _Index(self._modules.places), self._gives_anywhere
        for path, parts in self._all_takes:
            index.add(path, parts, self._scope(path, parts, givers, is_taker=True))
        return index

    @cached_property
    def _gives(self) -> _Index:
        """Who gives parts, known as far as these go."""
        index, takers = _Index(self._modules.places), _Index(self._modules.places, self._all_takes)
        for path, parts in self._all_gives:
            index.add(path, parts, self._scope(path, parts, takers, is_taker=False))
        return index

    @cached_property
    def _takes_addends(self) -> _Index:
        stated = self._modules.stated.items()
        found = [(path, _addends(flow.before)) for path, each in stated for flow in each.ins.values()]
        return _Index(self._modules.places, found)

    @cached_property
    def _gives_addends(self) -> _Index:
        stated = self._modules.stated.items()
        found = [(path, _addends(flow.after)) for path, each in stated for flow in each.outs.values()]
        return _Index(self._modules.places, found)

    def _scope(self, path: str, parts: Parts, others: _Index, is_taker: bool) -> str:
        """The module in which parts of features come or go; the root where that is not known, and for tokens."""
        here = self._modules.places.get(path, 0)
        for above in around(path) if any(sort == "features" for _, sort in parts) else ():
            stated = self._modules.stated.get(above)
            if is_taker and (others.has(above, parts, path, before=here) or (stated is not None and stated.ins)):
                return above
            if not is_taker and others.has(above, parts, path, after=here):
                return above
        return ""

    # -- what is given and not taken ----------------------------------------------------------------------------------

    def _escapes(self, paths: Iterable[str]) -> Iterator[tuple[str, str, bool]]:
        """The results that leave in parts or as addends and reach no module; and whether a hook takes them."""
        for path in paths:
            for name, flow in self._modules.stated[path].outs.items() if path else ():
                cut, addends = self._parts(flow.after), _addends(flow.after)
                if not (cut or addends):
                    continue
                is_taken, is_hooked = False, path in self._heads and "cross_entropy" in self._hooks(path, flow)
                block, after = _block(path), -1
                for above in around(path):
                    if not (above == block or is_below(above, block)):
                        after = self._modules.places.get(path, -1)  # layers before it do not hear of it
                    takes = (not cut or self._takes.has(above, cut, path, after)) and (
                        not addends or self._takes_addends.has(above, addends, path, after)
                    )
                    if takes or self._passes(above, cut, addends):
                        is_taken = True
                        break
                    hooks = self._hooks(above, flow)
                    is_hooked = is_hooked or path in self._heads or any(name != "cross_entropy" for name in hooks)
                if not is_taken:
                    yield path, name, is_hooked

    def _passes(self, above: str, cut: Parts, addends: Parts) -> bool:
        """Whether a module around says that it gives such a value; or, of a block alone, that it takes such, for then
        values leave it as they come, for the next one."""
        stated = self._modules.stated.get(above)
        if stated is None:
            return False
        flows = [*stated.outs.values(), *(stated.ins.values() if not above else ())]
        return any(cut <= self._parts(flow.before) and addends <= _addends(flow.before) for flow in flows)

    def _hooks(self, above: str, flow: Flow) -> list[str]:
        """The hooks of a module that may take a value: any but that of a loss, which takes logits cut by classes."""
        hooks = self._hooked.get(above, ())
        return [name for name in hooks if name != "cross_entropy" or _is_logits(flow)]

    def _heads_of_losses(self) -> frozenset[str]:
        """The linear layers whose logits a loss may take: with its hook, or else in a module that has it. Those in
        modules that are alike, such as layers, only where there are no others."""
        found: set[str] = set()
        inner: set[str] = set()
        losses = {path for path, hooks in self._hooked.items() if "cross_entropy" in hooks}
        if not losses:
            return frozenset()
        for path, layer in self._modules.layers.items():
            flow = layer.stated.out
            if layer.kind.name != "linear" or flow is None or not _is_logits(flow):
                continue
            if path in losses:
                found.add(path)
            elif not losses.isdisjoint(around(path)):
                (inner if self._is_alike(path) else found).add(path)
        return frozenset(found or inner)

    def _without_heads(self) -> Iterator[Finding]:
        """Losses that should take cut logits where nothing leaves such."""
        for at, stated in self._modules.stated.items():
            line = next((line for hook, line in stated.passing.uses if hook.name == "cross_entropy"), None)
            below = (path for path, layer in self._modules.layers.items() if layer.kind.name == "linear")
            outs = (
                self._modules.stated[p].passing.outs
                for p in below
                if p in self._modules.stated and (p == at or is_below(p, at))
            )
            if line is None or any(last_cut(flow.after) for each in outs for flow, _ in each.values()):
                continue
            yield Finding(
                "E403", "this loss finds no head that leaves its logits cut", line.origin,
                "it takes logits whose classes are cut over ranks, from a linear layer "
                + ("that is" if at in self._modules.layers else "below") + " here with such an `out`",
                "cut the head, `vocab_head(tp)`; or drop `use cross_entropy()`: whole logits need no hook", (), at,
            )  # fmt: skip

    def _is_alike(self, path: str) -> bool:
        """Whether a module is one of several alike, or in one."""
        return _block(path) in (path, *around(path))

    @property
    def logits(self) -> list[str]:
        """The modules whose logits a loss takes as they are cut."""
        return sorted({path for path, _, is_hooked in self._escapes(self._heads) if is_hooked})

    def _told(self, path: str, name: str) -> Finding:
        stated, named = self._modules.stated[path], self._modules.named
        flow, line = stated.outs[name], stated.line("out", name)
        said = stated.passing.outs[name][0]
        origin = origin_of(line)
        addends = partial_axes(flow.after)
        if addends:
            return Finding(
                "E404", f"this value leaves as addends along {named(addends)}, and nobody sums them", origin,
                f"`{as_written(said)}` has no arrow that sums: what meets it takes one rank's addend for the value",
                f"write `{as_written(said.before)} -> replicate` (one all_reduce), or say who sums: `in: partial("
                f"{named(addends)}) -> replicate` there",
                style_note(origin, "flow"), path,
            )  # fmt: skip
        cut = named(cut_axes(flow.after))
        fix = f"say who takes it: `in: {said.after}` there, or such an `out` on the module around; or gather it: "
        fix += f"`out: {said.before} -> replicate`"
        if set(cuts(flow.after)) == {-1} and "cross_entropy" not in fix:
            fix += "; for logits: `use cross_entropy()`"
        return Finding(
            "E403", f"this value leaves cut along {cut}, and no module takes it so", origin,
            "what meets it next would take one rank's part for the whole", fix, style_note(origin, "flow"), path,
        )  # fmt: skip

    # -- what is taken and not given ----------------------------------------------------------------------------------

    def _not_given(self) -> Iterator[Finding]:
        """Modules that take a value in parts which no module leaves so."""
        for path, stated in self._modules.stated.items():
            for name, flow in stated.ins.items() if path and path not in self._broken else ():
                cut = self._parts(flow.before)
                if cut and not self._is_given(path, cut, name):
                    line = stated.line("in", name)
                    yield self._refused(path, cut, str(stated.passing.ins[name][0].before), line)
        for path, layer in self._modules.layers.items():
            cut = _features(layer.cut("weight", "in")) if layer.kind.name == "linear" else frozenset()
            is_said = bool(layer.stated.ins) or path in self._broken or not layer.has_flow
            if path and cut and not is_said and not self._is_given(path, cut):
                line = layer.params["weight"].line
                text = str(natural(tuple(layer.cut("weight", "in"))).after)
                yield self._refused(path, cut, text, line)

    def _is_given(self, path: str, cut: Parts, name: str = "") -> bool:
        gives = self._gives_anywhere if name else self._gives  # arguments by name may come from afar
        block, before = _block(path), None
        for above in around(path):
            if self._is_alike(path) and not (above == block or is_below(above, block)):
                before = self._modules.places.get(path)  # layers do not hear of those after them
            if gives.has(above, cut, path, before=before):
                return True
            stated = self._modules.stated.get(above)
            if stated is None:
                continue
            feeds = any(hook.name != "cross_entropy" for hook, _ in stated.passing.uses)
            if feeds or any(cut <= self._parts(flow.after) for flow in stated.ins.values()):
                return True
            if stated.ins:
                return False
        return False

    def _refused(self, path: str, cut: Parts, text: str, line: Line | None) -> Finding:
        origin = origin_of(line)
        axes = self._modules.named(axis for axis in self._modules.axes.mesh.names if axis in dict(cut))
        return Finding(
            "E403", f"`{path}` takes values cut along {axes}, and no module leaves them so", origin,
            f"it wants `{text}`; the modules that it can hear from leave whole values, or say nothing of their results",
            f"cut those that feed it (`colwise({axes})`), or take whole values: `in: replicate -> {text}`",
            style_note(origin, "flow"), path,
        )  # fmt: skip

    def _not_made(self) -> Iterator[Finding]:
        """Modules that sum addends which nothing inside leaves: sums would be summed again."""
        modules, named = self._modules, self._modules.named
        for path, stated in modules.stated.items():
            if path in modules.layers or modules.owned.get(path) or stated.passing.uses:
                continue
            for name, flow in stated.outs.items():
                addends = set(partial_axes(flow.before))
                if not addends or self._gives_addends.has(path, _addends(flow.before), path):
                    continue
                summing = next((other for other in self._sums(addends) if is_below(other, path)), None)
                line = stated.line("out", name)
                why = "copies would be summed: the value comes out as many times too large as there are ranks"
                if summing is not None:
                    why = f"`{summing}` sums them already; summed again they are as many times too large as there "
                    why += f"are ranks along {named(addends)}"
                yield Finding(
                    "E403", f"nothing in `{path}` leaves addends along {named(sorted(addends))}",
                    origin_of(line), why, "drop this `out`, or the arrow inside",
                    style_note(origin_of(line), "flow"), path,
                )  # fmt: skip

    def _sums(self, addends: set[str]) -> Iterator[str]:
        for path, stated in self._modules.stated.items():
            if any(addends <= set(partial_axes(flow.before)) for flow in stated.outs.values()):
                yield path


@lru_cache(maxsize=4096)
def _features(axes: Names) -> Parts:
    return frozenset((axis, "features") for axis in axes)


def _is_logits(flow: Flow) -> bool:
    """Whether a result may be logits that are cut by classes."""
    return list(cuts(flow.after)) == [-1] and not partial_axes(flow.after)


@lru_cache(maxsize=4096)
def _addends(spec: Spec) -> Parts:
    """The axes along which a value is an addend."""
    return frozenset((axis, "addends") for axis in partial_axes(spec))


def _block(path: str) -> str:
    """The innermost module around a path, or itself, that is one of several alike: whose name is a number."""
    return next((each for each in (path, *around(path)) if each.rpartition(".")[2].isdecimal()), "\0")
