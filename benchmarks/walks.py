"""How much code a reader walks through to follow one call: files, function calls and depth, ours and the peers'.

One process on torch's fake process group of four ranks. Counted are calls of Python functions: ours are those of this
package, a peer's those of torch's `distributed` package. All but the command line's walk are counted in their steady
state, after they have run often.

    python benchmarks/walks.py
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import torch
from check_speed import LLAMA
from pretended import WORLD, start
from report import write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardtensor as st
from shardtensor.cli.main import main as command_line

OURS = str(Path(st.__file__).parent)
THEIRS = str(Path(torch.distributed.__file__).parent)
WARM = 8
Walk = Callable[[], Any]


@attrs.define
class Count:
    """What one call went through.

    Attributes:
        files: those whose functions ran.
        calls: of functions of these files.
        depth: the largest number of such calls that were open at once.
        functions: the different ones.
    """

    files: set[str] = attrs.Factory(set)
    calls: int = 0
    depth: int = 0
    functions: set[Any] = attrs.Factory(set)


def count(walk: Walk, within: str) -> Count:
    """Run `walk` once and count the Python calls of files below the folder `within`."""
    found, open_calls = Count(), 0

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        nonlocal open_calls
        code = frame.f_code
        if not code.co_filename.startswith(within) or code.co_name.startswith("<"):
            return
        if event == "call":
            open_calls += 1
            found.calls += 1
            found.files.add(code.co_filename)
            found.functions.add(code)
            found.depth = max(found.depth, open_calls)
        elif event == "return":
            open_calls -= 1

    sys.setprofile(on_event)
    try:
        walk()
    finally:
        sys.setprofile(None)
    return found


def cells_of(found: Count) -> dict[str, Any]:
    return {
        "files": len(found.files),
        "calls": found.calls,
        "depth": found.depth,
        "functions": len(found.functions),
    }


def steady(walk: Walk) -> Walk:
    for _ in range(WARM):
        walk()
    return walk


def parameter() -> Walk:
    """`shard_parameter`, when its layouts are known."""

    def shard(module: nn.Module) -> None:
        st.shard_parameter(module, "weight", "[tp, -]")

    for _ in range(WARM):
        shard(nn.Linear(64, 64))
    fresh = nn.Linear(64, 64)
    return lambda: shard(fresh)


def perceptron() -> tuple[Walk, Walk]:
    """Forward and backward of a column-parallel and a row-parallel linear layer."""
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    st.shard_parameter(module[0], "weight", "[tp, -]")
    st.shard_parameter(module[1], "weight", "[-, tp]")
    return forward_and_backward(module, torch.randn(4, 64, requires_grad=True))


def forward_and_backward(module: nn.Module, x: torch.Tensor) -> tuple[Walk, Walk]:
    losses: list[torch.Tensor] = []

    def forward() -> None:
        losses.append(module(x).sum())

    def backward() -> None:
        losses.pop().backward()

    for _ in range(WARM):
        forward()
        backward()
    return forward, backward


def sums() -> tuple[Walk, Walk]:
    """`a + b` of two layouts, ours and DTensor's."""
    a, b = st.rand("[tp, -]", 64, 64), st.rand("[-, tp]", 64, 64)
    mesh = init_device_mesh("cpu", (WORLD,))
    c, d = (distribute_tensor(torch.ones(64, 64), mesh, [place]) for place in (Shard(0), Replicate()))
    return steady(lambda: a + b), steady(lambda: c + d)


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))


def shard_fully(shard: Callable[..., Any]) -> tuple[Walk, nn.Sequential]:
    """`fully_shard` of three layers and their root; the module is sharded when the walk has run."""
    module = layers()

    def walk() -> None:
        for layer in module:
            shard(layer)
        shard(module)

    return walk, module


def check() -> None:
    """`shardtensor check` of the packaged plan for Llama-3-8B."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(LLAMA))
        assert not command_line(["check", "llama", "--world", "8", "--model", str(config)])


def main() -> None:
    start(__doc__)
    mesh = init_device_mesh("cpu", (WORLD,))
    rows: list[dict[str, Any]] = []

    def row(name: str, walk: Walk, peer: Walk | None = None) -> None:
        cells = cells_of(count(walk, OURS))
        theirs = dict.fromkeys(cells, "") if peer is None else cells_of(count(peer, THEIRS))
        rows.append({"walk": name, **cells, **{f"peer's {cell}": value for cell, value in theirs.items()}})

    row("shard_parameter, warm", parameter())
    forward, backward = perceptron()
    row("column + row MLP, forward", forward)
    row("column + row MLP, backward", backward)
    row("a + b, other layouts (DTensor)", *sums())

    warm, _ = shard_fully(st.fully_shard)
    warm()
    ours, module = shard_fully(st.fully_shard)
    theirs, peer = shard_fully(lambda module: fully_shard(module, mesh=mesh))
    row("fully_shard, 3 layers + root (FSDP2)", ours, theirs)
    walks, peers = (forward_and_backward(each, torch.randn(4, 64)) for each in (module, peer))
    row("its forward, steady", walks[0], peers[0])
    row("its backward, steady", walks[1], peers[1])

    optimizer = st.ShardedOptimizer(module, torch.optim.AdamW, lr=1e-3)
    forward, backward = walks

    def train() -> None:
        forward()
        backward()
        optimizer.step()

    steady(train)
    row("ShardedOptimizer.step", optimizer.step)
    row("check llama, the first time", check)
    write("walks", rows)


if __name__ == "__main__":
    main()
