"""The handler of operations whose row has letters: bind the call, redistribute the operands, compute, reduce.

An operation needs only a row of `shardtensor.rules.table`, unless the row names a function that reduces the ranks'
results: `combines` registers that function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from shardtensor.comm.group import Group
from shardtensor.comm.redistribute import along
from shardtensor.layout.layout import MeshLayout, Shape, replicated
from shardtensor.ops.binding import BoundCall, row_keyword
from shardtensor.ops.engine import chosen_sharding, group_of, write_out
from shardtensor.ops.local_call import (
    LocalCall,
    Place,
    cached_call,
    local_by,
    on_empty,
    operands_at,
    reducing,
    with_operands,
)
from shardtensor.rules.pattern import Pattern
from shardtensor.rules.propagate import OpSharding, with_dims
from shardtensor.rules.rule import Rule
from shardtensor.rules.table import ROWS, Row, rows
from shardtensor.tensor.dispatch import implements_each
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of

COMBINERS: dict[str, tuple[Callable[..., Any], bool]] = {}
"""The functions that rows name as ``@name``, with the option of `combines`."""


def combines(name: str, *, blocks: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the function that a row names as ``@name``: it computes the local result if that letter is sharded.

    It gets a `LetterCut` and the local tensors of the operands that are present, in order. It returns the local result,
    or results, in the layout of the row's output; NotImplemented makes the letter whole, as ``!`` would. All ranks call
    it or none, so its decisions must be equal on all ranks, and follow from the `LetterCut` and the dtypes.

    Args:
        blocks: it accepts a dim sharded in blocks, where a rank holds several ranges; else that is made whole.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        COMBINERS[name] = function, blocks
        return function

    return register


@attrs.frozen
class LetterCut:
    """The calls of one form in which a letter with an ``@name`` function is sharded.

    Attributes:
        func: the operation, and `name` its name.
        names: of the operands that are present, as the row has them.
        compute: the operation on the local tensors of these.
        layouts: of the operands, after redistribution.
        dims: the dims of the first operand that the letter stands for.
        subgroup: the ranks that hold the shards.
        options: the arguments of the call other than operands, by the names of the row.
    """

    func: Any
    name: str
    names: tuple[str, ...]
    compute: Callable[..., Any]
    layouts: tuple[MeshLayout, ...]
    dims: tuple[int, ...]
    subgroup: Group
    group: Group
    options: dict[str, Any]

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

    def for_one_call(*args: Any, **kwargs: Any) -> Any:
        row = ROWS[name]
        named = {row_keyword(key, row.call): value for key, value in kwargs.items()}
        out = named.pop("out", None)
        if isinstance(out, torch.Tensor):
            return write_out(lambda _, a, k: for_one_call(*a, **k), func, args, {**named, "out": out})
        call = BoundCall.of(func, name, row, args, named) if out is None else None
        if call is None:
            return fall_back(func, args, named if out is None else {**named, "out": out})
        rule = row.rule(call.shapes, call.dims, call.keepdim)
        if rule is None:
            return _without_rule(func, args, named)
        group, locals_ = group_of(name, call.present), list(map(local_of, call.present))
        for each in (rule, _without_functions(rule, row)):
            found = _local_call(call, each, row, for_every_dtype=False)
            if found is None:
                break
            result = found.on(*with_operands(call.places, locals_, args, named), group)
            if result is not NotImplemented:
                return result
        return fall_back(func, args, named)

    return cached_call(func, lambda args, kwargs: local_call_by_rule(func, name, args, kwargs), for_one_call, name)


def local_call_by_rule(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
    """Return the `LocalCall` of all calls of a form, by its row; None if each call is to be decided for itself."""
    row = ROWS[name]
    if row.pattern is None or kwargs.get("inplace") or any(row_keyword(key, row.call) != key for key in kwargs):
        return None
    if "out" in kwargs:
        return None
    call = BoundCall.of(func, name, row, args, kwargs)
    rule = None if call is None else row.rule(call.shapes, call.dims, call.keepdim)
    return None if call is None or rule is None else _local_call(call, rule, row, for_every_dtype=True)


def _local_call(call: BoundCall, rule: Rule, row: Row, *, for_every_dtype: bool) -> LocalCall | None:
    """Return how a call is made on local tensors; None if the rule does not apply. See `chosen_sharding`."""
    pattern, places, present = row.pattern, call.places, call.present
    assert pattern is not None
    if pattern.is_elementwise:  # boxes and ranges, all alike; plain operands are cut like them
        first, *others = {x._layout for x in present if isinstance(x, ShardedTensor)}
        is_one = not others and not first.partial and all(x.shape == first.shape for x in present)
        if is_one and not isinstance(first, MeshLayout):
            plain = (place for x, place in zip(present, places, strict=True) if not isinstance(x, ShardedTensor))
            return LocalCall(call.func, first, (), tuple((place, None, first) for place in plain))
    if pattern.reduces and pattern.combine and not rule.whole:
        found = _of_all_elements(call, pattern)
        if found is not None:
            return found
    chosen = chosen_sharding(call.name, rule, present, for_every_dtype=for_every_dtype)
    if chosen is None:
        return None
    sharding, group = chosen
    letter, how = _cut_letter(pattern, rule, sharding)
    if how:
        combiner, blocks = COMBINERS[how]
        if not blocks and any(sharding.needs[i].layout.is_blocked(d) for i, d in _dims_of(rule, letter)):
            return _local_call(call, whole_in(rule, letter), row, for_every_dtype=for_every_dtype)
        cut = _cut(call, rule, sharding, group, letter)
        return local_by(_combining(combiner, cut, places), sharding, group, present, places)
    sides = [side for side, x in zip(call.sides, call.operands, strict=True) if x is not None]
    added = [i for i, side in enumerate(sides) if side.added and sharding.output.partial]
    compute: Callable[..., Any] = _STRAIGHT.get(call.func, call.func)
    compute = on_empty(compute, None if row.takes_empty else rule, sharding, group, places, without=added)
    if added:
        compute, sharding = _then_added(compute, call, rule, sharding, group, added)
    found = local_by(compute, sharding, group, present, places)
    if pattern.makes_sizes and found.layout is not None:
        return found._replace(sized=_sizing(sharding.reduced))
    return found


def _then_added(
    compute: Callable[..., Any], call: BoundCall, rule: Rule, sharding: OpSharding, group: Group, added: Sequence[int]
) -> tuple[Callable[..., Any], OpSharding]:
    """Return a function that sums the ranks' results and then adds the operands `added`, once; and its layouts.

    With an argument ``beta``, as of ``addmm``, the local call multiplies a zero, and the operand after the sum, by it.
    """
    summed = reducing(compute, sharding.output, group)
    at, has_beta, beta = [call.places[i] for i in added], "beta" in call.signature.names, call.options.get("beta", 1)
    last = [rule.inputs[i][-1] if rule.inputs[i] else None for i in added]
    after = [0 if letter is None else rule.output[::-1].index(letter) for letter in last]

    def sum_and_add(*args: Any, **kwargs: Any) -> torch.Tensor:
        terms = operands_at(at, args, kwargs)
        given, named = with_operands(at, [x.new_zeros(()) if has_beta else None for x in terms], args, kwargs)
        out = summed(*given, **named)
        for x, count in zip(terms, after, strict=True):
            x = x.reshape(*x.shape, *(1,) * count) if count else x
            if beta == 0:  # values of `x`, even nan, do not count, but it stays in the graph
                x = x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)
            out = out + as_cast(x if beta in (0, 1) else x * beta, out)
        return out

    needs = list(sharding.needs)
    for i in added:  # ranks with partial sums of one result all add it, so each has its whole gradient
        axes = tuple(axis for axis in needs[i].grad_partial_axes if axis not in sharding.output.partial_axes)
        needs[i] = attrs.evolve(needs[i], grad_partial_axes=axes)
    return sum_and_add, attrs.evolve(sharding, needs=tuple(needs), output=sharding.reduced)


def _combining(combiner: Callable[..., Any], cut: LetterCut, places: Sequence[Place]) -> Callable[..., Any]:
    """Return the function of the arguments of a call that gives a combiner its operands."""
    if list(places) == [0]:
        return lambda local, *_, **__: combiner(cut, local)
    return lambda *args, **kwargs: combiner(cut, *operands_at(places, args, kwargs))


_STRAIGHT = {F.layer_norm: torch.layer_norm, F.rms_norm: torch.rms_norm}
"""The C functions that these Python functions call with the same arguments."""


def _of_all_elements(call: BoundCall, pattern: Pattern) -> LocalCall | None:
    """Return the `LocalCall` that reduces a tensor in boxes or ranges over all dims, without redistribution."""
    x = call.present[0]
    if not isinstance(x, ShardedTensor) or isinstance(x._layout, MeshLayout) or not 0 < x.dim() == len(call.dims):
        return None
    layout, group = x._layout.reduced(), x._group
    if isinstance(layout, MeshLayout) or (len(layout.ranks) != group.size and layout.grid != (len(layout.ranks),)):
        return None  # ranks outside the tensor have no replica of their own
    ((_, how),) = pattern.combine
    flat = replicated((x.numel(),), layout.ranks, layout.grid)
    subgroup = along(group, layout, layout.sharding_axes)
    names, options = tuple(call.present_names), call.options
    cut = LetterCut(call.func, call.name, names, call.func, (flat,), (0,), subgroup, group, options)
    combiner = COMBINERS[how[1:] if how.startswith("@") else "total"][0]
    shape = (1,) * x.dim() if cut.keepdim else ()
    places, moves = call.places, ((call.places[0], x._layout, layout),) if x._layout.partial else ()

    def reduce(*args: Any, **kwargs: Any) -> Any:
        result = combiner(cut, operands_at(places, args, kwargs)[0].reshape(-1))
        if result is NotImplemented or isinstance(result, tuple):
            return result if result is NotImplemented else tuple(map(shaped, result))
        return shaped(result)

    def shaped(y: torch.Tensor) -> torch.Tensor:
        return y if y.shape == shape else y.reshape(shape)  # a view would hide the collective

    return LocalCall(reduce, None, (), moves)


# -- letters -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def whole_in(rule: Rule, letter: str) -> Rule:
    """Return the rule with a letter, or all of ``k...``, whole."""
    every = {x for letters in rule.inputs for x in letters if x is not None and _matches(x, letter)}
    return attrs.evolve(rule, whole=rule.whole | every)


def _without_functions(rule: Rule, row: Row) -> Rule:
    """Return the rule in which no function combines the ranks' results: their letters are whole."""
    assert row.pattern is not None
    for letter, how in row.pattern.combine:
        rule = whole_in(rule, letter) if how.startswith("@") else rule
    return rule


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


