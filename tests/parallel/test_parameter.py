"""`shard_parameter`: the module's own forward gives the dense output and gradients, for any spec and world."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from harness import RankFailed, device, every_size
from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardtensor as st


def _world() -> int:
    return torch.distributed.get_world_size()


def _chunk(dim: int) -> str:
    return f'chunk(dim={dim}, placements=["rank:0-{_world() - 1}/{device().type}"])'


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, st.ShardedTensor) else tensor


def _integers(*shape):
    """Small whole numbers as floats: sums are exact in any order."""
    return torch.randint(-3, 4, shape, device=device()).float()


def _train_alike(sharded: nn.Module, dense: nn.Module, x: torch.Tensor, steps: int = 3, **close) -> None:
    """Outputs, gradients and three AdamW steps of the two modules are equal."""
    optimizers = [
        st.ShardedOptimizer(sharded.named_parameters(), torch.optim.AdamW, lr=0.01),
        torch.optim.AdamW(dense.parameters(), lr=0.01),
    ]
    for _ in range(steps):
        inputs = [x.clone().requires_grad_() if x.is_floating_point() else x for _ in range(2)]
        outputs = [module(value) for module, value in zip((sharded, dense), inputs, strict=True)]
        torch.testing.assert_close(_whole(outputs[0]), outputs[1], **close)
        for optimizer, out in zip(optimizers, outputs, strict=True):
            optimizer.zero_grad()
            _whole(out).square().sum().backward()
        if x.is_floating_point():
            torch.testing.assert_close(inputs[0].grad, inputs[1].grad, **close)
        for (name, a), b in zip(sharded.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(_whole(a.grad), b.grad, msg=lambda m, name=name: f"{name}: {m}", **close)
        for optimizer in optimizers:
            optimizer.step()
    for (name, a), b in zip(sharded.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(_whole(a.detach()), b.detach(), msg=lambda m, name=name: f"{name}: {m}", **close)


def mlp_is_dense():
    warnings.simplefilter("error", st.GatherWarning)
    for width, hidden, out in ((7, 10, 5), (8, 8, 4), (5, 3, 2)):  # (5, 3, 2): more ranks than rows
        for bias in (True, False):
            mlp = nn.Sequential(nn.Linear(width, hidden, bias), nn.GELU(), nn.Linear(hidden, out, bias)).to(device())
            dense = copy.deepcopy(mlp)
            st.shard_parameter(mlp[0], "weight", _chunk(0))
            st.shard_parameter(mlp[2], "weight", _chunk(1))
            with st.strict():
                out_plain = mlp(torch.randn(3, width, device=device()))
                assert type(out_plain) is torch.Tensor
                _train_alike(mlp, dense, torch.randn(4, width, device=device()))


@every_size
def test_mlp_column_then_row_trains_as_dense_under_strict(world, size):
    world(mlp_is_dense, size)


def count_collectives(needs_input_grad, shards_bias=False):
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(device())
    st.shard_parameter(mlp[0], "weight", _chunk(0))
    st.shard_parameter(mlp[2], "weight", _chunk(1))
    if shards_bias:
        st.shard_parameter(mlp[0], "bias", _chunk(0))
    x = torch.randn(3, 8, device=device(), requires_grad=needs_input_grad)
    counts = []
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as forward:
        loss = mlp(x).sum()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as backward:
        loss.backward()
    for part in (forward, backward):
        counts.append(sum(event.name.startswith("c10d::") for event in part.events()))
    return counts


def test_an_mlp_makes_one_collective_forward_and_one_backward(world):
    assert world(count_collectives, 4, needs_input_grad=True) == [[1, 1]] * 4
    assert world(count_collectives, 4, needs_input_grad=True, shards_bias=True) == [[1, 1]] * 4
    assert world(count_collectives, 4, needs_input_grad=False, shards_bias=True) == [[1, 0]] * 4
    assert world(count_collectives, 4, needs_input_grad=False) == [[1, 1]] * 4, "the plain bias's own"


def every_spec_of_a_linear():
    specs = [_chunk(0), _chunk(1), _chunk(-1), "[tp balanced, -]", "[-, tp balanced]", "[out: tp balanced]",
             "[in: tp balanced]", "replicate", "[tp pad(4), -]"]  # fmt: skip
    for spec in specs:
        for bias in (True, False):
            linear = nn.Linear(7, 5, bias).to(device())
            with torch.no_grad():
                for p in linear.parameters():
                    p.copy_(_integers(*p.shape))
            dense = copy.deepcopy(linear)
            st.shard_parameter(linear, "weight", spec)
            for batch in ((3,), (), (2, 3), (0,)):
                x = _integers(*batch, 7)
                a, b = (value.clone().requires_grad_() for value in (x, x))
                got, want = _whole(linear(a)), dense(b)
                assert torch.equal(got, want), (spec, batch)
                got.sum().backward()
                want.sum().backward()
                assert torch.equal(a.grad, b.grad), (spec, batch)
            for p, q in zip(linear.parameters(), dense.parameters(), strict=True):
                assert torch.equal(_whole(p.grad), q.grad), spec


@every_size
def test_a_linear_is_dense_for_every_spec(world, size):
    world(every_spec_of_a_linear, size)


def sharded_bias():
    linear = nn.Linear(6, 5).to(device())
    dense = copy.deepcopy(linear)
    st.shard_parameter(linear, "weight", _chunk(0))
    st.shard_parameter(linear, "bias", _chunk(0))
    _train_alike(linear, dense, torch.randn(4, 6, device=device()))


@every_size
def test_weight_and_bias_cut_alike(world, size):
    world(sharded_bias, size)


def b14():
    weight = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1]])
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]], device=device())
    for dim in (0, 1):
        linear = nn.Linear(4, 3).to(device())
        with torch.no_grad():
            linear.weight.copy_(weight)
            linear.bias.copy_(torch.tensor([100.0, 200, 300]))
        st.shard_parameter(linear, "weight", _chunk(dim))
        out = _whole(linear(x))
        assert out.tolist() == [[104, 206, 310], [112, 214, 326]]
        out.sum().backward()
        assert linear.bias.grad.tolist() == [2, 2, 2]
        assert linear.weight.grad.full_tensor().tolist() == [[6, 8, 10, 12]] * 3


@pytest.mark.parametrize("size", [2, 4])
def test_b14_bias_of_an_input_sharded_linear_is_added_once(world, size):
    world(b14, size)


def embedding_is_dense(**options):
    for spec in ("[vocab: tp balanced]", "[embed: tp balanced]"):
        table = nn.Embedding(7, 6, **options).to(device())
        dense = copy.deepcopy(table)
        st.shard_parameter(table, "weight", spec)
        _train_alike(table, dense, torch.tensor([[0, 1, 6], [5, 5, 2]], device=device()))


@every_size
@pytest.mark.parametrize("options", [{}, {"padding_idx": 5}, {"padding_idx": -2}])
def test_an_embedding_is_dense(world, size, options):
    world(embedding_is_dense, size, **options)


def b15(padding_idx):
    table = nn.Embedding(8, 2, padding_idx=padding_idx).to(device())
    with torch.no_grad():
        table.weight.copy_(torch.arange(16.0).reshape(8, 2))
    st.shard_parameter(table, "weight", _chunk(0))
    _whole(table(torch.tensor([1, 5, 5, 7], device=device()))).sum().backward()
    assert table.weight.grad.full_tensor().sum(1).tolist() == [0, 2, 0, 0, 0, 0, 0, 2]


@pytest.mark.parametrize("padding_idx", [5, -3])
def test_b15_padding_index_is_global(world, padding_idx):
    world(b15, 2, padding_idx=padding_idx)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def b20():
    model = Tied().to(device())
    dense = copy.deepcopy(model)
    st.shard_parameter(model.embed, "weight", _chunk(0))
    assert model.head.weight is model.embed.weight
    ids = torch.arange(7, device=device())
    optimizer = st.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.5)
    plain = torch.optim.SGD(dense.parameters(), lr=0.5)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 1
    for step in range(3):
        for module, opt in ((model, optimizer), (dense, plain)):
            opt.zero_grad()
            F.cross_entropy(module(ids), ids).backward()
            if step == 0 and module is dense:
                torch.testing.assert_close(model.embed.weight.grad.full_tensor(), dense.embed.weight.grad)
        optimizer.step()
        plain.step()
    names = [model.embed.weight.full_tensor(), model.head.weight.full_tensor()]
    assert torch.equal(*names)
    torch.testing.assert_close(names[0], dense.embed.weight.detach().requires_grad_())


@every_size
def test_b20_a_tie_survives_sharding(world, size):
    world(b20, size)


class Conv1D(nn.Module):
    """GPT-2's linear, which stores its weight (in, out)."""

    def __init__(self, width, out):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, out)), nn.Parameter(torch.randn(out))
        self.nf = out

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


