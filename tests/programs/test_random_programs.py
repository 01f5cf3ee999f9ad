"""Random programs of recorded seeds in the simulator and on gloo; what the generator and the shrinker promise.

``benchmarks/random_programs.py`` runs thousands, of any seeds, and prints the smallest form of what differs.
"""

from __future__ import annotations

import os
from collections import Counter

import attrs
import pytest
import torch
from harness import FULL

from programs.generate import HALVES, generate
from programs.run import Problem, run_sharded, simulated, verdict
from programs.shrink import shrink

FOUND = (
    *(18, 52, 94, 171, 199, 224, 286, 302, 318, 387, 458, 488, 580, 589, 627, 770, 826, 943, 1086, 1491, 1507, 1616),
    *(1735, 1852, 3360, 4004, 4021, 5225, 5530, 10125, 10793, 11470, 13317, 13646, 14874),
)
"""Seeds whose programs once gave another answer than the dense program."""

BATCH = 25
COUNT = 200 if FULL else 50
ON_GLOO = int(os.environ.get("SHARDTENSOR_TEST_PROGRAMS", "60" if FULL else "24"))
"""How many run on real ranks, too; 300 take half a minute."""
KNOWN = ("refused",)  # a RuleError that says why and what to do instead


def failures(seeds: range | tuple[int, ...]) -> list[str]:
    """What differs, shrunk, for a reader."""
    found = []
    for seed in seeds:
        program = generate(seed)
        problem = simulated(program)
        if problem is not None and problem.kind not in KNOWN:
            program, problem = shrink(program, problem, simulated)
            found.append(f"{problem.kind}: {problem.where}\n{program}\n{problem.text}")
    return found


@pytest.mark.parametrize("first", range(0, COUNT, BATCH))
def test_programs_in_the_simulator_are_the_dense_programs(first):
    assert not failures(range(first, first + BATCH))


def test_programs_that_once_differed():
    assert not failures(FOUND)


@pytest.mark.parametrize("first", range(0, 1000 if FULL else 50, BATCH))
def test_programs_of_half_precision_send_the_same_on_every_rank(first):
    assert not failures(range(HALVES + first, HALVES + first + BATCH))


def run_many(seeds: list[int]) -> list[tuple[int, Problem | None]]:
    torch.set_num_threads(1)
    return [(seed, run_sharded(generate(seed))) for seed in seeds]


@pytest.mark.worlds("gloo")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_programs_on_real_ranks_are_the_dense_programs(world, size):
    drawn = (*range(ON_GLOO), *range(HALVES, HALVES + ON_GLOO))
    seeds = [seed for seed in drawn if generate(seed).size == size]
    by_rank = world(run_many, size, timeout_s=120.0, seeds=seeds)
    for found in zip(*by_rank, strict=True):
        problem = verdict([problem for _, problem in found])
        assert problem is None or problem.kind in KNOWN, f"seed {found[0][0]}\n{problem}"


def test_a_seed_is_a_program_and_other_seeds_are_others():
    assert generate(7) == generate(7)
    assert len({str(attrs.evolve(generate(seed), seed=0)) for seed in range(50)}) == 50


def test_programs_are_of_every_kind():
    programs = [generate(seed) for seed in range(120)]
    specs = Counter(made.spec.split("(")[0].split("[")[0].strip() for p in programs for made in p.inputs)
    words = " ".join(made.spec for p in programs for made in p.inputs)
    assert {"chunk", "grid", "enum", "flat", "replicate", ""} <= set(specs)
    for word in ("balanced", "pad", "sizes", "blocks", "unit", "partial", "op=max", "dp*tp", "] flat("):
        assert word in words, word
    shapes = [made.shape for p in programs for made in p.inputs]
    assert any(0 in shape for shape in shapes) and any(1 in shape for shape in shapes) and () in shapes
    assert {p.size for p in programs} == {1, 2, 3, 4}
    assert any(len(p.mesh) == 2 for p in programs)
    functions = {step.func for p in programs for step in p.steps}
    assert {"reshard", "reshard_", "put", "operator.getitem", "torch.cat", "F.linear", "torch.sum"} <= functions
    assert len(functions) > 100


def test_programs_of_half_precision_are_so_and_have_empty_parts_and_flat_ranges_over_several_axes():
    programs = [generate(seed) for seed in range(HALVES, HALVES + 50)]
    specs = [made.spec for p in programs for made in p.inputs]
    specs += [step.args[1] for p in programs for step in p.steps if step.func in ("reshard", "reshard_")]
    assert all(any(order in spec for spec in specs) for order in ("flat(dp*tp", "flat(tp*dp"))
    assert any("sizes(0" in spec for spec in specs)
    dtypes = {step.args[1] for p in programs for step in p.steps if step.func == "Tensor.to"}
    assert {torch.bfloat16, torch.float16} <= dtypes


def test_a_wrong_answer_is_found_and_shrunk_to_what_it_needs(monkeypatch):
    seed, name = next(
        (seed, step.outs[0])
        for seed in range(200)
        for step in generate(seed).steps[:-2]
        if step.func == "torch.tanh" and simulated(generate(seed)) is None
    )
    right = torch.tanh
    from shardtensor.tensor.dispatch import HANDLERS

    handler = HANDLERS[right]
    monkeypatch.setitem(HANDLERS, right, lambda *args, **kwargs: handler(*args, **kwargs) * 2)
    program = generate(seed)
    problem = simulated(program)
    if problem is None:  # its operand is plain, and no handler sees it
        pytest.skip(f"seed {seed} calls tanh on a plain tensor only")
    program, problem = shrink(program, problem, simulated)
    assert (problem.kind, problem.where) == ("wrong", "torch.tanh")
    assert name in problem.text
    assert len(program.steps) < len(generate(seed).steps)
