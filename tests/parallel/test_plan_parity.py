"""A module done by a plan computes what the dense one computes: loss, every gradient, parameters after steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from family_plans import FAMILIES, STORED, plan_for
from harness import FULL, device

import shardtensor as st
from shardtensor.comm.process_group import as_group

both = pytest.mark.worlds("sim", "gloo")
sim = pytest.mark.worlds("sim")


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, st.ShardedTensor) else value


def oracle_dtype(batch: torch.Tensor) -> torch.dtype:
    return torch.float64 if batch.is_floating_point() else batch.dtype


def local_elements(p: torch.Tensor) -> int:
    return sum(s.tensor.numel() for s in p.local_shards()) if isinstance(p, st.ShardedTensor) else p.numel()


def same(module: torch.nn.Module, oracle: torch.nn.Module, grads: bool) -> None:
    found = dict(module.named_parameters())
    assert list(found) == [name for name, _ in oracle.named_parameters()]
    for name, want in oracle.named_parameters():
        got, want = (found[name].grad, want.grad) if grads else (found[name], want)
        assert (got is None) == (want is None), name
        if want is not None:
            got = whole(got).detach()
            torch.testing.assert_close(got, want.detach(), rtol=1e-9, atol=1e-10, msg=lambda t, n=name: f"{n}: {t}")


def trains(plan: str, family: str, params: dict[str, Any], steps: int = 2) -> int:
    world, (rank, each) = as_group(), (as_group().rank, FAMILIES[family])
    torch.manual_seed(0)
    oracle = each.make().double().to(device())
    module = copy.deepcopy(oracle)
    told = plan_for(plan, family, world.size, **params)
    st.shard_module(module, told)
    mesh = told.axes.mesh
    data = [i for i, name in enumerate(mesh.names) if name in told.axes.leaves(told.axes.data)]
    samples = mesh.ranks_along(rank, data)
    ways = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (oracle, module)]
    for step in range(steps):
        batch = each.batch(2 * len(samples), torch.Generator().manual_seed(step))
        batch = batch.to(device(), oracle_dtype(batch))
        want = each.loss(oracle, batch)
        got = each.loss(module, batch.chunk(len(samples))[samples.index(rank)])
        want.backward()
        got.backward()
        mean = world.all_reduce(whole(got.detach()).clone(), "avg")
        torch.testing.assert_close(mean, want.detach(), rtol=1e-9, atol=1e-10)
        same(module, oracle, grads=True)
        for way in ways:
            way.step()
            way.zero_grad()
    same(module, oracle, grads=False)
    held = sum(map(local_elements, module.parameters()))
    batch = each.batch(2, torch.Generator().manual_seed(9)).to(device(), batch.dtype)
    st.unshard_module(module)
    assert not [p for p in module.parameters() if isinstance(p, st.ShardedTensor)]
    same(module, oracle, grads=False)
    torch.testing.assert_close(each.loss(module, batch).detach(), each.loss(oracle, batch).detach())
    return held


CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("mlp", "mlp", 4, {}),
    ("llama", "llama", 4, {"tp": 4}),
    ("llama", "llama", 4, {"tp": 4, "sp": True}),
    ("llama", "llama_tied", 4, {"tp": 2}),
    ("llama_2d", "llama_tied", 4, {"tp": 2}),
    ("gpt2", "gpt2", 4, {}),
    ("bert", "bert", 4, {}),
    ("t5", "t5", 4, {}),
    ("vit", "vit", 4, {}),
    ("mixtral", "mixtral", 4, {"tp": 2, "ep": 2}),
    ("mixtral", "mixtral_stacked", 4, {"tp": 2, "ep": 2}),
    ("vocab", "vocab", 4, {}),
    ("uneven", "uneven", 4, {}),
    ("fsdp", "llama", 4, {"copies": 2, "grain": 4}),
]

MORE: list[tuple[str, str, int, dict[str, Any]]] = [
    *(("mlp", "mlp", n, {}) for n in (1, 2)),
    *(("llama", "llama", n, {"tp": tp, "sp": n > 1}) for n, tp in ((1, 1), (2, 2), (2, 1), (4, 1))),
    ("llama", "llama_tied", 4, {"tp": 4, "sp": True}),
    ("llama_2d", "llama_tied", 4, {"tp": 4}),
    ("llama_2d", "llama_tied", 2, {"tp": 1}),
    *((name, name, n, {}) for name in ("gpt2", "bert", "t5", "vit", "vocab") for n in (1, 2)),
    ("bert", "bert_two_heads", 4, {}),
    *(("mixtral", "mixtral", 4, {"tp": tp, "ep": ep}) for tp, ep in ((1, 4), (1, 2), (2, 1))),
    *(("mixtral", "mixtral_stacked", 4, {"tp": tp, "ep": ep}) for tp, ep in ((1, 4), (1, 2), (2, 1))),
    *(("fsdp", f, n, {}) for f in ("llama_tied", "gpt2", "bert", "t5", "vit", "mixtral_stacked") for n in (2, 4)),
]


"""Heads of no equal number for two ranks, one of which has nothing of the MLP."""


@both
@pytest.mark.parametrize("text", [STORED, STORED.replace("flat(dp)", "flat(dp, unit=row)")], ids=["anywhere", "rows"])
def test_parts_of_different_sizes_are_stored(world, text):
    world(trains, 4, plan=text, family="uneven", params={})


@both
@pytest.mark.parametrize(("plan", "family", "size", "params"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_a_plan_gives_the_dense_results(world, plan, family, size, params):
    world(trains, size, plan=plan, family=family, params=params)


@sim
@pytest.mark.skipif(not FULL, reason="SHARDTENSOR_TEST_FULL=1 tries more worlds")
@pytest.mark.parametrize(("plan", "family", "size", "params"), MORE, ids=lambda value: str(value).replace(" ", ""))
def test_other_worlds_do_so_too(world, plan, family, size, params):
    world(trains, size, plan=plan, family=family, params=params)
