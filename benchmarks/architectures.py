"""Which architectures of transformers work, as a table: with an imported plan, fully sharded, and on how many ranks.

``python benchmarks/architectures.py [NAME...]`` trains a small model of each for three steps on simulated ranks and
compares all parameters with those of the dense model. It needs transformers, and takes two minutes on one core.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from harness.architectures import ARCHITECTURES, off_after_three_steps, small_model

from shardtensor.errors import ShardTensorError
from shardtensor.parallel.model_info import model_info
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.patterns import starred
from shardtensor.plan.match.resolve import resolve
from shardtensor.sim.simulate import simulate
from shardtensor.trace.imported import imported_plan

WORLDS = (2, 4, 8)
CLOSE = 1e-5
"""Relative: some of their code computes in float32."""


def trained(module: Any, text: str, worlds: tuple[int, ...] = WORLDS) -> str:
    """Return on which numbers of ranks training gives the dense parameters, or what else happens."""
    found = []
    for ranks in worlds:
        try:
            off = max(simulate(ranks, off_after_three_steps, module, text))
            found.append("ok" if off < CLOSE else f"off by {off:.1g}")
        except Exception as error:  # what the model's code raises is a result, too
            kind = "" if isinstance(error, ShardTensorError) else f"{type(error).__name__}: "
            found.append(kind + str(error).strip().partition("\n")[0])
    return "ok" if set(found) == {"ok"} else "; ".join(f"{n}: {each}" for n, each in zip(worlds, found, strict=True))


def row(name: str) -> str:
    """Return the row of an architecture."""
    module = small_model(name)
    source = "its own" if any(word for word in (module.tp_plan or {}).values()) else "derived"
    try:
        text = imported_plan(module).text
        imported, share = trained(module, text), sharded(module, text)
    except ShardTensorError as error:
        imported, share = f"refused: {str(error).partition(chr(10))[0]}", "-"
    return f"| {name} | {source} | {imported} | {share} | {trained(module, 'fsdp', WORLDS[:2])} |"


def sharded(module: Any, text: str) -> str:
    """Return which part of the parameters in layers, without the vocabulary, the plan shards."""
    resolved = resolve(load_plan(text, config=module.config, world=2), model_info(module))
    layers = [each for name, each in resolved.tensors.items() if "*" in starred(name) and len(each.tensor.shape) > 1]
    cut = sum(each.tensor.numel for each in layers if not each.layout.is_replicated)
    return f"{100 * cut / max(sum(each.tensor.numel for each in layers), 1):.0f} %"


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    imported, fsdp = (", ".join(map(str, worlds)) for worlds in (WORLDS, WORLDS[:2]))
    print(f"three steps on {imported} simulated ranks, fsdp on {fsdp}; ok: the parameters of the dense model")
    print("| architecture | plan | imported | weights of layers sharded | fsdp |\n|---|---|---|---|---|")
    for name in sys.argv[1:] or ARCHITECTURES:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
