"""Gradients averaged over data axes are those of the dense module for the whole batch, in any layout and any order."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from harness import device
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.mesh import Mesh

PLAN = {
    "0.weight": "[tp balanced, -]",
    "0.bias": "[tp balanced]",
    "2.weight": "replicate",
    "3.weight": "[-, tp balanced]",
    "5.weight": "[tp balanced, -]",  # of one row: empty on all ranks but one
}
TINY = 1e-9  # each gradient fills a bucket
sim = pytest.mark.worlds("sim")
both = pytest.mark.worlds("sim", "gloo")


def grid(dp, tp, *names):
    mesh = Mesh(tuple(zip(names or ("dp", "tp"), (dp, tp), strict=True)))
    return as_group().on_mesh(mesh, {})


def dense(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)]
    return nn.Sequential(*layers).to(device())


def batch(step, size=12):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 5, generator=generator).to(device())


def mine(x, mesh):
    """This rank's part of a batch."""
    return x.chunk(mesh.mesh.sizes[0])[mesh.mesh.coordinate(mesh.rank)[0]]


def same(module, oracle, of=lambda p: p):
    for (name, p), q in zip(module.named_parameters(), oracle.parameters(), strict=True):
        got = of(p).full_tensor() if isinstance(of(p), st.ShardedTensor) else of(p)
        torch.testing.assert_close(got, of(q), rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def same_grads(module, oracle):
    same(module, oracle, lambda p: p.grad)


def model(mesh, plan=PLAN, **options):
    made = dense()
    if mesh.size > 1:
        st.shard_module(made, plan, process_group=mesh)
    return st.data_parallel(made, "dp", mesh, **options), dense()


# -- the law


def train(dp, tp, bucket_mib):
    mesh = grid(dp, tp)
    module, oracle = model(mesh, bucket_mib=bucket_mib)
    optimizer = st.ShardedOptimizer(module, torch.optim.AdamW, lr=0.1)
    other = torch.optim.AdamW(oracle.parameters(), lr=0.1)
    for step in range(3):
        x = batch(step)
        module(mine(x, mesh)).pow(2).mean().backward()
        oracle(x).pow(2).mean().backward()
        norms = st.clip_grad_norm_(module.parameters(), 0.1), nn.utils.clip_grad_norm_(oracle.parameters(), 0.1)
        torch.testing.assert_close(*norms)
        same_grads(module, oracle)
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
    same(module, oracle)


GRIDS = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4)]


@sim
@pytest.mark.parametrize("bucket_mib", [25.0, TINY])
@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_steps_are_the_dense_steps_over_the_whole_batch(world, dp, tp, bucket_mib):
    world(train, dp * tp, dp=dp, tp=tp, bucket_mib=bucket_mib)


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (4, 1)])
def test_steps_in_real_processes(world, dp, tp):
    world(train, 4, dp=dp, tp=tp, bucket_mib=TINY)


def accumulate(reduce):
    mesh = grid(2, 2)
    module, oracle = model(mesh)
    for step in range(3):
        x = batch(step)
        oracle(x).pow(2).mean().backward()
        loss = module(mine(x, mesh)).pow(2).mean()
        if step < 2 or reduce:
            with st.no_sync(module):
                loss.backward()
        else:
            loss.backward()
    if reduce:
        given = module if reduce == "module" else iter(list(module.parameters()))
        st.reduce_gradients(given, "dp", mesh)
    same_grads(module, oracle)


@both
@pytest.mark.parametrize("reduce", ["", "module", "parameters"])
def test_gradients_add_up_and_are_averaged_once(world, reduce):
    world(accumulate, 4, reduce=reduce)


# -- who has which gradients


