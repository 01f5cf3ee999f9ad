"""What a run says of its progress, and the order of its files."""

from __future__ import annotations

import pytest

from harness import progress


@pytest.mark.parametrize(
    ("seen", "line"),
    [
        ((2100, 7000, 80.0, 0.4), "2100/7000 tests, 1:20 elapsed, about 2:00 remaining"),
        ((1, 7000, 15.0, 0.0), "1/7000 tests, 0:15 elapsed, an unknown time remaining"),
        ((7000, 7000, 215.0, 1.0), "7000/7000 tests, 3:35 elapsed, about 0:00 remaining"),
    ],
)
def test_a_line_says_what_is_done_and_what_remains(seen, line):
    assert progress.line_of(*seen) == line


def test_the_longest_files_come_first(monkeypatch):
    monkeypatch.setattr(progress, "recorded_seconds", lambda: {"a.py::f": 0.5, "b.py::g": 2.0})
    nodeids = ["c.py::h", "a.py::f[1]", "a.py::f[2]", "b.py::g"]
    assert list(progress.longest_first(nodeids)) == ["b.py", "a.py", "c.py"]


def test_what_a_test_took_counts_once_it_is_over(pytestconfig, monkeypatch):
    said = []
    shown = progress.Progress(pytestconfig)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    monkeypatch.setattr(shown, "_say", said.append)
    shown.pytest_xdist_node_collection_finished(None, ["a.py::x", "a.py::y"])
    shown.pytest_xdist_node_collection_finished(None, ["a.py::x", "a.py::y"])
    for nodeid in ("a.py::x", "a.py::y"):
        for when in ("setup", "call", "teardown"):
            shown.pytest_runtest_logreport(pytest.TestReport(nodeid, ("", 0, ""), {}, "passed", None, when))
    assert [line.split()[0] for line in said] == ["1/2", "2/2"]
    assert said[-1].endswith("about 0:00 remaining")
