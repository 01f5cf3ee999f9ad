"""Convert a syntax tree to a spec: look up words, check arguments, and raise errors that point at the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import attrs
from lark import Token, Tree

from shardtensor.errors import SpecError
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec, ShardMetadata
from shardtensor.spec.diagnostics import Source, listed, nearest
from shardtensor.spec.nodes import Cut, Dim, Replicate, ShardingSpec, Spec
from shardtensor.spec.parts import MAX_NUMBER
from shardtensor.spec.placement import Run, parse_run

Place = Literal["form", "modifier", "suffix", "function", "style", "hook"]


@attrs.frozen
class Word:
    """A word of the language, the place where it is allowed, and its arguments.

    Args:
        params: name and kind of each argument, in order; the first `required` must be given.
        rest: the kind of positional arguments, if their number is free.
        usage: an example.
    """

    name: str
    place: Place
    usage: str
    params: dict[str, str] = attrs.field(factory=dict)
    required: int = 0
    rest: str = ""

    @property
    def is_bare(self) -> bool:
        """Whether the word is written without brackets."""
        return not self.params and not self.rest


_CHUNK = {"dim": "number", "placements": "places", "sizes": "numbers"}
_FLAT = {"axes": "axes", "unit": "number or row", "sizes": "numbers"}
_ENUM = 'enum([0:5, 0:4] @ "rank:0/cuda:0", [5:10, 0:4] @ "rank:1/cuda:1")'
_PLACES = 'placements=["rank:0-3/cuda:0-3"]'
_WORDS = (
    Word("replicate", "form", "replicate"),
    Word("chunk", "form", f"chunk(dim=0, {_PLACES})", _CHUNK, 2),
    Word("grid", "form", f"grid(splits=(2, 2), {_PLACES})", {"splits": "numbers", "placements": "places"}, 2),
    Word("enum", "form", _ENUM, rest="box"),
    Word("pad", "modifier", "pad(64)", {"pad": "number"}, 1),
    Word("blocks", "modifier", "blocks(3)", rest="number"),
    Word("unit", "modifier", "unit(128)", {"unit": "number"}, 1),
    Word("sizes", "modifier", "sizes(5, 3)", rest="number"),
    Word("balanced", "modifier", "balanced"),
    Word("flat", "suffix", "flat(dp)", _FLAT, 1),
    Word("only", "suffix", "only(ep, 1)", {"axis": "axis", "index": "number"}, 2),
    Word("partial", "suffix", "partial(tp)", {"axes": "axes", "op": "word"}, 1),
)
WORDS = {word.name: word for word in _WORDS}

STANDS = {
    "form": "begins a spec",
    "modifier": "stands after an axis, inside the square brackets",
    "suffix": "stands after the square brackets",
}

KIND_TEXTS = {
    "number": "a number",
    "number or row": "a number or `row`",
    "numbers": "numbers in round brackets, as in `(5, 3)` or `(5,)`",
    "axis": "an axis",
    "axes": "an axis, or a product as in `tp*dp`",
    "word": "a word",
    "places": 'a list of placements, as in `["rank:0-3/cuda:0-3"]`',
    "box": 'a box, as in `[0:5, 0:4] @ "rank:0/cuda:0"`',
}


def words_for(*places: Place) -> list[str]:
    """Return the words that are allowed in these places."""
    return [word.name for word in WORDS.values() if word.place in places]


Node = Any
"""A lark ``Tree`` or ``Token``; lark types their children as anything."""


def span(node: Node) -> tuple[int, int]:
    """Return the positions of the first character of a node and of the one after its last."""
    where: Any = node if isinstance(node, Token) else node.meta
    return where.start_pos, where.end_pos


class Use(NamedTuple):
    """One use of axes in a spec: the axes, and what they shard."""

    axes: tuple[str, ...]
    place: str


class Reader:
    """Reads specs outside of plans: every name is an axis, and numbers are digits. In a plan more names are defined."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.used: dict[str, Use] = {}
        self.place = ""

    def fault(self, code: str, node: Node, fault: str, why: str = "", fix: str = "") -> SpecError:
        return self.source.error(code, span(node), fault, why, fix)

    @contextmanager
    def at(self, node: Node) -> Iterator[None]:
        """Locate at `node` the errors that values raise inside this context."""
        try:
            yield
        except SpecError as error:
            if error.line:
                raise
            raise self.source.locate(error, span(node)) from None

    # ---------- the spec and its parts ----------

    def spec(self, tree: Node) -> ShardingSpec:
        head, *suffixes = tree.children
        spec = self.head(head)
        for call in suffixes:
            spec = self.suffixed(spec, call)
        return spec

    def head(self, head: Node) -> ShardingSpec:
        """Return the spec before the suffixes; a suffix alone belongs to `replicate`."""
        if head.data == "layout":
            return self.layout(head)
        if head.data == "word":
            self.word(head.children[0], ("form",), bare=True)
            return Replicate()
        word = self.word(head.children[0], ("form", "suffix"))
        return self.suffixed(Replicate(), head) if word.place == "suffix" else self.device_form(word, head)

    def layout(self, tree: Node) -> Spec:
        dims: list[Dim] = []
        named: dict[str, Cut] = {}
        after = ""
        for node in tree.children:
            if isinstance(node, Token):
                dims.append(None if node.type == "WHOLE" else ...)
                after = after if node.type == "WHOLE" else f" of those with `...` as dim {len(dims) - 1}"
                continue
            is_named = isinstance(node.children[0], Token)
            self.place = f"dim `{node.children[0]}`" if is_named else f"dim {len(dims)}{after}"
            cut = self.cut(node)
            if is_named:
                if (name := str(node.children[0])) in named:
                    raise self.fault("E204", node.children[0], f"the dim `{name}` is named twice", fix="keep one")
                named[name] = cut
            else:
                dims.append(cut)
        with self.at(tree):
            if dims and named:
                fix = f"write [{', '.join(f'{name}: {cut}' for name, cut in named.items())}], or every dim in order"
                facts = {"why": "dims that a spec does not name are whole"}
                raise SpecError("dims are named or in order, not both", facts, fix)
            return Spec(*dims, **named)

    def cut(self, tree: Node) -> Cut:
        nodes = tree.children[1:] if isinstance(tree.children[0], Token) else tree.children
        axes = self.axes(nodes[0])
        given: dict[str, Any] = {}
        for node in nodes[1:]:
            word = self.word(node.children[0], ("modifier",), bare=node.data == "word")
            if word.name in given:
                raise self.fault("E102", node, f"`{word.name}` is written twice", fix="keep one")
            values: dict[str, Any] = self.arguments(word, node) if node.data == "call" else {word.name: True}
            if word.rest:
                numbers = tuple(values[""])
                given[word.name] = numbers[0] if word.name == "blocks" and len(numbers) == 1 else numbers
            else:
                given |= values
            with self.at(node):
                Cut(axes, **given)
        return Cut(axes, **given)

    def suffixed(self, spec: ShardingSpec, call: Node) -> Spec:
        word = self.word(call.children[0], ("suffix",))
        if not isinstance(spec, Spec):
            why = "it names ranks, and is never mixed with mesh axes in one spec"
            fix = "write the cut in axes too, as in `[tp, -] flat(dp)`"
            raise self.fault("E204", call, "a device form has no suffixes", why, fix)
        if (word.name == "flat" and spec.flat_part) or (word.name == "only" and spec.only_part):
            raise self.fault("E102", call, f"`{word.name}` is written twice", fix="keep one")
        self.place = f"`{word.name}`"
        values = self.arguments(word, call)
        axes = values.pop("axes", ())
        with self.at(call):
            return getattr(spec, word.name)(*axes, **values)

    def device_form(self, word: Word, call: Node) -> ShardingSpec:
        values = self.arguments(word, call)
        with self.at(call):
            if word.name == "enum":
                return EnumerableShardingSpec(values[""])
            return (ChunkShardingSpec if word.name == "chunk" else GridShardingSpec)(**values)

    # ---------- words and their arguments ----------

    def word(self, token: Node, places: tuple[Place, ...], bare: bool = False) -> Word:
        """Return the word of a token; it must be allowed in one of these places. `bare`: no bracket follows."""
        known = words_for(*places)
        word = WORDS.get(str(token))
        kinds = listed([place if place != "form" else "spec" for place in places])
        if word is None:
            fix = nearest(str(token), known)
            if bare and not fix:
                fix = "write `[..., tp]` to cut a dim over an axis" if "form" in places else "a product is `tp*dp`"
            raise self.fault("E102", token, f"no {kinds} is called `{token}`", f"there are {', '.join(known)}", fix)
        if word.place not in places:
            code = "E204" if word.place == "form" else "E102"
            raise self.fault(code, token, f"`{word.name}` is not a {kinds}", f"it {STANDS[word.place]}", example(word))
        if word.is_bare != bare:
            fault = f"`{word.name}` takes no arguments" if word.is_bare else f"`{word.name}` needs arguments"
            raise self.fault("E102", token, fault, fix="drop the brackets" if word.is_bare else f"write `{word.usage}`")
        return word

    def arguments(self, word: Word, call: Node) -> dict[str, Any]:
        """Return the arguments of a call by name; a free number of positional ones is under the empty name."""
        values: dict[str, Any] = {"": []} if word.rest else {}
        names = list(word.params)
        for node in call.children[1:]:
            is_named = isinstance(node, Tree) and node.data == "arg"
            name, value = (str(node.children[0]), node.children[1]) if is_named else ("", node)
            if word.rest and not is_named:
                values[""].append(self.argument(word.rest, value, word))
                continue
            if not is_named and len(values) < len(names):
                name = names[len(values)]
            if name not in names:
                taken = f"`{word.name}` takes {listed(names)}" if names else f"`{word.name}` takes no names"
                fault = f"`{word.name}` has no argument `{name}`" if name else f"`{word.name}` has too many arguments"
                place = node.children[0] if is_named else node
                raise self.fault("E102", place, fault, taken, nearest(name, names) or as_in(word))
            if name in values:
                raise self.fault("E102", node, f"`{name}` is given twice", fix="keep one")
            values[name] = self.argument(word.params[name], value, word)
        missing = [name for name in names[: word.required] if name not in values]
        if missing or values.get("") == []:
            what = f"`{missing[0]}`" if missing and len(names) > 1 else "arguments"
            is_built_in = word.place not in ("style", "function")  # the usage of others has names of parameters in it
            fix = f"write `{word.usage}`" if is_built_in else as_in(word)
            raise self.fault("E102", call, f"`{word.name}` needs {what}", fix=fix)
        return values

    def argument(self, kind: str, node: Node, word: Word) -> Any:
        """Return the value of an argument; raise SpecError if it is not of `kind`."""
        data = node.data if isinstance(node, Tree) else "number"
        names = [str(token) for token in node.children[::2]] if data == "axes" else []
        if data in ("number", "minus") and kind in ("number", "number or row"):
            return self.number(node)
        if (kind == "number or row" and names == ["row"]) or (kind == "word" and len(names) == 1):
            return names[0]
        if names and (kind == "axes" or (kind == "axis" and len(names) == 1)):
            axes = self.axes(node)
            return axes if kind == "axes" else axes[0]
        if names and kind.startswith("number"):
            why = "a spec read alone has no names in scope: its numbers are written out"
            fix = nearest(names[0], ["row"] if kind == "number or row" else []) or as_in(word)
            fix += f"; several axes are one product: `{word.name}(a*b)`" * (kind == "number or row")
            raise self.fault("E103", node, f"`{names[0]}` is not a number", why, fix)
        if kind == "numbers" and data == "tuple":
            return tuple(self.argument("number", child, word) for child in node.children)
        if kind == data == "places":
            return list(map(self._placement, node.children))
        if kind == data == "box":
            return self.box(node)
        fix = f"write `({self.number(node)},)`" if (kind, data) == ("numbers", "number") else as_in(word)
        raise self.fault("E102", node, f"`{word.name}` needs {KIND_TEXTS[kind]} here", fix=fix)

    def number(self, node: Node) -> int:
        return self.digits(node) if isinstance(node, Token) else -self.digits(node.children[-1])

    def digits(self, token: Node) -> int:
        if len(token) > 19 or int(token) > MAX_NUMBER:
            raise self.fault("E001", token, "the number is too large", f"numbers go up to {MAX_NUMBER}")
        return int(token)

    def axes(self, node: Node) -> tuple[str, ...]:
        """Return the axes of a product of names."""
        return tuple(axis for token in node.children if token.type == "NAME" for axis in self.axis(token))

    def axis(self, token: Token) -> tuple[str, ...]:
        """Return the axes of a name, which may be used once in a spec."""
        name = str(token)
        if name in self.used:
            fix = "keep one of the two, or make the mesh of two axes"
            why = f"each rank has a single {name} coordinate"
            raise self.fault("E204", token, f"axis `{name}` is used twice in one spec", why, fix)
        self.used[name] = Use((name,), self.place)
        return (name,)

    def string(self, token: Node) -> str:
        try:
            return json.loads(str(token), strict=False)
        except ValueError:
            fix = r"write `\\` for a backslash"
            raise self.fault("E001", token, "the string has an unknown escape", fix=fix) from None

    def _placement(self, token: Node) -> Run:
        text = self.string(token)
        with self.at(token):
            return parse_run(text)

    def box(self, tree: Node) -> ShardMetadata:
        place = tree.children[-1] if tree.children and isinstance(tree.children[-1], Token) else None
        offsets, sizes = [], []
        for part in tree.children[: -1 if place is not None else None]:
            start, stop = map(self.digits, part.children)
            if stop < start:
                raise self.fault("E102", part, "the slice ends before it begins", "it is half open, as in Python")
            offsets.append(start)
            sizes.append(stop - start)
        text = None if place is None else self.string(place)
        with self.at(tree if place is None else place):
            return ShardMetadata(offsets, sizes, text)


def example(word: Word) -> str:
    """Return a fix: a spec with the word in its place."""
    examples = {"modifier": f"`[tp {word.usage}, -]`", "suffix": f"`[tp, -] {word.usage}`", "form": f"`{word.usage}`"}
    return f"write it as in {examples[word.place]}"


def as_in(word: Word) -> str:
    """Return a fix: the usage of a word."""
    return f"write it as in `{word.usage}`"
