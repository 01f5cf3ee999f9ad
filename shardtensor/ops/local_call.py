"""Dispatch cache: calls that run on local tensors are decided once for each form, then made in a few microseconds.

The form of a call, its cache key, is the function, its row in the table, the layouts of its sharded operands (by
identity: they are interned), the shapes of its plain ones, and its other arguments. By its rule the call is the same
function of the local tensors, wrapped; operands are redistributed before it and partial sums all-reduced after it
where needed. The group holds the cache, so the cache is freed with the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.comm.redistribute import along, redistribute
from shardtensor.layout.layout import Layout, MeshLayout
from shardtensor.ops.engine import computed, computed_alike
from shardtensor.rules.propagate import OpSharding
from shardtensor.rules.rule import Rule
from shardtensor.rules.table import ROWS
from shardtensor.tensor.dispatch import is_strict
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

MOST = 4096
"""Forms cached for one group; when there are more, the cache is cleared."""

_VALUES = frozenset((int, float, bool, str, NoneType, EllipsisType, torch.dtype, torch.Size, torch.memory_format))
_ENDS = frozenset((int, NoneType))
_INT = frozenset((int,))
SHARDED: set[type] = {ShardedTensor}
"""Classes of tensors that are handled like ShardedTensors."""

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_UNKNOWN = object()


class LocalCall(NamedTuple):
    """How a call of one form is made on local tensors.

    Attributes:
        call: the function; it gets the arguments of the call with local tensors in place of sharded ones.
        layout: of the result, or of each result; None if every rank has the whole, which is a plain tensor.
        sums: arguments (a position or a name) that are replicated and combined with sharded ones, and the ranks along
            which their gradients are summed; None stands for the group itself.
        moves: arguments that are redistributed first, from one layout to another; not used under `strict`, nor if
            operands differ in dtype, which decides the cheapest moves.
        is_view: the result is a view of the first argument.
        sized: returns the layout for the first result, if only that has the sizes of whole dims.
    """

    call: Callable[..., Any]
    layout: Layout | None
    sums: tuple[tuple[int | str, Group | None], ...] = ()
    moves: tuple[tuple[int | str, Layout, Layout], ...] = ()
    is_view: bool = False
    sized: Callable[[Any], Layout | None] | None = None


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
        if moves:
            if is_strict() or len({x.dtype for x in (*given, *named.values()) if isinstance(x, torch.Tensor)}) > 1:
                return handler(*args, **kwargs)
            for place, source, target in moves:
                values: Any = given if isinstance(place, int) else named
                values[place] = redistribute(values[place], source, target, group)
        for place, subgroup in sums:
            if isinstance(place, int):
                given[place] = collectives.sum_gradient(given[place], group if subgroup is None else subgroup)
            else:
                named[place] = collectives.sum_gradient(named[place], group if subgroup is None else subgroup)
        result = function(*given, **named) if named else function(*given)
        if sized is not None:
            layout = sized(result)
            cache[key] = (found[0]._replace(layout=layout, sized=None), found[1])
        if layout is None:
            return result
        if isinstance(result, torch.Tensor):
            return wrap(result, layout, None, group)
        parts = [wrap(part, layout, None, group) for part in result]
        return type(result)(parts) if isinstance(result, tuple) else parts

    return call


def local_by(
    call: Callable[..., Any],
    sharding: OpSharding | None,
    operands: Sequence[torch.Tensor],
    places: Sequence[int | str | None],
    rule: Rule | None = None,
) -> LocalCall | None:
    """Return the `LocalCall` for operands in the layouts of `sharding`; it redistributes operands in other layouts.

    The call itself reduces partial sums; None if the output is partial in another way.

    Args:
        call: gets the arguments of the call with local tensors.
        places: of the operands among the arguments: a position or a name; None for one inside a list.
        rule: of the call, if a rank whose part is empty computes with one element more.

        The result depends on layouts alone, so all ranks make a call in the same way, also those whose part is empty.
    """
    if sharding is None or any(op != "sum" for _, op in sharding.output.partial):
        return None
    if any(isinstance(x, ShardedTensor) and x._layout.partial for x in operands):
        return None
    group = next(x._group for x in operands if isinstance(x, ShardedTensor))
    if len(sharding.output.ranks) != group.size:
        return None
    layouts = [sharding.output, *(need.layout for need in sharding.needs)]
    if any(0 in layout.local_shape(group.rank) for layout in layouts):
        call = on_nothing(call, None if None in places else rule, layouts[1:], places)
    sums: list[tuple[int | str, Group | None]] = []
    moves: list[tuple[int | str, Layout, Layout]] = []
    for x, need, place in zip(operands, sharding.needs, places, strict=True):
        if isinstance(x, ShardedTensor):
            if x._layout != need.layout:
                if place is None or not isinstance(x._layout, MeshLayout):
                    return None  # boxes and ranges may have a handler of their own
                moves.append((place, x._layout, need.layout))
        elif need.layout.cut_dims:
            return None
        if need.grad_partial_axes:
            if place is None:
                return None
            subgroup = along(group, need.layout, need.grad_partial_axes)
            sums.append((place, None if subgroup is group else subgroup))
    output = sharding.output
    if output.partial:
        call = summed(call, along(group, output, output.partial_axes))
        output = sharding.reduced
    return LocalCall(call, None if output.is_replicated else output, tuple(sums), tuple(moves))


def summed(call: Callable[..., Any], subgroup: Group) -> Callable[..., torch.Tensor]:
    """Return a function that makes `call` and then sums its result over `subgroup`."""

    def call_and_sum(*args: Any, **kwargs: Any) -> torch.Tensor:
        return collectives.all_reduce(call(*args, **kwargs), subgroup)

    return call_and_sum


def on_nothing(
    call: Callable[..., Any], rule: Rule | None, layouts: Sequence[MeshLayout], places: Sequence[int | str | None]
) -> Callable[..., Any]:
    """Return `call` for a rank whose part, or result, is empty: it runs the same nodes, in its operands' graph."""

    def call_on_nothing(*args: Any, **kwargs: Any) -> Any:
        if rule is None:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            return computed(lambda *_: call(*args, **kwargs), tensors)
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}

        def compute(*operands: torch.Tensor) -> Any:
            values.update(zip(places, operands, strict=True))
            return call(*(values[i] for i in range(len(args))), **{key: values[key] for key in kwargs})

        return computed_alike(compute, rule, layouts, [values[place] for place in places])

    return call_on_nothing


def _read(x: Any, form: list[Any], group: Group | None) -> tuple[Any, Group | None]:
    """Return an argument with local tensors in place of sharded ones, and the group; `_UNKNOWN` for other kinds.

    Appends the argument's part of the cache key to `form`.
    """
    kind = type(x)
    if kind in SHARDED:
        if group is not None and x._group is not group:
            return _UNKNOWN, group
        form.append(id(x._layout))
        return x._local, x._group
    if kind in _VALUES:
        form += (kind, x)
        return x, group
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
