"""Laws of the text: it reads back, equal text is an equal object, and any text ends in a spec or a SpecError."""

import copy
import pickle
import time

import pytest
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as st

import shardtensor.spec.devices
from shardtensor.errors import SpecError
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec, ShardMetadata
from shardtensor.spec.nodes import Cut, Replicate, Spec
from shardtensor.spec.parse import parse_spec
from shardtensor.spec.placement import DEVICE_TYPES

PYTHON = {**vars(shardtensor.spec.devices), "parse_spec": parse_spec}

numbers = st.integers(1, 300) | st.integers(2**62, 2**63 - 1)
sizes = st.lists(st.integers(0, 300), min_size=1, max_size=4).map(tuple)
dim_names = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=6) | st.sampled_from(
    ["in", "flat", "self", "cls", "dims"]
)


@st.composite
def cuts(draw, axes):
    width = draw(st.integers(1, min(2, len(axes))))
    modifiers = {
        "unit": numbers,
        "pad": numbers,
        "blocks": numbers | st.lists(numbers, min_size=2, max_size=3).map(tuple),
    }
    given = draw(st.fixed_dictionaries({}, optional=modifiers))
    last = draw(st.sampled_from(["", "sizes", "balanced"]))
    if last:
        given[last] = draw(sizes) if last == "sizes" else True
    return Cut(tuple(axes.pop() for _ in range(width)), **given)


@st.composite
def axis_specs(draw):
    """Specs in mesh axes; each axis is used once."""
    axes = draw(st.permutations(["tp", "dp", "ep", "unit", "replicate", "_x1", "Pipe", "row", "cp"]))
    form = draw(st.sampled_from(["dims", "named", "none"]))
    if form == "dims":
        dims = [draw(cuts(axes)) if draw(st.booleans()) else None for _ in range(draw(st.integers(1, 3)))]
        if draw(st.booleans()):
            dims.insert(draw(st.integers(0, len(dims))), ...)
        spec = Spec(*dims)
    elif form == "named":
        names = draw(st.lists(dim_names, min_size=1, max_size=2, unique=True))
        spec = Spec(**{name: draw(cuts(axes)) for name in names})
    else:
        spec = Replicate()
    if draw(st.booleans()):
        unit, ranges = draw(st.just("row") | numbers), draw(st.none() | sizes)
        spec = spec.flat(axes.pop(), unit=unit, sizes=ranges)
    if draw(st.booleans()):
        spec = spec.only(axes.pop(), draw(st.integers(0, 9)))
    for _ in range(draw(st.integers(0, 1 + (len(axes) > 1)))):
        spec = spec.partial(axes.pop(), op=draw(st.sampled_from(["sum", "avg", "max", "min"])))
    return spec


workers = st.text(st.characters(codec="utf-8", exclude_characters="/:"), min_size=1, max_size=6)
owners = st.integers(0, 20).map("rank:{}/".format) | st.just("") | workers.map("{}/".format)
devices = st.tuples(st.sampled_from(["cuda", "cpu", *sorted(DEVICE_TYPES)]), st.sampled_from(["", ":0", ":1", ":7"]))
places = st.tuples(owners, devices.map("".join)).map("".join)
ranges = st.sampled_from(
    ["rank:0-3/cuda:0-3", "rank:2-9/cuda", "rank:1/cuda:4-7", "cuda:0-7", "rank:5-6", "rank:8-15/cuda:0-7"]
)
place_lists = st.lists(places | ranges, min_size=1, max_size=6)


@st.composite
def device_specs(draw):
    form = draw(st.sampled_from(["chunk", "grid", "enum"]))
    if form == "enum":
        ndim = draw(st.integers(0, 3))
        fixed = [(draw(st.integers(0, 9)), draw(st.integers(0, 9))) for _ in range(max(0, ndim - 1))]
        end, shards = 0, []
        for size in draw(st.lists(st.integers(0, 5), min_size=1, max_size=5 if ndim else 1)):
            box = [*fixed, (end, size)] if ndim else []
            shards.append(ShardMetadata([o for o, _ in box], [s for _, s in box], draw(st.none() | places)))
            end += size
        return EnumerableShardingSpec(draw(st.permutations(shards)))
    listed = ChunkShardingSpec(0, draw(place_lists)).placements
    if form == "grid":
        return GridShardingSpec(draw(st.permutations([1, len(listed)])), listed)
    given = draw(st.none() | st.lists(st.integers(0, 99), min_size=len(listed), max_size=len(listed)))
    return ChunkShardingSpec(draw(st.integers(-4, 4)), listed, given)


