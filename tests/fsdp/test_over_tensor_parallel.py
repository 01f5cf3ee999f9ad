"""Parameters that are tensor-parallel already are cut further over the data ranks; results stay the dense ones."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from harness import device
from parallel.decoder import HEAD, Decoder, rules
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError
from shardtensor.fsdp import fully_shard
from shardtensor.layout.layout import same_boxes
from shardtensor.mesh import Mesh
from shardtensor.tensor.placing import bind_named, mesh_of

sim = pytest.mark.worlds("sim")


def grid(*axes):
    return as_group().on_mesh(Mesh(axes), {})


def coordinate(mesh, axis):
    return mesh.mesh.coordinate(mesh.rank)[mesh.mesh.names.index(axis)]


def same(module, oracle, of=lambda p: p):
    for (name, p), q in zip(module.named_parameters(), oracle.parameters(), strict=True):
        got = of(p).full_tensor()
        torch.testing.assert_close(got, of(q), rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).to(device())


PLAIN = {"0.weight": "[tp, -]", "0.bias": "[tp]", "3.weight": "[-, tp]"}
FLOWS = {"0": st.colwise("tp"), "3": st.rowwise("tp")}


def train_mlp(plan, dp, tp, data=None, forms=None, norm=True):
    """`data` names the data ranks; of the mesh's axis, if None."""
    mesh = grid(("dp", dp), ("tp", tp))
    oracle = mlp()
    if not norm:
        oracle[2] = nn.Identity()
    module = copy.deepcopy(oracle)
    st.shard_module(module, plan, process_group=mesh)
    fully_shard(module[0], mesh=data or mesh.axis("dp"), shard_placement_fn=forms)
    fully_shard(module, mesh=data or mesh.axis("dp"), shard_placement_fn=forms)
    ways = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (oracle, module)]
    for step in range(3):
        x = torch.randn(3 * dp, 5, generator=torch.Generator().manual_seed(step)).to(device())
        oracle(x).pow(2).mean().backward()
        module(x.chunk(dp)[coordinate(mesh, "dp")]).pow(2).mean().backward()
        same(module, oracle, lambda p: p.grad)
        for way in ways:
            way.step()
            way.zero_grad()
    same(module, oracle)
    for p in module.parameters():
        assert same_boxes(bind_named(p.sharding_spec(), tuple(p.shape), mesh_of(p._group)), p._layout)
    return [str(p.sharding_spec()) for p in module.parameters()]


@sim
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 2), (2, 1), (4, 1), (1, 4)])
@pytest.mark.parametrize("plan", [PLAIN, FLOWS], ids=["wrappers", "flows"])
def test_column_then_row(world, plan, dp, tp):
    world(train_mlp, dp * tp, plan=plan, dp=dp, tp=tp, norm=plan is PLAIN)


UNEQUAL = {
    "one": ({"3.weight": "[tp balanced, -]"}, None),
    "all": ({"0.weight": "[tp sizes(5, 3), -]", "0.bias": "[tp sizes(5, 3)]", "3.weight": "[-, tp sizes(5, 3)]"}, None),
    "some ranks have none": ({"0.weight": "[tp sizes(8, 0), -]", "3.weight": "[tp sizes(0, 3), -]"}, None),
    "rows": ({"0.weight": "[tp sizes(5, 3), -]", "3.weight": "[-, tp sizes(5, 3)]"}, "flat(dp, unit=row)"),
    "another dim": ({"0.weight": "[tp sizes(5, 3), -]", "3.weight": "[-, tp sizes(5, 3)]"}, "dim"),
    "another dim, and none of it": ({"0.weight": "[tp sizes(8, 0), -]", "3.weight": "[-, tp sizes(0, 8)]"}, "dim"),
}


def train_unequal(name, dp, tp):
    plan, form = UNEQUAL[name]

    def forms(param):
        cut = isinstance(param, st.ShardedTensor) and param._layout.cut_dims
        return Shard(1 - cut[0]) if form == "dim" and cut and param.dim() == 2 else None if form == "dim" else form

    return train_mlp(plan, dp, tp, forms=forms if form else None)


@sim
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 2), (3, 2)])
@pytest.mark.parametrize("name", UNEQUAL)
def test_parts_of_different_sizes(world, name, dp, tp):
    world(train_unequal, dp * tp, name=name, dp=dp, tp=tp)


