"""Every error of a spec, in full: of text, with the place; of values made in Python, without."""

import pytest

from shardtensor.errors import SpecError
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec, ShardMetadata
from shardtensor.spec.nodes import Cut, Replicate, Spec
from shardtensor.spec.parse import as_spec, parse_spec
from shardtensor.spec.placement import DEVICE_TYPES

DEVICES = ", ".join(sorted(DEVICE_TYPES))

# Each entry is a whole message; the text that earns it stands in it, after the bars.
MESSAGES = [
    """
<spec>:1:7: error[E001]: expected `,` or `]`, found the end
    1 | [tp, -
      |       ^
  why: the `[` at column 1 is open
  fix: close it with `]`
""",
    """
<spec>:1:5: error[E001]: expected a name, `...` or `-`, found `,`
    1 | [tp,, -]
      |     ^
""",
    """
<spec>:1:1: error[E001]: expected `[` or a name, found `(`
    1 | (tp, -)
      | ^
  why: the dims of a tensor stand in square brackets
  fix: write them as in `[tp, -]`
""",
    """
<spec>:1:4: error[E001]: expected `:`, `,`, a name, `]` or `*`, found `;`
    1 | [tp; -]
      |    ^
""",
    """
<spec>:1:2: error[E001]: expected a name, `...` or `-`, found `'tp'`
    1 | ['tp', -]
      |  ^^^^
  why: names stand without quotes
  fix: write `tp`
""",
    """
<spec>:1:26: error[E001]: expected a number, `]` or a string, found `"`
    1 | chunk(dim=0, placements=["rank:0])
      |                          ^
  why: a string ends on its line
  fix: close it with `"`
""",
    """
<spec>:1:5: error[E102]: no modifier is called `unti`
    1 | [tp unti(128), -]
      |     ^^^^
  why: there are pad, blocks, unit, sizes, balanced
  fix: did you mean `unit`?
""",
    """
<spec>:1:5: error[E102]: no modifier is called `dp`
    1 | [tp dp]
      |     ^^
  why: there are pad, blocks, unit, sizes, balanced
  fix: a product is `tp*dp`
""",
    """
<spec>:1:1: error[E102]: no spec is called `tp`
    1 | tp
      | ^^
  why: there are replicate, chunk, grid, enum
  fix: write `[..., tp]` to cut a dim over an axis
""",
    """
<spec>:1:9: error[E102]: no suffix is called `flt`
    1 | [tp, -] flt(dp)
      |         ^^^
  why: there are flat, only, partial
  fix: did you mean `flat`?
""",
    """
<spec>:1:9: error[E102]: `unit` is not a suffix
    1 | [tp, -] unit(128)
      |         ^^^^
  why: it stands after an axis, inside the square brackets
  fix: write it as in `[tp unit(128), -]`
""",
    """
<spec>:1:5: error[E102]: `unit` needs arguments
    1 | [tp unit]
      |     ^^^^
  fix: write `unit(128)`
""",
    """
<spec>:1:5: error[E102]: `unit` needs arguments
    1 | [tp unit()]
      |     ^^^^^^
  fix: write `unit(128)`
""",
    """
<spec>:1:10: error[E103]: `hd` is not a number
    1 | [tp unit(hd)]
      |          ^^
  why: a spec read alone has no names in scope: its numbers are written out
  fix: write it as in `unit(128)`
""",
    """
<spec>:1:5: error[E102]: unit needs to be at least 1, found 0
    1 | [tp unit(0)]
      |     ^^^^^^^
""",
    """
<spec>:1:13: error[E102]: `unit` is written twice
    1 | [tp unit(2) unit(3)]
      |             ^^^^^^^
  fix: keep one
""",
    """
<spec>:1:21: error[E102]: `only` is written twice
    1 | [tp, -] only(ep, 1) only(ep, 1)
      |                     ^^^^^^^^^^^
  fix: keep one
""",
    """
<spec>:1:18: error[E102]: `flat` is written twice
    1 | [tp, -] flat(dp) flat(cp)
      |                  ^^^^^^^^
  fix: keep one
""",
    """
<spec>:1:14: error[E102]: a cut is balanced or has sizes, not both
    1 | [tp balanced sizes(2, 1)]
      |              ^^^^^^^^^^^
  cut: tp sizes(2, 1)
  fix: drop one
""",
    """
<spec>:1:6: error[E204]: axis `tp` is used twice in one spec
    1 | [tp, tp]
      |      ^^
  why: each rank has a single tp coordinate
  fix: keep one of the two, or make the mesh of two axes
""",
    """
<spec>:1:26: error[E204]: axis `tp` is used twice in one spec
    1 | [tp, -] flat(dp) partial(tp)
      |                          ^^
  why: each rank has a single tp coordinate
  fix: keep one of the two, or make the mesh of two axes
""",
    """
<spec>:1:1: error[E102]: dims are named or in order, not both
    1 | [out: tp, -]
      | ^^^^^^^^^^^^
  why: dims that a spec does not name are whole
  fix: write [out: tp], or every dim in order
""",
    """
<spec>:1:1: error[E102]: `...` stands twice
    1 | [tp, ..., ...]
      | ^^^^^^^^^^^^^^
  why: it means all other dims
  fix: keep one
""",
    """
<spec>:1:10: error[E102]: `flat` has no argument `unti`
    1 | flat(dp, unti=3)
      |          ^^^^
  why: `flat` takes axes, unit or sizes
  fix: did you mean `unit`?
""",
    """
<spec>:1:1: error[E102]: no reduction is called 'mean'
    1 | partial(tp, op=mean)
      | ^^^^^^^^^^^^^^^^^^^^
  fix: write one of sum, avg, max, min; several axes are one product: `partial(a*b)`
""",
    """
<spec>:1:10: error[E103]: `ep` is not a number
    1 | flat(dp, ep)
      |          ^^
  why: a spec read alone has no names in scope: its numbers are written out
  fix: write it as in `flat(dp)`; several axes are one product: `flat(a*b)`
""",
    """
<spec>:1:1: error[E102]: the coordinate needs to be at least 0, found -1
    1 | only(ep, -1)
      | ^^^^^^^^^^^^
""",
    """
<spec>:1:1: error[E102]: `only` needs `index`
    1 | only(ep)
      | ^^^^^^^^
  fix: write `only(ep, 1)`
""",
    """
<spec>:1:6: error[E204]: `chunk` is not a suffix
    1 | [tp] chunk(dim=0, placements=["rank:0"])
      |      ^^^^^
  why: it begins a spec
  fix: write it as in `chunk(dim=0, placements=["rank:0-3/cuda:0-3"])`
""",
    """
<spec>:1:37: error[E204]: a device form has no suffixes
    1 | chunk(dim=0, placements=["rank:0"]) partial(tp)
      |                                     ^^^^^^^^^^^
  why: it names ranks, and is never mixed with mesh axes in one spec
  fix: write the cut in axes too, as in `[tp, -] flat(dp)`
""",
    """
<spec>:1:14: error[E102]: `chunk` has no argument `placement`
    1 | chunk(dim=0, placement=["rank:0"])
      |              ^^^^^^^^^
  why: `chunk` takes dim, placements or sizes
  fix: did you mean `placements`?
""",
    """
<spec>:1:44: error[E102]: `chunk` needs numbers in round brackets, as in `(5, 3)` or `(5,)` here
    1 | chunk(dim=0, placements=["rank:0"], sizes=(5))
      |                                            ^
  fix: write `(5,)`
""",
    """
<spec>:1:36: error[E501]: Could not parse remote_device: rnak:1/cpu
    1 | chunk(dim=0, placements=["rank:0", "rnak:1/cpu"])
      |                                    ^^^^^^^^^^^^
  why: a placement is <worker>/<device>, rank:<n>/<device> or <device>
  fix: did you mean rank:<n>?
""",
    """
<spec>:1:26: error[E501]: no device type is called 'cuba'
    1 | chunk(dim=0, placements=["rank:0/cuba:0"])
      |                          ^^^^^^^^^^^^^^^
  why: Expected one of DEVICES
  fix: did you mean cuda?
""",
    """
<spec>:1:26: error[E501]: Invalid device string: 'cuda:x'
    1 | chunk(dim=0, placements=["rank:0/cuda:x"])
      |                          ^^^^^^^^^^^^^^^
  why: a device is a type and perhaps an index, as in cuda:0
""",
    """
<spec>:1:26: error[E501]: 4 ranks stand against 3 devices
    1 | chunk(dim=0, placements=["rank:0-3/cuda:0-2"])
      |                          ^^^^^^^^^^^^^^^^^^^
  placement: rank:0-3/cuda:0-2
  fix: give both ranges one length
""",
    """
<spec>:1:26: error[E501]: the range goes down from 3 to 0
    1 | chunk(dim=0, placements=["rank:3-0"])
      |                          ^^^^^^^^^^
  placement: rank:3-0
  fix: write the smaller number first
""",
    """
<spec>:1:26: error[E501]: the range has more than 1048576 placements
    1 | chunk(dim=0, placements=["rank:0-99999999999"])
      |                          ^^^^^^^^^^^^^^^^^^^^
  placement: rank:0-99999999999
  fix: name fewer ranks
""",
    """
<spec>:1:1: error[E208]: 3 sizes are given for 2 placements
    1 | chunk(dim=0, placements=["rank:0-1"], sizes=(1, 2, 3))
      | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  fix: give one size for each placement
""",
    """
<spec>:1:1: error[E208]: the grid has 4 pieces for 3 placements
    1 | grid(splits=(2, 2), placements=["rank:0-2"])
      | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  splits: (2, 2)
  fix: name one placement for each piece
""",
    """
<spec>:1:1: error[E209]: Shards [0:5] @ "rank:0/cpu" and [4:9] @ "rank:1/cpu" overlap
    1 | enum([0:5] @ "rank:0", [4:9] @ "rank:1")
      | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  why: every element of a tensor lies in one shard
  fix: give each element to one shard
""",
    """
<spec>:1:1: error[E202]: Found inconsistent ranks for shards: 1 and 2
    1 | enum([0:5] @ "rank:0", [5:9, 0:2] @ "rank:1")
      | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  why: every shard of a tensor has one offset and one size for each dim of it
""",
    """
<spec>:1:7: error[E102]: the slice ends before it begins
    1 | enum([5:0] @ "rank:0")
      |       ^^^
  why: it is half open, as in Python
""",
]