class Branches(nn.Module):
    """Some layers by choice, in a chosen order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x, chosen):
        return sum(self.layers[i](x).pow(2).mean() for i in chosen)


def unused(bucket_mib, keep):
    mesh = grid(2, 2)
    module, oracle = Branches(), Branches()
    st.shard_module(module, {"layers.*.weight": "[tp balanced, -]"}, process_group=mesh)
    st.data_parallel(module, "dp", mesh, bucket_mib=bucket_mib)
    first = mesh.mesh.coordinate(mesh.rank)[0] == 0
    for step in range(3):
        x = batch(step, 8)
        left, right = ((0, 2), (1, 0)) if step < 2 else ((2,), (2,))  # the layers in another order on the ranks
        module(mine(x, mesh), left if first else right).backward()
        a, b = x.chunk(2)
        ((oracle(a, left) + oracle(b, right)) / 2).backward()
        assert all(p.grad is None for p in module.layers[3].parameters())
        used = [p for p in zip(module.parameters(), oracle.parameters(), strict=True) if p[1].grad is not None]
        assert len(used) == (6 if step < 2 or keep else 2)
        for p, q in used:
            grad = p.grad.full_tensor() if isinstance(p.grad, st.ShardedTensor) else p.grad
            torch.testing.assert_close(grad, q.grad)
        module.zero_grad(set_to_none=not keep)
        oracle.zero_grad(set_to_none=not keep)


@both
@pytest.mark.parametrize(("bucket_mib", "keep"), [(25.0, False), (TINY, False), (TINY, True)])
def test_a_gradient_that_some_ranks_lack_counts_as_zero_and_one_that_all_lack_is_none(world, bucket_mib, keep):
    world(unused, 4, bucket_mib=bucket_mib, keep=keep)


class Experts(nn.Module):
    """Rows of a matrix cut over the ranks that bring the batch; each rank sends its row the inputs of all."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(4, 3))
        self.router = nn.Parameter(torch.ones(3))

    def forward(self, x, mesh=None, axes=("dp",)):
        x = x * self.router
        if mesh is None:
            return (x @ self.weight.T).pow(2).sum(1)
        group = mesh.axis(*axes)
        from shardtensor.comm.redistribute import all_gather, reduce_scatter
        from shardtensor.layout.route import DimStep

        local = self.weight._local
        everyone = all_gather(x, DimStep("all_gather", sums=True), group)
        parts = (everyone @ local.T).pow(2).sum(1)
        return reduce_scatter(parts, DimStep("reduce_scatter"), group)


def experts(axes, spec):
    mesh = grid(2, 2, "rep", "dp")
    cut = tuple(axis for axis in axes if axis in spec)
    module, oracle = Experts(), Experts()
    st.shard_module(module, {"weight": spec}, process_group=mesh)
    st.data_parallel(module, axes, mesh, bucket_mib=TINY)
    place = dict(zip(("rep", "dp"), mesh.mesh.coordinate(mesh.rank), strict=True))
    count, part = 1, 0
    for axis in axes:
        count, part = count * 2, part * 2 + place[axis]
    for step in range(2):
        x = batch(step, 4 * count)[:, :3]
        with st.no_sync(module):
            module(x.chunk(count)[part], mesh, cut).mean().backward()
        module(x.chunk(count)[part], mesh, cut).mean().backward()
        (2 * oracle(x).mean()).backward()
        same_grads(module, oracle)
    module.zero_grad()
    oracle.zero_grad()
    with st.no_sync(module):
        module(x.chunk(count)[part], mesh, cut).mean().backward()
    (whole,) = torch.autograd.grad(module(x.chunk(count)[part], mesh, cut).mean(), module.weight)
    torch.testing.assert_close(whole._local, module.weight.grad._local * 2 ** len(cut))  # that is not divided


@sim
@pytest.mark.parametrize(
    ("axes", "spec"),
    [(("dp",), "[dp, -]"), (("rep", "dp"), "[dp, -]"), (("rep", "dp"), "[rep*dp, -]"), (("rep",), "[rep, -]")],
)
def test_what_is_cut_along_a_data_axis_is_divided_and_not_summed_along_it(world, axes, spec):
    world(experts, 4, axes=axes, spec=spec)


