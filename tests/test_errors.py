"""The exception tree, and the shape of a message."""

from __future__ import annotations

import pickle

import pytest

from shardtensor import errors
from shardtensor.errors import LayoutError, ShardTensorError, SpecError, message


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("SpecError", ValueError),
        ("LayoutError", ValueError),
        ("RuleError", RuntimeError),
        ("ShardCountError", NotImplementedError),
        ("DisagreementError", ValueError),
        ("MissingParameterError", AttributeError),
        ("StaleParameterError", RuntimeError),
        ("CaptureError", RuntimeError),
    ],
)
def test_every_error_is_also_what_torch_raises_there(name, builtin):
    kind = getattr(errors, name)
    assert issubclass(kind, ShardTensorError)
    assert issubclass(kind, builtin)
    assert f"{name} " in errors.__doc__
    with pytest.raises(builtin, match=r"^the fault"):
        raise kind("the fault", {"fact": 1}, "the way out")


def test_the_docstring_draws_every_error():
    tree = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert all(name in errors.__doc__ for name in tree)


def test_a_message_is_the_fault_then_facts_then_ways_out():
    assert message("fault") == "fault"
    assert message("fault", {"a": 1, "longer": "x"}) == "fault\n  a       1\n  longer  x"
    assert message("fault", {}, "do") == "fault\n  fix  do"
    assert message("fault", {"a": 1}, ["do", "or that", "or this"]) == (
        "fault\n  a       1\n  either  do\n  or      or that\n  or      or this"
    )
    assert message("fault", {"text": "two\nlines"}, "") == "fault\n  text  two\n        lines"
    assert message("fault", {"text": ""}) == "fault\n  text  "


def test_a_spec_error_has_a_position():
    error = SpecError("wrong", {"why": "so"}, code="E001", file="plan.st", line=3, col=7)
    assert (error.code, error.file, error.line, error.col) == ("E001", "plan.st", 3, 7)
    assert (SpecError("wrong").file, SpecError("wrong").line) == ("<spec>", 0)


def test_errors_survive_a_trip_to_another_process():
    error = pickle.loads(pickle.dumps(LayoutError("fault", {"fact": "x"}, "fix it")))
    assert isinstance(error, LayoutError)
    assert str(error) == "fault\n  fact  x\n  fix   fix it"
