"""Clipping and loss scaling over fully sharded and plain parameters: each element once, one all-reduce, one verdict."""

from __future__ import annotations

import copy
import math
from collections import Counter

import pytest
import torch
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import fully_shard
from shardtensor.mesh import Mesh
from shardtensor.sim.simulate import SimGroup

NORMS = {"ours": st.clip_grad_norm_, "torch": torch.nn.utils.clip_grad_norm_}
VALUES = {"ours": st.clip_grad_value_, "torch": torch.nn.utils.clip_grad_value_}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.plain = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.plain(torch.relu(self.b(torch.relu(self.a(x)))))


def pair(is_hybrid=False):
    group = as_group()
    torch.manual_seed(0)
    dense = Net()
    model = copy.deepcopy(dense)
    mesh = group.on_mesh(Mesh((("rep", 2), ("dp", group.size // 2))), {}) if is_hybrid else None
    fully_shard(model.a, mesh=mesh)
    fully_shard(model.b, mesh=mesh)
    x = torch.randn(2 * group.size, 5, generator=torch.Generator().manual_seed(1))
    dense(x).pow(2).mean().backward()
    model(x[2 * group.index :][:2]).pow(2).mean().backward()
    for param in model.plain.parameters():
        group.all_reduce(param.grad)
        param.grad /= group.size
    return dense, model


def same_gradients(dense, model):
    for (name, p), q in zip(dense.named_parameters(), model.parameters(), strict=True):
        grad = q.grad.full_tensor() if isinstance(q, st.ShardedTensor) else q.grad
        torch.testing.assert_close(grad, p.grad, msg=lambda text, name=name: f"{name}: {text}")


def clipped(way, norm_type, is_hybrid):
    dense, model = pair(is_hybrid)
    want = torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.01, norm_type)
    got = NORMS[way](model.parameters(), 0.01, norm_type)
    torch.testing.assert_close(got, want)
    same_gradients(dense, model)
    torch.nn.utils.clip_grad_value_(dense.parameters(), 1e-4)
    VALUES[way](model.parameters(), 1e-4)
    same_gradients(dense, model)
    if as_group().index == 0:
        model.a.weight._local.grad[-1] = math.inf
    before = [q.grad.full_tensor() for q in (*model.a.parameters(), *model.b.parameters())]
    with pytest.raises(RuntimeError, match="non-finite"):
        NORMS[way](model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
    after = [q.grad.full_tensor() for q in (*model.a.parameters(), *model.b.parameters())]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("way", NORMS)
@pytest.mark.parametrize(("world", "is_hybrid"), [(1, False), (3, False), (4, True)])
def test_the_norm_of_the_dense_model(world, is_hybrid, way, norm_type):
    st.simulate(world, lambda: clipped(way, norm_type, is_hybrid))


@pytest.mark.parametrize("way", NORMS)
def test_one_all_reduce_and_nothing_else(way, monkeypatch):
    calls = Counter()
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "exchange"):
        original = getattr(SimGroup, name)

        def counted(self, *args, _name=name, _original=original, **kwargs):
            calls[_name] += 1
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(SimGroup, name, counted)

    def body():
        _, model = pair()
        as_group().barrier()
        before = Counter(calls) if as_group().index == 0 else None
        as_group().barrier()
        NORMS[way](model.parameters(), 0.01)
        as_group().barrier()
        return None if before is None else calls - before

    assert st.simulate(2, body)[0] == {"all_reduce": 2}  # by each of two ranks


def scaled(make):
    group = as_group()
    torch.manual_seed(0)
    model = Net()
    fully_shard(model.a)
    fully_shard(model)
    optimizer, scaler = make(model), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    seen = []
    for is_bad in (False, True, False, False):
        before = [param.full_tensor().clone() for param in model.parameters()]
        scaler.scale(model(torch.ones(2, 5)).pow(2).mean()).backward()
        if is_bad and group.index == group.size - 1:
            next(p for p in model.parameters() if p._local.numel())._local.grad[-1] = math.nan
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        is_same = all(torch.equal(x, p.full_tensor()) for x, p in zip(before, model.parameters(), strict=True))
        seen.append((is_same, scaler.get_scale()))
    return seen


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_nan_on_one_rank_skips_the_step_on_all(kind, is_fused):
    def make(model):
        if kind == "stock":
            return torch.optim.AdamW(model.parameters(), fused=is_fused)
        return st.ShardedOptimizer(model, torch.optim.AdamW, fused=is_fused)

    expected = [(False, 4.0), (True, 2.0), (False, 2.0), (False, 4.0)]
    assert st.simulate(3, lambda: scaled(make)) == [expected] * 3
