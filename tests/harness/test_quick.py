"""What the quick run leaves out: never a whole test, never a world size of a folder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from harness import quick
from harness.progress import bare_name

NAME = "tests/some/test_file.py::test_law"


def made(name: str = NAME, **params: list[Any]) -> list[Any]:
    """Items of a test with the product of these parameters."""
    found: list[dict[str, tuple[int, Any]]] = [{}]
    for key, values in params.items():
        found = [{**row, key: (i, value)} for row in found for i, value in enumerate(values)]
    return [item(name, row) for row in found]


def item(name: str, row: dict[str, tuple[int, Any]]) -> Any:
    spec = SimpleNamespace(
        params={key: value for key, (_, value) in row.items()}, indices={key: i for key, (i, _) in row.items()}
    )
    return Item(nodeid=f"{name}[{'-'.join(str(value) for _, value in row.values())}]", callspec=spec)


class Item(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def kept(items: list[Any]) -> list[str]:
    out = quick.left_out(items)
    return [one.nodeid for one in items if one not in out]


def test_sizes_are_taken_in_turns():
    for others in (1, 3, 7):
        rows = [nodeid[:-1].split("-")[-2:] for nodeid in kept(made(shape=list(range(others)), size=[1, 2, 3, 4]))]
        assert {shape.split("[")[-1] for shape, _ in rows} == {str(shape) for shape in range(others)}
        assert len({size for _, size in rows} - {"1"}) == min(3, others)
    assert len(kept(made(size=[2, 4]))) == 2, "sizes that were chosen one by one stay"


def test_real_ranks_run_once_where_simulated_ones_do_too():
    found = kept(made(world=["sim", "gloo"], shape=list(range(5))))
    assert len([nodeid for nodeid in found if "sim" in nodeid]) == 5
    assert len([nodeid for nodeid in found if "gloo" in nodeid]) == 1
    assert len(kept(made(world=["gloo"], shape=list(range(5))))) == 5


def test_what_takes_long_is_sampled_and_never_left_out(monkeypatch):
    monkeypatch.setattr(quick, "recorded_seconds", lambda: {NAME: 0.5, "tests/some/test_file.py::test_slow": 100.0})
    items = made(shape=list(range(9)))
    assert kept(items) == [items[0].nodeid, items[4].nodeid]
    slow = made("tests/some/test_file.py::test_slow", shape=[1, 2])
    assert kept(slow) == [slow[0].nodeid]
    plain = Item(nodeid="tests/some/test_file.py::test_plain")
    assert quick.left_out([plain]) == set()
    assert bare_name(slow[0].nodeid) == "tests/some/test_file.py::test_slow"


def test_a_sample_is_evenly_spread(monkeypatch):
    monkeypatch.setattr(quick, "FULL", False)
    assert quick.sampled(range(10), 4) == [0, 2, 5, 7]
    assert quick.sampled("abc", 4) == ["a", "b", "c"]
    monkeypatch.setattr(quick, "FULL", True)
    assert quick.sampled(range(10), 4) == list(range(10))
