"""Views: shapes, values and gradients; writes through views; copies that refuse to be written."""

from __future__ import annotations

import warnings

import pytest
import torch
from harness import device, every_size
from harness.law import case, check_table, specs, values, whole

import shardtensor as st

S = (5, 6)
T3 = (4, 2, 6)
CASES = [
    case("t", lambda x: x.t() * 2, (S,)),
    case("T", lambda x: x.T * 2, (S,)),
    case("mT", lambda x: x.mT * 2, (T3,)),
    case("transpose", lambda x: x.transpose(0, -1) * 2, (T3,)),
    case("permute", lambda x: x.permute(2, 0, 1) * 2, (T3,)),
    case("permute tuple", lambda x: torch.permute(x, (1, 2, 0)), (T3,)),
    case("movedim", lambda x: torch.movedim(x, 0, 2), (T3,)),
    case("unsqueeze", lambda x: x.unsqueeze(1) * 2, (S,)),
    case("squeeze", lambda x: x[:, None].squeeze(1), (S,)),
    case("squeeze all", lambda x: x.squeeze(), ((1, 5, 1),), gathers=(0, 1, 2)),
    case("flatten", lambda x: x.flatten(0, 1) * 2, (T3,), gathers=(1,)),
    case("flatten last", lambda x: x.flatten(1), (T3,), gathers=(2,)),
    case("view merge", lambda x: x.view(8, 6), (T3,), gathers=(1,)),
    case("view -1", lambda x: x.view(-1), (S,), gathers=(1,)),
    case("view split", lambda x: x.view(4, 2, 3, 2), (T3,), gathers=(2,)),
    case("view split rows", lambda x: x.view(2, 4, 3), ((8, 3),), gathers=(0,)),
    case("unflatten", lambda x: x.unflatten(1, (4, 2)), ((3, 8),), gathers=(1,)),
    case("reshape cross", lambda x: x.reshape(6, 5), (S,), gathers=True),
    case("reshape of transposed", lambda x: x.t().reshape(-1), (S,), gathers=True),
    case("same", lambda x: x.view(5, 6), (S,)),
    case("expand", lambda x: x.unsqueeze(1).expand(-1, 3, -1), (S,)),
    case("expand_as", lambda x, y: x.expand_as(y) * y, ((1, 6), S), gathers=(0,)),
    case("repeat", lambda x: x.repeat(2, 1, 1), (S,), gathers=True),
    case("slice", lambda x: x[1:4] * 2, (S,)),
    case("slice both", lambda x: x[1:, :-1], (S,)),
    case("slice step", lambda x: x[::2, 1::3], (S,)),
    case("slice nothing", lambda x: x[3:3], (S,)),
    case("index", lambda x: x[2], (S,)),
    case("index last", lambda x: x[..., -1], (S,)),
    case("index both", lambda x: x[1, 2], (S,)),
    case("index three", lambda x: x[:, 1, None, 2:4], (T3,)),
    case("narrow", lambda x: x.narrow(1, 2, 3), (S,)),
    case("select", lambda x: x.select(0, 1), (S,)),
    case("chunk", lambda x: x.chunk(2, 1), (S,)),
    case("split", lambda x: torch.split(x, [1, 3, 1]), (S,)),
    case("unbind", lambda x: x.unbind(1), (S,), gathers=(1,)),
    case("index list", lambda x: x[[0, 2]], (S,), gathers=True),
    case("index mask", lambda x: x[x > 0], (S,), gathers=True),
    case("cat", lambda x, y: torch.cat([x, y]), (S, (2, 6))),
    case("cat 1", lambda x, y: torch.cat([x, y, x], dim=1), (S, (5, 2))),
    case("stack", lambda x, y: torch.stack([x, y], 1), (S, S)),
    case("clone", lambda x: x.clone() * 1, (S,)),
    case("contiguous", lambda x: x.t().contiguous() * 1, (S,)),
    case("flip", lambda x: x.flip(1), (S,), gathers=(1,)),
    case("flip two dims", lambda x: x.flip(0, 1) + x.flip((1, 0)) + torch.flip(x, dims=(0, 1)), (S,), gathers=True),
    case("tril", lambda x: x.tril(), (T3,), gathers=(1, 2)),
    case("gather", lambda x, i: torch.gather(x, 1, i), (S, (5, 2)), make=("int", "ids:6"), gathers=(1,)),
    case("index_select", lambda x, i: x.index_select(1, i), (S, (3,)), make=("int", "ids:6")),
    case("diagonal", lambda x: x.diagonal(), (S,), gathers=True),
    case("no rows", lambda x: x.view(0, 3, 2), ((0, 6),)),
]


def _set(change):
    def function(x, *others):
        y = x * 1
        change(y, *others)
        return y

    return function


