"""A checksum of named tensors that does not depend on their layouts, devices and order, or on the number of ranks.

The checksum of a tensor is a sum over its elements, modulo 2**64. A term is the bits of the element, spread over 64
bits, times random odd numbers: one for each digit, to base 1024, of its index in each dim. So the sum over a box is a
few products with vectors, and the sums over all boxes add up. There are two such sums, the *lanes*, with other random
numbers. Each is multiplied by a random number for the tensor's name, dtype and shape; then those of all tensors are
added. If a single element changes, both lanes change.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from shardtensor.comm.group import Group
from shardtensor.errors import RuleError
from shardtensor.layout.box import Box, whole
from shardtensor.layout.holders import holders
from shardtensor.tensor.sharded_tensor import ShardedTensor

_LANES = 2
_BASE = 1024  # the number of weights of a table
_ROW = 512  # products over vectors shorter than this are slow
_SPREAD = 0x9E3779B97F4A7C15 - 2**64  # odd, as int64
_CHUNK = {"cpu": 1 << 18}  # elements: their 64-bit products stay in the caches of a core
_CHUNK_ELSEWHERE = 1 << 21
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint_of(tensors: Mapping[str, Tensor], group: Group, key: str = "") -> str:
    """Return the checksum of named tensors, 128 bits as hex text, the same on all ranks of `group`; all call this.

    One all-reduce of two numbers is sent. No tensor is gathered, and no more than a few million elements are copied.

    Args:
        tensors: sharded ones, each passed at least by the ranks of its layout, and plain ones, equal on all ranks.
        group: the ranks that hold the tensors.
        key: with another key the checksum of the same tensors is another one.

    Raises:
        RuleError: a tensor is partial.
    """
    _refuse_partials(tensors)
    totals = [0] * _LANES
    found: dict[torch.device, list[tuple[list[int], Tensor]]] = {}
    for name, tensor in tensors.items():
        about = repr((key, name, str(tensor.dtype), tuple(tensor.shape)))
        digest = hashlib.blake2b(about.encode(), digest_size=16 * _LANES).digest()
        numbers: tuple[int, ...] = struct.unpack(f"<{2 * _LANES}Q", digest)
        if _is_first(tensor, group):  # so that names of tensors without elements count, too
            totals = [total + number for total, number in zip(totals, numbers[_LANES:], strict=True)]
        factors = [number | 1 for number in numbers[:_LANES]]
        for part, box in _parts(tensor, group):
            found.setdefault(part.device, []).append((factors, _sum(part, box)))
    for pairs in found.values():
        sums = torch.stack([each for _, each in pairs]).tolist()  # waits for the device once
        for (factors, _), each in zip(pairs, sums, strict=True):
            totals = [total + factor * value for total, factor, value in zip(totals, factors, each, strict=True)]
    signed = [(total + 2**63) % 2**64 - 2**63 for total in totals]
    total = group.all_reduce(torch.tensor(signed, dtype=torch.int64)).tolist()
    return "".join(f"{value % 2**64:016x}" for value in total)


def _refuse_partials(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, ShardedTensor) and tensor._layout.partial:
            raise RuleError(
                "a fingerprint takes no tensor that is still to be reduced",
                {"tensor": name, "spec": str(tensor.sharding_spec())},
                "reduce it first: st.reshard(tensor, spec) with a spec that is not partial",
            )


def _is_first(tensor: Tensor, group: Group) -> bool:
    """Whether this rank is the one that counts what a tensor has once, not for each element."""
    return group.rank == tensor._layout.ranks[0] if isinstance(tensor, ShardedTensor) else group.index == 0


def _parts(tensor: Tensor, group: Group) -> Iterator[tuple[Tensor, Box]]:
    """Yield the boxes that this rank counts, with their elements."""
    if not isinstance(tensor, ShardedTensor):
        if group.index == 0 and tensor.numel():
            yield tensor.detach(), whole(tuple(tensor.shape))
        return
    layout, rank, local = tensor._layout, tensor._group.rank, tensor._local.detach()
    is_counted = layout.holds_first_copy(rank) if layout.shape else rank in holders(layout, whole(()))
    if is_counted:
        for box, place in zip(layout.boxes(rank), layout.local_boxes(rank), strict=True):
            if box.numel:
                part = local[place.slices]
                yield (part.view(box.sizes) if layout.packed else part), box


def _sum(part: Tensor, box: Box) -> Tensor:
    """Return the sum of both lanes over a box of a tensor."""
    if part.is_complex():
        part, box = torch.view_as_real(part.resolve_conj()), Box((*box.offsets, 0), (*box.sizes, 2))
    if not box.sizes:
        part, box = part.view(1), Box((0,), (1,))
    bits = part.resolve_neg().view(_INTEGERS[part.element_size()])
    most = _CHUNK.get(part.device.type, _CHUNK_ELSEWHERE)
    total = torch.zeros(_LANES, dtype=torch.int64, device=part.device)
    memory = torch.empty(_LANES * min(most, bits.numel()), dtype=torch.int64, device=part.device)
    for chunk, offsets in _chunks(bits, box.offsets, most):
        total += _chunk_sum(chunk, offsets, memory[: _LANES * chunk.numel()].view(_LANES, -1))
    return total


def _chunks(bits: Tensor, offsets: tuple[int, ...], most: int) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield boxes of at most so many elements, with their offsets: a box is cut along its first dim that can be cut."""
    if bits.numel() <= most:
        yield bits, offsets
        return
    dim = next(dim for dim, size in enumerate(bits.shape) if size > 1)
    step = max(1, most * bits.shape[dim] // bits.numel())
    for start in range(0, bits.shape[dim], step):
        part = bits.narrow(dim, start, min(step, bits.shape[dim] - start))
        yield from _chunks(part, (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]), most)


