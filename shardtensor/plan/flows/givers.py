"""Who gives a value in parts and who takes it so: parts and addends that nobody expects (E403, E404).

Which module hears from which is the model's own code, and no plan says it. So a part counts as expected where, going
outward from the module that leaves it, some module is found that takes such parts; what is refused nobody can take.
Parts of features do not go far: a module takes them from the innermost module around it in which another leaves such
parts before it, and leaves them to the innermost one in which another takes such after it. So `mlp.down_proj` does not
take what the attention leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.places import origin_of, style_note
from shardtensor.plan.flows.flow import Flow, as_written, cut_axes, cuts, last_cut, partial_axes
from shardtensor.plan.flows.layer_flows import LayerWork, natural
from shardtensor.plan.flows.meetings import Meetings
from shardtensor.plan.flows.modules import REPLICATE, Modules, Names, around, is_inside
from shardtensor.plan.flows.parts import Index, Parts, addends_in, block_of, features
from shardtensor.plan.line import Line
from shardtensor.spec.nodes import Spec

_MAKERS = ("dispatch",)
"""Hooks that make the result of their module, and take none."""


class Givers:
    """What modules give and take.

    Args:
        works: what known layers do that have flows.
        is_whole: modules of which nothing is said give whole values, and all that is given is taken in the model.
    """

    def __init__(
        self, modules: Modules, meetings: Meetings, works: Mapping[str, LayerWork], is_whole: bool = True
    ) -> None:
        self._modules, self._meetings, self._is_whole = modules, meetings, is_whole
        self._broken = meetings.broken
        self._outs = {path: dict(stated.outs) for path, stated in modules.stated.items()}
        for path, work in works.items():  # what it leaves also where that is not said
            self._outs[path].setdefault("", work.leaves)
        self._known: dict[Spec, Parts] = {}
        self._hooked = {
            path: [hook.name for hook, _ in stated.passing.uses]
            for path, stated in modules.stated.items() if stated.passing.uses
        }  # fmt: skip
        self._heads = self._heads_of_losses()

    @cached_property
    def _escaped(self) -> list[tuple[str, str, bool]]:
        return list(self._escapes(self._outs))

    @cached_property
    def to_hooks(self) -> Mapping[str, Finding]:
        """Modules whose cut result no module takes, but a hook may; and what is wrong if none does."""
        return {path: self._told(path, name) for path, name, is_hooked in self._escaped if is_hooked}

    def findings(self) -> Iterator[Finding]:
        """E403 and E404."""
        for path, name, is_hooked in self._escaped:
            if not is_hooked and path not in self._broken:
                yield self._told(path, name)
        yield from self._without_heads()
        if self._is_whole:
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
            (path, features(layer.cut("weight", "in")))
            for path, layer in layers
            if layer.kind.name == "linear" and (not layer.stated.ins or path in self._broken)
        ]  # one that contradicts itself may take what it says, or what its weight wants

    @cached_property
    def _all_gives(self) -> list[tuple[str, Parts]]:
        return [(path, self._parts(flow.after)) for path, outs in self._outs.items() for flow in outs.values()]

    @cached_property
    def _from_outside(self) -> Parts:
        """Parts of tokens that come from outside of a part of a model, for a module takes them before any gives such:
        they may leave it, too."""
        places = self._modules.places
        first: dict[tuple[str, str], tuple[int, bool]] = {}
        for is_given, found in ((False, self._all_takes), (True, self._all_gives)):
            for path, parts in found if not self._is_whole else ():
                for part in parts:
                    here = places.get(path, 0), is_given
                    first[part] = min(first.get(part, here), here)
        return frozenset(part for part, (_, is_given) in first.items() if part[1] != "features" and not is_given)

    @cached_property
    def _gives_anywhere(self) -> Index:
        return Index(self._modules.places, self._all_gives)

    @cached_property
    def _takes(self) -> Index:
        """Who takes parts, known as far as these come from."""
        index, givers = Index(self._modules.places), self._gives_anywhere
        for path, parts in self._all_takes:
            index.add(path, parts, self._scope(path, parts, givers, is_taker=True))
        return index

    @cached_property
    def _gives(self) -> Index:
        """Who gives parts, known as far as these go."""
        index, takers = Index(self._modules.places), Index(self._modules.places, self._all_takes)
        for path, parts in self._all_gives:
            index.add(path, parts, self._scope(path, parts, takers, is_taker=False))
        return index

    @cached_property
    def _takes_addends(self) -> Index:
        stated = self._modules.stated.items()
        found = [(path, addends_in(flow.before)) for path, each in stated for flow in each.ins.values()]
        return Index(self._modules.places, found)

    @cached_property
    def _gives_addends(self) -> Index:
        stated = self._modules.stated.items()
        found = [(path, addends_in(flow.after)) for path, each in stated for flow in each.outs.values()]
        return Index(self._modules.places, found)

    def _scope(self, path: str, parts: Parts, others: Index, is_taker: bool) -> str:
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
            for name, flow in self._outs[path].items() if path else ():
                cut, addends = self._parts(flow.after), addends_in(flow.after)
                if not (cut or addends):
                    continue
                own = [hook for hook in self._hooks(path, flow) if hook not in _MAKERS]
                is_taken, is_hooked = False, any(hook != "cross_entropy" or path in self._heads for hook in own)
                is_through = cut <= self._from_outside
                block, after = block_of(path), -1
                for above in around(path):
                    if not (is_through or above == block or is_inside(above, block)):
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
        return any(cut <= self._parts(flow.before) and addends <= addends_in(flow.before) for flow in flows)

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
        """Losses that should take cut logits where nothing leaves such, or all that is left so goes elsewhere."""
        stated, layers = self._modules.stated, self._modules.layers
        losses = [path for path, hooks in self._hooked.items() if "cross_entropy" in hooks]
        linear = [p for p, layer in layers.items() if losses and layer.kind.name == "linear" and p in stated]
        logits = self.logits
        for at in losses:
            line = next(line for hook, line in stated[at].passing.uses if hook.name == "cross_entropy")
            below = [path for path in linear if path == at or is_inside(path, at)]
            is_said = any(last_cut(flow.after) for path in below for flow, _ in stated[path].passing.outs.values())
            left = [path for path in below if (out := stated[path].out) is not None and last_cut(out.after)]
            if is_said and (not left or any(path == at or is_inside(path, at) for path in logits)):
                continue  # which may be whole in this world, over axes of one rank
            why = "it takes logits whose classes are cut over ranks, from a linear layer "
            why += ("that is" if at in layers else "below") + " here with such an `out`"
            fix = "cut the head, `vocab_head(tp)`; or drop `use cross_entropy()`: whole logits need no hook"
            taken = next((path for path in left if not self._is_alike(path)), None)
            if taken is not None:
                why += f"; what `{taken}` leaves cut another module takes"
                fix += "; or write `use cross_entropy()` in the block of the head"
            yield Finding("E403", "this loss finds no head that leaves its logits cut", line.origin, why, fix, (), at)

    def _is_alike(self, path: str) -> bool:
        """Whether a module is one of several alike, or in one."""
        return block_of(path) in (path, *around(path))

    @property
    def logits(self) -> list[str]:
        """The modules whose logits a loss takes as they are cut: it stands in their block, or no module takes them."""
        left = {path for path, _, is_hooked in self._escapes(self._heads) if is_hooked}
        return sorted(left | {path for path in self._heads if "cross_entropy" in self._hooked.get(path, ())})

    def _told(self, path: str, name: str) -> Finding:
        stated, named = self._modules.stated[path], self._modules.named
        flow, line = self._outs[path][name], stated.line("out", name)
        said = stated.passing.outs[name][0] if line is not None else flow
        if line is None:
            line = self._modules.layers[path].params["weight"].line
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
        fix += f"`out: {'' if said.before == REPLICATE.before else f'{as_written(said.before)} -> '}replicate`"
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
                if addends_in(flow.before) and not self._is_added(path, addends_in(flow.before)):
                    yield self._no_addends(path, partial_axes(flow.before), stated.line("in", name))
                cut = self._parts(flow.before)
                if cut and not self._is_given(path, cut, name):
                    line = stated.line("in", name)
                    yield self._refused(path, cut, stated.passing.ins[name][0].before, line)
        for path, layer in self._modules.layers.items():
            cut = features(layer.cut("weight", "in")) if layer.kind.name == "linear" else frozenset()
            is_said = bool(layer.stated.ins) or path in self._broken or not layer.has_flow
            if path and cut and not is_said and not self._is_given(path, cut):
                line = layer.params["weight"].line
                yield self._refused(path, cut, natural(tuple(layer.cut("weight", "in"))).after, line)

    def _is_given(self, path: str, cut: Parts, name: str = "") -> bool:
        gives = self._gives_anywhere if name else self._gives  # arguments by name may come from afar
        block, before = block_of(path), None
        for above in around(path):
            if self._is_alike(path) and not (above == block or is_inside(above, block)):
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

    def _is_added(self, path: str, addends: Parts) -> bool:
        """Whether some module, or one around with an `in` of the kind, may give addends to a module."""
        for above in around(path):
            stated = self._modules.stated.get(above)
            flows = stated.ins.values() if stated is not None else ()
            is_passed = any(addends <= addends_in(flow.after) for flow in flows)
            is_fed = any(hook != "cross_entropy" for hook in self._hooked.get(above, ()))
            if is_passed or is_fed or self._gives_addends.has(above, addends, path):
                return True
        return False

    def _no_addends(self, path: str, axes: Names, line: Line | None) -> Finding:
        named, origin = self._modules.named(axes), origin_of(line)
        return Finding(
            "E403", f"`{path}` takes addends along {named}, and no module leaves such", origin,
            "copies would be summed: the value comes out as many times too large as there are ranks",
            f"drop `partial({named})` here, or the arrow that sums them where they are made",
            style_note(origin, "flow"), path,
        )  # fmt: skip

    def _refused(self, path: str, cut: Parts, wanted: Spec, line: Line | None) -> Finding:
        origin = origin_of(line)
        axes = self._modules.named(axis for axis in self._modules.axes.mesh.names if axis in dict(cut))
        fix = f"cut those that feed it (`colwise({axes})`), or take whole values: `in: replicate -> {wanted}`"
        sources = [self._meetings.streams[axis] for axis in sorted(dict(cut)) if axis in self._meetings.streams]
        if sources and last_cut(wanted) is None:
            said = next(flow for flow, _ in self._modules.stated[sources[0]].passing.outs.values())
            fix = f"take them as `{sources[0]}` leaves them, cut as `{said.after}`"
        return Finding(
            "E403", f"`{path}` takes values cut along {axes}, and no module leaves them so", origin,
            f"it wants `{wanted}`; what it can hear from leaves whole values, or says nothing of its results",
            fix,
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
                if not addends or self._gives_addends.has(path, addends_in(flow.before), path):
                    continue
                summing = next((other for other in self._sums(addends) if is_inside(other, path)), None)
                if summing is None and not self._is_whole:
                    continue
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


def _is_logits(flow: Flow) -> bool:
    """Whether a result may be logits that are cut by classes."""
    return list(cuts(flow.after)) == [-1] and not partial_axes(flow.after)
