"""Dispatch cache: calls that run on local tensors are decided once for each form, then made in a few microseconds.

The form of a call, its cache key, is the function, its row in the table, the layouts of its sharded operands (by
identity: they are interned), the shapes of its plain ones, and its other arguments. By its rule the call is the same
function of the local tensors, wrapped; operands are redistributed before it and partial sums all-reduced after it
where needed. The group holds the cache, so the cache is freed with the group.
Calls that the cache does not take are decided in the same way, each for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import attrs
import torch

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.comm.redistribute import along, reduce_local
from shardtensor.layout.layout import Layout, MeshLayout
from shardtensor.ops.engine import arranged, computed_alike, move_to
from shardtensor.rules.propagate import OpSharding
from shardtensor.rules.rule import Rule
from shardtensor.rules.table import ROWS
from shardtensor.tensor.dispatch import is_strict
from shardtensor.tensor.sharded_tensor import WRAPPER_CLASSES, ShardedTensor, local_of, wrap

MOST = 4096
"""Forms cached for one group; when there are more, the cache is cleared."""

_VALUES = frozenset((int, float, bool, str, NoneType, EllipsisType, torch.dtype, torch.Size, torch.memory_format))
_ENDS = frozenset((int, NoneType))
_INT = frozenset((int,))
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_UNKNOWN = object()


Place = int | str | tuple[int | str, int]
"""Where an operand is among the arguments of a call: a position, a name, or an element of a list at one of these."""


def slot(args: list[Any], kwargs: dict[str, Any], place: Place) -> tuple[Any, int | str]:
    """Return the container that has a place, and the key there; a tuple of operands becomes a list first."""
    if isinstance(place, tuple):
        outer, key = slot(args, kwargs, place[0])
        if not isinstance(outer[key], list):
            outer[key] = list(outer[key])
        return outer[key], place[1]
    return (args if isinstance(place, int) else kwargs), place


def operands_at(places: Sequence[Place], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return what a call has at these places."""
    found = []
    for place in places:
        outer = place[0] if isinstance(place, tuple) else place
        value = args[outer] if isinstance(outer, int) else kwargs[outer]
        found.append(value[place[1]] if isinstance(place, tuple) else value)
    return found


