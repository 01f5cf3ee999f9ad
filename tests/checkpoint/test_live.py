"""A module that changes its plan or its ranks while it trains: the next step is that of one that never changed, and
that of one that saved under the old plan and loaded under the new one, bit for bit."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import device, every_size
from torch import nn

import shardtensor as st
from shardtensor.checkpoint.live import reshard_module
from shardtensor.comm.process_group import as_group
from shardtensor.layout.layout import replicated
from shardtensor.layout.route import lacking
from shardtensor.mesh import read_mesh
from shardtensor.plan.plan import Plan

sim = pytest.mark.worlds("sim")
both = pytest.mark.worlds("sim", "gloo")

COLUMNS = {"0": "[tp balanced, ...]", "2.weight": "[-, tp balanced]"}
ROWS = {"0.weight": "[-, tp balanced]", "2": "[tp balanced, ...]"}
FLAT = {"**.weight": "flat(tp)", "**.bias": "[tp balanced]"}
BLOCKS = {"0.weight": "[-, tp balanced blocks(2)]", "0.bias": "[tp pad(16)]", "2.weight": "replicate"}
PLAIN: dict[str, str] = {}


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def integers(shape: torch.Size | tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(device(), torch.float64)


def mlp(seed: int = 0) -> nn.Module:
    """Two layers of whole numbers, whose sums and products are exact."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 7)).to(device(), torch.float64)
    for i, param in enumerate(model.parameters()):
        param.data = integers(param.shape, seed + i)
    return model


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    out = whole(model(integers((3, 6), 10 + number)))
    (out * integers(out.shape, 20 + number)).sum().backward()
    optimizer.step()


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.named_parameters(), lr=0.25)


def ours(make: Any, **options: Any) -> Any:
    return lambda model: st.ShardedOptimizer(model, make, **options)


OPTIMIZERS = {
    "SGD": sgd,
    "AdamW": adamw,
    "our SGD": ours(torch.optim.SGD, lr=0.5, momentum=0.5),
    "our AdamW": ours(torch.optim.AdamW, lr=0.25),
    "our Adagrad": ours(torch.optim.Adagrad, lr=0.25),
    "our Adafactor": ours(torch.optim.Adafactor, lr=0.25),
}


def states(model: nn.Module, optimizer: Any) -> list[Any]:
    """Every tensor of the model and of the optimizer, whole."""
    found = [whole(x).detach().clone() for x in (*model.parameters(), *model.buffers())]
    for param in model.parameters():
        values = optimizer.state.get(param, {})
        found += [
            whole(values[key]).detach().clone() for key in sorted(values) if isinstance(values[key], torch.Tensor)
        ]
    return found


def assert_owns_its_bytes(model: nn.Module, optimizer: Any) -> None:
    """No part is a view that keeps a larger tensor in memory."""
    params = list(model.parameters())
    held = [*params, *(x for p in params for x in optimizer.state.get(p, {}).values() if isinstance(x, torch.Tensor))]
    for local in (getattr(x, "_local", x) for x in held):
        assert local.untyped_storage().nbytes() == local.numel() * local.element_size()


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(x, y), f"{i}: {x} is not {y}"


# -- one set of ranks --------------------------------------------------------------------------------------------------


def as_never_changed(kind: str) -> None:
    dense, model = mlp(), mlp()
    optimizers = [OPTIMIZERS[kind](dense), OPTIMIZERS[kind](model)]
    objects = list(model.parameters())
    for number, plan in enumerate((PLAIN, COLUMNS, ROWS, BLOCKS, PLAIN, FLAT, COLUMNS)):
        before = states(model, optimizers[1])
        assert reshard_module(model, plan, optimizers[1]) is model
        assert all(x is y for x, y in zip(model.parameters(), objects, strict=True))
        assert_same(states(model, optimizers[1]), before)
        assert_owns_its_bytes(model, optimizers[1])
        for net, optimizer in zip((dense, model), optimizers, strict=True):
            step(net, optimizer, number)
        assert_same(states(model, optimizers[1]), states(dense, optimizers[0]))


@sim
@every_size
@pytest.mark.parametrize("kind", ["SGD", "our SGD"])
def test_steps_between_changes_are_those_of_a_dense_run(world, size, kind):
    world(as_never_changed, size, kind=kind)


