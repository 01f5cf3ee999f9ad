"""Rules of which one is taken out, or is wrong: refused, or an error of the first call, or a result of another shape,
or the dense numbers; never other ones of the same shape."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decoder import Decoder, rules

import shardtensor as st

STREAMS = ("replicate", "[-, tp, ...]")


def entries(block: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where each entry stands, those of blocks after their block."""
    for key, value in block.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from entries(value, (*above, key))


def block_of(found: dict[str, Any], entry: tuple[str, ...]) -> dict[str, Any]:
    for key in entry[:-1]:
        found = found[key]
    return found


def without(stream: str, entry: tuple[str, ...]) -> dict[str, Any]:
    found = copy.deepcopy(rules(stream))
    del block_of(found, entry)[entry[-1]]
    return found


def with_flow(stream: str, entry: tuple[str, ...], flow: str) -> dict[str, Any]:
    found = copy.deepcopy(rules(stream))
    block_of(found, entry)[entry[-1]] = flow
    return found


def comes_to(plan: dict[str, Any]) -> str:
    """What a plan for the decoder comes to: ``refused``, ``raises``, ``right``, ``another shape`` than the dense result
    has, or what else is other than the dense."""
    torch.manual_seed(0)
    dense = Decoder().double()
    module, ids = copy.deepcopy(dense), torch.arange(16).view(2, 8)
    try:
        st.shard_module(module, plan)
    except st.ShardTensorError:
        return "refused"
    try:
        found, wanted = (whole(each(ids)) for each in (module, dense))
        found.square().sum().backward()
    except (RuntimeError, ValueError):
        return "raises"
    wanted.square().sum().backward()
    if found.shape != wanted.shape:
        return "another shape"
    if not torch.allclose(found, wanted):
        return "other values"
    for (name, p), q in zip(module.named_parameters(), dense.named_parameters(), strict=True):
        if not torch.allclose(whole(p.grad), q[1].grad):
            return f"another gradient of {name}"
    return "right"


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


DROPPED = [(stream, entry) for stream in STREAMS for entry in entries(rules(stream))]


@pytest.mark.parametrize(("stream", "entry"), DROPPED, ids=[f"{s}-{'/'.join(e)}" for s, e in DROPPED])
def test_a_rule_that_is_missing_never_gives_other_numbers(stream, entry):
    """A head of which nothing says how its logits leave gives this rank's classes: another shape."""
    fits = {"refused", "raises", "right"} | ({"another shape"} if entry[0] == "head" else set())
    assert set(st.simulate(2, comes_to, without(stream, entry))) <= fits


WRONG = {
    "a table leaves partial sums": ("replicate", ("embed", "out"), "partial(tp)"),
    "a product leaves partial sums": ("replicate", ("layers.*", "mlp", "down", "out"), "partial(tp)"),
    "tokens meet a weight that is cut alike": ("replicate", ("head", "in"), "replicate -> [-, tp, ...]"),
    "a norm that cuts what is cut": ("[-, tp, ...]", ("norm", "in"), "replicate -> [-, tp, ...]"),
}
MISFITS = {
    "a head that leaves its logits cut": ("replicate", ("head", "out"), "[..., tp balanced]"),
    "a table beside a stream": ("[-, tp, ...]", ("embed", "out"), "partial(tp) -> replicate"),
    "layers that gather nothing": ("[-, tp, ...]", ("layers.*", "mlp", "in"), "replicate"),
    "a sum that is not scattered": ("[-, tp, ...]", ("layers.*", "attn", "o", "out"), "partial(tp) -> replicate"),
    "a norm that gathers what is gathered later": ("[-, tp, ...]", ("norm", "out"), "[-, tp, ...] -> replicate"),
    "a head that takes parts for the whole": ("[-, tp, ...]", ("head", "in"), "replicate"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_flow_that_would_give_other_numbers_is_refused(name):
    assert set(st.simulate(2, comes_to, with_flow(*WRONG[name]))) == {"refused"}


@pytest.mark.parametrize("name", MISFITS)
def test_parts_that_reach_the_wrong_module_do_not_fit(name):
    """Which module calls which only its own code says, so nothing is said when the module is sharded."""
    assert set(st.simulate(2, comes_to, with_flow(*MISFITS[name]))) <= {"raises", "another shape"}


@pytest.mark.parametrize("stream", STREAMS)
def test_the_rules_themselves_are_right(stream):
    assert set(st.simulate(2, comes_to, rules(stream))) == {"right"}
