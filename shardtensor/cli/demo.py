"""``shardtensor demo``: train a small sharded decoder on real text, and the same one on one process to compare."""

from __future__ import annotations

import argparse
import copy
import logging
import math
import os
import sys
import sysconfig
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardtensor import ShardedOptimizer, shard_module
from shardtensor.cli.arguments import quiet_processes
from shardtensor.cli.show_text import print_scene, scene_of_plan
from shardtensor.parallel.model_info import model_info
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.plan import Plan

BATCH, LENGTH, LEARNING_RATE = 8, 96, 1e-3
TOLERANCE = 1e-4
"""Relative to the dense loss: a larger difference is not rounding."""
SLOWER = (
    "\nA sharded step is slower here: the {} ranks share this machine ({} cores) with the dense run, and this model is "
    "so small that the sums between its layers take longer than the work they divide. Sharding pays where each rank has"
    " a device of its own, or where a model does not fit into one."
)
NEXT = """
Next
  shardtensor plan mlp --world 4       bytes of every rank on a machine, before it runs
  shardtensor show mlp --world 4       who holds what
  shardtensor check llama --help       what is wrong with a plan for your model's config.json"""


@attrs.frozen
class Outcome:
    """The results of the demo.

    Attributes:
        sharded, dense: the loss of every step.
        step_s: the seconds of the sharded steps and of the dense steps.
    """

    sharded: list[float]
    dense: list[float]
    step_s: tuple[float, float]


def run_demo(options: argparse.Namespace) -> int:
    """Run ``shardtensor demo``; returns the exit status."""
    count, world = torch.cuda.device_count(), options.world
    try:
        if options.device == "cuda" and count < world:
            way = f"use --world {count} or --device cpu" if count else "use --device cpu"
            raise DemoError(f"{world} ranks need {world} GPUs, this machine has {count}; {way}")
        text = read_text(options.text)
    except DemoError as error:
        print(f"shardtensor demo: {error}", file=sys.stderr)
        return 2
    device = "cuda" if options.device != "cpu" and count >= world else "cpu"
    console = Console()
    console.print(
        f"{world} ranks on {device}, {len(text) / 1e6:.1f} MB of "
        f"{options.text or 'the Python standard library'}, {options.steps} steps, float32; starting ..."
    )
    start = time.perf_counter()
    outcome = _launch(text, options.steps, device, world)
    if outcome is None:
        return 1
    wall_s = time.perf_counter() - start
    show_holders(Corpus(text).vocabulary, world, console)
    return _judge(outcome, console, wall_s, world)


def _launch(text: bytes, steps: int, device: str, world: int) -> Outcome | None:
    quiet_processes()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failure is printed below, once
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=world, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        run_id="shardtensor-demo", max_restarts=0, monitor_interval=0.1, start_method="spawn",
    )  # fmt: skip
    try:
        return elastic_launch(config, work)(text, steps, device)[0]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message: dict[str, Any] = failure.message if isinstance(failure.message, dict) else {"message": failure.message}
        trace = message.get("extraInfo", {}).get("py_callstack", "")
        print(f"{trace}shardtensor demo: rank {rank} failed: {message['message']}", file=sys.stderr)
        return None


def _judge(outcome: Outcome, console: Console, wall_s: float, world: int) -> int:
    """Print the results; returns the exit status."""
    steps = len(outcome.sharded)
    step, difference = worst_difference(outcome.sharded, outcome.dense)
    console.print(
        f"\n{steps} steps: loss {outcome.sharded[0]:.4f} -> {outcome.sharded[-1]:.4f}; "
        f"{1e3 * outcome.step_s[0] / steps:.0f} ms a sharded step, {1e3 * outcome.step_s[1] / steps:.0f} ms a dense "
        f"one; {wall_s:.0f} s in all"
    )
    if not difference <= TOLERANCE:
        console.print(
            f"[bold red]The sharded run and the dense run differ[/]: by {difference:.1e} of the loss at step {step} "
            f"({outcome.sharded[step - 1]:.6f} sharded, {outcome.dense[step - 1]:.6f} dense); at most {TOLERANCE:.0e} "
            "is rounding."
        )
        return 1
    console.print(
        f"[bold green]The sharded run and the dense run agree[/]: every loss within {difference:.1e} "
        f"(worst at step {step})."
    )
    if outcome.step_s[0] > outcome.step_s[1]:
        console.print(SLOWER.format(world, os.cpu_count() or 1), highlight=False)
    console.print(NEXT, highlight=False)
    return 0


def show_holders(vocabulary: int, world: int, console: Console) -> None:
    """Draw who holds what of the parameters, as ``shardtensor show`` draws the tensors of a plan."""
    with torch.device("meta"):
        model = Decoder(vocabulary, LENGTH)
    plan = Plan.from_rules({**SPECS, "tie head.weight": "embed.weight", "unmatched": "replicate"}, f"tp={world}")
    print_scene(scene_of_plan(resolve(plan, model_info(model)), "\nwho holds what"), console)
    console.print()