def reloaded(model: nn.Module, optimizer: Any, kind: str, plan: Any, make: Any = mlp) -> tuple[nn.Module, Any]:
    """What a program has that loads under another plan what this one saved."""
    saved = st.full_state_dict(model), st.full_state_dict(st.optim_state_dict(model, optimizer))
    fresh = st.shard_module(make(seed=5), plan)
    fresh.load_state_dict(saved[0])
    its = OPTIMIZERS[kind](fresh)
    its.load_state_dict(st.optim_state_dict_to_load(fresh, its, saved[1]))
    return fresh, its


def as_reloaded(kind: str) -> None:
    model = st.shard_module(mlp(), COLUMNS)
    optimizer = OPTIMIZERS[kind](model)
    step(model, optimizer, 0)
    for number, plan in enumerate((ROWS, PLAIN, COLUMNS, FLAT), 1):
        fresh, its = reloaded(model, optimizer, kind, plan)
        reshard_module(model, plan, optimizer)
        for net, way in ((model, optimizer), (fresh, its)):
            step(net, way, number)
        assert_same(states(model, optimizer), states(fresh, its))


@sim
@every_size
@pytest.mark.parametrize("kind", ["AdamW", "our AdamW", "our Adagrad", "our Adafactor"])
@pytest.mark.filterwarnings("ignore::shardtensor.GatherWarning")
def test_the_next_step_is_that_after_a_save_and_a_load(world, size, kind):
    world(as_reloaded, size, kind=kind)


