"""`register_op`: a rule makes an operation work on sharded tensors; what is wrong with one is said at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from harness import device, every_size

import shardtensor as st
from shardtensor.ops.register import register_op
from shardtensor.rules.table import ROWS
from shardtensor.tensor.dispatch import HANDLERS


@pytest.fixture(autouse=True)
def _table_as_it_was() -> Iterator[None]:
    rows, handlers = dict(ROWS), dict(HANDLERS)
    yield
    for now, before in ((ROWS, rows), (HANDLERS, handlers)):
        now.clear()
        now.update(before)


def scores(x: torch.Tensor, keys: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    assert type(x) is type(keys) is torch.Tensor
    return x @ keys.t() * scale


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def own() -> None:
    registered = register_op("... k, n k -> ... n", combine="k sum")(scores)
    x, w = torch.arange(20.0, device=device()).view(5, 4), torch.arange(12.0, device=device()).view(3, 4) - 5
    dense = w.clone().requires_grad_()
    scores(x, dense, 2.0).sum().backward()
    for spec in ("[tp balanced, -]", "[-, tp balanced]"):
        keys = st.distribute(w, spec, requires_grad=True)
        y = registered(x, keys, scale=2.0)
        assert torch.equal(whole(y), scores(x, w, 2.0))
        y.sum().backward()
        assert torch.equal(keys.grad.full_tensor(), dense.grad)
    assert torch.equal(registered(x, w), scores(x, w))  # plain ones as ever


def torchs() -> None:
    assert register_op(torch.special.airy_ai, "... -> ...") is torch.special.airy_ai
    register_op(torch.renorm, "!i !j -> i j", call="input, p=, dim=, maxnorm=")
    x = torch.arange(20.0, device=device()).view(5, 4)
    with st.strict():
        y = torch.special.airy_ai(st.distribute(x, "[tp balanced, -]"))
    torch.testing.assert_close(whole(y), torch.special.airy_ai(x))
    y = torch.renorm(st.distribute(x, "[tp balanced, -]"), 2, 0, 1.0)
    torch.testing.assert_close(whole(y), torch.renorm(x, 2, 0, 1.0))


@torch.library.custom_op("shardtensor_test::scaled", mutates_args=())
def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


def custom() -> None:
    register_op(torch.ops.shardtensor_test.scaled.default, "..., ... -> ...")
    register_op(torch.ops.shardtensor_test.scaled, "..., ... -> ...")
    x = torch.arange(20.0, device=device()).view(5, 4)
    y = torch.ops.shardtensor_test.scaled(st.distribute(x, "[tp balanced, -]"), x)
    assert isinstance(y, st.ShardedTensor)
    assert torch.equal(y.full_tensor(), x * x)


@every_size
@pytest.mark.worlds("sim")
@pytest.mark.parametrize("body", [own, torchs, custom])
def test_it_gives_the_dense_result(world, size, body):
    world(body, size)


WRONG = {
    "a letter that no operand has": (
        lambda: register_op(scores, "b k, n k -> b m", combine="k sum"),
        "<rule>:1:15: error[E606]: no operand has `m`\n"
        "    1 | b k, n k -> b m\n"
        "      |               ^\n"
        "  fix: write `m'` for a dim that the operation makes",
    ),
    "no join": (
        lambda: register_op(scores, "b k, n k -> b n"),
        "<rule>:1:3: error[E603]: `k` is in no output, and nothing combines the results\n"
        "    1 | b k, n k -> b n\n"
        "      |   ^\n"
        "  why: a rank that holds a part of `k` has only a part of the result\n"
        "  fix: say how: `k sum`, avg, max, min, prod or @function; or `!k`, which must be whole",
    ),
    "no word": (
        lambda: register_op(scores, "b k, n 1k -> b n", combine="k sum"),
        "<rule>:1:8: error[E602]: `1k` is no dim\n"
        "    1 | b k, n 1k -> b n\n"
        "      |        ^^\n"
        "  why: a dim is `k`, `!k`, `k?`, `[k]`, `k...`, `...`, `k/1` or `k'`",
    ),
    "no arrow": (
        lambda: register_op(scores, "b k, n k"),
        "<rule>:1:1: error[E601]: a rule has operands and an output: `... k, n k -> ... n`\n"
        "    1 | b k, n k\n"
        "      | ^^^^^^^^",
    ),
    "a letter twice": (
        lambda: register_op(scores, "k k, n -> n", combine="k sum"),
        "<rule>:1:3: error[E605]: `k` stands twice in one operand\n    1 | k k, n -> n\n      |   ^",
    ),
    "no such join": (
        lambda: register_op(scores, "b k, n k -> b n", combine="k smu"),
        "<rule>:1:1: error[E604]: `smu` is no reduction\n"
        "    1 | k smu\n"
        "      | ^^^^^\n"
        "  why: there are sum, avg, max, min or prod\n"
        "  fix: did you mean `sum`?",
    ),
    "too many operands": (
        lambda: register_op(scores, "b, k, n, m -> b k n m"),
        "scores: the rule has 4 operands, the function takes 3 arguments\n"
        "  rule      b, k, n, m -> b k n m\n"
        "  function  scores(x: 'torch.Tensor', keys: 'torch.Tensor', scale: 'float' = 1.0) -> 'torch.Tensor'\n"
        "  fix       write one side for each tensor, apart by commas",
    ),
    "a call of other operands": (
        lambda: register_op(scores, "b k, n k -> b n", combine="k sum", call="x, keys, scale"),
        "scores: the rule has 2 operands, the call names 3\n"
        "  rule  b k, n k -> b n\n"
        "  call  x, keys, scale\n"
        "  fix   name the operands in order; what is no operand has a `=`: `input, weight, eps=`",
    ),
    "a function for a rule": (
        lambda: register_op(scores, "@views.reshaped"),
        "scores: a rule has letters\n  rule  @views.reshaped\n  fix   write `... k, n k -> ... n`",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_said_when_it_is_registered(fault):
    register, text = WRONG[fault]
    with pytest.raises((st.SpecError, st.RuleError)) as caught:
        register()
    assert str(caught.value) == text
