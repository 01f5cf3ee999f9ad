"""Parts of a container that are gathered by themselves: large layers that no call of `fully_shard` made units of.

The embedding and the head of a language model are as large as its blocks, and each is used once. As a part, a layer is
gathered just before it runs and lies in the ring with the blocks, where the container would have it gathered, and take
memory, from its own begin to the end of backward.

A container may also use a part's parameter outside of that layer's forward, as ``F.linear(x, self.embedding.weight)``.
It finds a ShardedTensor there; while the container runs, an operation on one computes with a whole that is gathered for
this use alone, and whose gradient is reduced with the part's.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter, tree_map

from shardtensor.comm.untraced import untraced
from shardtensor.fsdp.entry import Entry
from shardtensor.fsdp.flat import UNCOMPILED, Flat
from shardtensor.fsdp.policy import MixedPrecisionPolicy
from shardtensor.fsdp.unit import Unit, part_of
from shardtensor.plan.match.units import LARGE
from shardtensor.tensor.dispatch import LENDERS, name_of
from shardtensor.tensor.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from shardtensor.fsdp.schedule import Schedule


def large_layers(entries: Iterable[Entry]) -> set[int]:
    """The ids of the layers among the owners of `entries` that are to be parts: none of whose parameters is tied."""
    sizes: dict[int, int] = {}
    for entry in entries:
        owner = entry.homes[0][0]
        fits = len(entry.homes) == 1 and isinstance(owner, nn.Embedding | nn.Linear)
        sizes[id(owner)] = sizes.get(id(owner), 0) + (entry.param.numel() if fits else -(2**62))
    return {key for key, size in sizes.items() if size >= LARGE}


def make_part(owner: nn.Module, flats: Sequence[Flat], container: Unit) -> None:
    """Make a layer of a container a part: a unit that shows in nothing but two hooks."""
    policy = MixedPrecisionPolicy(container.policy.param_dtype, container.policy.reduce_dtype, None, False)
    part = Unit(owner, list(flats), container.domain, policy, container.reshard_after_forward or None, container.device)
    part.is_needed_in_backward = not part.is_lookup
    vars(owner)["_fsdp_part"] = part
    owner.register_forward_pre_hook(_enter, prepend=True, with_kwargs=True)
    owner.register_forward_hook(_leave, always_call=True)


def _enter(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    part = part_of(owner)
    assert part is not None
    return part.enter(args, kwargs)


def _leave(owner: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    part = part_of(owner)
    assert part is not None
    if output is None:  # its forward raised
        part.abandon()
        return None
    return part.leave(output)


def is_part_hook(hook: Any) -> bool:
    """Whether a hook of a module is one of those that `make_part` gives."""
    return hook in (_enter, _leave)


class Lender:
    """Lets the modules of a schedule compute with parameters of parts that do not run."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._flats = {id(flat) for unit in schedule.units if part_of(unit.module) is unit for flat in unit.flats}
        if self._flats:
            LENDERS.append(weakref.ref(self, LENDERS.remove))

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation on whole parameters; NotImplemented where it is none of this lender's."""
        if not self._schedule.is_running() or not any(map(self._lends, tree_iter((args, kwargs)))) or _writes(func):
            return NotImplemented
        args, kwargs = tree_map(lambda x: _borrowed(x) if self._lends(x) else x, (args, kwargs))
        return func(*args, **kwargs)

    def _lends(self, x: Any) -> bool:
        return isinstance(x, ShardedTensor) and id(x._flat) in self._flats


def _writes(func: Any) -> bool:
    name = name_of(func).rpartition(".")[2]
    return name.endswith("_") and not name.endswith("__")


def _borrowed(shell: Any) -> torch.Tensor:
    flat: Flat = shell._flat
    number = next(i for i, known in enumerate(flat.shells) if known is shell)
    if shell.requires_grad and torch.is_grad_enabled():
        whole = _Borrowed.apply(torch.empty(0, device=flat.device, requires_grad=True), flat, number)
    else:
        whole = _whole(flat, number)
    inner = flat.entries[number].inner
    return whole if inner is None else inner.around(whole)


def _whole(flat: Flat, number: int) -> torch.Tensor:
    gathered = flat.domain.shard.all_gather(flat.shard.detach().to(flat.compute_dtype))
    return flat.parts_of(gathered)[number]


class _Borrowed(torch.autograd.Function):
    """A parameter gathered for one use; its gradient joins those of the flat."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, flat: Flat, number: int) -> torch.Tensor:
        ctx.flat, ctx.number = flat, number
        return _whole(flat, number)

    @staticmethod
    @untraced(UNCOMPILED)
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        flat = ctx.flat
        grads: list[torch.Tensor | None] = [None] * len(flat.shells)
        grads[ctx.number] = grad
        flat.on_gradients([flat], [grads])
        return None, None, None