class Tied(nn.Module):
    """A tied vocabulary, a buffer that is saved, one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(6.0) + 1)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids) * whole(self.scale))


def tied_stay_tied() -> None:
    torch.manual_seed(0)
    dense = Tied().to(device(), torch.float64)
    model = copy.deepcopy(dense)
    optimizers = [ours(torch.optim.AdamW)(net) for net in (dense, model)]
    ids = torch.arange(10, device=device()).view(2, 5)
    for plan in ({"embed": "[tp balanced, -]", "scale": "[tp balanced]"}, {"head.weight": "[-, tp balanced]"}, PLAIN):
        reshard_module(model, plan, optimizers[1])
        assert model.head.weight is model.embed.weight
        assert isinstance(model.embed.weight, st.ShardedTensor) == bool(plan)
        assert torch.equal(whole(model.scale), whole(dense.scale))
        assert not isinstance(model.table, st.ShardedTensor)
        for net, optimizer in zip((dense, model), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(whole(net(ids)).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
        torch.testing.assert_close(states(model, optimizers[1]), states(dense, optimizers[0]))
    assert list(dict(model.named_buffers())) == ["scale", "table"]
    assert list(model.state_dict()) == list(dense.state_dict())


@sim
@every_size
def test_tied_weights_and_buffers_move_once(world, size):
    world(tied_stay_tied, size)


def plan_on(mesh: str, stored: bool = False) -> Plan:
    """Columns and rows with flows, on data ranks by tensor-parallel ranks."""
    column = {"weight": "[out: tp balanced]", "bias": "[out: tp balanced]", "out": "[..., tp balanced]"}
    row = {
        "weight": "[in: tp balanced]",
        "in": "[..., tp balanced]",
        "bias": "replicate",
        "out": "partial(tp) -> replicate",
    }
    rules: dict[str, Any] = {"0": column, "1": {"in": "[..., tp balanced]", "out": "[..., tp balanced]"}, "2": row}
    return Plan.from_rules(rules | ({"store **": "flat(dp)"} if stored else {}), mesh, data="dp")


MESHES = [("dp=2, tp=2", False), ("dp=1, tp=4", False), ("dp=2, tp=2", True), ("dp=4, tp=1", True)]


def with_data_ranks(kind: str, plans: list[tuple[str, bool]]) -> None:
    rank, dense, model = as_group().rank, mlp(), mlp()
    optimizers = [OPTIMIZERS[kind](dense), OPTIMIZERS[kind](model)]
    for number, (mesh, stored) in enumerate(plans):
        reshard_module(model, plan_on(mesh, stored), optimizers[1])
        copies = read_mesh(mesh).sizes[0]
        x, c = integers((4, 6), number), integers((4, 7), 30 + number)
        for net, optimizer, count in zip((dense, model), optimizers, (1, copies), strict=True):
            optimizer.zero_grad()
            mine = rank // (4 // count) if count > 1 else 0
            out = whole(net(x.chunk(count)[mine]))
            (out * c.chunk(count)[mine]).sum().mul(count).backward()
            optimizer.step()
        assert_same(states(model, optimizers[1]), states(dense, optimizers[0]))


@sim
@pytest.mark.parametrize("kind", ["SGD", "our SGD"])
@pytest.mark.parametrize("first", range(4))
def test_plans_on_other_meshes_and_fully_sharded(world, kind, first):
    """Each of four plans to each other one: flows, gradients averaged over data ranks, `store`."""
    others = [each for i, each in enumerate(MESHES) if i != first]
    world(with_data_ranks, 4, kind=kind, plans=[each for other in others for each in (MESHES[first], other)])


# -- other ranks -------------------------------------------------------------------------------------------------------


def group_of(ranks: list[int], how: str) -> Any:
    if how == "new_group":
        return dist.new_group(ranks)
    if how == "mesh":
        return dist.DeviceMesh(device().type, ranks)
    return as_group().subgroup(ranks)


def leaves_and_joins(kind: str, how: str = "subgroup", is_new: bool = False) -> None:
    world, dense, model = as_group(), mlp(), st.shard_module(mlp(), COLUMNS)
    three = group_of([0, 1, 2], how)
    optimizers = [OPTIMIZERS[kind](dense), OPTIMIZERS[kind](model)]
    number = 0
    for plan, group in ((ROWS, three), (COLUMNS, three), (FLAT, None), (BLOCKS, three), (PLAIN, None)):
        reshard_module(model, plan, optimizers[1], process_group=group)
        is_out = group is not None and world.rank == 3
        for net, optimizer in zip((dense, model), optimizers, strict=True):
            if net is dense or not is_out:
                step(net, optimizer, number)
        number += 1
        for optimizer in optimizers[: 1 if is_out else 2]:
            optimizer.param_groups[0]["lr"] *= 0.5
        if not is_out:
            assert_same(states(model, optimizers[1]), states(dense, optimizers[0]))
            assert optimizers[1].param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"]
            continue
        kept = [x for x in model.parameters()]
        kept += [x for p in kept for x in optimizers[1].state.get(p, {}).values() if isinstance(x, st.ShardedTensor)]
        assert not any(x._local.numel() for x in kept if isinstance(x, st.ShardedTensor))
        if is_new:  # a process that starts now
            model = mlp(seed=7)
            optimizers[1] = OPTIMIZERS[kind](model)


@sim
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "our SGD"])
def test_a_rank_leaves_and_joins(world, kind, is_new):
    world(leaves_and_joins, 4, kind=kind, is_new=is_new)


@pytest.mark.parametrize(("kind", "how"), [("SGD", "mesh"), ("our SGD", "new_group")])
def test_a_rank_leaves_and_joins_over_real_processes(world, kind, how):
    world(leaves_and_joins, 4, kind=kind, how=how)


def fewer_as_reloaded(kind: str) -> None:
    world, model = as_group(), st.shard_module(mlp(), COLUMNS)
    optimizer = OPTIMIZERS[kind](model)
    step(model, optimizer, 0)
    few = world.subgroup([0, 1, 2])
    saved = st.full_state_dict(model), st.full_state_dict(st.optim_state_dict(model, optimizer))
    reshard_module(model, ROWS, optimizer, process_group=few)
    if few.index >= 0:
        fresh = st.shard_module(mlp(seed=5), ROWS, process_group=few)
        fresh.load_state_dict(saved[0])
        its = OPTIMIZERS[kind](fresh)
        its.load_state_dict(st.optim_state_dict_to_load(fresh, its, saved[1]))
        for net, way in ((model, optimizer), (fresh, its)):
            step(net, way, 1)
        assert_same(states(model, optimizer), states(fresh, its))
        saved = copy.deepcopy((st.full_state_dict(model), st.full_state_dict(st.optim_state_dict(model, optimizer))))
    reshard_module(model, COLUMNS, optimizer)
    step(model, optimizer, 2)
    found = states(model, optimizer)
    if few.index >= 0:
        fresh = mlp(seed=5)
        fresh.load_state_dict(saved[0])
        its = OPTIMIZERS[kind](fresh)
        its.load_state_dict(st.optim_state_dict_to_load(fresh, its, saved[1]))
        step(fresh, its, 2)
        torch.testing.assert_close(found, states(fresh, its))


@sim
@pytest.mark.parametrize("kind", ["AdamW", "our AdamW", "our Adafactor"])
@pytest.mark.filterwarnings("ignore::shardtensor.GatherWarning")
def test_fewer_ranks_continue_as_after_a_load(world, kind):
    world(fewer_as_reloaded, 4, kind=kind)


def another_device_mesh() -> None:
    dense, model = mlp(), st.shard_module(mlp(), COLUMNS)
    optimizers = [sgd(dense), sgd(model)]
    grid = dist.init_device_mesh(device().type, (2, 2), mesh_dim_names=("a", "b"))
    for number, (plan, group) in enumerate(
        (({"**.weight": "[a balanced, b balanced]"}, grid), ({"**.weight": "[b*a balanced, -]"}, grid), (ROWS, None))
    ):
        reshard_module(model, plan, optimizers[1], process_group=group)
        for net, optimizer in zip((dense, model), optimizers, strict=True):
            step(net, optimizer, number)
        assert_same(states(model, optimizers[1]), states(dense, optimizers[0]))


def test_another_device_mesh(world):
    world(another_device_mesh, 4)


def in_the_midst_of_accumulation() -> None:
    dense, model = mlp(), st.shard_module(mlp(), COLUMNS)
    optimizers = [sgd(dense), sgd(model)]
    few = as_group().subgroup([0, 1])
    for number, (plan, group) in enumerate(((ROWS, None), (COLUMNS, few), (ROWS, None))):
        is_out = group is few and few.index < 0
        for net in (dense, model):
            (whole(net(integers((3, 6), number))) * integers((3, 7), 9)).sum().backward()
        reshard_module(model, plan, optimizers[1], process_group=group)
        if group is few:
            reshard_module(model, plan, optimizers[1])  # and back at once
        for param, want in zip(model.parameters(), dense.parameters(), strict=True):
            assert torch.equal(whole(param.grad), whole(want.grad)), is_out
    for net, optimizer in zip((dense, model), optimizers, strict=True):
        step(net, optimizer, 5)
    assert_same(states(model, optimizers[1]), states(dense, optimizers[0]))


@sim
def test_accumulated_gradients_move_too(world):
    world(in_the_midst_of_accumulation, 3)


# -- bytes -------------------------------------------------------------------------------------------------------------


def change(model: nn.Module, plan: Any, optimizer: Any) -> None:
    reshard_module(model, plan, optimizer)


def layouts(model: nn.Module) -> list[Any]:
    return [p._layout if isinstance(p, st.ShardedTensor) else None for p in model.parameters()]


def changed_layouts(old: Any, new: Any) -> list[tuple[Any, Any]]:
    model = st.shard_module(mlp(), old)
    optimizer = st.ShardedOptimizer(model, torch.optim.AdamW)
    for param in model.parameters():
        param.grad = torch.ones(param.shape, dtype=param.dtype)
    optimizer.step()
    optimizer.zero_grad()
    before = layouts(model)
    change(model, new, optimizer)
    return list(zip(before, layouts(model), strict=True))


@pytest.mark.parametrize(("old", "new"), [(COLUMNS, ROWS), (COLUMNS, FLAT), (PLAIN, ROWS), (ROWS, PLAIN), (ROWS, ROWS)])
@pytest.mark.parametrize("rank", range(3))
def test_a_rank_receives_what_it_lacks(old, new, rank):
    """Of each parameter and of its two tensors of state; beside small exchanges, in which ranks agree."""
    traffic = st.count_bytes("tp=3", changed_layouts, old, new, rank=rank)
    lacks = 0
    for before, after in traffic.result:
        if before is not None:  # what is plain, a rank holds whole
            after = replicated(before.shape, range(3)) if after is None else after
            lacks += 3 * 8 * lacking(before, after, rank)
    moved = [x for x in traffic.lines if x.site.endswith("in change") and not x.collective.startswith("exchange")]
    assert sum(line.received_bytes for line in moved) == lacks
    assert (lacks > 0) == (old not in (PLAIN, new))


# -- errors ------------------------------------------------------------------------------------------------------------


class Whole(st.Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return module


def looks(model: nn.Module, optimizer: Any) -> list[Any]:
    """What an error must leave as it is, without sending anything."""
    found: list[Any] = []
    for name, owner in model.named_modules():
        hooks = [list(owner._forward_hooks), list(owner._forward_pre_hooks), list(owner._load_state_dict_pre_hooks)]
        found.append((name, type(owner), hooks, {key: id(value) for key, value in vars(owner).items()}))
    for param in model.parameters():
        local = getattr(param, "_local", param)
        found.append((type(param), id(param), id(local), str(getattr(param, "_layout", "")), local.tolist()))
        found.append(
            [(k, v.tolist()) for k, v in optimizer.state[param].items() if not isinstance(v, st.ShardedTensor)]
        )
        found.append(
            [(k, v._local.tolist()) for k, v in optimizer.state[param].items() if isinstance(v, st.ShardedTensor)]
        )
    return found


def refused(what: str) -> str:
    world, dense, model = as_group(), mlp(), mlp()
    st.shard_module(
        model, plan_on("dp=1, tp=2") if what == "plan" else {"0": "[tp balanced, ...]", "2.bias": "[tp balanced]"}
    )
    optimizers = [ours(torch.optim.SGD, lr=0.5, momentum=0.5)(net) for net in (dense, model)]
    for net, optimizer in zip((dense, model), optimizers, strict=True):
        step(net, optimizer, 0)
    before, first = looks(model, optimizers[1]), world.rank == 0
    plan: Any = ROWS
    given, group, keep = [optimizers[1]], None, None
    if what in ("pattern", "plan"):
        plan = {"3.weight": "[tp, -]"}
    elif what == "spec":
        plan = {"2.weight": "[tp sizes(1, 1), -]"}
    elif what == "on one rank":
        plan = {"2.weight": "[tp sizes(1, 1), -]"} if first else ROWS
    elif what == "other plans":
        plan = COLUMNS if first else ROWS
    elif what == "another model":
        given = [sgd(mlp())]
    elif what == "other optimizers":
        given = [] if first else given
    elif what == "reference":
        keep = weakref.ref(model.get_parameter("2.weight")) if first else None
    elif what == "sharder":
        plan = {"0": Whole()}
    elif what == "absent" and first:
        return ""
    elif what == "groups":
        group = world.subgroup([0]) if first else None
    with pytest.raises(st.ShardTensorError) as error:
        reshard_module(model, plan, *given, process_group=group)
    assert looks(model, optimizers[1]) == before
    del keep
    if what == "absent":
        return str(error.value)
    for net, optimizer in zip((dense, model), optimizers, strict=True):
        step(net, optimizer, 1)
    assert_same(states(model, optimizers[1]), states(dense, optimizers[0]))
    reshard_module(model, ROWS, optimizers[1])
    for net, optimizer in zip((dense, model), optimizers, strict=True):
        step(net, optimizer, 2)
    assert_same(states(model, optimizers[1]), states(dense, optimizers[0]))
    return str(error.value)


@sim
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("pattern", "matches no parameter"),
        ("plan", "matches no parameter"),
        ("spec", "2.weight"),
        ("on one rank", "rank 0 has a fault"),
        ("other plans", "does not match"),
        ("another model", "steps no parameter"),
        ("other optimizers", "optimizer"),
        ("reference", "something else refers to it"),
        ("sharder", "takes specs only"),
    ],
)
def test_an_error_is_raised_on_every_rank_and_changes_nothing(world, what, words):
    texts = world(refused, 2, what=what)
    assert len(set(texts)) == 1
    assert words in texts[0]


@sim
def test_a_rank_that_does_not_call_leaves_the_others_unchanged(world):
    texts = world(refused, 2, what="absent")
    assert "reshard_module" in texts[1] or "exchange" in texts[1]
