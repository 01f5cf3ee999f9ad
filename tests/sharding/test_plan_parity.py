"""A module done by a plan computes what the dense one computes: loss, every gradient, parameters after steps."""

from __future__ import annotations

import copy
from typing import Any

import family_plans
import pytest
import torch
from family_plans import FAMILIES
from harness import device

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


def trains(family: str, plan: str, options: dict[str, Any], steps: int = 2) -> int:
    world, (rank, each) = as_group(), (as_group().rank, FAMILIES[family])
    torch.manual_seed(0)
    oracle = each.make().double().to(device())
    module = copy.deepcopy(oracle)
    told = getattr(family_plans, plan)(world.size, **options)
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


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("mlp", "mlp", {}),
    ("llama", "llama", {}),
    ("llama", "llama", {"sp": True}),
    ("llama_bias", "llama", {"tp": 2, "tied": True}),
    ("gpt2", "gpt2", {}),
    ("bert", "bert", {}),
    ("t5", "t5", {}),
    ("vit", "vit", {}),
    ("vocab", "vocab", {}),
    ("uneven", "uneven", {}),
    ("mixtral", "mixtral_plan", {}),
    ("mixtral_stacked", "mixtral_plan", {}),
    ("llama", "fsdp", {}),
    ("llama", "fsdp", {"copies": 2, "grain": "row"}),
    ("llama_even", "llama", {"tp": 2, "sp": True, "tied": True, "store": "flat(dp) by model.layers.*"}),
]


@both
@pytest.mark.parametrize(("family", "plan", "options"), CASES)
def test_a_plan_gives_the_dense_results(world, family, plan, options):
    world(trains, 4, family=family, plan=plan, options=options)
