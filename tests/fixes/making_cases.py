"""Errors of tensors that are made of what the ranks bring."""

from __future__ import annotations

from typing import Any

import torch
from shardtensor.sharded_tensor import ShardedTensorMetadata, TensorProperties
from torch.distributed import rpc

import shardtensor as st
from fixes.case import Act, Case, alone, on_cpu, rank
from shardtensor import sharded_tensor
from shardtensor.compat.rrefs import check
from shardtensor.tensor.from_metadata import from_local_shards_and_global_metadata


def piece(values: torch.Tensor | None = None, start: int | None = None, placement: Any = ...) -> st.Shard:
    """A shard of this rank; three ones, unless told otherwise."""
    values = torch.ones(3) if values is None else values
    start = 3 * rank() if start is None else start
    placement = on_cpu(rank())[0] if placement is ... else placement
    return st.Shard(values, st.ShardMetadata([start], list(values.shape), placement))


def joined(*shards: st.Shard, size: Any = 6) -> st.ShardedTensor:
    return st.init_from_local_shards(list(shards), *(size if isinstance(size, tuple) else (size,)))


def on_first(wrong: Any, right: Any) -> Any:
    return wrong if rank() == 0 else right


def local(values: Any, spec: Any = "[tp]", *size: int) -> st.ShardedTensor:
    return st.init_from_local_tensor(values, spec, *size)


def described(shards: list[st.Shard], placements: list[Any] | None = None, boxes: int = 2) -> st.ShardedTensor:
    """Made with metadata that all ranks trust."""
    places = on_cpu(0, 1) if placements is None else placements
    metadata = [st.ShardMetadata([3 * i], [3], place) for i, place in enumerate(places)][:boxes]
    properties = TensorProperties(dtype=torch.float32)
    return from_local_shards_and_global_metadata(shards, ShardedTensorMetadata(metadata, torch.Size([6]), properties))


def in_rpc(act: Act) -> Any:
    """Run in a process group and an RPC world of this process alone."""

    def started() -> Any:
        import tempfile

        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=2, init_method=f"file://{tempfile.mkdtemp()}/store"
        )
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
        try:
            return act()
        finally:
            rpc.shutdown()

    return alone(started)


def by_name(worker: str) -> st.ShardedTensor:
    return st.zeros(st.ChunkShardingSpec(0, [f"{worker}/cpu"]), 6)


