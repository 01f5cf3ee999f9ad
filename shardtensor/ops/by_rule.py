"""The handler of operations whose row has letters: bind the call, redistribute the operands, compute, reduce.

An operation needs only a row of `shardtensor.rules.table`, unless the row names a function that reduces the ranks'
results: `combines` registers that function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from shardtensor.comm.group import Group
from shardtensor.comm.redistribute import along
from shardtensor.layout.layout import MeshLayout, Shape, replicated
from shardtensor.layout.pieces import Blocked
from shardtensor.ops.binding import BoundCall, row_keyword
from shardtensor.ops.engine import Prepared, computed_alike, finish, layouts_of, prepare, write_out
from shardtensor.ops.local_call import LocalCall, cached_call, local_by
from shardtensor.rules.pattern import Pattern
from shardtensor.rules.propagate import OpSharding, propagate, with_dims
from shardtensor.rules.rule import Rule
from shardtensor.rules.table import ROWS, Row, rows
from shardtensor.tensor.dispatch import HANDLERS, resolve
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor, reduced

COMBINERS: dict[str, tuple[Callable[..., Any], bool, bool]] = {}
"""The functions that rows name as ``@name``, with the options of `combine`."""


def combines(
    name: str, *, blocks: bool = False, always: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the function that a row names as ``@name``: it computes the local result if that letter is sharded.

    It gets a `Cut` and returns the local result, or results, in the layout of the row's output; NotImplemented makes
    the letter whole, as ``!`` would. All ranks call it or none, so its decisions must be equal on all ranks.

    Args:
        blocks: it accepts a dim sharded in blocks, where a rank holds several ranges; else that is made whole.
        always: it never returns NotImplemented, so that its calls can be cached.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        COMBINERS[name] = function, blocks, always
        return function

    return register


@attrs.frozen
class Cut:
    """One call in which a letter with an ``@name`` function is sharded.

    Attributes:
        func: the operation, and `name` its name.
        names: of the operands, as the row has them.
        locals: the operands' local tensors, in order; absent operands are left out.
        compute: the operation on such local tensors.
        layouts: of the operands, after redistribution.
        dims: the dims of the first operand that the letter stands for.
        subgroup: the ranks that hold the shards.
        options: the arguments of the call other than operands, by the names of the row.
        reduced: the layout of the result.
    """

    func: Any
    name: str
    names: tuple[str, ...]
    locals: list[torch.Tensor]
    compute: Callable[..., Any]
    layouts: tuple[MeshLayout, ...]
    dims: tuple[int, ...]
    subgroup: Group
    group: Group
    options: dict[str, Any]
    reduced: MeshLayout

    @property
    def count(self) -> int:
        """The number of elements along the letter, in all ranks."""
        return math.prod(self.layouts[0].shape[d] for d in self.dims)

    @property
    def keepdim(self) -> bool:
        """Whether a reduction keeps the reduced dims, with size 1."""
        return bool(self.options.get("keepdim"))


def by_rule(func: Any, name: str) -> Callable[..., Any]:
    """Return the handler of `func` for the row of `name`."""

    def handler(*args: Any, **kwargs: Any) -> Any:
        return _bound(func, name, args, kwargs)

    return cached_call(func, lambda args, kwargs: local_call_by_rule(func, name, args, kwargs), handler, name)


def local_call_by_rule(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
    """Return the `LocalCall` for a call, by its row; None if the call needs the general handler."""
    row = ROWS[name]
    pattern = row.pattern
    named = {row_keyword(key, row.call): value for key, value in kwargs.items()}
    if pattern is None or named.pop("out", None) is not None or named.get("inplace"):
        return None
    call = BoundCall.of(func, name, row, args, named)
    if call is None:
        return None
    rule = pattern.bind(call.shapes, call.dims, call.keepdim)
    if rule is None:
        return None
    sharding = propagate(rule, layouts_of(call.present))
    if sharding is None:
        return None
    letter = _cut_letter(pattern, rule, sharding)
    if letter is not None:
        return _combined_locally(call, rule, sharding, letter)
    if sharding.output.partial and any(
        side.added and x is not None for side, x in zip(call.sides, call.operands, strict=False)
    ):
        return None  # an operand that is added once comes after the sum
    places = [place for place, x in zip(call.places, call.operands, strict=False) if x is not None]
    if call.listed or any(place not in kwargs for place in places if isinstance(place, str)):
        places = [None] * len(call.present)
    found = local_by(_STRAIGHT.get(func, func), sharding, call.present, places, None if row.takes_empty else rule)
    if found is None or not pattern.makes_sizes or found.layout is None:
        return found

    layout = sharding.reduced  # the call reduces partial results

    def sized(result: Any) -> MeshLayout:
        first = result if isinstance(result, torch.Tensor) else result[0]
        return _sized(layout, tuple(first.shape))

    return found._replace(sized=sized)


def _combined_locally(call: BoundCall, rule: Rule, sharding: OpSharding, letter: tuple[str, str]) -> LocalCall | None:
    """Return the `LocalCall` for a call of one operand whose ranks' results an ``@name`` function reduces."""
    combiner, blocks, always = COMBINERS[letter[1][1:]]
    (place, *more), (x, *_) = call.places, call.present
    if not always or more or place != 0 or not isinstance(x, ShardedTensor) or x._layout != sharding.needs[0].layout:
        return None
    if x._layout.partial or len(sharding.reduced.ranks) != x._group.size:
        return None
    if not blocks and any(_is_blocked(sharding, *where) for where in _dims_of(rule, letter[0])):
        return None
    call = attrs.evolve(call, operands=(None,), args=(None, *call.args[1:]))  # so that the cache keeps no tensor alive
    given = _cut(call, rule, Prepared([], sharding, x._group), letter[0])
    given = attrs.evolve(given, compute=lambda local: call.func(local, *call.args[1:], **call.kwargs))

    def compute(local: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given.locals.append(local)  # a new Cut for each call would take longer than the reduction
        try:
            return combiner(given)
        finally:
            given.locals.clear()

    return LocalCall(compute, None if sharding.reduced.is_replicated else sharding.reduced)


_STRAIGHT = {F.layer_norm: torch.layer_norm, F.rms_norm: torch.rms_norm}
"""The C functions that these Python functions call with the same arguments."""


def _bound(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle the general case: arguments in any form, named dims, ``@name`` functions."""
    row = ROWS[name]
    if kwargs:
        kwargs = {row_keyword(key, row.call): value for key, value in kwargs.items()}
        if kwargs.get("out") is not None:
            if not isinstance(kwargs["out"], torch.Tensor):
                return fall_back(func, args, kwargs)
            return write_out(lambda f, a, k: _bound(f, name, a, k), func, args, kwargs)
        kwargs.pop("out", None)
    pattern = row.pattern
    assert pattern is not None
    bound = BoundCall.of(func, name, row, args, kwargs)
    if bound is None:
        return fall_back(func, args, kwargs)
    rule = pattern.bind(bound.shapes, bound.dims, bound.keepdim)
    if rule is None:
        return _without_rule(func, args, kwargs)
    out = _computed(bound, rule, row)
    return fall_back(func, args, kwargs) if out is None else out


def _computed(call: BoundCall, rule: Rule, row: Row) -> Any:
    pattern, name = row.pattern, call.name
    assert pattern is not None
    present = call.present
    if pattern.reduces and pattern.combine:
        found = _of_all_elements(call, pattern)
        if found is not NotImplemented:
            return found
    sharding = propagate(rule, layouts_of(present))
    if sharding is None:
        return None
    added = [i for i, side in enumerate(call.sides) if side.added and call.operands[i] is not None]
    if added and sharding.output.partial:  # an operand that is added once comes after the sum over ranks
        without = call.without(added)
        inner = pattern.bind(without.shapes, without.dims, without.keepdim)
        out = None if inner is None else _computed(without, inner, row)
        if out is None:
            return None
        for i in added:
            k = sum(x is not None for x in call.operands[:i])
            x, letters = present[k], rule.inputs[k]
            after = rule.output[::-1].index(letters[-1]) if letters and letters[-1] is not None else 0
            out = out + as_cast(x.reshape(*x.shape, *(1,) * after) if after else x, out)
        return out
    letter = _cut_letter(pattern, rule, sharding)
    if letter is not None:
        combiner, blocks, _ = COMBINERS[letter[1][1:]]
        dims = _dims_of(rule, letter[0])
        if not blocks and any(_is_blocked(sharding, *place) for place in dims):
            return _computed(call, whole_in(rule, letter[0]), row)
    ready = prepare(name, rule, present)
    if ready is None:
        return None
    if letter is None:
        needed = [need.layout for need in ready.sharding.needs]
        found = computed_alike(call.compute, None if row.takes_empty else rule, needed, ready.locals)
        return _given(found, ready.sharding.output, ready.group, pattern)
    result = combiner(_cut(call, rule, ready, letter[0]))
    if result is NotImplemented:
        return _computed(call, whole_in(rule, letter[0]), row)
    return _given(result, ready.sharding.output, ready.group, pattern)


def _of_all_elements(call: BoundCall, pattern: Pattern) -> Any:
    """Reduce a tensor in boxes or ranges over all dims, without redistribution; return NotImplemented for others."""
    x = call.present[0]
    if not isinstance(x, ShardedTensor) or isinstance(x._layout, MeshLayout) or not 0 < x.dim() == len(call.dims):
        return NotImplemented
    x = reduced(x)
    layout, group = x._layout, x._group
    if isinstance(layout, MeshLayout) or (len(layout.ranks) != group.size and layout.grid != (len(layout.ranks),)):
        return NotImplemented  # ranks outside the tensor have no replica of their own
    ((_, how),) = pattern.combine
    flat = replicated((x.numel(),), layout.ranks, layout.grid)
    subgroup = along(group, layout, layout.sharding_axes)
    given = Cut(call.func, call.name, tuple(call.present_names), [x._local.reshape(-1)], call.func, (flat,), (0,),
                subgroup, group, call.options, flat)  # fmt: skip
    result = COMBINERS[how[1:] if how.startswith("@") else "total"][0](given)
    if result is NotImplemented:
        return result
    shape = (1,) * x.dim() if given.keepdim else ()
    results = [result] if isinstance(result, torch.Tensor) else result
    found = tuple(y if y.shape == shape else y.reshape(shape) for y in results)  # a view would hide the collective
    return found[0] if isinstance(result, torch.Tensor) else found


# -- letters -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def whole_in(rule: Rule, letter: str) -> Rule:
    """Return the rule with a letter, or all of ``k...``, whole."""
    every = {x for letters in rule.inputs for x in letters if x is not None and _matches(x, letter)}
    return attrs.evolve(rule, whole=rule.whole | every)


def _matches(name: str, letter: str) -> bool:
    return name == letter or (name.startswith(letter) and name[len(letter) :].isdigit())


@lru_cache(maxsize=8192)
def _dims_of(rule: Rule, letter: str) -> tuple[tuple[int, int], ...]:
    """Return operand and dim for each place of a letter."""
    return tuple(
        (i, d)
        for i, letters in enumerate(rule.inputs)
        for d, x in enumerate(letters)
        if x is not None and _matches(x, letter)
    )


def _cut_letter(pattern: Pattern, rule: Rule, sharding: OpSharding) -> tuple[str, str] | None:
    """Return the sharded letter with an ``@name`` function, and that name."""
    for letter, how in pattern.combine:
        if how.startswith("@") and any(sharding.needs[i].layout.dims[d] is not None for i, d in _dims_of(rule, letter)):
            return letter, how
    return None


def _is_blocked(sharding: OpSharding, operand: int, dim: int) -> bool:
    cut = sharding.needs[operand].layout.dims[dim]
    return cut is not None and isinstance(cut.pieces, Blocked)


def _cut(call: BoundCall, rule: Rule, ready: Prepared, letter: str) -> Cut:
    layouts = tuple(need.layout for need in ready.sharding.needs)
    places = _dims_of(rule, letter)
    first = places[0][0]
    dims = tuple(d for i, d in places if i == first)
    axes = tuple(
        sorted({axis for i, d in places for cut in [layouts[i].dims[d]] if cut is not None for axis in cut.axes})
    )
    subgroup = along(ready.group, layouts[first], axes)
    return Cut(
        call.func,
        call.name,
        tuple(call.present_names),
        ready.locals,
        call.compute,
        layouts,
        dims,
        subgroup,
        ready.group,
        call.options,
        ready.sharding.reduced,
    )


# -- results -----------------------------------------------------------------------------------------------------------


def _given(result: Any, layout: MeshLayout, group: Group, pattern: Pattern) -> Any:
    """Return the global tensor of a local result, or of several of one layout."""
    if not isinstance(result, torch.Tensor):
        found = [_given(part, layout, group, pattern) for part in result]
        return type(result)(found) if isinstance(result, tuple) else found
    return finish(result, _sized(layout, tuple(result.shape)) if pattern.makes_sizes else layout, group)


@lru_cache(maxsize=8192)
def _sized(layout: MeshLayout, local: Shape) -> MeshLayout:
    """Return the layout with the sizes that a local result has along whole dims."""
    shape = tuple(n if cut is None else full for n, full, cut in zip(local, layout.shape, layout.dims, strict=True))
    sized = with_dims(layout, shape, layout.dims)
    return attrs.evolve(sized, partial=layout.partial) if layout.partial else sized


def as_cast(x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """Return `x` in the dtype of the product it is added to, if autocast would have cast it."""
    is_autocast = not product.is_meta and torch.is_autocast_enabled(product.device.type)
    return x.to(product.dtype) if is_autocast else x


def leaves_partials(name: str, operands: tuple[torch.Tensor, ...]) -> bool:
    """Return whether the local results of an operation on these operands are partial sums."""
    rule = ROWS[name].rule(tuple(tuple(x.shape) for x in operands))
    sharding = None if rule is None else propagate(rule, layouts_of(operands))
    return sharding is not None and bool(sharding.output.partial)


def _without_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raise torch's error for shapes that no rule fits, before anything is sent; else use the fallback."""

    def zeros_for(x: Any) -> Any:
        return torch.zeros((), dtype=x.dtype).expand(x.shape) if isinstance(x, torch.Tensor) else x

    with torch.no_grad():
        func(*tree_map(zeros_for, args), **tree_map(zeros_for, kwargs))
    return fall_back(func, args, kwargs)


def install() -> None:
    """Register the handler of every row with letters that has no handler yet."""
    for row in rows():
        if row.pattern is not None and not row.pattern.is_elementwise:
            for name in row.names:
                for func in resolve(name):
                    HANDLERS.setdefault(func, by_rule(func, name.rpartition(".")[2]))


install()
