"""Random programs in the simulator against the dense program: ``--count 5000 --seed 0``; prints what differs, shrunk.

Each program is a few operations on tensors of random layouts, written from its seed; see tests/programs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from programs.generate import generate
from programs.run import simulated
from programs.shrink import shrink


def main() -> int:
    """Run the programs; the exit status is 1 when one differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--show", type=int, default=3, help="failures printed of each kind, shrunk")
    parser.add_argument("--refusals", action="store_true", help="print programs that a RuleError refused, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, seen, functions = time.perf_counter(), Counter(), Counter()
    seeds: dict[tuple[str, str], list[int]] = {}
    for seed in range(options.seed, options.seed + options.count):
        program = generate(seed)
        functions.update(step.func for step in program.steps)
        problem = simulated(program)
        kind = "equal" if problem is None else problem.kind
        seen[kind] += 1
        if problem is None:
            continue
        known = seeds.setdefault((problem.kind, problem.where), [])
        known.append(seed)
        if len(known) <= options.show and (problem.kind != "refused" or options.refusals):
            program, problem = shrink(program, problem, simulated)
            print(f"--- {problem.kind}: {problem.where}\n{program}\n{problem.text}\n", flush=True)
    took = time.perf_counter() - start
    for (kind, where), found in sorted(seeds.items(), key=lambda item: (item[0][0], -len(item[1]))):
        print(f"{kind:>12}  {where:<40} {len(found):>4}  seeds {' '.join(map(str, found[:12]))}")
    print(f"{options.count} programs, {sum(functions.values())} calls of {len(functions)} functions, {took:.0f} s")
    print(", ".join(f"{count} {kind}" for kind, count in seen.most_common()))
    return int(any(kind not in ("equal", "refused") for kind in seen))


if __name__ == "__main__":
    sys.exit(main())
