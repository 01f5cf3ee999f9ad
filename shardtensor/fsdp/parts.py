"""Parts of a container that are gathered by themselves: large layers that no call of `fully_shard` made units of.

The embedding and the head of a language model are as large as its blocks, and each is used once. As a part, a layer is
gathered just before it runs and lies in the ring with the blocks, where the container would have it gathered, and take
memory, from its own begin to the end of backward.

A container may also use a part's parameter outside of that layer's forward, as ``F.linear(x, self.embedding.weight)``:
see `fsdp.outside`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from shardtensor.fsdp.entry import Entry
from shardtensor.fsdp.flat import Flat
from shardtensor.fsdp.policy import MixedPrecisionPolicy
from shardtensor.fsdp.unit import Unit, part_of
from shardtensor.plan.match.units import LARGE


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
    part.is_needed_in_backward, part.container = not part.is_lookup, container
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
