"""Dtypes: of parameters, computation, reductions, outputs; of the gradients that come and of those that stay."""

from __future__ import annotations

import copy

import pytest
import torch
from fsdp.twins import LOCAL, both_backward, ids_of, loss_of, same_gradients, twins
from harness import device
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from shardtensor.mesh import Mesh

sim = pytest.mark.worlds("sim")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class _Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.other = nn.LayerNorm(4, eps=0.0), nn.Linear(4, 4)

    def forward(self, x):
        return self.norm(x)


class Told(nn.Module):
    """Notes the dtypes that it meets."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("table", torch.ones(2, dtype=torch.float64))
        self.met = None

    def forward(self, x, mask=None, *, more=None):
        self.met = (x.dtype, self.linear.weight.dtype, self.table.dtype, mask.dtype, more["y"].dtype)
        return {"out": self.linear(x.to(self.linear.weight.dtype)), "mask": mask}


def _met(policy):
    module = fully_shard(Told().to(device()), mp_policy=policy)
    mask, y = torch.ones(2, dtype=torch.int64, device=device()), torch.ones(1, dtype=torch.float64, device=device())
    out = module(torch.ones(2, 3, device=device()), mask, more={"y": y})
    out["out"].float().sum().backward()
    weight = module.linear.weight
    assert module.table.dtype == torch.float64
    assert out["mask"].dtype == torch.int64
    return (*module.met, out["out"].dtype, weight.dtype, weight.grad.dtype)


@sim
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("policy", "met"),
    [
        ({}, (FP32, FP32, torch.float64, torch.float64, FP32)),
        ({"param_dtype": BF16}, (BF16, BF16, torch.float64, BF16, BF16)),
        ({"param_dtype": BF16, "cast_forward_inputs": False}, (FP32, BF16, torch.float64, torch.float64, BF16)),
        ({"param_dtype": BF16, "output_dtype": FP32}, (BF16, BF16, torch.float64, BF16, FP32)),
        ({"output_dtype": torch.float64}, (FP32, FP32, torch.float64, torch.float64, torch.float64)),
    ],
    ids=str,
)
def test_dtypes(world, size, policy, met):
    x, weight, table, more, out = met
    expected = (x, weight, table, torch.int64, more, out, FP32, FP32)
    assert world(_met, size, policy=MixedPrecisionPolicy(**policy)) == [expected] * size


def _by_hand(param_dtype, reduce_dtype, own_dtype):
    """The gradient is the mean, in the dtype of reductions, of those that a cast copy of the module has."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(device(), own_dtype)
    model = fully_shard(
        copy.deepcopy(dense), mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    )
    group, x = as_group(), torch.randn(as_group().size, 4, 6).to(device())
    for _ in range(2):  # the second adds up
        model(x[group.index].to(own_dtype)).float().pow(2).sum().backward()
    compute = param_dtype or own_dtype
    reduce = reduce_dtype or compute
    copies = []
    for part in x:
        made = copy.deepcopy(dense).to(compute)
        made(part.to(own_dtype).to(compute)).float().pow(2).sum().backward()
        copies.append([p.grad.to(reduce) for p in made.parameters()])
    for p, *grads in zip(model.parameters(), *copies, strict=True):
        assert p.grad.dtype == p.dtype == own_dtype
        exact = torch.stack([g.double() for g in grads]).mean(0)
        got = p.grad.full_tensor().double() / 2
        eps = max(torch.finfo(t).eps for t in (reduce, own_dtype))
        assert (got - exact).abs().max() <= 4 * eps * exact.abs().max()


@sim
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("param", "reduce", "own"),
    [
        (BF16, FP32, FP32),
        (BF16, None, FP32),
        (None, FP32, BF16),
        (None, BF16, FP32),
        (FP16, None, FP32),
        (FP16, FP32, FP32),
        (None, None, torch.float64),
    ],
    ids=str,
)
def test_reduction_dtype(world, size, param, reduce, own):
    world(_by_hand, size, param_dtype=param, reduce_dtype=reduce, own_dtype=own)


def _large(factor):
    """Partial sums of 40000 in float16: their mean is one, their sum is none."""
    model = nn.Linear(1, 1, bias=False, device=device())
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=FP16))
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model(torch.full((1, 1), 40000.0, device=device())).sum().backward()
    return model.weight.grad.full_tensor().item()


@sim
def test_float16_is_divided_first(world):
    assert world(_large, 4, factor=None) == [40000.0] * 4
    assert world(_large, 4, factor=8) == [20000.0] * 4


def _trained(policy, tolerance):
    """A few steps stay near those in float32."""
    dense, model = twins(mp_policy=policy)
    opts = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (dense, model)]
    for step in range(3):
        both_backward(dense, model, step)
        same_gradients(dense, model, tolerance=tolerance)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        for p, q in zip(dense.parameters(), model.parameters(), strict=True):
            with torch.no_grad():
                q.copy_(p)


@sim
def test_training_in_bfloat16(world):
    world(_trained, 3, policy=MixedPrecisionPolicy(BF16, FP32), tolerance=3e-2)


