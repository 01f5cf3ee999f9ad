"""The simulated world: every rank is what a lone process would be, in one order, and no rank ever waits in vain."""

from __future__ import annotations

import random
import threading
import traceback
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardtensor as st
from shardtensor.comm import collectives
from shardtensor.comm.process_group import as_group, world_place
from shardtensor.comm.redistribute import local_slice
from shardtensor.layout.route import DimStep
from shardtensor.mesh import read_mesh
from shardtensor.spec.nodes import Cut

SIZES = (1, 2, 3, 4)


def told(error: BaseException) -> str:
    """An error as a user sees it, without the traceback: the text and the notes."""
    return "".join(traceback.format_exception_only(error))


def lines_of(text: str) -> list[str]:
    """A message's lines without the numbers of lines in this file, which move."""
    return [line.split(".py:")[0] if ".py:" in line else line for line in text.rstrip().splitlines()]


# -- the world --------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_none_means_the_world_inside_and_the_process_alone_outside(size):
    def place() -> tuple[int, int, int, tuple[int, int] | None]:
        group = as_group()
        assert as_group() is group is as_group(group) is as_group(group.process_group)
        return group.rank, group.index, group.size, world_place()

    assert st.simulate(size, place) == [(rank, rank, size, (rank, size)) for rank in range(size)]
    assert st.simulate(f"tp={size}", place)[-1][2] == size
    assert as_group().size == 1 and world_place() is None


