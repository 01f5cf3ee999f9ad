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
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardtensor.checkpoint.contents import collect
from shardtensor.checkpoint.items import Item, parts_of
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.layout.box import Box

_LANES = 2
_BASE = 1024  # the number of weights of a table
_ROW = 512  # products over vectors shorter than this are slow
_SPREAD = 0x9E3779B97F4A7C15 - 2**64  # odd, as int64
_CHUNK = {"cpu": 1 << 18}  # elements: their 64-bit products stay in the caches of a core
_CHUNK_ELSEWHERE = 1 << 21
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model: Any = None, optimizer: Any = None, *, key: str = "", process_group: Any = None) -> str:
    """Return a checksum of the tensors of a model and of an optimizer's state, equal under every layout.

    It is 128 bits as hex text. It does not depend on how the tensors are sharded, on the number of ranks, on the
    order of names or on the device; a change of one bit, a name, a shape or a dtype changes it. All ranks of the group
    call it: one all-reduce of two numbers is sent. No tensor is gathered; at most a few million elements are copied.

    Args:
        model, optimizer: as for `save`.
        key: a different key gives a different checksum of the same tensors.
        process_group: the ranks that hold the tensors, by default all.

    Raises:
        CheckpointError: a tensor is partial, or of a kind that a checkpoint does not hold.

    Example:
        >>> import torch, shardtensor as st
        >>> model = torch.nn.Linear(4, 2)
        >>> before = st.fingerprint(model)
        >>> st.shard_parameter(model, "weight", "[tp, -]")
        >>> st.fingerprint(model) == before
        True
    """
    group = as_group(process_group)
    made = collect(group, "fingerprint", model=model, optimizer=optimizer, rng=False)
    return fingerprints({"": made.items.values()}, group, key)[""]


@torch.no_grad()
def fingerprints(sections: Mapping[str, Iterable[Item]], group: Group, key: str = "") -> dict[str, str]:
    """Return the checksum of the tensors of each section, the same on all ranks of `group`; all call this."""
    totals = [0] * (_LANES * len(sections))
    found: dict[torch.device, list[tuple[int, list[int], Tensor]]] = {}
    for place, items in enumerate(sections.values()):
        for item in items:
            about = repr((key, item.name, str(item.local.dtype), item.shape))
            digest = hashlib.blake2b(about.encode(), digest_size=16 * _LANES).digest()
            numbers: tuple[int, ...] = struct.unpack(f"<{2 * _LANES}Q", digest)
            if group.rank == item.layout.ranks[0]:  # so that names of tensors without elements count, too
                for lane, number in enumerate(numbers[_LANES:]):
                    totals[_LANES * place + lane] += number
            factors = [number | 1 for number in numbers[:_LANES]]
            if item.layout.holds_first_copy(group.rank):
                for box, part in parts_of(item.local, item.layout, group.rank):
                    if box.numel:
                        found.setdefault(part.device, []).append((place, factors, _sum(part, box)))
    for each in found.values():
        sums = torch.stack([lanes for _, _, lanes in each]).tolist()  # waits for the device once
        for (place, factors, _), lanes in zip(each, sums, strict=True):
            for lane, (factor, value) in enumerate(zip(factors, lanes, strict=True)):
                totals[_LANES * place + lane] += factor * value
    signed = [(total + 2**63) % 2**64 - 2**63 for total in totals]
    reduced = [value % 2**64 for value in group.all_reduce(torch.tensor(signed, dtype=torch.int64)).tolist()]
    texts = ["".join(f"{value:016x}" for value in reduced[i : i + _LANES]) for i in range(0, len(reduced), _LANES)]
    return dict(zip(sections, texts, strict=True))


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