def _cut_letter(pattern: Pattern, rule: Rule, sharding: OpSharding) -> tuple[str, str]:
    """Return the sharded letter with an ``@name`` function, and that name; empty texts if there is none."""
    for letter, how in pattern.combine:
        if how.startswith("@") and any(sharding.needs[i].layout.dims[d] is not None for i, d in _dims_of(rule, letter)):
            return letter, how[1:]
    return "", ""


def _cut(call: BoundCall, rule: Rule, sharding: OpSharding, group: Group, letter: str) -> LetterCut:
    layouts = tuple(need.layout for need in sharding.needs)
    places = _dims_of(rule, letter)
    first = places[0][0]
    dims = tuple(d for i, d in places if i == first)
    axes = tuple(
        sorted({axis for i, d in places for cut in [layouts[i].dims[d]] if cut is not None for axis in cut.axes})
    )
    subgroup = along(group, layouts[first], axes)
    compute = attrs.evolve(call, operands=()).compute  # so that the cache keeps no tensor alive
    names, options = tuple(call.present_names), call.options
    return LetterCut(call.func, call.name, names, compute, layouts, dims, subgroup, group, options)


# -- results -----------------------------------------------------------------------------------------------------------


def _sizing(layout: MeshLayout) -> Callable[[Any], MeshLayout]:
    """Return a function that gives the layout the sizes of a local result, or of the first of several."""

    def sized(result: Any) -> MeshLayout:
        first = result if isinstance(result, torch.Tensor) else result[0]
        return _sized(layout, tuple(first.shape))

    return sized


