"""The names of a model as a tree: what a pattern stands for is found by going down it once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardtensor.plan.match.patterns import Deep, Segment, pattern

Way = tuple[Segment | Deep, ...]


class _Node:
    __slots__ = ("below", "is_module", "order", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.below = _NOTHING
        self.is_module = False
        self.order = -1  # of a tensor, in the model


_NOTHING: dict[str, _Node] = {}  # below what nothing is below; nothing is ever put into it


class NameTree:
    """Names of tensors, and paths of modules.

    Example:
        >>> tree = NameTree(["layers.0.q.weight", "layers.1.q.weight", "norm.weight"], ["", "layers.0", "layers.1"])
        >>> tree.tensors("layers.*"), tree.modules("**.1")
        (('layers.0.q.weight', 'layers.1.q.weight'), ('layers.1',))
    """

    def __init__(self, tensors: Iterable[str], modules: Iterable[str]) -> None:
        self._root = _Node("")
        self._nodes = {"": self._root}
        self._names = tuple(tensors)
        self._kept: dict[tuple[str, bool], tuple[str, ...]] = {}
        self._begins: dict[Way, bool] = {}
        for order, name in enumerate(self._names):
            self._node(name).order = order
        for path in modules:
            self._node(path).is_module = True

    def _node(self, path: str) -> _Node:
        new = []
        while (node := self._nodes.get(path)) is None:
            new.append(path)
            path = path.rpartition(".")[0]
        for below in reversed(new):
            if node.below is _NOTHING:
                node.below = {}
            node.below[below.rpartition(".")[2]] = self._nodes[below] = node = _Node(below)
        return node

    def tensors(self, text: str) -> tuple[str, ...]:
        """The tensors of a pattern's name, and all below modules of that name, in the order of the model."""
        key = text, True
        if key not in self._kept:
            orders: set[int] = set()
            for top in self._found(pattern(text).segments, is_below=True):
                stack = [top]
                while stack:
                    node = stack.pop()
                    if node.order >= 0:
                        orders.add(node.order)
                    stack += node.below.values()
            self._kept[key] = tuple(self._names[order] for order in sorted(orders))
        return self._kept[key]

    def modules(self, text: str) -> tuple[str, ...]:
        """The modules of a pattern's name."""
        key = text, False
        if key not in self._kept:
            self._kept[key] = tuple(
                dict.fromkeys(node.path for node in self._found(pattern(text).segments) if node.is_module)
            )
        return self._kept[key]

    def has(self, way: Way) -> bool:
        """Whether some name begins as the segments of a pattern say."""
        if way not in self._begins:
            self._begins[way] = next(self._found(way, is_below=True), None) is not None
        return self._begins[way]

    def _found(self, way: Way, is_below: bool = False) -> Iterator[_Node]:
        """The nodes that a pattern stands for (`is_below`: not those below one that was found)."""
        is_deep = any(isinstance(segment, Deep) for segment in way)
        texts = [None if isinstance(segment, Deep) else segment.literal for segment in way]
        seen: set[tuple[int, int]] = set()
        stack = [(self._root, 0)]
        while stack:
            node, at = stack.pop()
            if is_deep:  # else there is one way to each node
                if (id(node), at) in seen:
                    continue
                seen.add((id(node), at))
            if at == len(way):
                yield node
                continue
            segment, text = way[at], texts[at]
            if text is not None:
                child = node.below.get(text)
                stack += [] if child is None else [(child, at + 1)]
            elif isinstance(segment, Deep):
                if not (is_below and at + 1 == len(way)):  # else this node is found, and all below it with it
                    stack += [(child, at) for child in reversed(node.below.values())]
                stack.append((node, at + 1))
            else:
                matching = [child for name, child in node.below.items() if segment.captures(name) is not None]
                stack += [(child, at + 1) for child in reversed(matching)]