def _two_policies():
    """An inner unit of another policy casts what the outer one gives it, and back."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(device())
    model = copy.deepcopy(dense)
    inner = fully_shard(model[0], mp_policy=MixedPrecisionPolicy(BF16, FP32, output_dtype=FP32))
    fully_shard(model)
    assert inner is model[0]
    x = torch.randn(as_group().size * LOCAL, 3).to(device())
    out = model(x[as_group().index * LOCAL :][:LOCAL])
    assert out.dtype == FP32
    out.pow(2).mean().backward()
    dense(x).pow(2).mean().backward()
    same_gradients(dense, model, tolerance=3e-2)


@sim
def test_policies_of_units(world):
    world(_two_policies, 2)


def _offloaded():
    """On the CPU there is nothing to offload."""
    dense, model = twins(offload_policy=CPUOffloadPolicy())
    both_backward(dense, model)
    same_gradients(dense, model)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_offload_on_the_cpu():
    st.simulate(2, _offloaded)


def _scaled(fails):
    """A gradient scaler's steps are the dense ones, and skip where any rank has a gradient that is not finite."""
    dense, model = twins()
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (dense, model)]
    scalers = [torch.amp.GradScaler(device().type, init_scale=8.0, growth_interval=2) for _ in opts]
    group = as_group()
    for step in range(4):
        ids, mine = ids_of(step)
        for m, part, opt, scaler in zip((dense, model), (ids, mine), opts, scalers, strict=True):
            loss = loss_of(m(part))
            if step == fails and (m is dense or group.rank == group.size - 1):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    for p, q in zip(dense.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p, rtol=1e-5, atol=1e-5)


@sim
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("fails", [None, 1])
def test_grad_scaler(world, size, fails):
    world(_scaled, size, fails=fails)


FACTORS = [[256.0, 1.0], [1.0, 512.0], [-256.0, 2.0]]
"""Of each data rank's two tokens, one for each rank of tp: no sum of them is a number of bfloat16."""


def _copied_over_tp(way, data, reduce_dtype, backwards):
    """Gradients of a norm's parameters, which lie whole on each rank of tp, where the tokens are cut over tp."""
    mesh = as_group().on_mesh(Mesh((("dp", data), ("tp", 2))), {})
    module = _Normed().to(device())
    if way == "flows":
        cut = "[-, tp, ...]"
        rules = {"in": f"replicate -> {cut}", "norm": st.along(cut), "out": f"{cut} -> replicate"}
        st.shard_module(module, rules, process_group=mesh)
    elif way == "copies":
        st.shard_module(module, {"norm": "replicate"}, process_group=mesh)
    else:  # plain ones, gathered with a sharded one
        st.shard_module(module, {"other.weight": "[tp, -]"}, process_group=mesh)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    fully_shard(module, mesh=mesh.axis("dp"), mp_policy=policy, reshard_after_forward=False)
    x = torch.tensor([-1.0, 1.0, 1.0, -1.0], device=device()).expand(1, 2, 4).contiguous()
    factors = torch.tensor(FACTORS, device=device())[mesh.mesh.coordinate(mesh.rank)[0]].view(1, 2, 1)
    for i in range(backwards):
        module.set_requires_gradient_sync(i == backwards - 1)
        given = x if way == "flows" else st.distribute(x, "[-, tp, -]", process_group=mesh)
        (module(given) * factors).sum().backward()
    return [p.grad.full_tensor().tolist() for p in module.norm.parameters()]


@sim
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("data", [1, 3])
@pytest.mark.parametrize("way", ["flows", "copies", "plain"])
def test_gradients_of_copies_are_summed_in_the_dtype_of_reductions(world, way, data, backwards):
    total = sum(map(sum, FACTORS[:data])) / data
    signs = [-1.0, 1.0, 1.0, -1.0]  # of the tokens, of which a weight's gradient is a multiple
    for found in world(_copied_over_tp, 2 * data, way=way, data=data, reduce_dtype=FP32, backwards=backwards):
        exact = torch.tensor([[backwards * total * sign for sign in signs], [backwards * total] * 4])
        torch.testing.assert_close(torch.tensor(found), exact, rtol=1e-6, atol=0)


@sim
def test_gradients_of_copies_are_summed_in_their_own_dtype_unless_asked(world):
    assert world(_copied_over_tp, 2, way="flows", data=1, reduce_dtype=None, backwards=1)[0][1] == [256.0] * 4


class _Remembers(nn.Module):
    """Its norm lies whole on each rank of tp beside a sharded weight; the hidden value is kept."""

    def __init__(self):
        super().__init__()
        self.norm, self.other = nn.LayerNorm(256), nn.Linear(256, 256)

    def forward(self, x):
        self.hidden = self.norm(x)
        return self.other(self.hidden)


def _stale_copy():
    mesh = as_group().on_mesh(Mesh((("dp", 2), ("tp", 2))), {})
    model = nn.Sequential(*(_Remembers() for _ in range(4))).to(device())
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for unit in (*model, model):
        if unit is not model:
            st.shard_module(unit, {"other.weight": "[tp, -]"}, process_group=mesh)
        fully_shard(unit, mesh=mesh.axis("dp"), mp_policy=policy)
    model(torch.ones(2, 256, device=device()))
    with pytest.raises(st.RuleError, match="parameters of a fully sharded module that are no longer gathered"):
        model[0].hidden.square().sum().backward()


@sim
def test_a_parameter_whose_gradient_is_wider_is_guarded_as_the_others_are(world):
    world(_stale_copy, 4)
