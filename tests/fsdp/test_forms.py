"""What `shard_placement_fn` returns says how each parameter is cut; results stay those of the dense module."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import device
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError, SpecError
from shardtensor.fsdp import fully_shard
from shardtensor.layout.layout import same_boxes
from shardtensor.mesh import Mesh
from shardtensor.tensor.placing import bind_named, mesh_of

sim = pytest.mark.worlds("sim")
every_size = pytest.mark.parametrize("size", [1, 2, 3, 4])


class Net(nn.Module):
    """With an uneven matrix, one of a single row, an empty and a scalar parameter, and a convolution."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.conv = nn.Conv1d(1, 3, 3)
        self.last = nn.Linear(24, 1, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.last(torch.tanh(self.conv(x[:, None])).flatten(1)) * self.scale + self.nothing.sum()


def dense():
    torch.manual_seed(0)
    return Net().to(device())


def by_name(module, forms):
    """A placement function that tells parameters by their shapes."""
    shapes = {tuple(p.shape): forms.get(name) for name, p in module.named_parameters()}
    return lambda param: shapes[tuple(param.shape)]


def steps(forms, mesh=None):
    group = as_group()
    domain = None if mesh is None else group.on_mesh(Mesh(mesh), {})
    oracle = dense()
    module = copy.deepcopy(oracle)
    fn = by_name(module, forms) if isinstance(forms, dict) else lambda param: forms
    fully_shard(module, mesh=domain, shard_placement_fn=fn)
    ways = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (oracle, module)]
    for step in range(3):
        x = torch.randn(2 * group.size, 6, generator=torch.Generator().manual_seed(step)).to(device())
        oracle(x).pow(2).mean().backward()
        module(x[2 * group.index : 2 * group.index + 2]).pow(2).mean().backward()
        for (name, p), q in zip(module.named_parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5, msg=name)
        for way in ways:
            way.step()
            way.zero_grad()
    for (name, p), q in zip(module.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-4, atol=1e-4, msg=name)
        layout = bind_named(p.sharding_spec(), tuple(q.shape), mesh_of(p._group))
        assert same_boxes(layout, p._layout), name
    return {name: str(p.sharding_spec()) for name, p in module.named_parameters()}


FORMS = {
    "nothing": None,
    "anywhere": "flat(dp)",
    "rows": "flat(dp, unit=row)",
    "stretches": "flat(dp, unit=16)",
    "long stretches": "flat(dp, unit=1000)",
    "mixed": {
        "first.weight": "flat(dp, unit=row)",
        "first.bias": "flat(dp, unit=6)",
        "conv.weight": "flat(dp, unit=9)",
        "last.weight": Shard(1),
    },
    "columns": {"first.weight": Shard(1), "conv.weight": Shard(-1), "last.weight": Shard(0)},
}


@sim
@every_size
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
def test_results_are_the_dense_ones(world, size, forms):
    world(steps, size, forms=forms)


@sim
@pytest.mark.parametrize("forms", [FORMS["mixed"], FORMS["columns"]], ids=["mixed", "columns"])
def test_two_copies(world, forms):
    world(steps, 4, forms=forms, mesh=(("rep", 2), ("dp", 2)))


def test_in_real_processes(world):
    world(steps, 3, forms=FORMS["mixed"])


def specs():
    module = nn.Sequential(nn.Linear(16, 6), nn.Linear(6, 32))
    module[0].weight.asked, module[0].bias.asked = "flat(dp, unit=row)", None
    module[1].weight.asked, module[1].bias.asked = Shard(1), "flat(dp, unit=8)"
    fully_shard(module, shard_placement_fn=lambda param: param.asked)
    return [str(p.sharding_spec()) for p in module.parameters()]


@sim
def test_specs_say_what_was_asked_for(world):
    for found in world(specs, 2):
        assert found == [
            "flat(dp, unit=row, sizes=(96, 0))",
            "flat(dp, sizes=(6, 0))",
            "[-, dp sizes(1, 5)]",
            "flat(dp, unit=8, sizes=(32, 0))",
        ]


REFUSED = {
    "a cut": ("[dp, -]", "what fully_shard cannot do"),
    "sizes": ("flat(dp, sizes=(1, 1))", "what fully_shard cannot do"),
    "copies": ("replicate", "what fully_shard cannot do"),
    "one rank": ("only(dp, 1)", "what fully_shard cannot do"),
    "no such dim": (Shard(2), "which has"),
    "two axes": ("flat(rep*dp)", "the data axis is dp"),
}


def refused(asked, text):
    module = nn.Linear(3, 3)
    with pytest.raises((LayoutError, SpecError), match=text):
        fully_shard(module, shard_placement_fn=lambda param: asked)
    assert type(module) is nn.Linear
    assert type(module.weight) is nn.Parameter


@sim
@pytest.mark.parametrize(("asked", "text"), REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_changes(world, asked, text):
    world(refused, 2, asked=asked, text=text)


def disagree():
    with pytest.raises(ValueError, match="parameters"):
        fully_shard(nn.Linear(3, 3), shard_placement_fn=lambda param: f"flat(dp, unit={1 + as_group().rank})")


@sim
def test_ranks_agree_on_forms(world):
    world(disagree, 2)


def in_name_order():
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(12)))
    fully_shard(model)
    return [entry.name for entry in model._fsdp_state.param_groups[0].params_info][:4]


def test_numbers_in_names_are_ordered_as_numbers():
    assert st.simulate(1, in_name_order) == [["0.weight", "1.weight", "2.weight", "3.weight"]]