def experts_alone():
    mesh = grid(2, 1)
    module = nn.ModuleDict({"shared": nn.Linear(1, 1), "experts": Experts()})
    st.shard_module(module, {"experts.weight": "[dp, -]"}, process_group=mesh)
    st.data_parallel(module, "dp", mesh)
    loss = module["experts"].weight._local.sum()
    if mesh.rank == 0:
        loss = loss + module["shared"](torch.ones(1, 1)).sum()
    loss.backward()
    assert module["shared"].weight.grad.tolist() == [[0.5]]
    assert module["experts"].weight.grad._local.unique().tolist() == [0.5]
    assert module["experts"].router.grad is None


@sim
def test_a_rank_that_reaches_only_its_own_parts_takes_part(world):
    world(experts_alone, 2)


def cut_experts_reduced():
    mesh = grid(2, 1)
    module, oracle = Experts(), Experts()
    st.shard_module(module, {"weight": "[dp, -]"}, process_group=mesh)
    x = batch(0, 4)[:, :3]
    module(mine(x, mesh), mesh).mean().backward()
    st.reduce_gradients(module, "dp", mesh)
    oracle(x).mean().backward()
    same_grads(module, oracle)


@sim
def test_reduce_gradients_divides_what_is_cut(world):
    world(cut_experts_reduced, 2)


# -- parameters that change


CHANGES = {
    "assign": lambda module, mesh: module.load_state_dict(
        {key: copy.deepcopy(value).detach() for key, value in module.state_dict().items()}, assign=True
    ),
    "a layer": lambda module, mesh: module.__setitem__(3, copy.deepcopy(module[3])),
    "a parameter": lambda module, mesh: setattr(module[5], "bias", nn.Parameter(module[5].bias.detach().clone())),
    "unshard": lambda module, mesh: st.unshard_module(module),
    "reshard": lambda module, mesh: module[0].weight.reshard("[-, tp balanced]"),
    "shard later": lambda module, mesh: st.shard_parameter(module[5], "bias", "replicate", process_group=mesh),
    "freeze": lambda module, mesh: module[0].requires_grad_(False),
    "call again": lambda module, mesh: st.data_parallel(module, "dp", mesh, bucket_mib=TINY),
}


def changed(change):
    mesh = grid(2, 2)
    module, oracle = model(mesh)
    CHANGES[change](module, mesh)
    if change == "freeze":
        oracle[0].requires_grad_(False)
    for step in range(2):
        x = batch(step)
        module(mine(x, mesh)).pow(2).mean().backward()
        oracle(x).pow(2).mean().backward()
        same_trained(module, oracle)
    if change == "freeze":
        for m in (module, oracle):
            m.requires_grad_(True)
            m.zero_grad()
        module(mine(x, mesh)).pow(2).mean().backward()
        oracle(x).pow(2).mean().backward()
        same_grads(module, oracle)


def same_trained(module, oracle):
    pairs = zip(module.parameters(), oracle.parameters(), strict=True)
    for p, q in pairs:
        if q.grad is None:
            assert p.grad is None
            continue
        grad = p.grad.full_tensor() if isinstance(p.grad, st.ShardedTensor) else p.grad
        torch.testing.assert_close(grad, q.grad, rtol=1e-4, atol=1e-5)


@sim
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_are_replaced_are_averaged_too(world, change):
    world(changed, 4, change=change)


def from_meta():
    mesh = grid(2, 1)
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    st.data_parallel(module, "dp", mesh)
    module.to_empty(device=device())
    nn.init.constant_(module.weight, float(mesh.rank))
    nn.init.zeros_(module.bias)
    module(torch.ones(1, 3, device=device()) * mesh.rank).sum().backward()
    assert module.weight.unique().tolist() == [0.0]  # the first rank's
    assert module.weight.grad.unique().tolist() == [0.5]