def with_operands(
    places: Sequence[Place], operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call with other operands at these places."""
    args, kwargs = list(args), dict(kwargs)
    for outer in {place[0] for place in places if isinstance(place, tuple)}:
        values, key = slot(args, kwargs, outer)
        values[key] = list(values[key])  # the caller's own list stays as it is
    for place, x in zip(places, operands, strict=True):
        values, key = slot(args, kwargs, place)
        values[key] = x
    return args, kwargs


class LocalCall(NamedTuple):
    """How a call of one form is made on local tensors.

    Attributes:
        call: the function; it gets the arguments of the call with local tensors in place of sharded ones. It may return
            NotImplemented, equally on all ranks: the call is then not local.
        layout: of the result, or of each result; None if every rank has the whole, which is a plain tensor.
        sums: arguments that are replicated and combined with sharded ones, and the ranks along which their gradients
            are summed; None stands for the group itself.
        moves: arguments that are redistributed first, from one layout to another; not used under `strict`, nor if
            operands differ in dtype, which decides the cheapest moves.
        is_view: the result is a view of the first argument.
        sized: returns the layout for the first result, if only that has the sizes of whole dims.
    """

    call: Callable[..., Any]
    layout: Layout | None
    sums: tuple[tuple[Place, Group | None], ...] = ()
    moves: tuple[tuple[Place, Layout | None, Layout | None], ...] = ()
    is_view: bool = False
    sized: Callable[[Any], Layout | None] | None = None

    def on(self, given: list[Any], named: dict[str, Any], group: Group) -> Any:
        """Make the call with these arguments, which have local tensors in place of sharded ones."""
        self.move(given, named, group)
        for place, subgroup in self.sums:
            values, key = slot(given, named, place)
            values[key] = collectives.sum_gradient(values[key], group if subgroup is None else subgroup)
        result = self.call(*given, **named)
        if result is NotImplemented:
            return result
        return wrapped(result, self.layout if self.sized is None else self.sized(result), group)

    def move(self, given: list[Any], named: dict[str, Any], group: Group) -> None:
        """Redistribute the arguments that need it, in place."""
        for place, source, target in self.moves:
            values, key = slot(given, named, place)
            values[key] = arranged(values[key], source, target, group)


def wrapped(result: Any, layout: Layout | None, group: Group) -> Any:
    """Return the global tensor of a local result, or of several of one layout; see `LocalCall.layout`."""
    if layout is None:
        return result
    if isinstance(result, torch.Tensor):
        return wrap(result, layout, None, group)
    parts = [wrap(part, layout, None, group) for part in result]
    return type(result)(parts) if isinstance(result, tuple) else parts


Decide = Callable[[tuple[Any, ...], dict[str, Any]], LocalCall | None]


def cached_call(func: Any, decide: Decide, handler: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Return a handler of `func` that caches the result of `decide` for each form; `handler` does the other calls.

    Args:
        decide: returns for the arguments of a call the `LocalCall` of all calls of its form; None if it is not local.
        handler: does any call.
        name: of the row that both use.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        form: list[Any] = [func, ROWS.get(name)]
        given: list[Any] = []
        group = None
        for x in args:
            kind = type(x)
            if kind is ShardedTensor:
                form.append(id(x._layout))
                given.append(x._local)
                if group is None:
                    group = x._group
                elif x._group is not group:
                    return handler(*args, **kwargs)
            elif kind in _VALUES:
                form += (kind, x)
                given.append(x)
            elif kind in _PLAIN:
                form.append(x.shape)
                given.append(x)
            elif kind is tuple and _INT.issuperset(map(type, x)):
                form.append(x)
                given.append(x)
            else:
                x, group = _read(x, form, group)
                if x is _UNKNOWN:
                    return handler(*args, **kwargs)
                given.append(x)
        named = kwargs
        if kwargs:
            named = {}
            for keyword, x in kwargs.items():
                kind = type(x)
                if kind in _VALUES:
                    form += (keyword, kind, x)
                    named[keyword] = x
                    continue
                form.append(keyword)
                named[keyword], group = _read(x, form, group)
                if named[keyword] is _UNKNOWN:
                    return handler(*args, **kwargs)
        if group is None:
            return handler(*args, **kwargs)
        cache = group.__dict__.get("_local_calls")
        if cache is None:
            cache = group.__dict__["_local_calls"] = {}
        key = tuple(form)
        found = cache.get(key)
        if found is None:
            if len(cache) >= MOST:
                cache.clear()
            # The layouts are kept, so that no other layout gets the id of a freed one.
            found = cache[key] = (decide(args, kwargs), _layouts_in(args, kwargs))
        if found[0] is None:
            return handler(*args, **kwargs)
        function, layout, sums, moves, is_view, sized = found[0]
        if is_view and args[0]._copied is not None:  # a view of a copy is a copy
            return handler(*args, **kwargs)
        if moves and (
            is_strict() or len({x.dtype for x in (*given, *named.values()) if isinstance(x, torch.Tensor)}) > 1
        ):
            return handler(*args, **kwargs)
        if moves:
            found[0].move(given, named, group)
        for place, subgroup in sums:
            values: Any
            values, at = (given, place) if isinstance(place, int) else slot(given, named, place)
            values[at] = collectives.sum_gradient(values[at], group if subgroup is None else subgroup)
        result = function(*given, **named) if named else function(*given)
        if result is NotImplemented:
            cache[key] = (None, found[1])
            return handler(*args, **kwargs)
        if sized is not None:
            layout = sized(result)
            cache[key] = (found[0]._replace(layout=layout, sized=None), found[1])
        if layout is None:
            return result
        return wrap(result, layout, None, group) if isinstance(result, torch.Tensor) else wrapped(result, layout, group)

    return call


def local_by(
    call: Callable[..., Any],
    sharding: OpSharding,
    group: Group,
    operands: Sequence[torch.Tensor],
    places: Sequence[Place],
) -> LocalCall:
    """Return the `LocalCall` for operands in the layouts of `sharding`; it redistributes operands in other layouts.

    The result depends on layouts alone, so all ranks make a call in the same way, also those whose part is empty. The
    call itself reduces partial results.

    Args:
        call: gets the arguments of the call with local tensors.
        places: of the operands among the arguments.
    """
    sums: list[tuple[Place, Group | None]] = []
    moves: list[tuple[Place, Layout | None, Layout | None]] = []
    for x, need, place in zip(operands, sharding.needs, places, strict=True):
        move = move_to(x, need.layout, group)
        if move is not None:
            moves.append((place, *move))
        if need.grad_partial_axes and (len(need.layout.ranks) == group.size or x.requires_grad):
            subgroup = along(group, need.layout, need.grad_partial_axes)
            sums.append((place, None if subgroup is group else subgroup))
    call = reducing(call, sharding.output, group)
    return LocalCall(call, None if sharding.reduced.is_replicated else sharding.reduced, tuple(sums), tuple(moves))


def run_as(sharding: OpSharding, group: Group, operands: Sequence[torch.Tensor], compute: Callable[..., Any]) -> Any:
    """Compute on the local operands, redistributed to the layouts of `sharding`, and return the global result.

    All ranks of the group call it. The result is a ShardedTensor; a plain tensor if every rank holds all of it.
    """
    places = range(len(operands))
    found = local_by(on_empty(compute, None, sharding, group, places), sharding, group, operands, places)
    return found.on(list(map(local_of, operands)), {}, group)


def reducing(call: Callable[..., Any], output: MeshLayout, group: Group) -> Callable[..., Any]:
    """Return a function that makes `call` and reduces its result, if it is partial."""
    if not output.partial:
        return call
    subgroup = along(group, output, output.partial_axes)  # raises on all ranks where ranks outside cannot take part

    def reduce(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return type(result)(map(reduce, result))
        if len(output.ranks) == group.size and all(op == "sum" for _, op in output.partial):
            return collectives.all_reduce(result, subgroup)
        return reduce_local(result, output, group)

    return lambda *args, **kwargs: reduce(call(*args, **kwargs))


def on_empty(
    call: Callable[..., Any],
    rule: Rule | None,
    sharding: OpSharding,
    group: Group,
    places: Sequence[Place],
    *,
    without: Sequence[int] = (),
) -> Callable[..., Any]:
    """Return `call`; on a rank whose part, or result, is empty, one that runs the same nodes in its operands' graph.

    Args:
        rule: of the call; None for one that torch computes on empty operands as on others.
        without: the operands that it does not get.
    """
    if not any(
        0 in layout.local_shape(group.rank) for layout in (sharding.output, *(x.layout for x in sharding.needs))
    ):
        return call
    kept = [i for i in range(len(places)) if i not in without]
    layouts, places = [sharding.needs[i].layout for i in kept], [places[i] for i in kept]
    inner = None if rule is None else attrs.evolve(rule, inputs=tuple(rule.inputs[i] for i in kept))

    def call_on_empty(*args: Any, **kwargs: Any) -> Any:
        def compute(*operands: torch.Tensor) -> Any:
            given, named = with_operands(places, operands, args, kwargs)
            return call(*given, **named)

        return computed_alike(compute, inner, layouts, operands_at(places, args, kwargs))

    return call_on_empty


def _read(x: Any, form: list[Any], group: Group | None) -> tuple[Any, Group | None]:
    """Return an argument with local tensors in place of sharded ones, and the group; `_UNKNOWN` for other kinds.

    Appends the argument's part of the cache key to `form`.
    """
    kind = type(x)
    if kind in WRAPPER_CLASSES:
        if group is not None and x._group is not group:
            return _UNKNOWN, group
        form.append(id(x._layout))
        return x._local, x._group
    if kind in _PLAIN:
        form.append(x.shape)
        return x, group
    if kind is slice:
        start, stop, step = x.start, x.stop, x.step
        form += (kind, start, stop, step)
        is_constant = type(start) in _ENDS and type(stop) in _ENDS and type(step) in _ENDS
        return (x if is_constant else _UNKNOWN), group
    if kind is list or kind is tuple:
        form += (kind, len(x))
        read = None
        for i, part in enumerate(x):
            kind = type(part)
            if kind in _VALUES:
                form += (kind, part)
                continue
            same, group = _read(part, form, group)
            if same is _UNKNOWN:
                return _UNKNOWN, group
            if same is not part:
                read = list(x) if read is None else read
                read[i] = same
        return (x if read is None else read if type(x) is list else tuple(read)), group
    return _UNKNOWN, group


def _layouts_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Layout]:
    found: list[Layout] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, ShardedTensor):
            found.append(x._layout)
        elif isinstance(x, list | tuple):
            found += _layouts_in(tuple(x), {})
    return found