def worst_difference(sharded: list[float], dense: list[float]) -> tuple[int, float]:
    """Return the step (from 1) with the largest difference relative to the dense loss, and that; NaN counts as most."""
    relative = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(sharded, dense, strict=True)]
    relative = [math.inf if math.isnan(difference) else difference for difference in relative]
    step = max(range(len(relative)), key=relative.__getitem__)
    return step + 1, relative[step]


def work(text: bytes, steps: int, device_type: str) -> Outcome | None:
    """Train for `steps`; rank 0 returns the outcome. Every rank of the demo calls it, started by torch elastic."""
    torch.set_num_threads(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=60))
    try:
        return _train(Corpus(text), steps, device, dist.get_rank())
    finally:
        dist.destroy_process_group()


def _train(corpus: Corpus, steps: int, device: torch.device, rank: int) -> Outcome | None:
    torch.manual_seed(0)
    model = Decoder(corpus.vocabulary, LENGTH).to(device)
    dense = copy.deepcopy(model) if rank == 0 else None
    shard_module(model, SPECS)
    optimizer: torch.optim.Optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=LEARNING_RATE)
    beside = None if dense is None else torch.optim.AdamW(dense.parameters(), lr=LEARNING_RATE)
    losses: tuple[list[float], list[float]] = ([], [])
    seconds = [0.0, 0.0]
    for step in range(steps):
        tokens, targets = (t.to(device) for t in corpus.batch(step, BATCH, LENGTH))
        for i, (each, stepped) in enumerate(((model, optimizer), (dense, beside))):
            if each is not None and stepped is not None:
                start = time.perf_counter()
                losses[i].append(train_step(each, stepped, tokens, targets))
                seconds[i] += time.perf_counter() - start
        if rank == 0 and ((step + 1) % max(steps // 10, 1) == 0 or step == 0):
            print(
                f"step {step + 1:4d}/{steps}  loss {losses[0][-1]:.6f} sharded  {losses[1][-1]:.6f} dense", flush=True
            )
    return Outcome(*losses, (seconds[0], seconds[1])) if rank == 0 else None


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, targets: torch.Tensor
) -> float:
    """Run one step and return the loss. The sharded and the dense model use the same code."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


HEAD = 32

SPECS = {
    "embed.weight": "[vocab: tp balanced]",
    "blocks.*.{q,k,v}.weight": f"[out: tp unit({HEAD}) balanced]",
    "blocks.*.{q,k,v}.bias": f"[out: tp unit({HEAD}) balanced]",
    "blocks.*.proj.weight": f"[in: tp unit({HEAD}) balanced]",
    "blocks.*.up.weight": "[out: tp balanced]",
    "blocks.*.up.bias": "[out: tp balanced]",
    "blocks.*.down.weight": "[in: tp balanced]",
}
"""Column-parallel at the input of a block, row-parallel at its output, the vocabulary by rows; norms, positions and the
other biases are replicated."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Tokens ``(batch, length)`` -> logits ``(batch, length, vocabulary)``; the head shares the embedding's weight."""

    def __init__(self, vocabulary: int, length: int, width: int = 128, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


ENOUGH_BYTES = 2_000_000


class DemoError(Exception):
    """The demo cannot start; the text is the reason."""


def read_text(path: Path | None) -> bytes:
    """Return up to two million bytes of a text file, a folder of text files, or Python's standard library.

    Raises:
        DemoError: there is no text, or too little.
    """
    if path is None:
        path, pattern = Path(sysconfig.get_path("stdlib")), "*.py"
    else:
        pattern = "**/*"
    if not path.exists():
        raise DemoError(f"{path} does not exist")
    files = sorted(path.glob(pattern)) if path.is_dir() else [path]
    parts, size = [], 0
    for file in files:
        if size >= ENOUGH_BYTES:
            break
        if file.is_file():
            parts.append(file.read_bytes())
            size += len(parts[-1])
    text = b"\n".join(parts)[:ENOUGH_BYTES]
    if len(text) < 1000:
        raise DemoError(f"{path} holds {len(text)} bytes of text; the demo needs at least 1000")
    return text


class Corpus:
    """Text as numbers, one for each byte value that occurs in it."""

    def __init__(self, text: bytes) -> None:
        values = sorted(set(text))
        number = torch.zeros(256, dtype=torch.long)
        number[values] = torch.arange(len(values))
        self.vocabulary = len(values)
        self.numbers = number[torch.frombuffer(bytearray(text), dtype=torch.uint8).long()]

    def batch(self, step: int, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of a step, each ``(batch, length)`` int64; the same on every rank."""
        generator = torch.Generator().manual_seed(step)
        length = min(length, len(self.numbers) - 2)
        starts = torch.randint(len(self.numbers) - length - 1, (batch,), generator=generator)
        rows = torch.stack([self.numbers[start : start + length + 1] for start in starts.tolist()])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