SETS = [
    case("setitem slice", _set(lambda y: y.__setitem__(slice(1, 4), 7.0)), (S,)),
    case("setitem int", _set(lambda y, v: y.__setitem__((2, slice(1, 3)), v)), (S, (2,)), gathers="into whole"),
    case("setitem rows", _set(lambda y, v: y.__setitem__(slice(0, 2), v)), (S, (6,)), gathers="into whole"),
    case("setitem mask", _set(lambda y: y.__setitem__(y.detach() > 0, 9.0)), (S,)),
    case("through t", _set(lambda y: y.t().add_(1)), (S,), refuses=True),
    case("through slice", _set(lambda y: y[1:, 2:4].mul_(3)), (S,), refuses=True),
    case("through view", _set(lambda y: y.view(8, 6).zero_()), ((8, 6),)),
    case("setitem list", _set(lambda y: y.__setitem__([0, 2], 5.0)), (S,), gathers=True),
]


def views() -> None:
    check_table(CASES)


def writes() -> None:
    check_table(SETS)


@pytest.mark.worlds("sim")
@every_size
def test_views_equal_dense(world, size):
    world(views, size)


@pytest.mark.worlds("sim")
@every_size
def test_writes_through_views_equal_dense(world, size):
    world(writes, size)


def lost_writes() -> None:
    x = st.distribute(values("int", (4, 6), 1), "[-, tp]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", st.GatherWarning)
        copies = [x.view(-1), x.view(6, 4), x.diagonal(), x.reshape(2, 12).t()]
    changes = [
        lambda c: c.add_(1),
        lambda c: c.copy_(torch.zeros(c.shape)),
        lambda c: c.__imul__(2),
        lambda c: c.exp_(),
        lambda c: c.zero_(),
        lambda c: c.fill_(2),
    ]
    for copy in copies:
        for change in changes:
            with pytest.raises(st.RuleError, match="in place on a copy"):
                change(copy)
        assert (copy.clone().add_(1) == copy + 1).all()


def test_a_write_into_a_copy_that_should_be_a_view_is_refused(world):
    world(lost_writes, 2)


READS = {
    "all in one dim": lambda t: t.view(-1),
    "a part of that": lambda t: t.view(-1)[2:],
    "other dims": lambda t: t.reshape(8, 3),
    "a row": lambda t: t[0],
    "a part of a column": lambda t: t.select(1, 4)[1:],
    "an element": lambda t: t[2, 3],
    "one row, many times": lambda t: t.view(-1)[6:8].expand(3, 2),
    "all, many times": lambda t: t.reshape(1, 8, 3).expand(2, 8, 3),
    "a row of a row": lambda t: t.view(2, 2, 6)[1][0],
    "a diagonal, taken off the graph": lambda t: t.diagonal().detach(),
    "one of all rows": lambda t: t.unbind(0)[1],
    "one of all columns": lambda t: t.unbind(1)[5],
}
CHANGES = {
    "add_": lambda t: t.add_(1),
    "through a view": lambda t: t.t().mul_(2),
    "a slice": lambda t: t.__setitem__(slice(0, 2), 3),
    "a row": lambda t: t[0].add_(5),
    "a mask": lambda t: t.masked_fill_(t > 20, 0),
    "by index": lambda t: t.index_fill_(0, torch.tensor([1], device=t.device), 7),
    "foreach": lambda t: torch._foreach_mul_([t], 3),
    "off the graph": lambda t: t.detach().sub_(1),
    "out": lambda t: torch.mul(t, 2, out=t),
    "zero_": lambda t: t.zero_(),
}


def shows(ours, theirs) -> bool:
    """Whether a view shows what the dense one shows, or refuses to show what it was made of."""
    try:
        return torch.equal(whole(ours), theirs)
    except st.RuleError as error:
        return "used after its source was written" in str(error)


def written_sources() -> None:
    plain = torch.arange(24.0, device=device()).view(4, 6)
    for spec in ("[-, tp balanced]", "[tp balanced, -]"):
        x, dense = st.distribute(plain, spec), plain.clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", st.GatherWarning)
            for change_name, change in CHANGES.items():
                held = {name: (read(x), read(dense)) for name, read in READS.items()}
                for name, (ours, theirs) in held.items():
                    assert torch.equal(whole(ours), theirs), (spec, name)
                change(x), change(dense)
                for name, (ours, theirs) in held.items():
                    assert shows(ours, theirs), (spec, change_name, name)
                assert torch.equal(whole(x), dense), (spec, change_name)


@every_size
def test_a_copy_in_place_of_a_view_is_not_used_after_its_source_was_written(world, size):
    world(written_sources, size)


def copies_in_a_graph() -> None:
    found = []
    for make in (lambda t: st.distribute(t, "[-, tp balanced]"), lambda t: t):
        leaf = torch.arange(24.0, device=device()).view(4, 6).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", st.GatherWarning)
            x = make(leaf) * 2
            before = x.view(-1).clone()
            x.mul_(3)
            flat, row = x.view(-1), x[1]
            (flat * flat).sum().backward(retain_graph=True)
            (row * row * before[:6]).sum().backward(retain_graph=True)
            x[1] = 2.0
            (x.view(-1) * before).sum().backward(retain_graph=True)
            x[1].sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


