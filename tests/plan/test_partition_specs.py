"""PartitionSpec-like tuples and logical axis rules <-> specs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtensor import SpecError, parse_spec
from shardtensor.plan.interop.partition_spec import partition_from_spec, spec_from_axis_rules, spec_from_partition

AXES = ("dp", "fsdp", "tp", "ep")


@st.composite
def partitions(draw):
    axes = draw(st.permutations(AXES))
    entries = []
    for size in draw(st.lists(st.integers(0, 2), max_size=4)):
        taken, axes = axes[:size], axes[size:]
        entries.append(None if not taken else taken[0] if len(taken) == 1 else tuple(taken))
    return tuple(entries)


@given(partitions())
def test_there_and_back(partition):
    assert partition_from_spec(spec_from_partition(partition, len(partition))) in (partition, ())
    bare = partition_from_spec(spec_from_partition(partition))
    assert bare == partition[: len(bare)] and not any(partition[len(bare) :])


def test_entries_missing_at_the_end_are_whole():
    assert str(spec_from_partition(("tp",), ndim=3)) == "[tp, -, -]"
    assert spec_from_partition(("tp",)) == spec_from_partition(("tp", None)) == parse_spec("[tp, ...]")
    assert str(spec_from_partition((("dp",), ()), ndim=2)) == "[dp, -]"


def test_a_partition_spec_is_read_as_one():
    class PartitionSpec(tuple):
        unreduced = frozenset({"tp"})

    assert str(spec_from_partition(PartitionSpec(("dp", None)), ndim=2)) == "[dp, -] partial(tp)"


def test_faults_of_partitions():
    with pytest.raises(SpecError, match="3 entries, the tensor has 2 dims"):
        spec_from_partition(("tp", None, None), ndim=2)
    with pytest.raises(SpecError, match="is no entry of a partition"):
        spec_from_partition((SimpleNamespace(), None))
    with pytest.raises(SpecError, match="`tp` is used twice"):
        spec_from_partition(("tp", "tp"))


def test_a_unit_is_a_check_and_nothing_else():
    assert partition_from_spec("[tp unit(128), -]") == ("tp", None)


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ("[tp blocks(3), -]", "`blocks`"),
        ("[tp pad(64), -]", "`pad`"),
        ("[tp balanced, -]", "`balanced`"),
        ("[tp sizes(1, 2), -]", "`sizes`"),
        ("[tp, -] flat(dp)", r"flat\(dp\)"),
        ("[-, -] partial(dp)", r"partial\(dp\)"),
        ("[out: tp]", "names of dims"),
        ("[..., tp]", "before other dims"),
        ('chunk(dim=0, placements=["rank:0/cpu"])', "placements"),
    ],
)
def test_what_a_partition_spec_cannot_say(spec, what):
    with pytest.raises(SpecError, match=f"a PartitionSpec cannot say .*{what}"):
        partition_from_spec(spec)


def test_logical_axis_rules_take_the_first_axes_that_are_free():
    rules = [("batch", ("dp", "fsdp")), ("mlp", "tp"), ("vocab", "tp"), ("embed", "fsdp"), ("embed", None)]
    assert str(spec_from_axis_rules(("embed", "mlp"), rules)) == "[embed: fsdp, mlp: tp]"
    assert str(spec_from_axis_rules(("batch", "embed"), rules)) == "[batch: dp*fsdp]"
    assert str(spec_from_axis_rules((None, "embed", "embed"), rules)) == "[-, fsdp, -]"
    with pytest.raises(SpecError, match="no rule says where the dim `heads` goes"):
        spec_from_axis_rules(("heads",), rules)
    with pytest.raises(SpecError, match="every axis for the dim `vocab` is taken"):
        spec_from_axis_rules(("mlp", "vocab"), rules)
