"""Read any number of odd texts as plans: ``--count 50000``; each has to end in a plan or an error with its place.

Texts are derived from the grammar, or are plans with bytes changed, each from its seed; see tests/plan/plan_texts.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from rich.progress import track

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "plan"))

from plan_texts import text_of, verdict


def main() -> int:
    """Read the texts; the exit status is 1 when one ended otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first text; the others follow")
    parser.add_argument("--show", type=int, default=5, help="texts printed that ended otherwise")
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    slowest, slow_seed, wrong = 0.0, 0, 0
    began = time.perf_counter()
    for seed in track(range(options.seed, options.seed + options.count), description="reading"):
        text = text_of(seed)
        found = verdict(text, seed)
        outcomes[found.outcome] += 1
        if found.seconds > slowest:
            slowest, slow_seed = found.seconds, seed
        if found.problem:
            wrong += 1
            if wrong <= options.show:
                print(f"--- seed {seed}: {found.problem}\n{text[:2000]}\n")
    took = time.perf_counter() - began
    print(", ".join(f"{count} {kind}" for kind, count in sorted(outcomes.items())))
    print(
        f"{options.count} texts in {took:.0f} s; the slowest {slowest * 1000:.0f} ms (seed {slow_seed}); {wrong} wrong"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
