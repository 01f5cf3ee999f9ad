"""The errors of this library, and the shape of their messages.

.. code-block:: text

    ShardTensorError
    ├── SpecError              (ValueError)      the text or value of a spec is wrong; has a position
    ├── LayoutError            (ValueError)      a spec does not fit the mesh, the world or the shape
    │   └── WrappedTwiceError  (AssertionError)  a fully sharded module is to be sharded again
    ├── RuleError              (RuntimeError)    an operation cannot be done on these layouts
    │   └── ShardCountError    (NotImplementedError)  a rank holds no shard, or several, where one is needed
    ├── DisagreementError      (ValueError)      ranks passed different values; no data has moved
    │   └── CallMismatchError  (RuntimeError)    ranks are in different collectives
    ├── AbsentRankError        (RuntimeError)    ranks did not join a collective, or were lost in it
    ├── MissingParameterError  (AttributeError)  a module has no parameter of that name
    ├── PlanError              (TypeError, KeyError, RuntimeError)  a sharding plan contradicts itself or its module
    ├── StaleParameterError    (RuntimeError)    an optimizer holds parameters that the module no longer has
    ├── CaptureError           (RuntimeError)    a step cannot be captured in a CUDA graph, or be replayed as called
    └── CheckpointError        (ValueError, RuntimeError)  a checkpoint cannot be saved, or cannot be loaded here

`NotTraced` stands alone: nothing is wrong, but a step of a module cannot run in this process.

Each also inherits the built-in type that torch raises in the same place, so ported ``except`` clauses work.
A message has three parts: the fault in the user's terms, facts as aligned pairs, and fixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self


def message(fault: str, facts: Mapping[str, object] | None = None, fix: str | Iterable[str] = ()) -> str:
    """Return the text of an error message: the fault, aligned facts, then fixes.

    Example:
        >>> print(message("dim 2 does not exist", {"spec": "[-, -, tp]", "shape": "4 x 8"}, "write `[-, tp]`"))
        dim 2 does not exist
          spec   [-, -, tp]
          shape  4 x 8
          fix    write `[-, tp]`
    """
    rows = _rows(facts or {}, fix)
    width = max((len(name) for name, _ in rows), default=0)
    lines = [fault]
    for name, value in rows:
        first, *rest = value.splitlines() or [""]
        lines.append(f"  {name:<{width}}  {first}")
        lines += [f"  {'':<{width}}  {line}" for line in rest]
    return "\n".join(lines)


def _rows(facts: Mapping[str, object], fix: str | Iterable[str]) -> list[tuple[str, str]]:
    """Return the rows below the fault: facts, then fixes, each as a key and a text."""
    ways = [fix] if isinstance(fix, str) else list(fix)
    keys = ["fix"] if len(ways) == 1 else ["either"] + ["or"] * (len(ways) - 1)
    rows = [(name, str(value)) for name, value in facts.items()]
    return rows + [(key, way) for key, way in zip(keys, ways, strict=False) if way]


def some(names: Iterable[object], most: int = 8) -> str:
    """Return names as one fact: the first ones, and how many more there are.

    Example:
        >>> some("abcd", 2), some([])
        ('a, b and 2 more', '')
    """
    texts = list(map(str, names))
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


class ShardTensorError(Exception):
    """Base of every error this library raises on purpose.

    Args:
        fault: line one, what is wrong in the user's terms.
        facts: the place in the text or code, what was found, what was needed.
        fix: one fix, or several.

    Attributes:
        fault, rows: the message in parts; each row is a key and its text.
    """

    def __init__(self, fault: str, facts: Mapping[str, object] | None = None, fix: str | Iterable[str] = ()) -> None:
        fix = fix if isinstance(fix, str) else tuple(fix)
        self.fault, self.rows = fault, _rows(facts or {}, fix)
        super().__init__(message(fault, facts, fix))

    def of(self, name: str) -> Self:
        """Return this error with the name of a tensor, a module or a rule before its message."""
        self.fault = f"{name}: {self.fault}"
        self.args = (f"{name}: {self.args[0]}",)
        return self


class SpecError(ShardTensorError, ValueError):
    """The text or the value of a spec is wrong.

    Attributes:
        code: the check that failed, such as ``E001``; empty where no check has a code.
        file: the file of the text; ``<spec>`` for a string in Python.
        line, col: position of the fault, counted from 1; 0 for values made in Python.
        parts: for an error in a text: its `Source`, the span of the wrong characters, and whether a value raised the
            error, so that the text that gave the value may be elsewhere.
        findings: of a plan, every error that was found; `sources`, the files that were read.
    """

    parts: Any = None
    findings: tuple[Any, ...] = ()
    sources: tuple[Any, ...] = ()

    def __init__(
        self,
        fault: str,
        facts: Mapping[str, object] | None = None,
        fix: str | Iterable[str] = (),
        *,
        code: str = "",
        file: str = "<spec>",
        line: int = 0,
        col: int = 0,
    ) -> None:
        super().__init__(fault, facts, fix)
        self.code, self.file, self.line, self.col = code, file, line, col


class LayoutError(ShardTensorError, ValueError):
    """A spec does not fit the mesh, the world or the shape it is bound to.

    Attributes:
        code: the check that failed, such as ``E205``; empty where no check of plans has one.
        about: the numbers of the fault by name, for code that writes another message.
    """

    def __init__(
        self,
        fault: str,
        facts: Mapping[str, object] | None = None,
        fix: str | Iterable[str] = (),
        *,
        code: str = "",
        about: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(fault, facts, fix)
        self.code, self.about = code, about or {}


class WrappedTwiceError(LayoutError, AssertionError):
    """A fully sharded module is to be sharded again."""


class RuleError(ShardTensorError, RuntimeError):
    """An operation cannot be done on these layouts."""


class ShardCountError(RuleError, NotImplementedError):
    """A rank holds no shard of a tensor, or several, where one is needed."""


class DisagreementError(ShardTensorError, ValueError):
    """Ranks passed different values to a call that needs equal ones; no data has moved."""


class CallMismatchError(DisagreementError, RuntimeError):
    """Ranks called different collectives, or one collective with different numbers; no data has moved."""


class AbsentRankError(ShardTensorError, RuntimeError):
    """Ranks did not join a collective within the timeout of their group, or ended during it."""


class MissingParameterError(ShardTensorError, AttributeError):
    """A module has no parameter of that name."""


class PlanError(ShardTensorError, TypeError, KeyError, RuntimeError):
    """A sharding plan contradicts itself or its module; the module is unchanged."""

    __str__ = Exception.__str__  # KeyError would show the repr


class StaleParameterError(ShardTensorError, RuntimeError):
    """An optimizer holds parameters that are no longer those of the module."""


class CaptureError(ShardTensorError, RuntimeError):
    """A step cannot be captured in a CUDA graph, or a captured step cannot be replayed with these arguments."""


class CheckpointError(ShardTensorError, ValueError, RuntimeError):
    """A checkpoint cannot be written or read, or does not fit what it is to be loaded into; nothing has changed."""


class NotTraced(Exception):
    """A step of a module cannot run in this process; `ways` are what the user may do about it."""

    def __init__(self, text: str, *ways: str) -> None:
        super().__init__("; ".join([text, *ways]))
        self.text, self.ways = text, ways