CASES: dict[str, Case] = {
    "shards of two dtypes": Case(
        lambda: joined(
            piece(torch.ones(1)), piece(torch.ones(2, dtype=on_first(torch.int64, torch.float32)), 1 + 3 * rank())
        ),
        {"convert them to one": lambda: joined(piece(torch.ones(1)), piece(torch.ones(2), 1 + 3 * rank()))},
    ),
    "a sparse shard": Case(
        lambda: joined(piece(on_first(torch.ones(3).to_sparse(), torch.ones(3)))),
        {"call to_dense() first": lambda: joined(piece(torch.ones(3).to_sparse().to_dense()))},
    ),
    "a shard with gaps": Case(
        lambda: joined(piece(on_first(torch.ones(6)[::2], torch.ones(3)))),
        {"call contiguous() first": lambda: joined(piece(torch.ones(6)[::2].contiguous()))},
    ),
    "a shard of another rank": Case(
        lambda: joined(piece(placement=on_cpu(1)[0])),
        {"name this rank in the placement of its shards": lambda: joined(piece(placement=on_cpu(rank())[0]))},
    ),
    "a shard on another device": Case(
        lambda: piece(torch.ones(3, device="meta")),
        {
            "move the tensor, or name its device in the placement": lambda: [
                joined(piece(torch.ones(3, device="cpu"))),
                piece(torch.ones(3, device="meta"), placement=f"rank:{rank()}/meta"),
            ]
        },
        differs=True,
    ),
    "no shards on any rank": Case(
        lambda: joined(),
        {"pass at least one shard": lambda: joined(*on_first([piece(torch.ones(6))], []))},
    ),
    "global sizes that differ": Case(
        lambda: joined(piece(), size=on_first(6, 7)),
        {"pass the same on every rank; nothing was made on any rank": lambda: joined(piece(), size=6)},
    ),
    "a global size of other dims": Case(
        lambda: joined(piece(), size=(None, 6)),
        {"give one number or None for each dim of the shards": lambda: [joined(piece(), size=n) for n in (6, None)]},
    ),
    "a local part that is no tensor": Case(
        lambda: local([1.0, 1.0]), {"pass this rank's part as a tensor": lambda: local(torch.tensor([1.0, 1.0]))}
    ),
    "a local part on another device": Case(
        lambda: local(torch.ones(3), st.ChunkShardingSpec(0, ["rank:0/meta", "rank:1/cpu"]), 6),
        {
            "move the tensor, or name its device in the spec": lambda: [
                local(torch.ones(3, device="meta"), st.ChunkShardingSpec(0, ["rank:0/meta", "rank:1/meta"]), 6),
                local(torch.ones(3), st.ChunkShardingSpec(0, on_cpu(0, 1)), 6),
            ]
        },
        differs=True,
    ),
    "parts that no size fits": Case(
        lambda: local(torch.ones(3 - 2 * rank())),
        {
            "pass the global size after the spec; or sizes(...) in the spec where the parts are uneven": lambda: [
                local(torch.ones(12), "[-, -] flat(tp)", 4, 6),
                local(torch.ones(3 - 2 * rank()), "[tp sizes(3, 1)]"),
            ]
        },
    ),
    "a negative size": Case(
        lambda: local(torch.ones(3), "[tp]", -6),
        {"give the number of elements of each dim": lambda: local(torch.ones(3), "[tp]", 6)},
    ),
    "metadata of no shards": Case(
        lambda: described([piece()], boxes=0), {"list every shard": lambda: described([piece()], boxes=2)}
    ),
    "shards that the metadata lacks": Case(
        lambda: described([]),
        {"pass the shards that the metadata gives this rank": lambda: described([piece()])},
        differs=True,
    ),
    "a described shard with gaps": Case(
        lambda: described([piece(torch.ones(6)[::2])]),
        {"call contiguous() first": lambda: described([piece(torch.ones(6)[::2].contiguous())])},
    ),
    "metadata without a placement": Case(
        lambda: described([piece()], [None, None]),
        {'give the shard a placement such as "rank:0/cpu"': lambda: described([piece()], ["rank:0/cpu", "rank:1/cpu"])},
    ),
    "metadata without a rank": Case(
        lambda: described([piece()], ["cpu", "cpu"]),
        {'write it as in "rank:0/cpu"': lambda: described([piece()], ["rank:0/cpu", "rank:1/cpu"])},
    ),
    "a worker without RPC": Case(
        lambda: alone(lambda: by_name("worker0")),
        {
            "call torch.distributed.rpc.init_rpc first": lambda: in_rpc(lambda: by_name("worker0")),
            'name the rank instead, as in "rank:0/cpu"': lambda: alone(lambda: by_name("rank:0")),
        },
        mesh="",
    ),
    "a worker that is not there": Case(
        lambda: in_rpc(lambda: by_name("worker7")),
        {"use a name that a rank gave to init_rpc": lambda: in_rpc(lambda: by_name("worker0"))},
        mesh="",
    ),
    "shards shown without RPC": Case(
        lambda: alone(lambda: sharded_tensor.zeros("[tp]", 6, init_rrefs=True)),
        {
            "call init_rpc on every rank": lambda: in_rpc(
                lambda: sharded_tensor.zeros("[tp]", 6, init_rrefs=True).remote_shards()
            ),
            "leave init_rrefs out: full_tensor() and gather() need no RPC": lambda: alone(
                lambda: [st.zeros("[tp]", 6).full_tensor(), st.zeros("[tp]", 6).gather(0, torch.empty(6))]
            ),
        },
        mesh="",
    ),
    "another rank in RPC": Case(
        lambda: check({0: 1, 1: 0}),
        {"pass init_rpc the rank that init_process_group has": lambda: check({0: 0, 1: 1})},
        mesh="",
    ),
    "shards that are not shown": Case(
        lambda: sharded_tensor.zeros("[tp]", 6).remote_shards(),
        {
            "metadata() has the ranks of all shards": lambda: st.zeros("[tp]", 6).metadata(),
            "full_tensor() or gather() copy them here": lambda: st.zeros("[tp]", 6).full_tensor(),
        },
    ),
    "a device that is not there": Case(
        lambda: st.zeros("[tp]", 6, device="cuda:99"),
        {
            "name a device that" if torch.cuda.is_available() else 'write device="cpu"': lambda: st.zeros(
                "[tp]", 6, device="cpu"
            )
        },
    ),
    "a device beside those of the spec": Case(
        lambda: st.zeros(st.ChunkShardingSpec(0, on_cpu(0, 1)), 6, device="cuda"),
        {
            "leave device= out, or write a spec of axes, as [tp, -]": lambda: [
                st.zeros(st.ChunkShardingSpec(0, on_cpu(0, 1)), 6),
                st.zeros("[tp, -]", 6, 4, device="cpu"),
            ]
        },
    ),
}
