"""Errors of sharded tensors: making, reading, writing them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

import shardtensor as st
from fixes.case import Case, blocked, linear, on_cpu, partials, placed, rank, weight
from shardtensor.comm.process_group import as_group

CASES: dict[str, Case] = {
    "an array": Case(
        lambda: weight().__array__(),
        {
            "full_tensor().numpy() for the whole": lambda: weight().full_tensor().numpy(),
            "local_tensor().numpy() for this rank's part": lambda: weight().local_tensor().numpy(),
        },
    ),
    "a group without ranks that hold shards": Case(
        lambda: weight().cpu(process_group=as_group().subgroup([rank()])),
        {
            "pass a group of all ranks that hold the tensor": lambda: weight().cpu(
                process_group=as_group().subgroup([0, 1])
            )
        },
        differs=True,
    ),
    "a write into a copy": Case(
        lambda: weight("[-, tp]").view(6, 4).add_(1),
        {
            "write into the source: source[...] = value": lambda: weight("[-, tp]").__setitem__(..., 1),
            "clone() first where the source shall stay as it is": lambda: weight("[-, tp]").view(6, 4).clone().add_(1),
        },
    ),
    "a copy of what was written since": Case(
        lambda: written_since(lambda x: x.view(6, 4)),
        {
            "read it again after the write": lambda: weight("[-, tp]").mul_(2).view(6, 4) + 1,
            "clone() it before the write": lambda: written_since(lambda x: x.view(6, 4).clone()),
        },
    ),
    "a copy of another layout": Case(
        lambda: weight("[-, tp]").view(6, 4).reshard("replicate"),
        {
            "shardtensor.reshard(tensor, spec) makes a new tensor": lambda: st.reshard(
                weight("[-, tp]").view(6, 4), "replicate"
            )
        },
    ),
    "another shape by out=": Case(
        lambda: torch.special.airy_ai(weight(), out=weight(rows=2)),
        {"use the form that returns a new tensor": lambda: torch.special.airy_ai(weight())},
    ),
    "a gather into another dtype": Case(
        lambda: weight().gather(0, [torch.empty(4, 6).double(), None][rank()]),
        {
            "pass enforce_dtype=True to convert": lambda: weight().gather(
                0, [torch.empty(4, 6).double(), None][rank()], enforce_dtype=True
            )
        },
    ),
    "the gradient of averages": Case(
        lambda: averages().grad,
        {
            "reduce the tensor first": lambda: [
                (x := st.reshard(averages(), "[tp, -]")),
                x.retain_grad(),
                x.sum().backward(),
                x.grad.full_tensor(),
            ]
        },
    ),
    "a partial maximum that is joined": Case(
        lambda: st.init_from_local_tensor(torch.ones(4).requires_grad_(), "[-] partial(tp, op=max)", 4).full_tensor(),
        {
            "reduce it under torch.no_grad()": lambda: torch.no_grad()(
                st.init_from_local_tensor(torch.ones(4).requires_grad_(), "[-] partial(tp, op=max)", 4).full_tensor
            )()
        },
    ),
    "a pickle of what no spec says": Case(
        lambda: pickle.dumps(squares().t()),
        {
            "pickle a leaf made from a spec, or full_tensor()": lambda: [
                pickle.loads(pickle.dumps(squares())),
                pickle.loads(pickle.dumps(squares().t().full_tensor())),
            ]
        },
        mesh=4,
    ),
    "a sum over some axes of a tensor on some ranks": Case(
        lambda: squares().sum(0),
        {
            "make the tensor on a process group of the ranks that hold it": lambda: (
                rank() < 4 and squares(as_group().subgroup([0, 1, 2, 3])).sum(0)
            )
        },
        mesh=6,
    ),
    "a new partial tensor": Case(
        lambda: st.zeros("[-, -] partial(tp)", 4, 6),
        {"make it whole, or use init_from_local_tensor": lambda: [st.zeros("[-, -]", 4, 6), partials()]},
    ),
    "an array of numpy": Case(
        lambda: weight().numpy(),
        {
            "local_tensor() or local_shards()": lambda: [weight().local_tensor().numpy(), weight().local_shards()],
            "full_tensor()": lambda: weight().full_tensor().numpy(),
            "shardtensor.full_state_dict(model)": lambda: st.full_state_dict(linear())["0.weight"].numpy(),
        },
    ),
    "the memory of the whole": Case(
        lambda: weight().untyped_storage(),
        {
            "local_tensor() or local_shards()": lambda: weight().local_tensor().untyped_storage(),
            "full_tensor()": lambda: weight().full_tensor().untyped_storage(),
            "shardtensor.full_state_dict(model)": lambda: st.full_state_dict(linear())["0.weight"].untyped_storage(),
        },
    ),
    "several shards": Case(
        lambda: blocked().local_tensor(),
        {"local_shards() returns all of them, each with its tensor": lambda: blocked().local_shards()[1].tensor},
        differs=True,
    ),
    "data of a plain tensor": Case(
        lambda: setattr(weight(), "data", torch.zeros(4, 6)),
        {
            "use copy_(tensor), under no_grad, to take its values, or distribute(tensor, spec) first": lambda: [
                torch.no_grad()(weight().copy_)(torch.zeros(4, 6)),
                setattr(weight(), "data", st.distribute(torch.zeros(4, 6), "[tp, -]")),
            ]
        },
    ),
    "data of another layout": Case(
        lambda: setattr(weight(), "data", weight("[-, tp]")),
        {"use copy_(tensor) to take its values": lambda: weight().copy_(weight("[-, tp]"))},
    ),
    "set_ to another layout": Case(
        lambda: weight().set_(weight("[-, tp]")), {"use copy_(source)": lambda: weight().copy_(weight("[-, tp]"))}
    ),
    "another shape in place": Case(lambda: weight().squeeze_(), {"use squeeze": lambda: weight().squeeze()}),
    "a gather with out on all ranks": Case(
        lambda: weight().gather(0, torch.empty(4, 6)),
        {"pass out=None on every rank but 0": lambda: weight().gather(0, [torch.empty(4, 6), None][as_group().rank])},
    ),
    "a gather without out": Case(
        lambda: weight().gather(0),
        {
            "pass out=torch.empty((4, 6)) there": lambda: weight().gather(
                0, [torch.empty((4, 6)), None][as_group().rank]
            )
        },
    ),
    "a gather into another shape": Case(
        lambda: weight().gather(0, [torch.empty(6, 4), None][as_group().rank]),
        {
            "pass a tensor of the global shape": lambda: weight().gather(0, [torch.empty(4, 6), None][as_group().rank]),
            "torch.gather(tensor, dim, index)": lambda: torch.gather(weight(), 1, torch.zeros(4, 1, dtype=torch.int64)),
        },
    ),
    "in place on partial sums": Case(
        lambda: partials().add_(1),
        {"reduce it first: x = distribute(x, spec)": lambda: st.distribute(partials(), "replicate").add_(1)},
    ),
    "a checkpoint of partial sums": Case(
        lambda: partials().__create_chunk_list__(),
        {
            "reduce it first: st.reshard(tensor, spec)": lambda: st.reshard(
                partials(), "[tp, -]"
            ).__create_chunk_list__()
        },
    ),
    "shards of other sizes": Case(
        lambda: st.Shard(torch.ones(2), st.ShardMetadata([0], [3], "rank:0/cpu")),
        {"give the metadata the sizes of the tensor": lambda: st.Shard(torch.ones(3), placed(0, 3)[0])},
    ),
    "no global size": Case(
        lambda: st.init_from_local_shards([]),
        {
            "pass it after the shards, or None for the dim along which they add up": lambda: [
                st.init_from_local_shards([st.Shard(torch.ones(3), placed(0, 3)[as_group().rank])], size)
                for size in (6, None)
            ]
        },
    ),
    "a local tensor of another size": Case(
        lambda: st.init_from_local_tensor(torch.ones(3 - as_group().rank), "[tp]", 6),
        {
            "pass the true global size, or a spec with sizes(...)": lambda: [
                st.init_from_local_tensor(torch.ones(3), "[tp]", 6),
                st.init_from_local_tensor(torch.ones(3 - as_group().rank), "[tp sizes(3, 2)]", 5),
            ]
        },
        differs=True,
    ),
    "a local tensor that is not contiguous": Case(
        lambda: st.init_from_local_tensor(torch.ones(6, 2).t(), "[tp, -]", (4, 6)),
        {
            "call contiguous() first": lambda: st.init_from_local_tensor(
                torch.ones(6, 2).t().contiguous(), "[tp, -]", (4, 6)
            )
        },
    ),
}


def squares(group: Any = None) -> st.ShardedTensor:
    return st.ones(st.GridShardingSpec([2, 2], on_cpu(0, 1, 2, 3)), 4, 4, process_group=group)


def averages() -> st.ShardedTensor:
    x = st.init_from_local_tensor(torch.ones(4, 6).requires_grad_(), "[-, -] partial(tp, avg)", (4, 6))
    x.full_tensor().sum().backward()
    return x


def gradient_of(x: st.ShardedTensor) -> torch.Tensor:
    x.retain_grad()
    x.sum().backward()
    return x.grad.full_tensor()


def written_since(read: Callable[[st.ShardedTensor], torch.Tensor]) -> torch.Tensor:
    x = weight("[-, tp]")
    before = read(x)
    x.mul_(2)
    return before + 1
