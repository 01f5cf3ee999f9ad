"""Every way out that an error of the package names works when it is followed, and every rank gets the same error."""

from __future__ import annotations

import pytest
from harness.ways_out import Place, came_by, recording

from fixes.case import ROW, go_on, go_wrong
from fixes.followed import cases, missing, places_of

SEEN: dict[str, set[Place]] = {}
"""Where the errors of the cases are made that ran."""


@pytest.mark.filterwarnings("ignore")  # on wrong ways there are some; they have tests of their own
@pytest.mark.parametrize("name", cases())
def test_each_way_out_works(name: str) -> None:
    case = cases()[name]
    with recording() as made:
        texts = go_wrong(case)
    SEEN[name] = came_by(made, "\n".join(texts))
    assert len(set(texts)) == 1 or case.differs
    ways = ROW.findall(texts[0])
    assert len(ways) == len(case.ways) > 0, texts[0]
    for way, words in zip(ways, case.ways, strict=True):
        assert words in way
    go_on(case)


@pytest.mark.filterwarnings("ignore")
def test_every_place_that_names_a_way_out_is_followed_or_says_why_not() -> None:
    for name in cases().keys() - SEEN.keys():  # where only some of the cases run, or elsewhere
        SEEN[name] = places_of(cases()[name])
    seen = {place for found in SEEN.values() for place in found}
    left, stale = missing(seen)
    assert (list(map(str, left)), stale) == ([], []), "places that no case comes by, and reasons without a place"
    assert [name for name, found in SEEN.items() if not found] == [], "cases that come by no place"