@sim
def test_a_module_may_be_materialised_later(world):
    world(from_meta, 2)


def starting_values():
    mesh = grid(2, 2)
    for init_sync in (True, False):
        torch.manual_seed(mesh.mesh.coordinate(mesh.rank)[0])
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        module[1].running_mean.fill_(mesh.rank // 2)
        st.shard_parameter(module[0], "weight", "[tp balanced, -]", process_group=mesh)
        module[0].bias.requires_grad_(False)
        st.data_parallel(module, "dp", mesh, init_sync=init_sync)
        values = torch.cat([module[0].bias.detach(), module[1].running_mean])
        everyone = mesh.axis("dp").all_gather(values).view(2, -1)
        assert torch.equal(everyone[0], everyone[1]) == init_sync


@sim
def test_ranks_start_from_the_values_of_the_first(world):
    world(starting_values, 4)


def dtypes():
    mesh = grid(2, 1)
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(torch.bfloat16)
    module[0].weight.grad_dtype = torch.float32
    st.data_parallel(module, "dp", mesh)
    x = torch.full((1, 2), 1.0 + mesh.rank, dtype=torch.bfloat16)
    module(x).sum().backward()
    assert [p.grad.dtype for p in module.parameters()] == [torch.float32, torch.bfloat16]
    both = mesh.all_gather(module[0].weight.grad).view(2, -1)
    assert torch.equal(both[0], both[1])
    module.zero_grad()
    module[0].weight.grad_dtype = torch.bfloat16
    module.double()
    module(x.double()).sum().backward()
    both = mesh.all_gather(module[1].weight.grad).view(2, -1)
    assert both.dtype is torch.float64
    assert torch.equal(both[0], both[1])
    phase = st.data_parallel(nn.Linear(1, 1, bias=False, dtype=torch.complex64), "dp", mesh)
    phase(torch.full((1, 1), 1j * mesh.rank)).abs().sum().backward()
    both = mesh.all_gather(phase.weight.grad).view(2, -1)
    assert torch.equal(both[0], both[1])


@sim
def test_gradients_of_any_dtype(world):
    world(dtypes, 2)


# -- kinds of backward


def checkpointed(use_reentrant, bucket_mib):
    mesh = grid(2, 2)
    module, oracle = model(mesh, bucket_mib=bucket_mib)
    parts = list(module)

    def forward(_, x):
        for part in parts:
            x = checkpoint(part, x, use_reentrant=use_reentrant)
        return x

    module.forward = forward.__get__(module)
    x = batch(0)
    module(mine(x, mesh).requires_grad_()).pow(2).mean().backward()
    oracle(x).pow(2).mean().backward()
    same_grads(module, oracle)


@sim
@pytest.mark.parametrize("bucket_mib", [25.0, TINY])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_checkpoint(world, use_reentrant, bucket_mib):
    world(checkpointed, 4, use_reentrant=use_reentrant, bucket_mib=bucket_mib)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=True)
        return x


def twice():
    module = st.data_parallel(Twice(), "dp", bucket_mib=TINY)
    x = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(st.RuleError) as error:
        module(x).sum().backward()
    assert str(error.value).startswith("a gradient came to `inner.")
    assert str(error.value).endswith(
        "` after its bucket had been sent\n"
        "  because  the parameter is used in several checkpoints whose backward runs apart\n"
        "  fix      checkpoint(..., use_reentrant=False)"
    )


@sim
def test_a_parameter_in_two_reentrant_checkpoints_is_refused(world):
    world(twice, 2)