@lru_cache(maxsize=8192)
def _sized(layout: MeshLayout, local: Shape) -> MeshLayout:
    """Return the layout with the sizes that a local result has along whole dims."""
    shape = tuple(n if cut is None else full for n, full, cut in zip(local, layout.shape, layout.dims, strict=True))
    return with_dims(layout, shape, layout.dims)


def as_cast(x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """Return `x` in the dtype of the product it is added to, if autocast would have cast it."""
    is_autocast = not product.is_meta and torch.is_autocast_enabled(product.device.type)
    return x.to(product.dtype) if is_autocast else x


def _without_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raise torch's error for shapes that no rule fits, before anything is sent; else use the fallback."""

    def zeros_for(x: Any) -> Any:
        return torch.zeros((), dtype=x.dtype).expand(x.shape) if isinstance(x, torch.Tensor) else x

    with torch.no_grad():
        func(*tree_map(zeros_for, args), **tree_map(zeros_for, kwargs))
    return fall_back(func, args, kwargs)


def install() -> None:
    """Register the handler of every row with letters ; modules imported later replace some."""
    for row in rows():
        if row.pattern is not None and not row.pattern.is_elementwise:
            for name in row.names:
                implements_each(name, partial(by_rule, name=name.rpartition(".")[2]))


install()