def test_parts_of_different_sizes_in_real_processes(world):
    found = world(train_unequal, 4, name="all", dp=2, tp=2)
    assert found[0][:2] == ["[tp sizes(5, 3), -] flat(dp)", "[tp sizes(5, 3)] flat(dp)"]


@sim
def test_specs_name_both_axes(world):
    found = world(train_mlp, 4, plan=FLOWS, dp=2, tp=2, norm=False)
    assert found == [["[tp, -] flat(dp, sizes=(16, 4))", "[tp] flat(dp, sizes=(4, 0))", *found[0][2:]]] * 4
    assert found[0][2] == "[-, tp] flat(dp, sizes=(0, 12))"


def rows(param):
    return "flat(dp, unit=row)"


def other_dim(param):
    if isinstance(param, st.ShardedTensor) and str(param.sharding_spec()) == "[tp, -]":
        return Shard(1)
    return "flat(dp, unit=16)"


@sim
@pytest.mark.parametrize("forms", [rows, other_dim])
def test_forms(world, forms):
    world(train_mlp, 4, plan=FLOWS, dp=2, tp=2, forms=forms, norm=False)


def train_decoder(dp, tp, stream, checkpoint=False):
    mesh = grid(("dp", dp), ("tp", tp))
    torch.manual_seed(0)
    oracle = Decoder().to(device())
    module = copy.deepcopy(oracle)
    st.shard_module(module, rules(stream), process_group=mesh)
    for layer in module.layers:
        fully_shard(layer, mesh=mesh.axis("dp"))
    fully_shard(module, mesh=mesh.axis("dp"))
    ways = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (oracle, module)]
    for step in range(2):
        ids = torch.randint(0, 16, (2 * dp, 3 * HEAD), generator=torch.Generator().manual_seed(step)).to(device())
        oracle(ids).logsumexp(-1).mean().backward()
        module(ids.chunk(dp)[coordinate(mesh, "dp")]).logsumexp(-1).mean().backward()
        same(module, oracle, lambda p: p.grad)
        norms = st.clip_grad_norm_(module.parameters(), 0.1), nn.utils.clip_grad_norm_(oracle.parameters(), 0.1)
        torch.testing.assert_close(*norms)
        for way in ways:
            way.step()
            way.zero_grad()
    same(module, oracle)


@sim
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("stream", ["replicate", "[-, tp, ...]"], ids=["tensor parallel", "sequence parallel"])
def test_a_decoder(world, dp, tp, stream):
    world(train_decoder, dp * tp, dp=dp, tp=tp, stream=stream)


def test_a_decoder_in_real_processes(world):
    world(train_decoder, 4, dp=2, tp=2, stream="[-, tp, ...]")


# -- how the data ranks are named


def from_device_mesh(by_part):
    mesh = dist.init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    oracle = mlp()
    module = copy.deepcopy(oracle)
    st.shard_module(module, PLAIN, process_group=mesh["tp"] if by_part else mesh)
    fully_shard(module, mesh=mesh["dp"])
    x = torch.arange(20.0).view(4, 5).to(device())
    oracle(x).pow(2).mean().backward()
    module(x.chunk(2)[mesh.get_local_rank("dp")]).pow(2).mean().backward()
    same(module, oracle, lambda p: p.grad)
    return str(module[0].weight.sharding_spec())


@pytest.mark.parametrize("by_part", [False, True])
def test_a_device_mesh_and_its_parts(world, by_part):
    assert world(from_device_mesh, 4, by_part=by_part) == ["[tp, -] flat(dp, sizes=(20, 0))"] * 4


def test_names_of_axes_and_groups_of_a_simulated_world():
    def body(data):
        oracle = mlp()
        module = copy.deepcopy(oracle)
        st.shard_module(module, PLAIN)
        fully_shard(module, mesh=data and data())
        x = torch.arange(20.0).view(4, 5)
        oracle(x).sum().backward()
        module(x.chunk(2)[coordinate(as_group(), "dp")]).sum().mul(2).backward()
        same(module, oracle, lambda p: p.grad)

    for data in (lambda: "dp", lambda: as_group().axis("dp")):
        st.simulate("dp=2, tp=2", body, data)


