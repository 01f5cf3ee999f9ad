"""Which tensors a backend supports, and the conversions for all others.

Gloo sends memory of the CPU and NCCL memory of CUDA devices; each supports a few dtypes. A collective that only moves
data sends other dtypes as bytes. One that reduces sends them widened to a dtype that can hold their sums.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from shardtensor.comm.group import REDUCTIONS

# What both gloo and NCCL reduce and move. Without bool: a sum of two Trues writes 2 into a bool.
_NATIVE = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
)
_WIDER = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


def dtype_of_sums(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of a dtype are summed."""
    is_native = dtype in _NATIVE or dtype.is_complex
    return dtype if is_native else _WIDER.get(dtype, torch.float32)  # the others are floats of 8 bits


@attrs.frozen
class BackendSupport:
    """Which tensors the backends of a group send as they are, and the conversions for all others.

    `reduced_as_is` are triples (is on cuda, dtype, op), `moved_as_is` pairs (is on cuda, dtype). Tensors of devices
    without a backend are copied to `device_type`, or the group's `bound_device`. Of `ops` only "avg" may be missing.
    """

    backends: dict[str, str]
    device_type: str
    bound_device: torch.device | None
    reduced_as_is: frozenset[tuple[bool, torch.dtype, str]]
    moved_as_is: frozenset[tuple[bool, torch.dtype]]
    ops: frozenset[str]

    @classmethod
    def of_backends(cls, config: str, bound_device: torch.device | None) -> BackendSupport:
        """Parse torch's description of a group's backends, such as ``cpu:gloo,cuda:nccl``."""
        named = dict(pair.split(":") for pair in config.split(","))
        # Gloo registers itself for cuda but implements few of the calls there.
        backends = {device: name for device, name in named.items() if (device, name) != ("cuda", "gloo")}
        backends = {device: name for device, name in backends.items() if device in ("cpu", "cuda")}
        on_cuda = "cuda" in backends and ("cpu" not in backends or torch.cuda.is_available())
        has_average = not {"gloo", "mpi"} & set(backends.values())
        ops = frozenset(REDUCTIONS if has_average else set(REDUCTIONS) - {"avg"})
        moved = frozenset((device == "cuda", dtype) for device in backends for dtype in (*_NATIVE, torch.bool))
        reduced = frozenset(
            (device == "cuda", dtype, op)
            for device in backends
            for dtype in _NATIVE
            for op in ops
            if op != "avg" or dtype.is_floating_point
        )
        return cls(
            backends=backends,
            device_type="cuda" if on_cuda else "cpu",
            bound_device=bound_device,
            reduced_as_is=reduced,
            moved_as_is=moved,
            ops=ops,
        )

    def _device(self, t: torch.Tensor) -> Any:
        if t.device.type in self.backends:
            return t.device
        return self.bound_device if self.bound_device is not None else torch.device(self.device_type)

    def to_move(self, t: torch.Tensor) -> torch.Tensor:
        """Return `t` flat, contiguous, on a supported device, as bytes if its dtype is not supported. May be a view."""
        if (t.is_cuda, t.dtype) in self.moved_as_is:
            return t.detach().contiguous().view(-1)
        flat = t.detach().to(self._device(t)).resolve_conj().resolve_neg().contiguous().view(-1)
        if (flat.is_cuda, flat.dtype) in self.moved_as_is:
            return flat
        if flat.stride(0) != 1:  # contiguous with any stride if it has at most one element, but `view` needs stride 1
            flat = flat.clone(memory_format=torch.contiguous_format)
        return flat.view(torch.uint8)

    def elements_per_item(self, dtype: torch.dtype) -> int:
        """Return how many elements `to_move` makes of one element."""
        return 1 if (self.device_type == "cuda", dtype) in self.moved_as_is else dtype.itemsize

    def from_move(self, sent: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Undo `to_move`: flat, with the dtype and device of `like`."""
        if sent.dtype != like.dtype:
            sent = sent.view(like.dtype)
        return sent if sent.device == like.device else sent.to(like.device)

    def to_reduce(self, t: torch.Tensor) -> torch.Tensor:
        """Return `t` flat, contiguous, on a supported device, in a dtype that the backend can sum. May be a view."""
        if (t.is_cuda, t.dtype, "sum") in self.reduced_as_is:
            return t.detach().contiguous().view(-1)
        if t.dtype.is_complex:
            flat = t.detach().to(self._device(t)).resolve_conj().contiguous().view(-1)
            return torch.view_as_real(flat).view(-1)
        return t.detach().to(self._device(t), dtype_of_sums(t.dtype)).contiguous().view(-1)

    def from_reduce(self, sent: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Undo `to_reduce`: flat, with the dtype and device of `like`."""
        if like.dtype.is_complex:
            sent = torch.view_as_complex(sent.view(-1, 2))
        # No `to` without a change: torch 2.11 compiles it to a result without a gradient.
        is_same = sent.dtype == like.dtype and sent.device == like.device
        return sent if is_same else sent.to(like.device, like.dtype)
