"""A small training run whose values follow from its step: what a checkpoint of any step has to hold is known."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

import shardtensor as st
from shardtensor.checkpoint.folders import checkpoints_in
from shardtensor.checkpoint.storage import Folder
from shardtensor.comm.process_group import as_group


class Counted:
    """A dataloader, or a scheduler: its state is a number."""

    def __init__(self, count: int = -1) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "list": [1, (2, 3.5)], "name": "counted"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Net(nn.Module):
    """Two layers of which one parameter is tied, and a buffer; the middle is as wide as asked for."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 5)
        self.tied = self.first.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


@attrs.define
class Run:
    """A model and all that is saved with it."""

    model: nn.Module
    optimizer: Any
    loader: Counted = attrs.field(factory=Counted)
    scheduler: Counted = attrs.field(factory=Counted)

    @classmethod
    def new(cls, *, width: int = 7, sharded: bool | None = None) -> Run:
        """Make a run that has made a step, so that its optimizer has state; on several ranks it is sharded."""
        model = Net(width)
        if as_group().size > 1 if sharded is None else sharded:
            st.shard_parameter(model, "first.weight", "[tp balanced, -]")
            st.shard_parameter(model, "last.weight", "[-, tp balanced]")
            optimizer = st.ShardedOptimizer(model.named_parameters(), torch.optim.Adam, lr=0.5)
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        run = cls(model, optimizer)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        return run

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, as they are here."""
        names = {id(param): name for name, param in self.model.named_parameters()}
        own_names = getattr(self.optimizer, "named_params", {})
        names |= {id(param): name for name, param in own_names.items()}
        found: dict[str, torch.Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for param, values in self.optimizer.state.items():
            found |= {f"{names[id(param)]}/{key}": value for key, value in values.items()}
        return found

    @torch.no_grad()
    def set_to(self, step: int) -> None:
        """Give every tensor the values of a step. Nothing is sent."""
        for name, tensor in self.tensors().items():
            for own, values in _pairs(name, tensor, step):
                own.copy_(values)
        self.loader.count = self.scheduler.count = step

    def wrong(self, step: int) -> list[str]:
        """Return the names of what does not have the values of a step on this rank. Nothing is sent."""
        found = [
            name
            for name, tensor in self.tensors().items()
            if not all(torch.equal(own, values) for own, values in _pairs(name, tensor, step))
        ]
        return found + ["loader"] * (self.loader.count != step) + ["scheduler"] * (self.scheduler.count != step)

    @property
    def parts(self) -> dict[str, Any]:
        """The arguments of `save` and `load`."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "dataloader": self.loader,
            "scheduler": self.scheduler,
        }

    def save(self, path: str | Path, step: int, *, asynchronous: bool = False, **options: Any) -> None:
        """Save the values of a step."""
        self.set_to(step)
        extra = {"step": step, "tensor": values_of("extra", step, (3, 2)), "odd": (1, {2: b"x"}, float("inf"))}
        options = {**self.parts, "extra": extra, "step": step, **options}
        if asynchronous:
            saving = st.async_save(path, **options)
            self.set_to(step + 10_000)  # what comes later is not saved
            saving.wait()
        else:
            st.save(path, **options)

    def load(self, path: str | Path) -> int:
        """Load a checkpoint, and return the step that it is of.

        Raises:
            AssertionError: a value is not the one that was saved.
        """
        extra = st.load(path, **self.parts)
        step = extra["step"]
        assert self.wrong(step) == [], f"{path}: of other values than those of step {step}: {self.wrong(step)}"
        assert torch.equal(extra["tensor"], values_of("extra", step, (3, 2)))
        assert extra["odd"] == (1, {2: b"x"}, float("inf"))
        return step


def _pairs(name: str, tensor: torch.Tensor, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the parts of a tensor that this rank has, each with its values at a step."""
    values = values_of(name, step, tuple(tensor.shape)).to(tensor.dtype)
    if not isinstance(tensor, st.ShardedTensor):
        return [(tensor.detach(), values)]
    layout, rank = tensor._layout, tensor._group.rank
    places = zip(layout.boxes(rank), layout.local_boxes(rank), strict=True)
    return [(tensor._local.detach()[at.slices], values[box.slices]) for box, at in places]


def values_of(name: str, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the values of a tensor at a step: whole numbers."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randint(0, 1000, shape, generator=generator)


def whole_checkpoints(parent: str | Path, run: Run) -> dict[str, int]:
    """Load every checkpoint in a folder, and return their steps by name.

    Raises:
        Exception: one of them is not whole.
    """
    return {folder.name: run.load(folder.path) for _, folder in checkpoints_in(Folder(str(parent)))}
