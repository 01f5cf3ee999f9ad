"""`Profile`: a kind of machine, as numbers; the ones that come with the package, and those of a user's own file."""

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
"""The collectives that a profile has a curve of."""

_PACKAGED = Path(__file__).parent / "profiles"


@attrs.frozen
class Profile:
    """What communication and arithmetic cost on one kind of machine.

    Attributes:
        name: of the machine.
        about: where the numbers come from.
        ranks_per_node: ranks that are linked as in `within`.
        memory_bytes: of one device.
        memory_bytes_per_s: read and written by one device.
        flops_per_s: of large matrix products on one device, by dtype.
        efficiency: the part of that which the products of a training step reach.
        within: a curve for each kind of collective among ranks of one node.
        between: the same among nodes, one rank of each; bytes are those through the links of one rank.
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
        """FLOPs a second that products of this dtype reach in a step; of an unknown dtype, the slowest."""
        return self.flops_per_s.get(dtype, min(self.flops_per_s.values())) * self.efficiency

    def as_text(self) -> str:
        """As its file says it; `read_profile` reads it."""
        said = attrs.asdict(self, recurse=False)
        for link in ("within", "between"):
            said[link] = {kind: curve.as_dict() for kind, curve in said[link].items()}
        return json.dumps(said, indent=2) + "\n"


def profile_names() -> tuple[str, ...]:
    """The profiles that come with the package.

    Example:
        >>> profile_names()
        ('cpu', 'h100', 'h200')
    """
    return tuple(sorted(path.stem for path in _PACKAGED.glob("*.json")))


@lru_cache(maxsize=64)
def read_profile(name: str | Path) -> Profile:
    """Return the profile of a name, or that of a file which ``shardtensor plan --calibrate`` wrote.

    Args:
        name: one of `profile_names`, or the path of a JSON file.

    Raises:
        LayoutError: (a ValueError) there is none, or the file is none; says what is missing.

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


def _from(said: Mapping[str, Any]) -> Profile:
    unknown = set(said) - {field.name for field in attrs.fields(Profile)}
    if unknown:
        raise ValueError(f"unknown key {', '.join(sorted(unknown))}")
    links = {link: {kind: Curve(**said[link][kind]) for kind in KINDS} for link in ("within", "between")}
    values = {field.name: said[field.name] for field in attrs.fields(Profile)}
    return Profile(**{**values, **links})
