"""`load`: read a checkpoint into the objects of a training run, whatever their layouts and the number of ranks are."""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn, optim

from shardtensor.checkpoint.checksums import fingerprints
from shardtensor.checkpoint.contents import collect, models_of, optimizer_state, sections
from shardtensor.checkpoint.manifest import TensorRecord, rank_file
from shardtensor.checkpoint.optimizer_targets import load_by_name, optimizer_targets
from shardtensor.checkpoint.random_states import rng_state, set_rng_state
from shardtensor.checkpoint.reading import OpenFiles, Reading, fill, verify
from shardtensor.checkpoint.saving import wait_for_save
from shardtensor.checkpoint.stored import Stored, open_checkpoint
from shardtensor.checkpoint.targets import ReadTarget, model_targets, target_of
from shardtensor.checkpoint.tensor_file import DTYPES
from shardtensor.checkpoint.together import agree_or_raise, fault_of
from shardtensor.checkpoint.values import decode, dtype_named, final, stored_in
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.errors import CheckpointError, some
from shardtensor.optim.fqn import plain_name


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
    """Load a checkpoint into objects with their current layouts. All ranks of the group call it.

    Each rank reads the bytes of its own shards and no others. First it verifies the checksums of the blocks that hold
    them; values are copied when every rank has done so. So after an error all objects are unchanged, and the memory
    that a load needs is that of the optimizer's new state, and a few buffers of 16 MiB.

    Args:
        path: a folder that `save` has written, or a folder or file of safetensors, as from Hugging Face. Nothing is
            unpickled.
        model, optimizer, scheduler, dataloader: as for `save`; what is not passed is not loaded. The model may be on
            the meta device: its tensors then get memory on the group's device.
        extra: a dict to update with the saved ``extra``.
        rng: set the random generators of each rank; by default if an optimizer is loaded. In a world of another size
            they are set only if the states of all ranks were equal.
        strict: raise for tensors that are missing, extra, or of another shape, and for state of another optimizer
            class. If False, these stay unchanged, with a warning.
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


@attrs.frozen(eq=False)
class _Loadable:
    """An object whose state is loaded: its name, functions that return and set its state, and the saved state."""

    name: str
    state: Callable[[], Any]
    load: Callable[[Any], None]
    saved: Callable[[], Any]


def _of_user(name: str, owner: Any, saved: Callable[[], Any]) -> _Loadable:
    """Return the loadable of an object with ``state_dict`` and ``load_state_dict``."""
    return _Loadable(name, lambda: copy.deepcopy(owner.state_dict()), owner.load_state_dict, saved)


class _Loads:
    """The loads of one checkpoint into objects; if a later step fails, `undo` sets their earlier states."""

    def __init__(self, group: Group, call: str) -> None:
        self._group, self._call = group, call
        self._before: list[tuple[_Loadable, Any]] = []

    def load(self, loadables: Iterable[_Loadable]) -> None:
        """Load the saved states. All ranks of the group call it, with the same objects.

        Raises:
            CheckpointError: on every rank: an object of a rank did not take its state; all have their earlier states.
        """
        fault = None
        for each in loadables:
            try:
                self._before.append((each, each.state()))
                each.load(each.saved())
            except Exception as error:  # user code raises anything
                fault = CheckpointError(
                    f'"{each.name}" does not take the saved state; nothing has been loaded',
                    {"why": f"{type(error).__name__}: {error}"[:400]},
                    "load it into an object of the class that was saved",
                )
                break
        self.agree(fault)

    def agree(self, fault: CheckpointError | None) -> None:
        """Raise on every rank, and set the earlier states, if a rank has a fault."""
        try:
            agree_or_raise(self._group, self._call, {}, fault)
        except Exception:
            self.undo()
            raise

    def undo(self) -> None:
        """Set the earlier states of all objects, the last one first."""
        for each, state in reversed(self._before):
            with suppress(Exception):  # an object that cannot even take its own state
                each.load(state)
        self._before.clear()


@attrs.define
class _Loading:
    """One load: the tensors to read, and the objects that take their state when these are read.

    Attributes:
        objects: of the user, and states of modules that are no tensors; `optimizers`, whose loads are collective.
        install: puts new tensors into models that are on the meta device.
    """

    stored: Stored
    group: Group
    strict: bool
    cast: bool
    targets: list[ReadTarget] = attrs.field(factory=list)
    objects: list[_Loadable] = attrs.field(factory=list)
    optimizers: list[_Loadable] = attrs.field(factory=list)
    install: list[Callable[[], None]] = attrs.field(factory=list)
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
            targets, saved = optimizer_targets(each, models, state, tensors, self.group, strict=self.strict)
            self.targets += targets
            current, load = partial(optimizer_state, models, each), partial(load_by_name, each, models)
            self.optimizers.append(_Loadable(section, current, load, saved))
        for section, each in sections("scheduler", scheduler, ()).items():
            self.objects.append(_of_user(section, each, self._whole(self._value(section))))
        loaders = sections("dataloader", dataloader, ())
        own: dict[str, Any] = {**loaders, "rng": None} if (bool(optimizers) if rng is None else rng) else loaders
        if own:
            self._plan_own(own)
        if "extra" in self.stored.manifest.values:
            self.extra = self._whole(self._value("extra"))
        self.reading = Reading.of(self.targets, self.stored)

    @property
    def facts(self) -> dict[str, str]:
        """What must be equal on every rank: the checkpoint, and what is loaded."""
        tensors = sorted(f"{t.name} {t.layout.shape} {t.local.dtype}" for t in self.targets)
        objects = ", ".join(each.name for each in (*self.objects, *self.optimizers))
        return {"checkpoint": self.stored.digest, "objects": objects, "tensors": "\n".join(tensors)}

    def _plan_model(self, section: str, model: Any) -> None:
        found = model_targets(section, model, self.stored, self.group, strict=self.strict, cast=self.cast)
        self.targets += found.targets
        self.install.append(found.install)
        self.skipped += [f"{section}/{name}" for name in found.skipped]
        if found.rest and isinstance(model, nn.Module) and section in self.stored.manifest.values:
            names = {full: plain_name(full) for full in model.state_dict()}  # wrappers add to names
            own = {full: name for full, name in names.items() if name in found.rest}
            saved = self._whole(self._value(section))

            def by_full_name() -> dict[str, Any]:
                values = saved()
                return {full: values[name] for full, name in own.items() if name in values}

            def current() -> dict[str, Any]:
                return copy.deepcopy({full: value for full, value in model.state_dict().items() if full in own})

            self.objects.append(_Loadable(section, current, partial(model.load_state_dict, strict=False), by_full_name))

    def _value(self, section: str) -> Any:
        """Return the saved values of a section, with a `StoredTensor` for each tensor."""
        manifest = self.stored.manifest
        if section not in manifest.values:
            raise CheckpointError(
                f'the checkpoint holds no "{section}"; nothing has been loaded',
                {"it holds": ", ".join(manifest.values) or "tensors alone"},
                f"load without {section.partition('.')[0]}=",
            )
        return decode(manifest.values[section], manifest.tensors)

    def _plan_own(self, objects: Mapping[str, Any]) -> None:
        """Plan to load what the checkpoint holds for each rank: the states of dataloaders and random generators (None).

        A rank loads its own state. In a world of another size it loads state that was equal on all ranks; random
        generators that were not are left as they are.
        """
        stored, group = self.stored, self.group
        files = [name for name in stored.manifest.files if name.startswith("state/")]
        mine = rank_file(group.rank, stored.manifest.world)
        is_same_world = len(files) == group.size and mine in files
        if not files:
            if list(objects) != ["rng"]:
                raise CheckpointError("the checkpoint holds no state of a dataloader", fix="load without dataloader=")
            return
        read = [mine] if is_same_world else files
        stored.open_headers(read)
        values = [_values(stored, file) for file in read]
        entries = [stored.headers[file].entries for file in read]
        records = {key: TensorRecord(x.shape, DTYPES[x.format], file=read[0]) for key, x in entries[0].items()}
        for name, owner in objects.items():
            value = decode(values[0].get(name), entries[0])
            is_equal = all(each.get(name) == values[0].get(name) for each in values) and all(
                each[found.name].sums == entries[0][found.name].sums for each in entries for found in stored_in(value)
            )
            if owner is None and (name not in values[0] or not is_equal):
                continue
            if name not in values[0]:
                raise CheckpointError(f'the checkpoint holds no "{name}"', fix="load without dataloader=")
            if not is_equal:
                raise CheckpointError(
                    f'"{name}" has another state on each rank, and the number of ranks has changed',
                    {"saved by": f"{len(files)} ranks", "here": f"{group.size} ranks"},
                    "load without dataloader=, and start it anew",
                )
            saved = self._whole(value, records)
            self.objects.append(
                _Loadable(name, rng_state, set_rng_state, saved) if owner is None else _of_user(name, owner, saved)
            )

    def _whole(self, value: Any, own: Mapping[str, TensorRecord] | None = None) -> Callable[[], Any]:
        """Plan to read the tensors of a value, whole, to the CPU; return a function that then returns the value.

        `own` are the records of tensors in the file of one rank, which lists them under their full names.
        """
        tensors: dict[str, torch.Tensor] = {}
        for found in stored_in(value):
            record = (self.stored.manifest.tensors if own is None else own)[found.name]
            tensors[found.name] = torch.empty(record.shape, dtype=dtype_named(record.dtype))
            target = target_of(found.name, record, tensors[found.name], self.group)
            self.targets.append(target if own is None else attrs.evolve(target, key=found.name))
        return lambda: final(value, tensors)

    def run(self, call: str) -> Any:
        """Verify and read. All ranks of the group call it.

        Values of tensors that held others are copied last: what can fail has been done by then.
        """
        with OpenFiles(self.stored.folder) as files:
            agree_or_raise(self.group, call, {}, self._read(verify, files))
            loads = _Loads(self.group, call)
            loads.load(self.objects)
            for install in self.install:
                install()
            loads.load(self.optimizers)
            loads.agree(self._read(fill, files))
        if self.skipped and self.group.index == 0:
            warnings.warn(f"{call}: left as they are: {some(self.skipped)}", stacklevel=4)
        return self.extra()

    def _read(self, step: Callable[[OpenFiles, Reading], None], files: OpenFiles) -> CheckpointError | None:
        """Run `verify` or `fill`; return the error of this rank."""
        assert self.reading is not None, "it is planned"
        try:
            step(files, self.reading)
        except Exception as error:  # of the disk, or damage
            return fault_of(error)
        return None

    def compare(self, model: Any, optimizer: Any) -> None:
        """Compare the fingerprints of what was loaded whole with those in the checkpoint. All ranks call it.

        Raises:
            CheckpointError: the values are not those that were saved, though every block of the files was right.
        """
        manifest = self.stored.manifest
        if not manifest.fingerprint or self.cast or self.skipped:
            return
        loaded = collect(self.group, "load", model=model, optimizer=optimizer, rng=False).by_section()
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


def _values(stored: Stored, file: str) -> dict[str, Any]:
    try:
        return dict(json.loads(stored.headers[file].metadata["rank_values"]))
    except (KeyError, ValueError, TypeError, RecursionError):
        raise CheckpointError(f'the file "{file}" is damaged: it has no values of its rank') from None
