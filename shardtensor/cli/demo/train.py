"""Each rank of the demo trains the sharded model with the others; rank 0 trains the dense model beside it."""

from __future__ import annotations

import copy
import os
import sysconfig
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardtensor import ShardedOptimizer, shard_parameter
from shardtensor.cli.demo.report import Held, Progress
from shardtensor.plan.match.patterns import matches
from shardtensor.tensor.sharded_tensor import local_of

BATCH, LENGTH, LEARNING_RATE = 8, 96, 1e-3


@attrs.frozen
class Outcome:
    """What the demo found.

    Attributes:
        sharded, dense: the loss of every step.
        step_s: seconds that the sharded steps and the dense steps took.
        held: who holds what of each parameter.
        bytes_by_rank: of parameters, gradients and optimizer state, measured on each rank.
        bytes_dense: the same for the dense model.
    """

    sharded: list[float]
    dense: list[float]
    step_s: tuple[float, float]
    held: list[Held]
    bytes_by_rank: list[tuple[int, ...]]
    bytes_dense: tuple[int, ...]


def work(text: bytes, steps: int, device_type: str) -> Outcome | None:
    """Train for `steps`; rank 0 returns the outcome. Every rank of the demo calls it, started by torch elastic."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    try:
        return _train(Corpus(text), steps, device, rank, world)
    finally:
        dist.destroy_process_group()


def _train(corpus: Corpus, steps: int, device: torch.device, rank: int, world: int) -> Outcome | None:
    torch.manual_seed(0)
    model = Decoder(corpus.vocabulary, LENGTH).to(device)
    dense = copy.deepcopy(model) if rank == 0 else None
    for name, spec in matched(model, SPECS):
        shard_parameter(model, name, spec)
    optimizer: torch.optim.Optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=LEARNING_RATE)
    beside = None if dense is None else torch.optim.AdamW(dense.parameters(), lr=LEARNING_RATE)

    losses: tuple[list[float], list[float]] = ([], [])
    seconds = [0.0, 0.0]
    with Progress(steps, shown=rank == 0) as progress:
        for step in range(steps):
            tokens, targets = (t.to(device) for t in corpus.batch(step, BATCH, LENGTH))
            start = time.perf_counter()
            losses[0].append(train_step(model, optimizer, tokens, targets))
            seconds[0] += time.perf_counter() - start
            if dense is not None and beside is not None:
                start = time.perf_counter()
                losses[1].append(train_step(dense, beside, tokens, targets))
                seconds[1] += time.perf_counter() - start
                progress.advance(losses[0][-1], losses[1][-1])
    held = [Held.of(name, param, world) for name, param in model.named_parameters()]
    sizes = _gathered(_bytes(model, optimizer), world, device)
    if dense is None or beside is None:
        return None
    return Outcome(losses[0], losses[1], (seconds[0], seconds[1]), held, sizes, _bytes(dense, beside))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, targets: torch.Tensor
) -> float:
    """One step; returns the loss. The same code for the sharded and the dense model."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def matched(model: nn.Module, specs: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Each parameter's name with the spec whose pattern it matches."""
    for name, _ in list(model.named_parameters()):
        yield from ((name, spec) for pattern, spec in specs.items() if matches(pattern, name))


def _bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int, int]:
    """Bytes this process holds of parameters, gradients and optimizer state."""
    params = list(model.parameters())
    grads = [param.grad for param in params if param.grad is not None]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return _size(params), _size(grads), _size(value for value in states if isinstance(value, torch.Tensor))


def _gathered(sizes: tuple[int, int, int], world: int, device: torch.device) -> list[tuple[int, ...]]:
    """The sizes of every rank, sent as a tensor. All ranks call it."""
    mine = torch.tensor(sizes, device=device)
    found = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(found, mine)
    return [tuple(each.tolist()) for each in found]


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local.numel() * local.element_size() for local in map(local_of, tensors))


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
"""Column-parallel into a block, row-parallel out of it, the vocabulary by rows; norms, positions and the other biases
stay whole."""


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


class TextError(Exception):
    """There is no text to train on, and why."""


def read_text(path: Path | None) -> bytes:
    """Return up to two million bytes of a text file, a folder of text files, or Python's standard library.

    Raises:
        TextError: nothing there, or too little.
    """
    if path is None:
        path, pattern = Path(sysconfig.get_path("stdlib")), "*.py"
    else:
        pattern = "**/*"
    if not path.exists():
        raise TextError(f"{path} does not exist")
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
        raise TextError(f"{path} holds {len(text)} bytes of text; the demo needs at least 1000")
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
        """The inputs and targets of a step, each ``(batch, length)`` int64; the same on every rank."""
        generator = torch.Generator().manual_seed(step)
        length = min(length, len(self.numbers) - 2)
        starts = torch.randint(len(self.numbers) - length - 1, (batch,), generator=generator)
        rows = torch.stack([self.numbers[start : start + length + 1] for start in starts.tolist()])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