def text_of(message):
    """The source line that a message shows."""
    return message.splitlines()[1].partition(" | ")[2]


@pytest.mark.parametrize("message", [message.strip("\n").replace("DEVICES", DEVICES) for message in MESSAGES])
def test_message_of_a_text(message):
    with pytest.raises(SpecError) as caught:
        parse_spec(text_of(message))
    assert str(caught.value) == message
    error = caught.value
    assert message.startswith(f"<spec>:{error.line}:{error.col}: error[{error.code}]: ")


def test_message_of_a_text_of_several_lines():
    with pytest.raises(SpecError) as caught:
        parse_spec("[tp, -]  # rows\n\tflat(dp,)\n  partial(,)")
    assert str(caught.value) == (
        "<spec>:3:11: error[E001]: expected a number, `(`, `[`, a name, `)` or `-`, found `,`\n"
        "    3 |   partial(,)\n"
        "      |           ^"
    )


def test_message_of_an_empty_text():
    with pytest.raises(SpecError) as caught:
        parse_spec("  ")
    assert str(caught.value) == (
        "<spec>:1:1: error[E001]: the spec is empty\n"
        "    1 |   \n"
        "      | ^\n"
        "  fix: write `replicate`, or dims as in `[tp, -]`"
    )


def test_a_long_line_is_shown_round_the_fault():
    with pytest.raises(SpecError) as caught:
        parse_spec("[" + "-, " * 60 + "tp unti(3), " + "-, " * 60 + "-]")
    _, source, caret, *_ = str(caught.value).splitlines()
    assert len(source) < 120
    assert source[caret.index("^") :].startswith("unti(3)")


