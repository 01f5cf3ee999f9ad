"""All cases by name, the places of the package that they come by, and those that none does."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

from harness.ways_out import Place, came_by, places, recording

from fixes.case import Case, go_wrong


@cache
def areas() -> dict[str, ModuleType]:
    """Modules of cases by area. Each has `CASES`, and may have `NOT_FOLLOWED`: reasons by ``file:function``."""
    files = sorted(Path(__file__).parent.glob("*_cases.py"))
    return {path.stem.removesuffix("_cases"): importlib.import_module(f"fixes.{path.stem}") for path in files}


@cache
def cases() -> dict[str, Case]:
    return {f"{area}: {name}": case for area, module in areas().items() for name, case in module.CASES.items()}


def not_followed() -> dict[str, str]:
    """Why no case follows the errors of a function, by ``file:function``."""
    return {key: why for module in areas().values() for key, why in getattr(module, "NOT_FOLLOWED", {}).items()}


def places_of(case: Case) -> set[Place]:
    """Where the errors are made that the case shows."""
    with recording() as made:
        texts = go_wrong(case)
    return came_by(made, "\n".join(texts))


def missing(seen: Iterable[Place], folders: Iterable[str] = ()) -> tuple[list[Place], list[str]]:
    """Of some folders, or all: places that no case came by and no reason excuses; and reasons that excuse nothing."""
    seen, folders = set(seen), set(folders)
    open_places = [p for p in places() if p not in seen and (not folders or p.file.partition("/")[0] in folders)]
    excused = {f"{place.file}:{place.within}" for place in open_places} & set(not_followed())
    left = [place for place in open_places if f"{place.file}:{place.within}" not in excused]
    return left, [
        key for key in not_followed() if key not in excused and (not folders or key.partition("/")[0] in folders)
    ]


def main() -> None:
    """Run all cases as far as their errors, and print what is missing."""
    warnings.simplefilter("ignore")
    seen: set[Place] = set()
    for name, case in cases().items():
        try:
            found = places_of(case)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}")
            continue
        if not found:
            print(f"{name}: comes by no place")
        seen |= found
    left, stale = missing(seen, sys.argv[1:])
    print(*left, *(f"nothing to excuse: {key}" for key in stale), sep="\n")
    print(f"{len(places())} places, {len(seen & set(places()))} followed, {len(left)} missing here")
    unknown = seen - set(places())
    print(*(f"not listed as a place: {place}" for place in unknown), sep="\n")


if __name__ == "__main__":
    main()