def repeated():
    """Three axes: repeated, cut, tensor-parallel."""
    mesh = grid(("rep", 1), ("dp", 2), ("tp", 2))
    oracle = mlp()
    module = copy.deepcopy(oracle)
    st.shard_module(module, PLAIN, process_group=mesh)
    data = mesh.axis("rep", "dp").on_mesh(Mesh((("rep", 1), ("dp", 2)), mesh.axis("rep", "dp").ranks), {})
    fully_shard(module, mesh=data)
    x = torch.arange(20.0).view(4, 5)
    oracle(x).sum().backward()
    module(x.chunk(2)[coordinate(mesh, "dp")]).sum().mul(2).backward()
    same(module, oracle, lambda p: p.grad)


@sim
def test_two_copies(world):
    world(repeated, 4)


# -- refused


def refused(plan, axis, text, make=mlp):
    mesh = grid(("dp", 2), ("tp", 2))
    module = make()
    st.shard_module(module, plan, process_group=mesh)
    with pytest.raises(LayoutError, match=text):
        fully_shard(module, mesh=mesh.axis(axis))
    assert type(module) is nn.Sequential


@sim
@pytest.mark.parametrize(
    ("plan", "axis", "text"),
    [
        ({"0.weight": "[tp, -]"}, "tp", "`0.weight` is cut over the data axis tp already"),
        ({"0.weight": "flat(tp)"}, "dp", "cannot be cut further"),
        ({"0.weight": 'chunk(0, ["rank:0/cpu", "rank:1/cpu"])'}, "dp", "not sharded over all of its mesh"),
        ({"0.weight": 'chunk(0, ["rank:0-3/cpu"])'}, "dp", "not sharded over all of its mesh"),
    ],
)
def test_what_cannot_be_cut_further_is_told(world, plan, axis, text):
    world(refused, 4, plan=plan, axis=axis, text=text)


def unjoined():
    mesh = grid(("dp", 2), ("tp", 2))
    module = mlp()
    st.shard_parameter(module, "0.weight", "[tp, -]", process_group=as_group().subgroup(mesh.axis("tp").ranks))
    with pytest.raises(LayoutError, match="no mesh joins"):
        fully_shard(module, mesh=mesh.axis("dp"))


@sim
def test_ranks_that_no_mesh_joins(world):
    world(unjoined, 4)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.b.weight = self.a.weight

    def forward(self, ids):
        return self.b(self.a(ids))


def tied():
    """A tied pair, tensor-parallel, in one unit."""
    mesh = grid(("dp", 2), ("tp", 2))
    torch.manual_seed(0)
    oracle = Tied().to(device())
    module = copy.deepcopy(oracle)
    st.shard_parameter(module, "a.weight", "[tp, -]", process_group=mesh)
    fully_shard(module, mesh=mesh.axis("dp"))
    assert module.a.weight is module.b.weight
    ids = torch.arange(6).to(device())
    oracle(ids).pow(2).mean().backward()
    module(ids.chunk(2)[coordinate(mesh, "dp")]).pow(2).mean().backward()
    torch.testing.assert_close(module.a.weight.grad.full_tensor(), oracle.a.weight.grad)


@sim
def test_ties_stay(world):
    world(tied, 4)


@sim
def test_axes_of_one_rank_are_told_apart(world):
    """On a mesh where the data axis and one that a weight is cut over have one rank each."""

    def body():
        mesh = grid(("dp", 1), ("a", as_group().size), ("b", 1))
        oracle = mlp()
        module = st.shard_module(copy.deepcopy(oracle), {"0.weight": "[a*b, -]", "0.bias": "[a*b]"}, process_group=mesh)
        fully_shard(module, mesh=mesh.axis("dp"))
        x = torch.ones(2, 5, device=device())
        torch.testing.assert_close(module(x), oracle(x))

    world(body, 2)


def test_a_mesh_with_the_data_axis_and_without_the_other_axis_joins_nothing():
    def body():
        world = as_group()
        module = mlp()
        others = world.subgroup([0, 3] if world.rank in (0, 3) else [1, 2])
        st.shard_parameter(
            module, "0.weight", "[tp, -]", process_group=others.on_mesh(Mesh((("tp", 2),), others.ranks), {})
        )
        with pytest.raises(LayoutError, match="no mesh joins"):
            fully_shard(module, mesh="dp")

    st.simulate("dp=2, x=2", body)
