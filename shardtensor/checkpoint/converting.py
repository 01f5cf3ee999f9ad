"""Convert checkpoints between this library, torch.distributed.checkpoint, ``torch.save`` and Hugging Face; in one
process. The new one is written file by file, so at most one file's tensors are in memory; of ``torch.save``, all are.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import attrs
import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.futures import Future

from shardtensor.checkpoint.converted_files import in_batches, write_hf, write_own
from shardtensor.checkpoint.encoding import StoredTensor, dtype_named, replaced, stored_in
from shardtensor.checkpoint.folders import PARTIAL
from shardtensor.checkpoint.sources import SourceCheckpoint, cause_of, open_source
from shardtensor.checkpoint.storage import Folder
from shardtensor.checkpoint.tensor_file import ITEM_BYTES
from shardtensor.checkpoint.torch_trees import to_tree
from shardtensor.errors import CheckpointError


@attrs.frozen
class Conversion:
    """What was converted: the kinds, the number of tensors, the names of the parts, and what was left out, in words."""

    source: str
    target: str
    tensors: int
    bytes: int
    parts: tuple[str, ...]
    left_out: tuple[str, ...]


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    trust: bool = False,
    optimizer: str = "",
) -> Conversion:
    """Write a checkpoint anew as one of another kind. The models are always converted; optimizers between this library
    and torch.distributed.checkpoint, and from files of ``torch.save`` whose states have names of parameters.

    Args:
        source: a checkpoint of this library, a folder of torch.distributed.checkpoint, a file of ``torch.save``, or a
            folder or file of safetensors.
        target: where nothing is yet. It is complete, or absent.
        to: ``"shardtensor"``, ``"dcp"``, ``"hf"`` (safetensors, the models alone), or ``"torch"`` (one file of
            ``torch.save``, the models alone).
        trust: read the metadata of torch.distributed.checkpoint, which is a pickle: to read it is to run what it names.
        optimizer: the name of the optimizer's class, if its options do not tell it.

    Raises:
        CheckpointError: the source cannot be read, or cannot be of that kind.
    """
    writers = {"shardtensor": write_own, "dcp": _write_dcp, "hf": write_hf, "torch": _write_torch}
    if to not in writers:
        raise CheckpointError(f'there is no kind of checkpoint "{to}"', fix=f"write one of {', '.join(writers)}")
    goal = Folder(target)
    if goal.has():
        raise CheckpointError(
            "there is a file or folder at the target", {"path": goal.path}, "choose another name, or remove it"
        )
    if to in ("dcp", "torch") and not goal.is_local:
        raise CheckpointError(
            f"a checkpoint of kind {to} is written to a disk", {"path": goal.path}, "name a local path"
        )
    found = open_source(source, trust=trust, optimizer_class=optimizer)
    state = found.state
    if to in ("hf", "torch"):
        state.left_out += [*state.optimizers, *state.rest]
        state.optimizers, state.rest = {}, {}
    _with_numbers(found)
    made = goal.beside(PARTIAL.format(goal.name)) if goal.is_local else goal
    try:
        made.remove()
        writers[to](found, made)
    except BaseException as error:
        with suppress(OSError):
            made.remove()
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            "a file cannot be written",
            {"path": goal.path, "why": error.strerror or error},
            "choose a folder that this process may write, on a disk with space",
        ) from None
    if goal.is_local:
        made.sync()
        made.rename(goal.name)
    names = {leaf.name for leaf in stored_in([state.models, state.optimizers, state.rest])}
    sizes = [math.prod(x.shape) * ITEM_BYTES.get(x.dtype, 0) for name, x in found.outlines.items() if name in names]
    parts = (*state.models, *state.optimizers, *state.rest)
    return Conversion(found.kind, to, len(names), sum(sizes), parts, tuple(state.left_out))


def _with_numbers(source: SourceCheckpoint) -> None:
    """Read all tensors without dims that are not of a model: ``step`` and the like."""
    state = source.state
    names = {leaf.name for leaf in stored_in([state.optimizers, state.rest]) if not source.outlines[leaf.name].shape}
    numbers = source.read(sorted(names)) if names else {}

    def number(leaf: StoredTensor) -> Any:
        return leaf.final(numbers[leaf.name]) if leaf.name in numbers else leaf

    state.optimizers, state.rest = replaced(state.optimizers, number), replaced(state.rest, number)


def _write_torch(source: SourceCheckpoint, folder: Folder) -> None:
    """Write one file: the state dict of the model; of several models a dict of them."""
    models = source.state.models
    tensors = source.read(sorted({leaf.name for leaf in stored_in(models)}))
    states = {name.partition(".")[2]: replaced(each, lambda leaf: tensors[leaf.name]) for name, each in models.items()}
    with open(folder.root, "wb") as file:
        torch.save(states.get("", states), file)
        file.flush()
        os.fsync(file.fileno())


def _write_dcp(source: SourceCheckpoint, folder: Folder) -> None:
    outlines = source.outlines
    standing: dict[int, str] = {}
    made: dict[str, torch.Tensor] = {}

    def stand_in(leaf: StoredTensor) -> torch.Tensor:
        if leaf.name not in made:
            dtype = dtype_named(outlines[leaf.name].dtype)
            made[leaf.name] = torch.empty(outlines[leaf.name].shape, dtype=dtype, device="meta")
            standing[id(made[leaf.name])] = leaf.name
        return made[leaf.name]

    tree = replaced(to_tree(source.state), stand_in)
    planner = _ReadingPlanner(standing, lambda name: source.read([name])[name].contiguous())
    try:
        _save_state_dict(tree, _FilesWriter(folder.root), no_dist=True, planner=planner)
    except CheckpointException as error:
        raise cause_of(error, folder) from None


class _ReadingPlanner(DefaultSavePlanner):
    """Plans with tensors on the meta device, and reads each when it is written."""

    def __init__(self, standing: Mapping[int, str], read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._standing, self._read = standing, read

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        return self._read(self._standing[id(found)]) if id(found) in self._standing else found


class _FilesWriter(FileSystemWriter):
    """Writes several files, one after the other: torch's keeps the tensors of a file in memory until it is written."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        results: list[Any] = []
        for i, items in enumerate(in_batches(plan.items, lambda item: item.tensor_storage_size() or 0)):
            prefix = dataclasses.replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{i}_")
            results += super().write_data(dataclasses.replace(plan, items=items, storage_data=prefix), planner).wait()
        done: Future[Any] = Future()
        done.set_result(results)
        return done
