"""The tensors of a checkpoint, each with its layout and this rank's local tensor; also those in other values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from shardtensor.checkpoint.tensor_file import ITEM_BYTES
from shardtensor.checkpoint.values import encode, scalar_json, tensor_name
from shardtensor.comm.group import Group
from shardtensor.errors import CheckpointError
from shardtensor.layout.box import Box
from shardtensor.layout.explain import dtype_name
from shardtensor.layout.layout import Layout, replicated
from shardtensor.tensor.dispatch import is_dtensor
from shardtensor.tensor.dtensor import from_dtensor
from shardtensor.tensor.sharded_tensor import ShardedTensor


@attrs.frozen(eq=False)
class Item:
    """A tensor of a checkpoint: its name, its layout, and this rank's local tensor. If ranks may hold other values
    under one name, as statistics of batches, those of the first rank count (`is_of_first`)."""

    name: str
    local: torch.Tensor
    layout: Layout
    is_of_first: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> str:
        return dtype_name(self.local.dtype)

    @property
    def whole_bytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * self.local.element_size()


def item_of(name: str, tensor: torch.Tensor, group: Group | None, *, is_of_first: bool = False) -> Item:
    """Return the item of a tensor; a plain one is replicated on the ranks of `group`, or a rank's own without one.

    Raises:
        CheckpointError: it is a partial sum, on the meta device, sparse, or of a dtype that files do not hold.
    """
    if is_dtensor(tensor):
        tensor = from_dtensor(tensor.detach())
    if isinstance(tensor, ShardedTensor):
        local, layout = tensor._local, tensor._layout
    else:
        local, layout = tensor, replicated(tuple(tensor.shape), range(1) if group is None else group.ranks)
    fault = None
    if layout.partial:
        fault = "is a partial sum", "reduce it first: st.reshard(tensor, spec) with a spec that is not partial"
    elif local.is_meta:
        fault = "is on the meta device, without values", "call st.materialize(model) first"
    elif local.layout != torch.strided or local.is_quantized:
        fault = "is quantized" if local.is_quantized else f"is {local.layout}", "save its dense parts"
    elif dtype_name(local.dtype) not in ITEM_BYTES:
        fault = f"has dtype {local.dtype}", "save it as another dtype"
    if fault is not None:
        raise CheckpointError(f'tensor "{name}" {fault[0]}: a checkpoint does not hold it', fix=fault[1])
    local = local.detach().resolve_conj().resolve_neg()
    return Item(name, local, layout, is_of_first and not isinstance(tensor, ShardedTensor))


def parts_of(local: torch.Tensor, layout: Layout, rank: int) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of a rank under a layout, each with the view of its elements in the rank's local tensor."""
    for box, place in zip(layout.boxes(rank), layout.local_boxes(rank), strict=True):
        part = local[place.slices]
        yield box, part.view(box.sizes) if layout.packed else part


def encoded(value: Any, path: str, items: dict[str, Item], group: Group | None, *, is_of_first: bool = False) -> Any:
    """Return a value as JSON, and add its tensors to `items`.

    Args:
        path: the name of the value; tensors are named ``<path>/<keys>``.
        group: the ranks that hold the plain tensors; None for values of this rank alone.
        is_of_first: of plain tensors the first rank's are saved.

    Raises:
        CheckpointError: a part of it is of a type that a checkpoint does not hold.
    """
    numbers: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, dict[str, Any]]]] = {}

    def in_json(found: torch.Tensor, name: str) -> Any:
        if not (found.dim() or found.is_meta or isinstance(found, ShardedTensor) or is_dtensor(found)):
            made: dict[str, Any] = {}
            numbers.setdefault((found.device, found.dtype), []).append((found.detach(), made))
            return made
        name = tensor_name(name, items)
        items[name] = item_of(name, found, group, is_of_first=is_of_first)
        return {"$tensor": name}

    found = encode(value, path, in_json)
    for (_, dtype), pairs in numbers.items():  # each device is waited for once
        for (_, made), number in zip(pairs, torch.stack([x for x, _ in pairs]).tolist(), strict=True):
            made.update(scalar_json(dtype, number))
    return found
