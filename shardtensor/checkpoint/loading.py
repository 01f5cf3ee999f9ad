"""`load`: read a checkpoint into the objects of a training run, whatever their layouts and the number of ranks are."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn, optim

from shardtensor.checkpoint.checksums import fingerprints
from shardtensor.checkpoint.contents import collect, fault_of, models_of, sections
from shardtensor.checkpoint.decoding import decoded, dtype_named, replaced, stored_in
from shardtensor.checkpoint.optimizer_targets import optimizer_targets
from shardtensor.checkpoint.progress import ByteProgress
from shardtensor.checkpoint.rank_state import rank_targets
from shardtensor.checkpoint.reading import OpenFiles, Reading, fill, verify
from shardtensor.checkpoint.saving import wait_for_save
from shardtensor.checkpoint.stored import Stored, open_checkpoint
from shardtensor.checkpoint.targets import ReadTarget, model_targets, target_of
from shardtensor.checkpoint.together import agree_or_raise
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.errors import CheckpointError


def load(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    dataloader: Any = None,
    extra: dict[str, Any] | None = None,
    rng: bool | None = None,
    strict: bool = True,
    cast: bool = False,
    process_group: Any = None,
) -> Any:
    """Load a checkpoint into objects as they are sharded here. All ranks of the group call it.

    Each rank reads the bytes of its own shards and no others. First it verifies the checksums of the blocks that hold
    them; values are copied when every rank has done so. So after an error all objects are unchanged, and the memory
    that a load needs is that of the optimizer's new state, and a few buffers of 16 MiB.

    Args:
        path: a folder that `save` has written, or a folder or file of safetensors, as those of Hugging Face. Nothing
            is unpickled.
        model, optimizer, scheduler, dataloader: as for `save`; what is not passed is not loaded. The model may be on
            the meta device: its tensors then get memory on the group's device.
        extra: a dict to update with the saved ``extra``.
        rng: set the random generators of each rank; by default if an optimizer is loaded. In a world of another size
            they are set only if the states of all ranks were equal.
        strict: raise for tensors that are missing, extra, or of another shape, and for state of another optimizer
            class. Else these are left as they are, with a warning.
        cast: convert values to the dtypes of the model's tensors where these differ; else they raise an error.
        process_group: the ranks that load, by default all.

    Returns:
        the saved ``extra``; None if there is none.

    Raises:
        CheckpointError: on every rank, and nothing has changed: there is no checkpoint, a file is damaged, or it does
            not fit.

    Example:
        >>> import tempfile, torch, shardtensor as st
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> folder = tempfile.mkdtemp() + "/step-1"
        >>> st.save(folder, model=model, optimizer=optimizer, extra={"loss": 0.5})
        >>> st.load(folder, model=model, optimizer=optimizer)
        {'loss': 0.5}
    """
    wait_for_save()
    group = as_group(process_group)
    call = f'load("{os.fspath(path)}")'
    loading, fault = None, None
    try:
        loading = _Loading(open_checkpoint(path), group, strict=strict, cast=cast)
        loading.plan(model, optimizer, scheduler, dataloader, rng)
    except Exception as error:  # on one rank: the others raise it, too
        fault = fault_of(error)
    facts = {"path": os.fspath(path), "strict": str(strict), "cast": str(cast)}
    if loading is not None:
        facts |= loading.facts
    agree_or_raise(group, call, facts, fault)
    assert loading is not None
    found = loading.run(call)
    loading.compare(model, optimizer)
    if extra is not None and isinstance(found, Mapping):
        extra.update(found)
    return found


@attrs.define
class _Loading:
    """One load: the tensors to read, and what to do when they are read."""

    stored: Stored
    group: Group
    strict: bool
    cast: bool
    targets: list[ReadTarget] = attrs.field(factory=list)
    finishes: list[Callable[[], None]] = attrs.field(factory=list)
    skipped: list[str] = attrs.field(factory=list)
    reading: Reading | None = None
    extra: Callable[[], Any] = lambda: None

    def plan(self, model: Any, optimizer: Any, scheduler: Any, dataloader: Any, rng: bool | None) -> None:
        """Match everything by name, and allocate new tensors. Changes nothing."""
        models = models_of(model)
        for section, each in models.items():
            self._plan_model(section, each)
        optimizers = sections("optimizer", optimizer, optim.Optimizer)
        for section, each in optimizers.items():
            tensors = self.stored.manifest.tensors
            state = self._value(section)
            found = optimizer_targets(each, models, state, tensors, self.group, strict=self.strict)
            self._add(*found)
        for section, each in sections("scheduler", scheduler, ()).items():
            value = self._whole(self._value(section))
            self.finishes.append(partial(_load_into, each, value))
        loaders = sections("dataloader", dataloader, ())
        sets_rng = bool(optimizers) if rng is None else rng
        if loaders or sets_rng:
            self._add(*rank_targets(self.stored, self.group, loaders, rng=sets_rng))
        if "extra" in self.stored.manifest.values:
            self.extra = self._whole(self._value("extra"))
        self.reading = Reading.of(self.targets, self.stored)

    @property
    def facts(self) -> dict[str, str]:
        """What must be equal on every rank: the checkpoint, and the tensors to load."""
        tensors = sorted(f"{t.name} {t.layout.shape} {t.local.dtype}" for t in self.targets)
        return {"checkpoint": self.stored.digest, "tensors": "\n".join(tensors)}

    def _add(self, targets: list[ReadTarget], finish: Callable[[], None]) -> None:
        self.targets += targets
        self.finishes.append(finish)

    def _plan_model(self, section: str, model: Any) -> None:
        found = model_targets(section, model, self.stored, self.group, strict=self.strict, cast=self.cast)
        self._add(found.targets, found.install)
        self.skipped += [f"{section}/{name}" for name in found.skipped]
        if found.rest and isinstance(model, nn.Module) and section in self.stored.manifest.values:
            value = self._whole(self._value(section))

            def load_rest() -> None:
                rest = {name: each for name, each in value().items() if name in found.rest}
                model.load_state_dict(rest, strict=False)

            self.finishes.append(load_rest)

    def _value(self, section: str) -> Any:
        """Return the saved values of a section, with a `StoredTensor` for each tensor."""
        manifest = self.stored.manifest
        if section not in manifest.values:
            raise CheckpointError(
                f'the checkpoint holds no "{section}"; nothing has been loaded',
                {"it holds": ", ".join(manifest.values) or "tensors alone"},
                f"load without {section.partition('.')[0]}=",
            )
        return decoded(manifest.values[section], manifest.tensors)

    def _whole(self, value: Any) -> Callable[[], Any]:
        """Plan to read the tensors of a value, whole, to the CPU; return a function that then returns the value."""
        tensors: dict[str, torch.Tensor] = {}
        for found in stored_in(value):
            record = self.stored.manifest.tensors[found.name]
            tensors[found.name] = torch.empty(record.shape, dtype=dtype_named(record.dtype))
            self.targets.append(target_of(found.name, record, tensors[found.name], self.group))
        return lambda: replaced(value, lambda found: found.final(tensors[found.name]))

    def run(self, call: str) -> Any:
        """Verify and read. All ranks of the group call it."""
        assert self.reading is not None, "it is planned"
        reading, shown = self.reading, self.group.index == 0
        with OpenFiles(self.stored.folder) as files:
            for what in (verify, fill):
                fault = None
                try:
                    with ByteProgress(f"{what.__name__}: {call}", reading.size_bytes, shown=shown) as progress:
                        what(files, reading, progress.add)
                except Exception as error:  # of the disk, or damage
                    fault = fault_of(error)
                agree_or_raise(self.group, call, {}, fault)
        for finish in self.finishes:
            finish()
        if self.skipped and shown:
            warnings.warn(f"{call}: left as they are: {', '.join(self.skipped[:8])}", stacklevel=4)
        return self.extra()

    def compare(self, model: Any, optimizer: Any) -> None:
        """Compare the fingerprints of what was loaded whole with those in the checkpoint. All ranks call it.

        Raises:
            CheckpointError: the values are not those that were saved, though every block of the files was right.
        """
        manifest = self.stored.manifest
        if not manifest.fingerprint or self.cast or self.skipped:
            return
        loaded = collect(self.group, model=model, optimizer=optimizer, rng=False).by_section()
        names: dict[str, set[str]] = {}
        for name in manifest.tensors:
            names.setdefault(name.partition("/")[0], set()).add(name)
        loaded = {
            section: items for section, items in loaded.items() if {item.name for item in items} == names.get(section)
        }
        found = fingerprints(loaded, self.group)
        differing = [section for section, text in found.items() if manifest.fingerprint.get(section, text) != text]
        if differing:
            raise CheckpointError(
                f'the values of "{differing[0]}" are not those that were saved; they have been loaded',
                {"fingerprint": found[differing[0]], "saved": manifest.fingerprint[differing[0]]},
                "do not train on; report this as an error of the library, with the layouts of both runs",
            )


def _load_into(stateful: Any, value: Callable[[], Any]) -> None:
    stateful.load_state_dict(value())
