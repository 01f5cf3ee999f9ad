"""The tensors of a module that are on the meta device, and how they come to have memory and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import torch
from torch import nn

from shardtensor.parallel.memory import Home, become, put_in_place, with_memory
from shardtensor.sharding.writes import Writes
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of


@attrs.define(eq=False)
class MetaTensor:
    """A tensor without memory, under all its names, and what comes of it."""

    tensor: torch.Tensor
    homes: list[Home] = attrs.field(factory=list)
    names: list[str] = attrs.field(factory=list)
    undo: Callable[[], None] = lambda: None
    storage: int = 0
    is_set: bool = False

    def __str__(self) -> str:
        spec = f"{self.tensor.sharding_spec()} of " if isinstance(self.tensor, ShardedTensor) else ""
        return f"{spec}{tuple(self.tensor.shape)} {self.tensor.dtype} on meta"

    def get_memory(self, device: torch.device) -> None:
        old, twin = self.tensor, with_memory(self.tensor, device)
        self.tensor = put_in_place(old, twin, self.homes)
        self.storage = _storage(local_of(self.tensor))

        def undo() -> None:
            for owner, name in self.homes:
                setattr(owner, name, old)
            if self.tensor is old:  # the object has stayed, and the twin is what it was
                become(old, twin)

        self.undo = undo

    def take(self, writes: Writes) -> None:
        """See whether this has values by now; take those of what was set in its place."""
        local = local_of(self.tensor)
        self.is_set = not local.numel() or self.storage in writes.storages or _storage(local) != self.storage
        for owner, name in self.homes:
            value = getattr(owner, name, None)
            if value is self.tensor:
                continue
            self.is_set = not isinstance(value, torch.Tensor) or not value.is_meta
            if isinstance(value, torch.Tensor) and not value.is_meta and self._can_take(value):
                self.tensor.copy_(value)
                setattr(owner, name, self.tensor)

    def _can_take(self, value: torch.Tensor) -> bool:
        is_alike = (value.shape, value.dtype) == (self.tensor.shape, self.tensor.dtype)
        return is_alike or isinstance(self.tensor, ShardedTensor)  # which cannot be given up: torch tells its shape


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def owned(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors that a module itself owns."""
    return ((n, t) for n, t in [*module._parameters.items(), *module._buffers.items()] if t is not None)


def on_meta(module: nn.Module) -> list[MetaTensor]:
    """The tensors on the meta device that a module and those below it own, each once."""
    found: dict[int, MetaTensor] = {}
    for path, owner in module.named_modules():
        for name, tensor in owned(owner):
            if tensor.is_meta:
                each = found.setdefault(id(tensor), MetaTensor(tensor))
                each.homes.append((owner, name))
                each.names.append(f"{path}.{name}" if path else name)
    return list(found.values())