VALUES = [
    (lambda: Spec("tp", "tp"), "axis `tp` is used twice in one spec"),
    (lambda: Spec("tp").flat("dp").partial("dp"), "axis `dp` is used twice in one spec"),
    (lambda: Spec("tp", out="dp"), "dims are named or in order, not both"),
    (lambda: Spec(..., "tp", ...), "`...` stands twice"),
    (lambda: Spec(out=None), "the dim out is named but not cut"),
    (lambda: Spec("tp*dp"), "'tp*dp' cannot be the name of an axis"),
    (lambda: Spec("-"), "'-' cannot be the name of an axis"),
    (lambda: Spec(3), "3 cannot be the name of an axis"),
    (lambda: Spec(()), "a cut needs an axis"),
    (lambda: Spec(**{"a b": "tp"}), "'a b' cannot be the name of a dim"),
    (lambda: Cut("tp", unit=0), "unit needs to be at least 1, found 0"),
    (lambda: Cut("tp", unit=2.0), "unit needs to be a whole number, found 2.0"),
    (lambda: Cut("tp", unit=2**63), f"unit needs to be at most {2**63 - 1}, found {2**63}"),
    (lambda: Cut("tp", pad=10**5000), "pad needs to be at most 9223372036854775807, found a number of 16610 bits"),
    (lambda: Cut("tp", blocks=(3,)), "blocks needs at least 2 numbers"),
    (lambda: Cut("tp", sizes=()), "sizes needs at least 1 number"),
    (lambda: Cut("tp", sizes=3), "sizes needs to be a list of whole numbers, found 3"),
    (lambda: Cut("tp", sizes=(3, -1)), "sizes needs to be at least 0, found -1"),
    (lambda: Cut("tp", sizes=(1,), balanced=True), "a cut is balanced or has sizes, not both"),
    (lambda: Replicate().partial("tp", op="prod"), "no reduction is called 'prod'"),
    (lambda: Replicate().only("ep", -1), "the coordinate needs to be at least 0, found -1"),
    (lambda: ChunkShardingSpec(0, []), "the list of placements is empty"),
    (lambda: ChunkShardingSpec(0, 3), "placements needs to be a list of placements, found 3"),
    (lambda: ChunkShardingSpec(None, ["rank:0"]), "Sharding dim needs to be an integer, found: None"),
    (lambda: ChunkShardingSpec(0, ["rank:0"], sizes=(1, 2)), "2 sizes are given for 1 placements"),
    (lambda: GridShardingSpec((2, 2), ["rank:0-2"]), "the grid has 4 pieces for 3 placements"),
    (lambda: GridShardingSpec((), ["rank:0"]), "splits needs at least 1 number"),
    (lambda: EnumerableShardingSpec([]), "Empty shard list provided: []"),
    (lambda: EnumerableShardingSpec([3]), "not a shard: 3"),
    (
        lambda: ShardMetadata([0], [1, 1]),
        "shard_offsets and shard_sizes should have the same number of elements, found 1 and 2 respectively",
    ),
    (lambda: ShardMetadata([-1], [1]), "shard_offsets should be >=0, found [-1]"),
    (lambda: ShardMetadata([0], [-1]), "shard_sizes should be >= 0, found [-1]"),
    (lambda: ShardMetadata([0.5], [1]), "shard_offsets needs to be whole numbers, found [0.5]"),
    (lambda: parse_spec(b"[tp]"), "a spec is text, found bytes"),
    (lambda: as_spec(3), "not a spec: 3"),
]


@pytest.mark.parametrize(("make", "fault"), VALUES, ids=[fault for _, fault in VALUES])
def test_fault_of_a_value(make, fault):
    with pytest.raises(ValueError) as caught:
        make()
    assert isinstance(caught.value, SpecError)
    assert str(caught.value).splitlines()[0] == fault
    assert caught.value.code
    assert caught.value.line == 0


def test_message_of_a_value():
    with pytest.raises(SpecError) as caught:
        Spec("tp*dp", None)
    assert str(caught.value) == (
        "'tp*dp' cannot be the name of an axis\n"
        "  why  a name is letters, digits and underscores, and does not begin with a digit\n"
        "  fix  a product of axes is a tuple in Python: ('tp', 'dp')"
    )


def test_a_dim_by_name_is_not_implemented_for_devices():
    with pytest.raises(NotImplementedError, match="does not support named dimension") as caught:
        ChunkShardingSpec("N", ["cuda:0", "cuda:1"])
    assert isinstance(caught.value, SpecError)