@every_size
def test_gradients_flow_from_copies_in_place_of_views(world, size):
    world(copies_in_a_graph, size)


def steps() -> None:
    for make in (
        lambda w: st.ShardedOptimizer({"w": w}, torch.optim.SGD, lr=1.0),
        lambda w: st.ShardedOptimizer({"w": w}, torch.optim.AdamW, lr=1.0, weight_decay=0.0, fused=True),
        lambda w: torch.optim.SGD([w], lr=1.0),
        lambda w: torch.optim.AdamW([w], lr=1.0, weight_decay=0.0, fused=True),
    ):
        weight = torch.nn.Parameter(st.distribute(torch.ones(4, 3, device=device()), "[tp balanced, -]"))
        row = weight.detach()[3]
        weight.grad = torch.ones(4, 3, device=device())
        make(weight).step()
        if isinstance(row, st.ShardedTensor):
            with pytest.raises(st.RuleError, match="used after its source was written"):
                row + 1
        torch.testing.assert_close(whole(weight.detach()[3]), torch.zeros(3, device=device()), atol=1e-6, rtol=0)


@every_size
def test_a_copy_is_not_used_after_an_optimizer_wrote_its_source(world, size):
    world(steps, size)


def indexed() -> None:
    for spec in ("[tp balanced, -]", "[-, tp balanced]", f'grid(splits=(1, 1), placements=["rank:0/{device().type}"])'):
        if "grid" in spec and torch.distributed.get_world_size() > 1:
            continue
        dense = values("int", (4, 6), 1)
        x = st.distribute(dense, spec)
        dense = dense.clone()
        for t in (x, dense):
            row = t[0]
            t[0] += 1
            t[:, 2] *= 3
            t[1, 2].fill_(9)
            t[3].copy_(torch.arange(6.0))
            t[2][1] = 7
            t[2][3] -= 2
            t[-1].add_(t[0]).relu_()
            row.mul_(2)  # what was read before is read again
        assert torch.equal(x.full_tensor(), dense), spec
        leaf = st.distribute(dense, spec, requires_grad=True)
        y = leaf * 1
        y[1] *= 3
        (y * y).sum().backward()
        want = dense.clone().requires_grad_()
        z = want * 1
        z[1] *= 3
        (z * z).sum().backward()
        assert torch.equal(leaf.grad.full_tensor(), want.grad), spec


@every_size
def test_a_write_into_an_indexed_row_reaches_its_source(world, size):
    world(indexed, size)


def through_partial() -> None:
    for write in (
        lambda x: x.__setitem__(0, 7.0),
        lambda x: x.t().zero_(),
        lambda x: x.view(-1).add_(1),
        lambda x: x[0:1].fill_(2),
        lambda x: x[0].mul_(2),
    ):
        x = st.init_from_local_tensor(torch.ones(2, 3), "replicate partial(tp)", 2, 3)
        with pytest.raises(st.RuleError, match="reduced"):
            write(x)
        assert (x.full_tensor() == torch.distributed.get_world_size()).all()


def test_a_write_through_a_view_of_a_partial_tensor_is_refused(world):
    world(through_partial, 2)


def own_memory() -> None:
    dense = torch.arange(35.0).view(5, 7)
    x = st.distribute(dense, 'chunk(dim=0, placements=["rank:0-2/cpu"])')  # the last rank has one row
    x[:, 1] *= 3
    x[:, 0:2] = x[:, 1:3]
    x[:, 0:3].add_(x[:, 1:4])
    dense[:, 1] *= 3
    dense[:, 0:2] = dense[:, 1:3].clone()
    dense[:, 0:3].add_(dense[:, 1:4].clone())
    assert torch.equal(x.full_tensor(), dense)


def test_writing_what_is_read_elsewhere_is_right_on_every_rank(world):
    world(own_memory, 3)


def expanded() -> None:
    x = st.distribute(torch.ones(2, 1), 'chunk(dim=0, placements=["rank:0-2/cpu"])')  # the last rank has nothing
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        x.expand(-1, 3).add_(1)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        x.expand(-1, 3).copy_(torch.ones(2, 3))
    x.expand(-1, 3).fill_(2)
    assert (x.full_tensor() == 2).all()


def test_an_expanded_tensor_is_refused_on_every_rank(world):
    world(expanded, 3)


def crossing() -> None:
    x = st.distribute(torch.arange(96.0).view(12, 8), "[-, tp]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", st.GatherWarning)
        found = whole(x.view(16, 6))
    assert found[1].tolist() == [6, 7, 8, 9, 10, 11]
    assert list(specs((2,)))


def test_a_view_across_a_cut_inner_dim_is_right(world):
    world(crossing, 4)