def test_two_axes_are_a_mesh_with_a_group_along_each():
    def body() -> tuple[str, list[int], list[int], float]:
        group = as_group()
        x = torch.tensor([float(group.rank)])
        group.axis("dp").all_reduce(x)
        return str(group.mesh), list(group.axis("dp").ranks), list(group.axis("tp").ranks), x.item()

    assert st.simulate("dp=2, tp=3", body) == [
        ("(dp=2, tp=3)", [rank % 3, rank % 3 + 3], list(range(rank // 3 * 3, rank // 3 * 3 + 3)), 2.0 * (rank % 3) + 3)
        for rank in range(6)
    ]


def test_a_mesh_is_read_or_said_to_be_wrong():
    assert read_mesh(" ( dp = 2,tp=4 ) ") == st.Mesh((("dp", 2), ("tp", 4)))
    with pytest.raises(st.LayoutError) as caught:
        st.simulate("dp=2 tp", print)
    assert str(caught.value) == (
        '"dp=2 tp" is not an axis of a mesh\n'
        '  mesh  "dp=2 tp"\n'
        '  fix   name each axis and its size, as in "tp=4" or "dp=2, tp=4"'
    )
    with pytest.raises(st.LayoutError, match="two axes of the mesh have one name"):
        read_mesh("tp=2, tp=2")
    with pytest.raises(st.LayoutError, match="at least one rank"):
        read_mesh("tp=0")


def test_ranks_take_turns_in_rank_order():
    seen: list[tuple[int, int]] = []

    def body() -> None:
        group = as_group()
        for turn in range(3):
            seen.append((turn, group.rank))
            group.barrier()

    for _ in range(2):
        seen.clear()
        st.simulate(3, body)
        assert seen == [(turn, rank) for turn in range(3) for rank in range(3)]


def test_arguments_go_in_and_results_come_out_by_rank():
    assert st.simulate(2, lambda a, *, b: (a, b, as_group().rank), 1, b=2) == [(1, 2, 0), (1, 2, 1)]
    assert st.simulate(2, lambda: st.simulate(3, lambda: as_group().rank)) == [[0, 1, 2]] * 2


def test_modes_of_the_caller_hold_inside():
    with torch.no_grad(), st.strict(), torch.device("meta"):
        modes = st.simulate(2, lambda: (torch.is_grad_enabled(), torch.empty(1).device.type))
    assert modes == [(False, "meta")] * 2
    assert st.simulate(2, torch.is_grad_enabled) == [True] * 2


# -- each rank is as a process alone --------------------------------------------------------------------------


def draws(group_of_one: bool) -> list[torch.Tensor]:
    """Random numbers of every kind with collectives in between, which must not mix the ranks' streams."""
    group = as_group()
    meet = (lambda: None) if group_of_one else group.barrier
    found = [torch.rand(3)]
    meet()
    layer = nn.Linear(7, 5)
    meet()
    found += [layer.weight.detach(), nn.functional.dropout(torch.ones(20), 0.5)]
    meet()
    found += [torch.randn(5), torch.tensor(random.random()), nn.init.trunc_normal_(torch.empty(9))]
    meet()
    return [*found, torch.randperm(10)]


def test_random_numbers_are_those_of_a_lone_process():
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state()
    by_rank = st.simulate(3, draws, False)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's stream is as it was
    alone = draws(True)
    for found in by_rank:
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def test_ranks_that_seed_for_themselves_keep_their_seeds():
    def body() -> list[float]:
        torch.manual_seed(as_group().rank)
        numbers = []
        for _ in range(3):
            numbers.append(torch.rand(()).item())
            as_group().barrier()
        return numbers

    by_rank = st.simulate(3, body)
    for rank, numbers in enumerate(by_rank):
        assert numbers == torch.rand(3, generator=torch.Generator().manual_seed(rank)).tolist()


def test_warning_filters_and_the_default_dtype_belong_to_a_rank():
    def body() -> tuple[torch.dtype, int]:
        rank = as_group().rank
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always" if rank else "ignore")
            torch.set_default_dtype(torch.float64 if rank else torch.float32)
            as_group().barrier()
            warnings.warn("look")
            as_group().barrier()
            return torch.get_default_dtype(), len(caught)

    filters = warnings.filters
    assert st.simulate(2, body) == [(torch.float32, 0), (torch.float64, 1)]
    assert torch.get_default_dtype() == torch.float32
    assert warnings.filters is filters


# -- results are as of real groups --------------------------------------------------------------------------


def test_results_are_fresh_and_what_was_brought_may_be_used_again_at_once():
    def body() -> None:
        group = as_group()
        t = torch.full((2,), float(group.rank))
        gathered = group.all_gather(t)
        t.fill_(9.0)
        assert gathered.tolist() == [0, 0, 1, 1, 2, 2]
        gathered.fill_(7.0)
        group.barrier()
        assert t.tolist() == [9, 9] and gathered.tolist() == [7] * 6
        moved = group.all_to_all(
            t, [1, 1, 0] if group.rank else [0, 2, 0], {0: [0, 1, 1], 1: [2, 1, 1]}.get(group.rank, [0] * 3)
        )
        t.zero_()
        assert moved.tolist() == {0: [9.0] * 2, 1: [9.0] * 4}.get(group.rank, [])
        assert group.all_reduce(t.add_(1)) is t and t.tolist() == [3, 3]

    st.simulate(3, body)


def test_reductions_in_place_count_no_version_as_backends_do():
    def body() -> int:
        t = torch.ones(3)
        as_group().all_reduce(t)
        as_group().broadcast(t, 1)
        return t._version

    assert st.simulate(2, body) == [0, 0]


def test_a_started_reduction_lets_others_overtake_it():
    def body() -> list[float]:
        group = as_group()
        t = torch.tensor([1.0 + group.rank])
        started = group.all_reduce_async(t)
        other = group.all_reduce(torch.tensor([10.0]))
        return [started.wait().item(), started.wait().item(), other.item()]

    assert st.simulate(2, body) == [[3.0, 3.0, 20.0]] * 2


def test_gradients_meet_in_backward_nested_and_checkpointed():
    x = torch.arange(1.0, 5.0, requires_grad=True)
    (x.square().sum() ** 2).backward()

    def body(reentrant: bool) -> torch.Tensor:
        group = as_group()
        leaf = torch.arange(1.0, 5.0, requires_grad=True)

        def total(whole: torch.Tensor) -> torch.Tensor:
            part = local_slice(whole, DimStep("slice", cut=Cut("tp", sizes=(3, 1))), group)
            return collectives.all_reduce(part.square().sum(), group)

        (checkpoint(total, leaf, use_reentrant=reentrant) ** 2).backward()
        return leaf.grad

    for reentrant in (False, True):
        for grad in st.simulate(2, body, reentrant):
            assert torch.equal(grad, x.grad)


# -- training --------------------------------------------------------------------------


def train(specs: tuple[str, str] | None) -> list[torch.Tensor]:
    """A few steps of an MLP; column and row parallel with specs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 4)).double()
    if specs is not None:
        st.shard_parameter(model[0], "weight", specs[0])
        st.shard_parameter(model[3], "weight", specs[1])
        optimizer = st.ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: list[float] = []
    hook = model[3].weight.register_hook(lambda grad: seen.append(grad.sum().item()))
    data = torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = model(batch).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    hook.remove()
    weights = [p.full_tensor() if isinstance(p, st.ShardedTensor) else p for p in model.parameters()]
    return [*losses, torch.tensor(seen, dtype=torch.float64), *(w.detach() for w in weights)]


@pytest.mark.parametrize(
    ("mesh", "specs"),
    [("tp=2", ("[tp, -]", "[-, tp]")), ("tp=4", ("[tp, -]", "[-, tp]")), ("dp=2, tp=2", ("[tp, dp]", "[dp, tp]"))],
)
def test_a_sharded_mlp_with_its_optimizer_is_the_dense_one(mesh, specs):
    dense = train(None)
    for found in st.simulate(mesh, train, specs):
        for got, wanted in zip(found, dense, strict=True):
            torch.testing.assert_close(got, wanted)


# -- faults --------------------------------------------------------------------------


def test_different_collectives_name_both_calls():
    def body() -> None:
        group = as_group()
        if group.rank == 2:
            group.all_gather(torch.ones(3))
        else:
            group.all_reduce(torch.ones(3))

    with pytest.raises(st.DisagreementError) as caught:
        st.simulate("tp=4", body)
    assert lines_of(told(caught.value)) == [
        "shardtensor.errors.DisagreementError: ranks 0 and 2 are in different collectives; nothing was moved",
        "  rank 0  all_reduce(sum of 3 float32) over tp=4",
        "            test_simulate",
        "  rank 2  all_gather(4 x 3 of float32) over tp=4",
        "            test_simulate",
        "  fix     make the same calls in the same order on every rank of the group",
        "every rank of (tp=4) raised this",
    ]
    assert f"test_simulate.py:{body.__code__.co_firstlineno + 3} in body" in str(caught.value)


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (
            (lambda g: g.all_reduce(torch.ones(2)), lambda g: g.all_reduce(torch.ones(3))),
            "different calls of all_reduce",
        ),
        ((lambda g: g.all_reduce(torch.ones(2)), lambda g: g.all_reduce(torch.ones(2), "max")), "calls of all_reduce"),
        ((lambda g: g.all_reduce(torch.ones(2)), lambda g: g.all_reduce(torch.ones(2).int())), "calls of all_reduce"),
        (
            (lambda g: g.broadcast(torch.ones(2), 0), lambda g: g.broadcast(torch.ones(2), 1)),
            "different calls of broadcast",
        ),
        (
            (lambda g: g.all_gather(torch.ones(2), [2, 3]), lambda g: g.all_gather(torch.ones(2), [1, 2])),
            "of all_gather",
        ),
        ((lambda g: g.exchange(b"ab"), lambda g: g.exchange(b"abc")), "different calls of exchange"),
        (
            (
                lambda g: g.all_to_all(torch.ones(2), [0, 2], [0, 1]),
                lambda g: g.all_to_all(torch.ones(2), [2, 0], [2, 0]),
            ),
            "rank 1 sends 2 elements where rank 0 expects 1; nothing was moved",
        ),
    ],
)
def test_calls_that_do_not_fit_raise_the_same_error_on_every_rank(calls, text):
    def body() -> str:
        with pytest.raises(st.DisagreementError) as caught:
            calls[as_group().rank](as_group())
        assert text in str(caught.value)
        as_group().barrier()  # and the ranks may go on
        return str(caught.value)

    first, second = st.simulate(2, body)
    assert first == second


def test_a_call_names_the_module_that_it_is_part_of():
    class Uneven(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            group = as_group()
            return group.all_reduce(x) if group.rank else group.all_gather(x)

    def body() -> None:
        nn.Sequential(nn.Identity(), nn.Sequential(Uneven()))(torch.ones(1))

    with pytest.raises(st.DisagreementError, match=r"test_simulate\.py:\d+ in forward, at 1\.0"):
        st.simulate(2, body)


def test_waiting_for_a_rank_that_has_returned_is_a_deadlock():
    def body() -> None:
        if as_group().rank != 1:
            as_group().all_reduce(torch.ones(3))

    with pytest.raises(st.DisagreementError) as caught:
        st.simulate("tp=3", body)
    assert lines_of(told(caught.value)) == [
        "shardtensor.errors.DisagreementError: deadlock: rank 0 would wait for a rank that has returned for ever",
        "  rank 0  all_reduce(sum of 3 float32) over tp=3",
        "            test_simulate",
        "  rank 1  returned",
        "  fix     make the same calls in the same order on every rank of the group",
        "rank 0 of (tp=3) raised this",
        "  rank 1 returned",
        "  rank 2 raised this, too",
    ]


def test_waiting_for_each_other_is_a_deadlock():
    def body() -> None:
        group = as_group()
        (group.axis("dp") if group.rank in (0, 3) else group.axis("tp")).barrier()

    with pytest.raises(st.DisagreementError) as caught:
        st.simulate("dp=2, tp=2", body)
    assert lines_of(told(caught.value)) == [
        "shardtensor.errors.DisagreementError: deadlock: ranks 0-3 would wait for each other for ever",
        "  rank 0  barrier() over dp=2 (ranks 0, 2)",
        "            test_simulate",
        "  rank 1  barrier() over tp=2 (ranks 0, 1)",
        "            test_simulate",
        "  rank 2  barrier() over tp=2 (ranks 2, 3)",
        "            test_simulate",
        "  rank 3  barrier() over dp=2 (ranks 1, 3)",
        "            test_simulate",
        "  fix     make the same calls in the same order on every rank of the group",
        "every rank of (dp=2, tp=2) raised this",
    ]


def test_a_rank_that_raises_stops_the_others_and_is_raised_as_it_is():
    def body() -> None:
        if as_group().rank == 1:
            raise KeyError("lost")
        as_group().all_reduce(torch.ones(3))

    with pytest.raises(KeyError) as caught:
        st.simulate("tp=3", body)
    assert lines_of(told(caught.value)) == [
        "KeyError: 'lost'",
        "rank 1 of (tp=3) raised this",
        "  rank 0 was stopped in all_reduce(sum of 3 float32) over tp=3",
        "    test_simulate",
        "  rank 2 was stopped in all_reduce(sum of 3 float32) over tp=3",
        "    test_simulate",
    ]
    assert "in body" in "".join(traceback.format_tb(caught.value.__traceback__))  # the rank's own traceback


def test_no_rank_can_catch_that_another_failed():
    def body() -> None:
        if as_group().rank == 0:
            raise ValueError("first")
        for _ in range(3):
            try:
                as_group().barrier()
            except Exception as error:
                raise AssertionError("the fault of rank 0 looked like one of this rank") from error

    with pytest.raises(ValueError, match="first"):
        st.simulate(2, body)


def test_an_error_that_all_ranks_raise_says_so():
    def body() -> None:
        st.distribute(torch.ones(5), "[tp]")

    with pytest.raises(st.LayoutError, match="cannot be cut evenly") as caught:
        st.simulate("tp=2", body)
    assert caught.value.__notes__ == ["every rank of (tp=2) raised this"]


def test_the_ranks_of_a_world_that_is_over_take_part_in_nothing():
    tensors = st.simulate("tp=2", lambda: st.distribute(torch.arange(4.0), "[tp]"))
    with pytest.raises(st.RuleError) as caught:
        tensors[1].full_tensor()
    assert str(caught.value).splitlines()[1:] == [
        "  rank  1, which has returned",
        "  fix   make every call that talks to other ranks inside the function that `simulate` runs, in its own thread",
    ]


def test_a_thread_of_its_own_cannot_speak_for_a_rank():
    def body() -> list[str]:
        group, texts = as_group(), []

        def speak() -> None:
            try:
                group.barrier()
            except st.RuleError as error:
                texts.append(str(error).splitlines()[1].strip())

        thread = threading.Thread(target=speak)
        thread.start()
        thread.join()
        return texts

    assert st.simulate(2, body) == [[f"rank  {rank}, which runs in another thread"] for rank in range(2)]


def test_a_subgroup_leaves_the_others_alone():
    def body() -> float:
        group = as_group()
        some = group.subgroup([2, 0])
        if group.rank == 1:
            assert some.index == -1
            with pytest.raises(RuntimeError, match="rank 1 is not a member"):
                some.barrier()
            return 0.0
        assert some is group.subgroup((0, 2))
        return some.all_reduce(torch.tensor([1.0 + group.rank])).item()

    assert st.simulate(3, body) == [4.0, 0.0, 4.0]
