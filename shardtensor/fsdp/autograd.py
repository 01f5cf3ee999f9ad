"""Version counters of unsharded parameters, by which autograd detects stale values, and outputs in reused memory.

Modules compute with views of buffers that they use in turns. While a buffer has a module's values, the version counters
of its views are at the generation of these values (`next_generation`); otherwise at the module's `absent` number.
Autograd compares the counter of a saved tensor when a backward uses it, so it refuses one whose values are gone, on
every path to that backward and at no cost for an operation. The error then names the module: see `explained`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from operator import is_
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.autograd import Variable

from shardtensor.errors import RuleError
from shardtensor.tensor.sharded_tensor import local_of
from shardtensor.tensor.trees import map_tensors, tensors_in


class Owner(Protocol):
    """The state that owns parameters: its title for errors, and their version counters."""

    versions: Versions

    @property
    def title(self) -> str:
        """The name of the module in error messages."""


_set_versions = torch._C._autograd._unsafe_set_version_counter
_SPACE = 64  # between generations; a user's writes to a gathered parameter increase its counter
_generations = count(1 << 20, _SPACE)  # larger than the counters of other tensors get
_absences = count(1 << 31)  # counters have 32 bits
_REFUSAL = re.compile(r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\].* is at version (\d+);")

_owners: WeakSet[Owner] = WeakSet()


def next_generation() -> int:
    """Return a new number for the present values of parameters; no other values have it."""
    return next(_generations)


class Versions:
    """The version counters of one state's unsharded parameters.

    Attributes:
        present: their current value.
        absent: their value while other values are in their memory.
    """

    def __init__(self, state: Owner, parts: Sequence[torch.Tensor]) -> None:
        self._parts = tuple(parts)
        self.absent = next(_absences)
        self.present = -1
        self.set(self.absent)
        _owners.add(state)

    def set(self, version: int) -> None:
        """Set all counters with one call of torch."""
        if self.present != version:
            self.present = version
            if self._parts:
                _set_versions(self._parts, (version,) * len(self._parts))

    def are_of(self, parts: Sequence[torch.Tensor]) -> bool:
        """Whether these are the counters of `parts`."""
        return len(parts) == len(self._parts) and all(map(is_, parts, self._parts))

    def has_one_of(self, sizes: Sequence[int]) -> bool:
        """Whether a tensor of `sizes` may be one of the parameters, possibly with its dims in another order."""
        return any(sorted(part.shape) == sorted(sizes) for part in self._parts)


class _Engine(torch._C._ImperativeEngine):
    """Autograd's engine; its errors about parameters that are not gathered name the module."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run_backward(*args, **kwargs)
        except RuntimeError as error:
            explanation = explained(error)
            if explanation is None:
                raise
            raise explanation from error


def watch_backward() -> None:
    """Replace autograd's engine by one that explains errors about gathered parameters, in the whole process."""
    if not isinstance(Variable._execution_engine, _Engine):
        Variable._execution_engine = _Engine()


def explained(error: RuntimeError) -> RuleError | None:
    """Return an error with the reason why autograd refused a saved parameter of a unit; None for other errors."""
    found = _REFUSAL.search(str(error)) if type(error) is RuntimeError else None
    if found is None:
        return None
    sizes, version = [int(size) for size in found[1].split(",") if size.strip()], int(found[2])
    states = [state for state in _owners if state.versions.present == version]
    states = [state for state in states if state.versions.has_one_of(sizes)] or states
    if not states:
        return None
    modules = sorted({state.title for state in states})
    facts = {"module" if len(modules) == 1 else "one of": ", ".join(modules[:4]), "saved tensor": tuple(sizes)}
    if version >> 31:
        return RuleError(
            "backward came to parameters of a fully sharded module that are no longer gathered, by another way than a "
            "result of the module's forward",
            facts,
            [
                "return what the loss is computed from in the results of the module's forward, rather than keep it in"
                " an attribute, a hook or a closure",
                "fully_shard(module, reshard_after_forward=False) keeps parameters gathered; second derivatives"
                " (create_graph=True) need it",
            ],
        )
    return _written(facts)


def written_too_early(params_info: Iterable[Any]) -> RuleError:
    """Return the error for a backward whose parameters were written since the forward."""
    return _written({"parameters": ", ".join([info.name for info in params_info][:4])})


def _written(facts: Mapping[str, Any]) -> RuleError:
    return RuleError(
        "parameters were written between a forward and its backward",
        facts,
        "call backward before the optimizer steps or values are loaded",
    )


def not_in_buffer(output: Any, memory: range, state: Owner) -> Any:
    """Copy the tensors of `output` that lie in `memory`, which other units overwrite after this one has run.

    Args:
        memory: the addresses of the unit's gathered parameters.
        state: of the module that returned `output`.

    Raises:
        RuleError: such a tensor is in an object in which it cannot be replaced.
    """
    if type(output) is torch.Tensor:  # the common case, with the fewest calls
        try:
            return output.clone() if output.data_ptr() in memory else output
        except RuntimeError:
            return output
    if not any(_address(x) in memory for x in tensors_in(output)):
        return output
    replaced = map_tensors(lambda x: x.clone() if _address(x) in memory else x, output)
    if any(_address(x) in memory for x in tensors_in(replaced)):
        raise RuleError(
            "the forward of a fully sharded module returned a view of its parameter inside of an object; other values"
            " come into that memory when the module has run",
            {"module": state.title, "object": type(output).__name__},
            "return a copy (parameter.clone()), or return it in a list, tuple, dict or dataclass",
        )
    return replaced


def _address(x: torch.Tensor) -> int:
    try:
        return int(local_of(x).data_ptr())
    except RuntimeError:  # it has no memory of its own: it is sparse, or a function transform made it
        return 0
