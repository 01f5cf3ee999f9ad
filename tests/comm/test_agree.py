"""agree(): silent when ranks bring the same, one error on every rank when they do not."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from harness import every_size

from shardtensor.comm.agree import agree, agree_in_groups
from shardtensor.comm.group import NonMemberGroup, SingleRankGroup
from shardtensor.comm.process_group import as_group
from shardtensor.errors import DisagreementError, LayoutError, RuleError, ShardTensorError, SpecError


def outcome(facts_of: dict, call_of: dict, fault_of: dict) -> tuple[str, str, int] | None:
    """What agree raises here, as (type, text, exchanges); facts, calls and faults by rank, "else" for the rest."""
    group, rank = as_group(), dist.get_rank()
    before = dist.group.WORLD._get_sequence_number_for_group()
    try:
        agree(group, call_of.get(rank, call_of["else"]), facts_of.get(rank, facts_of["else"]), fault_of.get(rank))
    except ShardTensorError as error:
        exchanges = dist.group.WORLD._get_sequence_number_for_group() - before
        return type(error).__name__, str(error), exchanges
    assert dist.group.WORLD._get_sequence_number_for_group() - before == (1 if group.size > 1 else 0)
    return None


def outcomes(world, size=4, facts=None, call=None, fault=None):
    """The one outcome of all ranks."""
    call = {"else": 'shard_parameter("up.weight")', **(call or {})}
    facts = {"else": {"spec": "[tp, -]", "shape": "4 x 8"}, **(facts or {})}
    results = world(outcome, size, facts_of=facts, call_of=call, fault_of=fault or {})
    assert len(set(results)) == 1, results
    return results[0]


@every_size
def test_equal_facts_cost_one_exchange(world, size):
    assert outcomes(world, size) is None


def test_a_rank_that_differs_is_named_with_what_it_holds(world):
    name, text, exchanges = outcomes(world, facts={2: {"spec": "[-, tp]", "shape": "4 x 8"}})
    assert name == "DisagreementError"
    assert exchanges == 3  # digests, then the lengths and the texts
    assert text == (
        'shard_parameter("up.weight"): spec of rank 0 does not match with spec of rank 2; nothing was moved\n'
        "  spec  ranks 0-1, 3  [tp, -]\n"
        "        rank 2        [-, tp]\n"
        "  fix   give every rank of the group the same spec"
    )


def test_every_fact_that_differs_is_listed(world):
    _, text, _ = outcomes(world, 3, facts={0: {"spec": "[tp, -]", "shape": "4 x 9", "dtype": "float32"}})
    assert text == (
        'shard_parameter("up.weight"): shape of rank 0 does not match with shape of rank 1; nothing was moved\n'
        "  shape  rank 0     4 x 9\n"
        "         ranks 1-2  4 x 8\n"
        "  dtype  rank 0     float32\n"
        "         ranks 1-2  (none)\n"
        "  fix    give every rank of the group the same shape and dtype"
    )


def test_ranks_in_different_calls(world):
    _, text, _ = outcomes(world, 2, call={1: "load(checkpoint)"})
    assert text == (
        "ranks are in different calls; nothing was moved\n"
        '  call  rank 0  shard_parameter("up.weight")\n'
        "        rank 1  load(checkpoint)\n"
        "  fix   make the same calls in the same order on every rank of the group"
    )


def test_a_fault_of_one_rank_is_raised_on_all(world):
    fault = LayoutError("the local tensor has the wrong shape", {"found": "3 x 4", "needed": "2 x 4"})
    name, text, _ = outcomes(world, fault={2: fault})
    assert name == "LayoutError"
    assert text == (
        'shard_parameter("up.weight"): rank 2 has a fault, so nothing was done on any rank\n'
        "  rank 2  the local tensor has the wrong shape\n"
        "            found   3 x 4\n"
        "            needed  2 x 4"
    )


def test_different_faults_are_listed_and_the_lowest_rank_gives_the_type(world):
    faults = {1: RuleError("no rule"), 2: LayoutError("no shape"), 3: RuleError("no rule")}
    name, text, _ = outcomes(world, fault=faults)
    assert name == "RuleError"
    assert text == (
        'shard_parameter("up.weight"): ranks 1-3 have a fault, so nothing was done on any rank\n'
        "  ranks 1, 3  no rule\n"
        "  rank 2      no shape"
    )


def test_a_fault_that_all_ranks_found_is_raised_as_it_is(world):
    fault = LayoutError("dim 2 does not exist", fix="write `[-, tp]`")
    assert outcomes(world, 2, fault={0: fault, 1: fault})[:2] == ("LayoutError", str(fault))


def test_alone_the_fault_itself_is_raised():
    fault = SpecError("bad", line=3)
    with pytest.raises(SpecError) as raised:
        agree(SingleRankGroup(), "call", {}, fault)
    assert raised.value is fault
    assert agree(SingleRankGroup(), "call", {}) is None


def check_subgroup() -> None:
    pair = as_group().subgroup([1, 3])
    if pair.index < 0:
        return
    agree(pair, "call", {"spec": "same"})
    with pytest.raises(DisagreementError, match="rank 3"):
        agree(pair, "call", {"spec": str(pair.index)})


def test_in_a_subgroup_global_ranks_are_named(world):
    world(check_subgroup)


def test_a_rank_in_none_of_the_groups_agrees_with_itself():
    outside = NonMemberGroup(0, (1, 2))
    for groups in ([], [None], [outside, None]):
        assert agree_in_groups(groups, "a call", {"spec": "[tp]"}, None) is None
        with pytest.raises(RuleError, match="a fault"):
            agree_in_groups(groups, "a call", {}, RuleError("a fault"))
    with pytest.raises(RuleError, match="a fault"):
        agree_in_groups([outside, SingleRankGroup()], "a call", {}, RuleError("a fault"))
