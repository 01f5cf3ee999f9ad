"""Batches, meshes and optimizers out of the ordinary train as the eager library does, or are one error."""

from __future__ import annotations

import gc
from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from spmd_steps import STYLES, compiled, eager_optimizer, mlp, own_batch, plain_step, same_as_eager, same_modules, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardtensor as st
from shardtensor.fsdp import fully_shard
from shardtensor.spmd import compile
from shardtensor.spmd.building import shard_layers

styles = pytest.mark.parametrize("style", STYLES)


def permuted_batch():
    return torch.randn(5, 3, 4).permute(2, 1, 0), torch.randn(3, 3, 4).permute(2, 1, 0)


def permuted_labels():
    return torch.randn(4, 5), torch.randn(3, 4).t()


def expanded_batch():
    return torch.randn(1, 5).expand(4, 5), torch.randn(4, 3)[:, torch.tensor([0, 1, 2])]


def flattening_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = (model(batch[0]).flatten() - batch[1].flatten()).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


@styles
@pytest.mark.parametrize("batch", [permuted_batch, permuted_labels, expanded_batch])
def test_batches_that_are_not_contiguous(world, style, batch):
    world(same_as_eager, 2, style=style, batch=batch, step=flattening_step, exact=False)


def half_permuted(style):
    """The same shapes with other strides in the second step."""
    torch.manual_seed(0)
    module = mlp()
    run = compiled(flattening_step, style)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    batch = permuted_batch()
    a = run(module, optimizer, tuple(x.contiguous() for x in batch))
    b = run(module, optimizer, batch)
    torch.testing.assert_close(a, b)


@styles
def test_strides_may_change(world, style):
    world(half_permuted, 2, style=style)


@dataclass
class Sample:
    inputs: torch.Tensor
    labels: torch.Tensor


def record_step(model, optimizer, batch):
    return plain_step(model, optimizer, (batch.inputs, batch.labels))


def records():
    module = mlp()
    other = deepcopy(module)
    run = compiled(record_step, "replicate")
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, other))
    for i in range(4):
        torch.manual_seed(i)
        run(module, ours, Sample(*own_batch()))
        gc.collect()
        torch.manual_seed(i)
        plain_step(other, theirs, own_batch())
    same_modules(module, other, exact=False)
    return run.compiles


def test_a_dataclass(world):
    assert world(records, 1) == [1]


def captured():
    """A tensor of elsewhere keeps its values of the call, not those of the trace."""
    scale = torch.ones(())
    module = mlp()
    other = deepcopy(module)
    run = compiled(lambda m, o, b: plain_step(m, o, (b[0] * scale, b[1])), "replicate")
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, other))
    for i in range(3):
        scale.fill_(i)
        batch = own_batch()
        run(module, ours, batch)
        plain_step(other, theirs, (batch[0] * scale, batch[1]))
    same_modules(module, other, exact=False)


def test_a_tensor_of_the_closure(world):
    world(captured, 1)


# -- meshes


def on_copies(style):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))
    torch.manual_seed(0)
    module = mlp()
    other = deepcopy(module)
    if style == "fully_shard":
        fully_shard(other, mesh=mesh)
    else:
        st.data_parallel(other)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    beside = eager_optimizer(other, style, torch.optim.Adam, {"lr": 0.1})
    run = compiled(plain_step, style, mesh=mesh)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        batch = own_batch()
        run(module, optimizer, batch)
        plain_step(other, beside, batch)
        same_modules(module, other, exact=False)


@styles
def test_a_mesh_of_two_axes(world, style):
    world(on_copies, 4, timeout_s=20, style=style)


def on_one_axis(style):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "dp"))
    torch.manual_seed(mesh.get_local_rank("other"))
    module = mlp()
    other = deepcopy(module)
    if style == "fully_shard":
        shard_layers(other, mesh["dp"])
    else:
        st.data_parallel(other, process_group=mesh["dp"].get_group())
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    beside = eager_optimizer(other, style, torch.optim.Adam, {"lr": 0.1})
    run = compiled(plain_step, style, mesh=mesh["dp"])
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        batch = own_batch()
        run(module, optimizer, batch)
        plain_step(other, beside, batch)
        same_modules(module, other)


@styles
def test_one_axis_of_a_mesh(world, style):
    world(on_one_axis, 4, timeout_s=20, style=style)


def sharded_before():
    """A module that the user has fully sharded, each layer as a unit."""
    torch.manual_seed(0)
    module, other = mlp(), mlp()
    other.load_state_dict(module.state_dict())
    for each in (module, other):
        fully_shard(each[0])
        fully_shard(each)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    beside = st.ShardedOptimizer(other.named_parameters(), torch.optim.Adam, lr=0.1)
    run = compiled(plain_step, "fully_shard")
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        batch = own_batch()
        run(module, optimizer, batch)
        plain_step(other, beside, batch)
        same_modules(module, other)


def test_a_module_that_is_fully_sharded_already(world):
    world(sharded_before, 2)


# -- optimizers and results


def matrices():
    return nn.Sequential(nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))


@pytest.mark.parametrize(
    ("style", "name"), [("replicate", "Adafactor"), ("replicate", "Muon"), ("fully_shard", "Muon")]
)
def test_optimizers_that_need_whole_matrices(world, style, name):
    world(
        same_as_eager,
        2,
        style=style,
        build=matrices,
        cls=getattr(torch.optim, name),
        options={"lr": 0.01},
        exact=False,
    )


def searching(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = (model(batch[0]) - batch[1]).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def line_search(style):
    module = mlp()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(st.ShardTensorError):
        compiled(searching, style)(module, torch.optim.LBFGS(module.parameters()), own_batch())
    for p, q in zip(module.parameters(), before, strict=True):
        assert torch.equal(p, q)


def test_an_optimizer_that_evaluates_again_is_an_error(world):
    world(line_search, 2, style="replicate")


def giving_step(model, optimizer, batch):
    plain_step(model, optimizer, batch)
    return [p.grad for p in model.parameters()], [2 * p for p in model.parameters()], batch[0]


def given(style):
    torch.manual_seed(0)
    module = mlp()
    run = compiled(giving_step, style)
    torch.manual_seed(dist.get_rank())
    batch = own_batch()
    grads, doubled, inputs = run(module, torch.optim.SGD(module.parameters(), lr=0.1), batch)
    assert torch.equal(inputs, batch[0])
    for p, grad, twice in zip(module.parameters(), grads, doubled, strict=True):
        assert torch.equal(whole(twice), 2 * whole(p).detach())
        assert grad.shape == p.shape
        assert torch.equal(whole(grad), whole(p.grad))


@styles
def test_gradients_and_parameters_as_results(world, style):
    world(given, 2, style=style)


def seeded(style):
    torch.manual_seed(0)
    module = mlp()
    run = compiled(plain_step, style, seed=7)
    run(module, torch.optim.SGD(module.parameters(), lr=0.1), own_batch())
    return torch.rand(1).item()


def test_a_seed_gives_each_rank_its_own_numbers(world):
    assert len(set(world(seeded, 2, style="replicate"))) == 2


def test_a_plan_that_failed_is_not_forgotten():
    """A second call with the same mistake has the same error, and does not train without the plan."""
    run = compile(plain_step, parallel_mode={"0.weight": "replicate"}, backend="eager")
    for _ in range(2):
        with pytest.raises(st.ShardTensorError, match="a plan is for one module"):
            run(mlp(), mlp(), own_batch())