def conv1d_is_dense():
    for spec in ("[out: tp balanced]", "[in: tp balanced]"):
        module = Conv1D(6, 5).to(device())
        dense = copy.deepcopy(module)
        st.shard_parameter(module, "weight", spec)
        _train_alike(module, dense, torch.randn(2, 3, 6, device=device()))


@every_size
def test_a_conv1d_is_dense(world, size):
    world(conv1d_is_dense, size)


def values_come_from_the_source():
    torch.manual_seed(torch.distributed.get_rank())
    linear = nn.Linear(4, 6).to(device())
    mine = linear.weight.detach().clone()
    st.shard_parameter(linear, "weight", _chunk(0), src_rank=1)
    theirs = [torch.empty_like(mine) for _ in range(_world())]
    torch.distributed.all_gather(theirs, mine)
    assert torch.equal(linear.weight.full_tensor(), theirs[1])
    part = linear.weight.local_tensor()
    assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_values_come_from_the_source_rank(world):
    world(values_come_from_the_source, 3)


def refused(spec=None, name="weight", by_rank=False, src_rank=0):
    linear = nn.Linear(6, 4).to(device())
    before = linear.weight
    rank = torch.distributed.get_rank()
    spec = _chunk(rank % 2) if by_rank else spec
    with pytest.raises((ValueError, AttributeError)) as caught:
        st.shard_parameter(linear, name, spec or _chunk(0), src_rank=rank if src_rank == "rank" else src_rank)
    assert linear.weight is before
    assert type(before) is nn.Parameter
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"spec": "[tp, -, -]"}, "the spec has 3 dims, the tensor has 2"),
        ({"spec": "[tp"}, "error["),
        ({"spec": "[-, tp unit(4)]"}, "not a multiple of its unit 4"),
        ({"spec": 'chunk(dim=2, placements=["rank:0-3/cpu"])'}, "Invalid sharding dim: 2 for a tensor of 2 dims"),
        ({"spec": 'chunk(dim=0, placements=["rank:0-4/cpu"])'}, "Global rank 4 does not exist in input process group"),
        ({"spec": 'enum([0:4, 0:5] @ "rank:0/cpu")'}, "no shard holds element (0, 5)"),
        ({"name": "wait"}, "has no attribute"),
        ({"by_rank": True}, "sharding_spec"),
        ({"src_rank": "rank"}, "src_rank"),
        ({"src_rank": 7}, "src_rank=7 is not a rank of this group"),
    ],
)
def test_bad_input_is_one_error_on_every_rank_and_changes_nothing(world, bad, says):
    texts = world(refused, 4, **bad)
    assert len(set(texts)) == 1
    assert says in texts[0]


