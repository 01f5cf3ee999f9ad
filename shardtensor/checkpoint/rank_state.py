"""What a checkpoint holds for each rank: the state of its random generators and of its dataloader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from shardtensor.checkpoint.encoding import decoded, dtype_named, final, stored_in
from shardtensor.checkpoint.loadable import Loadable, of_user
from shardtensor.checkpoint.manifest import TensorRecord, rank_file
from shardtensor.checkpoint.random_states import rng_state, set_rng_state
from shardtensor.checkpoint.stored import Stored
from shardtensor.checkpoint.targets import ReadTarget
from shardtensor.checkpoint.tensor_file import DTYPES
from shardtensor.comm.group import Group
from shardtensor.errors import CheckpointError
from shardtensor.layout.layout import replicated


def rank_targets(
    stored: Stored, group: Group, loaders: Mapping[str, Any], *, rng: bool
) -> tuple[list[ReadTarget], list[Loadable]]:
    """Return the tensors to read, and what is then loaded.

    A rank loads its own state. In a world of another size it loads state that was equal on all ranks; random generators
    that were not are left as they are.

    Raises:
        CheckpointError: there is no state of a dataloader, or each rank had another one and their number has changed.
    """
    files = [name for name in stored.manifest.files if name.startswith("state/")]
    own = rank_file(group.rank, stored.manifest.world)
    is_same_world = len(files) == group.size and own in files
    if loaders and not files:
        raise CheckpointError("the checkpoint holds no state of a dataloader", fix="load without dataloader=")
    if not files:
        return [], []
    stored.open_headers([own] if is_same_world else files)
    file = own if is_same_world else files[0]
    values = _values(stored, file)
    others = {} if is_same_world else {other: _values(stored, other) for other in files}
    targets: list[ReadTarget] = []
    loads: list[Loadable] = []
    for name, loader in [*loaders.items(), *([("rng", None)] if rng else [])]:
        entries = stored.headers[file].entries
        value = decoded(values.get(name), entries)
        is_equal = all(each.get(name) == values.get(name) for each in others.values()) and all(
            stored.headers[other].entries[found.name].sums == entries[found.name].sums
            for other in others
            for found in stored_in(value)
        )
        if loader is None and (name not in values or not is_equal):
            continue
        if name not in values:
            raise CheckpointError(f'the checkpoint holds no "{name}"', fix="load without dataloader=")
        if not is_equal:
            raise CheckpointError(
                f'"{name}" has another state on each rank, and the number of ranks has changed',
                {"saved by": f"{len(files)} ranks", "here": f"{group.size} ranks"},
                "load without dataloader=, and start it anew",
            )
        tensors: dict[str, torch.Tensor] = {}
        for found in stored_in(value):
            entry = entries[found.name]
            record = TensorRecord(entry.shape, DTYPES[entry.format], file=file)
            tensors[found.name] = torch.empty(entry.shape, dtype=dtype_named(record.dtype))
            layout = replicated(entry.shape, (group.rank,))
            targets.append(ReadTarget(found.name, found.name, record, tensors[found.name], layout, group.rank, True))
        saved = partial(final, value, tensors)
        loads.append(
            Loadable(name, rng_state, set_rng_state, saved) if loader is None else of_user(name, loader, saved)
        )
    return targets, loads


def _values(stored: Stored, file: str) -> dict[str, Any]:
    try:
        return dict(json.loads(stored.headers[file].metadata["rank_values"]))
    except (KeyError, ValueError, TypeError, RecursionError):
        raise CheckpointError(f'the file "{file}" is damaged: it has no values of its rank') from None
