"""`Profile`: the speed and memory of a kind of machine, from the package or from a file of the user's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs

from shardtensor.cost.curve import Curve
from shardtensor.errors import LayoutError

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
"""The collectives for which a profile has curves."""

_PACKAGED = Path(__file__).parent / "profiles"


@attrs.frozen
class Profile:
    """The speed of communication and arithmetic on one kind of machine.

    Attributes:
        name: of the machine.
        about: the source of the numbers.
        ranks_per_node: the number of ranks connected by the links of `within`.
        memory_bytes: of one device.
        memory_bytes_per_s: memory bandwidth of one device.
        flops_per_s: of large matmuls on one device, by dtype.
        efficiency: the fraction of `flops_per_s` that the matmuls of a training step reach.
        within: a curve for each kind of collective among the ranks of one node.
        between: a curve for each kind among nodes, one rank of each; its bytes pass through the links of one rank.
    """

    name: str
    about: str
    ranks_per_node: int
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    efficiency: float
    within: Mapping[str, Curve]
    between: Mapping[str, Curve]

    def flops(self, dtype: str) -> float:
        """Return the FLOP/s that matmuls of this dtype reach in a step; an unknown dtype has those of the slowest."""
        return self.flops_per_s.get(dtype, min(self.flops_per_s.values())) * self.efficiency

    def as_text(self) -> str:
        """Return the text of its file, which `read_profile` reads."""
        fields = attrs.asdict(self, recurse=False)
        for link in ("within", "between"):
            fields[link] = {kind: curve.as_dict() for kind, curve in fields[link].items()}
        return json.dumps(fields, indent=2) + "\n"


def profile_names() -> tuple[str, ...]:
    """Return the names of the profiles in the package.

    Example:
        >>> profile_names()
        ('cpu', 'h100', 'h200')
    """
    return tuple(sorted(path.stem for path in _PACKAGED.glob("*.json")))


@lru_cache(maxsize=64)
def read_profile(name: str | Path) -> Profile:
    """Return the profile with this name, or from a file that ``shardtensor plan --calibrate`` wrote.

    Args:
        name: one of `profile_names`, or the path of a JSON file.

    Raises:
        LayoutError: (a ValueError) there is no such profile, or the file is not one.

    Example:
        >>> profile = read_profile("h100")
        >>> profile.ranks_per_node, sorted(profile.within)
        (8, ['all_gather', 'all_reduce', 'all_to_all', 'reduce_scatter'])
    """
    path = _PACKAGED / f"{name}.json" if str(name) in profile_names() else Path(name)
    try:
        return _from(json.loads(path.read_text()))
    except FileNotFoundError:
        raise LayoutError(
            f"there is no hardware profile `{name}`",
            {"known": ", ".join(profile_names())},
            "name one of these, or the file that `shardtensor plan --calibrate FILE` wrote",
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        detail = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise LayoutError(
            f"`{path}` is no hardware profile",
            {"found": detail},
            "write a fresh one: shardtensor plan --calibrate FILE",
        ) from None


def _from(fields: Mapping[str, Any]) -> Profile:
    unknown = set(fields) - {field.name for field in attrs.fields(Profile)}
    if unknown:
        raise ValueError(f"unknown key {', '.join(sorted(unknown))}")
    links = {link: {kind: Curve(**fields[link][kind]) for kind in KINDS} for link in ("within", "between")}
    values = {field.name: fields[field.name] for field in attrs.fields(Profile)}
    return Profile(**{**values, **links})