def device_mesh():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).to(device())
    dense = copy.deepcopy(mlp)
    st.shard_parameter(mlp, "0.weight", "[tp, -]", process_group=mesh)
    st.shard_parameter(mlp, "2.weight", "[-, tp]", process_group=mesh)
    assert tuple(mlp[0].weight.local_tensor().shape) == (4, 6)
    _train_alike(mlp, dense, torch.randn(3, 6, device=device()))
    st.shard_parameter(grid := nn.Linear(6, 8).to(device()), "weight", "[dp, tp]", process_group=mesh)
    assert tuple(grid.weight.local_tensor().shape) == (4, 3)


def test_axes_of_a_device_mesh(world):
    world(device_mesh, 4)


def gradients_of_gradients():
    for dims in ((0, 1), (1, 0)):
        mlp = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)).to(device())
        dense = copy.deepcopy(mlp)
        for layer, dim in zip((mlp[0], mlp[2]), dims, strict=True):
            st.shard_parameter(layer, "weight", _chunk(dim))
        start = torch.randn(3, 6, device=device())
        found = []
        for module in (mlp, dense):
            x = start.clone().requires_grad_()
            leaves = [x, *module.parameters()]
            first = torch.autograd.grad(_whole(module(x)).square().sum(), leaves, create_graph=True)
            sum((grad * grad).sum() for grad in first).backward()
            found.append([_whole(leaf.grad) for leaf in leaves])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@every_size
