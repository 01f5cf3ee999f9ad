"""What the demo shows: progress, a map of who holds what, bytes per rank, and whether the losses are equal."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from shardtensor import ShardedTensor
from shardtensor.cli.show_text import draw_boxes, rank_style
from shardtensor.layout.box import Box, whole
from shardtensor.plan.findings.brief import brief_names

TOLERANCE = 1e-4
PLAIN = "plain"


@attrs.frozen
class Held:
    """Who holds what of one parameter: its boxes by rank; a whole parameter is on every rank."""

    name: str
    shape: tuple[int, ...]
    spec: str
    boxes: tuple[tuple[Box, ...], ...]

    @classmethod
    def of(cls, name: str, param: torch.Tensor, world: int) -> Held:
        """Read a parameter's layout."""
        if isinstance(param, ShardedTensor):
            boxes = tuple(param._layout.boxes(rank) for rank in range(world))
            return cls(name, tuple(param.shape), str(param.sharding_spec()), boxes)
        return cls(name, tuple(param.shape), PLAIN, tuple((whole(tuple(param.shape)),) for _ in range(world)))


class Progress:
    """A bar with both losses on a terminal, a line every tenth of the way elsewhere; silent where not shown."""

    def __init__(self, steps: int, shown: bool) -> None:
        self._steps, self._done, self._shown = steps, 0, shown
        self._console = Console()
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        if self._shown and self._console.is_terminal:
            columns = (
                TextColumn("training"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(),
                TextColumn("{task.fields[loss]}"),
            )  # fmt: skip
            self._bar = Bar(*columns, console=self._console)
            self._task = self._bar.add_task("", total=self._steps, loss="")
            self._bar.start()
        return self

    def advance(self, sharded: float, dense: float) -> None:
        """One step is done, with these losses."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1, loss=f"loss {sharded:.4f} sharded, {dense:.4f} dense")
        elif self._shown and (self._done % max(self._steps // 10, 1) == 0 or self._done == 1):
            print(f"step {self._done:4d}/{self._steps}  loss {sharded:.6f} sharded  {dense:.6f} dense", flush=True)

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.stop()


def show_holders(held: list[Held], console: Console) -> None:
    """Draw, for each parameter, its tensor with every rank's boxes in that rank's colour. Parameters that lie alike
    are drawn once."""
    world = len(held[0].boxes)
    legend = Text("who holds what   ")
    for rank in range(world):
        legend.append(f" rank {rank} ", style=rank_style(rank)).append(" ")
    console.print(legend)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for title in ("parameter", "shape", "spec"):
        table.add_column(title, no_wrap=True)
    table.add_column("dim 0 down, dim 1 right")
    alike: dict[tuple[Any, ...], list[Held]] = {}
    for entry in held:
        if entry.spec != PLAIN:
            alike.setdefault((entry.shape, entry.spec, entry.boxes), []).append(entry)
    for (shape, spec, boxes), entries in alike.items():
        names = "\n".join(brief_names(entry.name for entry in entries))
        table.add_row(names, " x ".join(map(str, shape)), Text(spec), draw_boxes(shape, boxes))
    console.print(table)
    plain = brief_names(entry.name for entry in held if entry.spec == PLAIN)
    console.print("whole on every rank: " + ", ".join(plain))


def show_bytes(by_rank: list[tuple[int, ...]], dense: tuple[int, ...], console: Console) -> None:
    """Print bytes of parameters, gradients and optimizer state for each rank and for the dense model."""
    table = Table(box=None, pad_edge=False)
    for title in ("KiB held", "parameters", "gradients", "optimizer", "sum", "of dense"):
        table.add_column(title, justify="left" if title == "KiB held" else "right")
    for who, sizes in [*((f"rank {rank}", sizes) for rank, sizes in enumerate(by_rank)), ("dense", dense)]:
        cells = [f"{size / 1024:,.1f}" for size in (*sizes, sum(sizes))]
        style = rank_style(int(who[5:])) if who.startswith("rank") else ""
        table.add_row(Text(who, style=style), *cells, f"{100 * sum(sizes) / sum(dense):.0f} %")
    console.print(table)


def worst_difference(sharded: list[float], dense: list[float]) -> tuple[int, float]:
    """The step (from 1) whose losses differ most, and by how much, relative to the dense loss; NaN counts as most."""
    relative = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(sharded, dense, strict=True)]
    relative = [math.inf if math.isnan(difference) else difference for difference in relative]
    step = max(range(len(relative)), key=relative.__getitem__)
    return step + 1, relative[step]