specs = axis_specs() | device_specs()


@examples(300)
@given(specs)
def test_every_spec_reads_back(spec):
    back = parse_spec(str(spec))
    assert back == spec
    assert hash(back) == hash(spec)
    assert str(back) == str(spec)
    assert type(back) is type(spec)


@examples(100)
@given(specs)
def test_python_text_and_pickle_and_copies_are_the_same_object(spec):
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert copy.deepcopy(spec) == spec
    assert hash(pickle.loads(pickle.dumps(spec))) == hash(spec)
    if not isinstance(spec, EnumerableShardingSpec):  # its shards print as torch's do
        assert eval(repr(spec), dict(PYTHON)) == spec


@examples(100)
@given(specs, specs)
def test_equal_text_is_an_equal_object(one, other):
    assert (one == other) == (str(one) == str(other))
    assert (one == other) <= (hash(one) == hash(other))


def refused_or_read(text):
    """Whatever a text is, the answer is a spec or an error with its place, and comes soon."""
    began, refusal = time.perf_counter(), None
    try:
        spec = parse_spec(text)
    except SpecError as error:
        refusal = error
    assert time.perf_counter() - began < 5  # a bound against explosion; the clock of a busy machine is not fine
    if refusal is None:
        assert parse_spec(str(spec), max_length=10**9) == spec
        return
    assert refusal.code
    assert 1 <= refusal.line <= text.count("\n") + 1
    assert 1 <= refusal.col <= len(text) + 1
    head, source, caret, *_ = str(refusal).split("\n")
    assert head.startswith(f"<spec>:{refusal.line}:{refusal.col}: error[{refusal.code}]: ")
    assert source.startswith(f"{refusal.line:5} | ")
    assert caret.startswith("      | ")
    assert caret[8:].strip(" ").strip("^") == ""
    assert "^" in caret


@examples(300)
@given(st.text() | st.text('[]()-.*,:=@"0123456789 atpunifl\n#_\\'))
def test_any_text(text):
    refused_or_read(text)


@examples(300)
@given(specs.map(str), st.data())
def test_any_slip_of_the_pen(text, data):
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text = (
            text[:at] + data.draw(st.text('[](),-.*:=@"09 t\n', max_size=2)) + text[at + data.draw(st.integers(0, 2)) :]
        )
    refused_or_read(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "(" * 100_000,
        "[tp unit" + "(" * 50_000,
        "[tp unit(" + "9" * 100_000 + ")]",
        'chunk(dim=0, placements=["rank:0-99999999999"])',
        'chunk(dim=0, placements=["rank:0-' + "9" * 5000 + '"])',
        'chunk(dim=0, placements=["rank:' + "9" * 5000 + '"])',
        'chunk(dim=0, placements=["rank:0/cuda:' + "9" * 5000 + '"])',
        'chunk(dim=0, placements=["rank:0-1048575", "rank:0-1048575"])',
        "[tp, " + "-, " * 40_000 + "-]",
        "[" + "a" * 100_000 + "]",
        "[" + ", ".join(f"a{i}" for i in range(5_000)) + ", a4999]",
        '"' + "\\" * 100_000,
        "-" * 10**7,
    ],
    ids=lambda text: text[:12] + str(len(text)),
)
def test_large_texts_have_limits(text):
    refused_or_read(text)


def test_a_long_text_can_be_asked_for():
    spec = EnumerableShardingSpec([ShardMetadata([i], [1], f"rank:{i}/cuda:{i % 8}") for i in range(4000)])
    with pytest.raises(SpecError, match="the spec is too long"):
        parse_spec(str(spec))
    assert parse_spec(str(spec), max_length=10**6) == spec
