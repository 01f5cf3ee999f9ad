"""What a backend takes goes as it is; the rest is brought into that form and back, without a loss."""

from __future__ import annotations

import pytest
import torch

from shardtensor.comm.backend_support import BackendSupport

MOVED = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
BACKENDS = {
    # of torch's description, and whether there is CUDA: backends, where other tensors go, whether it averages
    ("cpu:gloo", False): ({"cpu": "gloo"}, "cpu", False),
    ("cpu:gloo,cuda:gloo", True): ({"cpu": "gloo"}, "cpu", False),
    ("cpu:gloo,cuda:nccl", True): ({"cpu": "gloo", "cuda": "nccl"}, "cuda", False),
    ("cpu:gloo,cuda:nccl", False): ({"cpu": "gloo", "cuda": "nccl"}, "cpu", False),
    ("cuda:nccl", False): ({"cuda": "nccl"}, "cuda", True),
    ("cuda:nccl", True): ({"cuda": "nccl"}, "cuda", True),
    ("cpu:fake,cuda:fake,xpu:fake", True): ({"cpu": "fake", "cuda": "fake"}, "cuda", True),
    ("cpu:mpi", False): ({"cpu": "mpi"}, "cpu", False),
    ("cpu:gloo,xpu:xccl", False): ({"cpu": "gloo"}, "cpu", False),
}


@pytest.mark.parametrize(("config", "has_cuda"), BACKENDS)
def test_backends_are_read_from_torchs_description(monkeypatch, config, has_cuda):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    backends, device_type, averages = BACKENDS[config, has_cuda]
    wire = BackendSupport.of_backends(config, None)
    assert wire.backends == backends and wire.device_type == device_type and wire.bound_device is None
    assert wire.ops == {"sum", "max", "min", "prod"} | ({"avg"} if averages else set())
    assert {is_cuda for is_cuda, _ in wire.moved_as_is} == {kind == "cuda" for kind in backends}
    for is_cuda in {kind == "cuda" for kind in backends}:
        assert (is_cuda, torch.bool) in wire.moved_as_is and (is_cuda, torch.bool, "sum") not in wire.reduced_as_is
        assert (is_cuda, torch.int64, "max") in wire.reduced_as_is and (is_cuda, torch.int16) not in wire.moved_as_is
        assert (is_cuda, torch.int64, "avg") not in wire.reduced_as_is
        assert ((is_cuda, torch.float32, "avg") in wire.reduced_as_is) == averages


def as_bytes(t: torch.Tensor) -> list[int]:
    return t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()


def forms(dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of any strides, one and no elements among them, and lazy conjugates."""
    x = (torch.arange(12) % 5).to(dtype)
    found = [
        x,
        x.view(3, 4).t(),
        x[::2],
        x[:1],
        x[3:4].view(()),
        x[:0],
        x.view(3, 4)[:, 1],
        x[1:2].as_strided((1,), (3,)),
    ]
    if dtype.is_complex:
        y = torch.complex(x.real, x.real + 1)
        found += [y.conj(), y.conj().imag, y.view(3, 4).mH]
    return found


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_there_and_back_nothing_is_lost(dtype):
    wire = BackendSupport.of_backends("cpu:gloo", None)
    for x in forms(dtype):
        plain = x.resolve_conj().resolve_neg().contiguous().view(-1)
        sent = wire.to_move(x)
        assert sent.dim() == 1 and sent.is_contiguous() and (False, sent.dtype) in wire.moved_as_is
        assert sent.numel() == x.numel() * wire.elements_per_item(x.dtype)
        back = wire.from_move(sent, x)
        assert back.dtype == x.dtype and back.shape == plain.shape
        assert as_bytes(back) == as_bytes(plain)
        sent = wire.to_reduce(x)
        assert sent.dim() == 1 and sent.is_contiguous() and (False, sent.dtype, "sum") in wire.reduced_as_is
        back = wire.from_reduce(sent, x)
        assert back.dtype == x.dtype and as_bytes(back) == as_bytes(plain)
        assert not sent.requires_grad


def test_what_is_added_up_has_room():
    wire = BackendSupport.of_backends("cpu:gloo", None)
    for dtype in MOVED:
        ones = torch.ones(2).to(dtype)
        sent = wire.to_reduce(ones)
        info = torch.finfo(sent.dtype) if sent.is_floating_point() else torch.iinfo(sent.dtype)
        own = torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else None
        assert dtype == torch.bool or info.max >= (own.max if own else 1)
        assert dtype != torch.bool or sent.tolist() == [1, 1]
    for dtype, wide in ((torch.int16, torch.int32), (torch.uint16, torch.int32), (torch.uint32, torch.int64)):
        assert wire.to_reduce(torch.ones(1).to(dtype)).dtype == wide
    assert wire.to_reduce(torch.ones(1).to(torch.float8_e4m3fn)).dtype == torch.float32


def test_other_devices_go_where_the_backend_moves():
    meta = torch.ones(3, device="meta")
    wire = BackendSupport.of_backends("cuda:nccl", torch.device("meta", 0))
    assert wire._device(torch.ones(1)) == torch.device("meta", 0), "the one device of the group"
    assert BackendSupport.of_backends("cuda:nccl", None)._device(torch.ones(1)) == torch.device("cuda")
    assert BackendSupport.of_backends("cpu:gloo", None)._device(meta) == torch.device("cpu")
    assert BackendSupport.of_backends("cpu:gloo", None)._device(torch.ones(1)) == torch.device("cpu")
    assert wire.to_move(torch.ones(2)).device.type == "meta" and wire.to_reduce(torch.ones(2)).device.type == "meta"
    plain = BackendSupport.of_backends("cpu:gloo", None)
    assert (
        plain.from_move(torch.ones(3), meta).device.type == plain.from_reduce(torch.ones(3), meta).device.type == "meta"
    )