def other_backwards():
    mesh = grid(2, 1)
    module = st.data_parallel(nn.Linear(2, 2, bias=False), "dp", mesh)
    x = torch.full((1, 2), 1.0 + mesh.rank)
    module(x).pow(2).sum().backward(create_graph=True)
    assert not module.weight.grad.requires_grad
    values = mesh.all_gather(module.weight.grad).view(2, -1)
    assert torch.equal(values[0], values[1])
    module.zero_grad()
    (grad,) = torch.autograd.grad(module(x).sum(), module.weight)
    assert grad.unique().tolist() == [1.0 + mesh.rank]  # this rank's own
    assert module.weight.grad is None
    kept = module.weight.grad = torch.zeros(2, 2)
    module(x).sum().backward(inputs=[module.weight])
    assert module.weight.grad is kept
    assert kept.unique().tolist() == [1.5]


@sim
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_other_kinds_of_backward(world):
    world(other_backwards, 2)


def broken():
    mesh = grid(2, 1)
    module, oracle = model(mesh, bucket_mib=TINY)
    handle = module[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module(mine(batch(0), mesh)).sum().backward()
    handle.remove()
    module.zero_grad()
    x = batch(1)
    module(mine(x, mesh)).mean().backward()
    oracle(x).mean().backward()
    same_grads(module, oracle)


@sim
def test_a_backward_that_broke_off_is_forgotten(world):
    world(broken, 2)


def overlaps():
    mesh = grid(2, 1)
    module, _ = model(mesh, bucket_mib=TINY)
    group, started = mesh.axis("dp"), []
    start = group.all_reduce_async
    group.all_reduce_async = lambda t, op="sum": (started.append(t.numel()), start(t, op))[1]
    before = []
    module[0].weight.register_hook(lambda grad: before.append(len(started)))
    module(mine(batch(0), mesh)).sum().backward()
    assert (before, len(started)) == ([7], 8)  # all others were on their way
    st.data_parallel(module, "dp", mesh, bucket_mib=25.0)
    started.clear()
    module(mine(batch(0), mesh)).sum().backward()
    assert started == [sum(p.numel() for p in module.parameters()) + 8]  # one message, with a flag for each


@sim
def test_buckets_leave_while_backward_runs(world):
    world(overlaps, 2)


def copies():
    mesh = grid(2, 1)
    module = st.data_parallel(dense(), "dp", mesh)
    x = torch.full((1, 5), 1.0 + mesh.rank)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other(x).sum().backward()
        first = mesh.all_gather(other[0].weight.grad).view(2, -1)
        assert not torch.equal(first[0], first[1])
        with pytest.raises(st.RuleError, match="not data parallel"), st.no_sync(other):
            pass
    module(x).sum().backward()
    found = weakref.ref(module), weakref.ref(module[2].bias)
    del module
    gc.collect()
    assert [find() for find in found] == [None, None]


@sim
def test_copies_are_not_data_parallel_and_nothing_is_kept_alive(world):
    world(copies, 2)


def tied_and_attributes():
    mesh = grid(2, 2)
    module = nn.Module()
    module.a = nn.Linear(3, 3, bias=False)
    module.b = nn.Linear(3, 3, bias=False)
    module.b.weight = module.a.weight
    module.extra = st.distribute(torch.ones(4), "[tp]", process_group=mesh, requires_grad=True)
    st.data_parallel(module, "dp", mesh)
    x = torch.full((1, 3), 1.0 + mesh.mesh.coordinate(mesh.rank)[0])
    (module.b(module.a(x)).sum() + (module.extra * x[0, 0]).sum()).backward()
    assert module.extra.grad.full_tensor().tolist() == [1.5] * 4
    values = mesh.axis("dp").all_gather(module.a.weight.grad).view(2, -1)
    assert torch.equal(values[0], values[1])


@sim
def test_tied_parameters_and_sharded_attributes(world):
    world(tied_and_attributes, 4)


# -- real groups


def device_mesh():
    mesh = dist.init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    module, oracle = dense(), dense()
    st.shard_module(module, PLAN, process_group=mesh["tp"])  # wrappers that know of one axis only
    st.data_parallel(module, "dp", mesh["dp"])
    x = batch(0)
    module(x.chunk(2)[mesh.get_local_rank("dp")]).pow(2).mean().backward()
    oracle(x).pow(2).mean().backward()
    same_grads(module, oracle)


def test_sharded_over_one_group_and_averaged_over_another(world):
    world(device_mesh, 4)


def compiled():
    mesh = grid(2, 1)
    module, oracle = dense(), dense()
    st.data_parallel(module, "dp", mesh)
    forward = torch.compile(module, backend="aot_eager", fullgraph=True)
    for step in range(2):
        x = batch(step)
        forward(mine(x, mesh)).pow(2).mean().backward()
        oracle(x).pow(2).mean().backward()
        same_grads(module, oracle)


def test_a_compiled_module_is_averaged_in_one_graph(world):
    world(compiled, 2)


# -- refusals


def refusals():
    mesh = grid(2, 2)
    with pytest.raises(st.LayoutError) as error:
        st.data_parallel(nn.Linear(2, 2), "data", mesh)
    assert str(error.value) == ("no mesh axis is called `data`\n  mesh  (dp=2, tp=2)\n  fix   use one of dp, tp")
    with pytest.raises(st.LayoutError, match="has one axis, not several"):
        st.data_parallel(nn.Linear(2, 2), "dp*tp")
    module = st.shard_module(nn.Linear(4, 4), {"weight": "[dp, -]"}, process_group=mesh)
    with pytest.raises(st.LayoutError) as error:
        st.data_parallel(module, "dp", mesh)
    assert str(error.value) == (
        "`weight` is cut along a data axis, but Linear takes its input as equal on all ranks\n"
        "  spec       [dp, -]\n"
        "  data axes  dp\n"
        "  fix        shard it along other axes; a layer that sends its inputs to the ranks may cut along a data axis"
    )
    whole = st.data_parallel(nn.Sequential(nn.Linear(2, 2)), "dp", mesh)
    with pytest.raises(st.LayoutError) as error:
        st.data_parallel(whole[0], "dp", mesh)
    assert str(error.value) == (
        "another optimizer or data_parallel reduces the gradient of `weight` already\n"
        "  fix  call data_parallel once, on the whole model"
    )
    with pytest.raises(st.RuleError) as error:
        st.data_parallel(nn.Embedding(4, 2, sparse=True), "dp", mesh)
    assert str(error.value) == (
        "the gradient of `weight` is sparse, and sparse gradients are not averaged\n"
        "  fix  make the embedding with sparse=False"
    )
    with pytest.raises(st.RuleError) as error, st.no_sync(whole[0]):
        pass
    assert str(error.value) == (
        "this module is not data parallel\n  fix  call no_sync on the module that data_parallel returned"
    )
    with pytest.raises(st.DisagreementError, match="parameters of rank 0 does not match") as error:
        st.data_parallel(nn.Linear(2, 2 + mesh.rank), "dp", mesh)
    part = st.distribute(torch.ones(4), 'chunk(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])', requires_grad=True)
    module = nn.Module()
    module.part = part
    with pytest.raises(st.LayoutError, match=r"neither whole nor cut along the data axis|cut along"):
        st.data_parallel(module, "dp", mesh)
    return str(error.value)


@sim
def test_faults_are_the_same_on_every_rank_before_anything_moves(world):
    assert len(set(world(refusals, 4))) == 1


def passed_on():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, device=device()))

        def forward(self, x):
            return (x * self.weight).sum(), self.weight

    table = st.data_parallel(Table(), "dp", grid(2, 1))
    for _ in range(3):
        table(torch.ones(3, device=device()))[0].backward()
    return len(table.weight._backward_hooks or {}), table.weight.grad.tolist()


@sim
def test_a_parameter_that_a_module_returns_gets_no_hook_in_each_forward(world):
    assert world(passed_on, 2) == [(0, [3.0, 3.0, 3.0])] * 2