def _chunk_sum(bits: Tensor, offsets: tuple[int, ...], lanes: Tensor) -> Tensor:
    """Return the sum of both lanes over a box of integers; overwrites `lanes`."""
    first, second = lanes
    first.view(bits.shape).copy_(bits)
    if bits.dtype == torch.int64:
        _fold(first)
    _fold(first.mul_(_SPREAD))
    torch.bitwise_right_shift(first, 29, out=second)
    second ^= first  # so that two values with equal low bits in one lane differ in the low bits of the other
    weights = [
        _weights(dim, start, start + size, bits.device)
        for dim, (start, size) in enumerate(zip(offsets, bits.shape, strict=True))
    ]
    while len(weights) > 1 and weights[-1].shape[1] < _ROW:
        last = weights.pop()
        weights[-1] = _outer(weights[-1], last)
    for each in reversed(weights):
        lanes = lanes.view(_LANES, -1, each.shape[1]).mul_(each[:, None]).sum(2)
    return lanes[:, 0]


def _fold(words: Tensor) -> None:
    """Add, without carry, the high half of each word to its low half: a product spreads bits only upwards."""
    low, high = words.view(torch.int32).view(-1, 2).unbind(1)
    low ^= high


def _weights(dim: int, start: int, stop: int, device: torch.device, level: int = 0) -> Tensor:
    """Return the weights, in each lane, of a range of the indices of a dim, divided by 1024 `level` times."""
    table = _table(dim, level, device)
    if stop <= _BASE:
        return table[:, start:stop]
    first = start // _BASE
    higher = _weights(dim, first, (stop - 1) // _BASE + 1, device, level + 1)
    return _outer(higher, table)[:, start - first * _BASE : stop - first * _BASE]


def _outer(major: Tensor, minor: Tensor) -> Tensor:
    """Return all products of two vectors in each lane, those of the first element first."""
    return (major[:, :, None] * minor[:, None]).flatten(1)


@lru_cache(maxsize=256)
def _table(dim: int, level: int, device: torch.device) -> Tensor:
    """Return the weights of a digit, in each lane: random odd numbers. A leading zero has weight 1."""
    data = hashlib.shake_128(f"{dim} {level}".encode()).digest(8 * _LANES * _BASE)
    table = torch.frombuffer(bytearray(data), dtype=torch.int64).view(_LANES, _BASE) | 1
    if level:
        table[:, 0] = 1
    return table.to(device)