def test_gradients_of_gradients_are_dense(world, size):
    world(gradients_of_gradients, size)


def autocast():
    x = torch.randn(3, 6, device=device())
    for module, specs in ((nn.Linear(6, 5), ("[out: tp balanced]", "[in: tp balanced]")), (Conv1D(6, 5), (_chunk(0),))):
        for spec in specs:
            dense = copy.deepcopy(module.to(device()))
            sharded = copy.deepcopy(dense)
            st.shard_parameter(sharded, "weight", spec)
            with torch.autocast(device().type, dtype=torch.bfloat16):
                outputs = [_whole(sharded(x)), dense(x)]
            assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16, spec
            torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)


@every_size
def test_autocast_gives_the_dense_dtype(world, size):
    world(autocast, size)


def frozen() -> None:
    module = nn.Linear(3, 5).to(device())
    dense = copy.deepcopy(module)
    for net in (module, dense):
        net.weight.requires_grad_(False)
    st.shard_parameter(module, "weight", "[tp balanced, -]")
    found = []
    for net in (module, dense):
        leaf = torch.ones(2, 3, device=device(), requires_grad=True)
        x = leaf * 2
        y = net(x)
        x.mul_(5)  # torch keeps no input for a weight that wants no gradient
        (y.square().sum() + x.sum()).backward()
        found.append((leaf.grad, net.bias.grad))
    torch.testing.assert_close(*found)


@every_size
def test_a_frozen_weight_keeps_no_input(world, size):
    world(frozen, size)


def test_a_world_of_one_needs_no_process_group():
    linear = nn.Linear(3, 2)
    dense = copy.deepcopy(linear)
    st.shard_parameter(linear, "weight", "[tp, -]")
    torch.testing.assert_close(_whole(linear(torch.ones(3))), dense(torch.ones(3)))


__all__ = ["RankFailed"]


def kinds_of_results():
    x = st.rand("[tp balanced, -]", 5, 3)
    return [type(y).__name__ for y in (x, x * 2, x @ torch.ones(3, 2, device=device()), x.sum(1), x.sum(0), x.sum())]


def test_what_comes_back_does_not_depend_on_the_number_of_ranks(world):
    kinds = [world(kinds_of_results, size)[0] for size in (1, 2, 3, 4)]
    assert kinds[0] == ["ShardedTensor"] * 4 + ["Tensor"] * 2
    assert all(kind == kinds[0] for kind in kinds)
