"""Errors of `load`: what lies at a path is damaged, or is no checkpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import nn
from xxhash import xxh3_128_hexdigest

import shardtensor as st
from fixes.case import Case, linear
from fixes.checkpoint_cases import at, fresh, loads, of_another_kind, on_first, saved
from shardtensor.checkpoint.converting import convert
from shardtensor.checkpoint.storage import Folder


def damaged(name: str, damage: Callable[[Path], Any], **arguments: Any) -> Case:
    """A checkpoint that is changed on the disk, and the earlier one."""

    def wrong() -> None:
        path = saved(name)
        on_first(lambda: damage(Path(path)))
        loads(path)

    return Case(wrong, {"load an earlier": lambda: loads(f"{at(name)}-earlier")})


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def model_file(folder: Path) -> Path:
    return sorted(folder.glob("model*.safetensors"))[0]


def edit(folder: Path) -> None:
    file = folder / "checkpoint.json"
    file.write_text(file.read_text().replace("model", "m"))


def another_checksum(folder: Path) -> None:
    """A digit of the first checksum in a header."""
    file = model_file(folder)
    data = file.read_bytes()
    found = re.search(rb"[0-9a-f]{16}", data)
    assert found is not None
    place = found.start()
    file.write_bytes(data[:place] + (b"1" if data[place : place + 1] == b"0" else b"0") + data[place + 1 :])


def resign(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest as a program would that computes its checksum, too."""
    file = folder / "checkpoint.json"
    table = json.loads(file.read_text())
    del table["checksum"]
    change(table)
    body = json.dumps(table)[:-1]
    file.write_text(f'{body},\n "checksum": "{xxh3_128_hexdigest(body.encode())}"\n}}\n')


def two_models(cls: type = nn.Linear) -> dict[str, nn.Module]:
    return {"x": cls(2, 2), "y": cls(2, 2, bias=False)}


def in_the_file_of_another(change: bool) -> None:
    path = saved("another file", model=two_models())
    if change:
        on_first(
            lambda: resign(
                Path(path), lambda t: t["tensors"]["model.x/bias"].update(file=t["tensors"]["model.y/weight"]["file"])
            )
        )
    st.load(path if change else f"{path}-earlier", model=two_models())


def of_another_version(change: bool) -> None:
    path = saved("version")
    if change:
        on_first(lambda: resign(Path(path), lambda t: t.update(version=99)))
    loads(path)


def pickled(is_converted: bool) -> None:
    path = of_another_kind("pickled", lambda folder: torch.save(linear(None).state_dict(), folder / "model.bin"))
    if is_converted:
        to_own(f"{path}/model.bin", f"{path}/converted")
    loads(f"{path}/converted" if is_converted else path)


def to_own(source: str, target: str, **options: Any) -> None:
    on_first(lambda: convert(source, target, "shardtensor", **options))


def of_torch(how: str) -> None:
    """A checkpoint of torch.distributed.checkpoint with the tensors of a model."""
    want = {"model": linear(None).state_dict()}
    path = of_another_kind("of torch", lambda folder: torch_checkpoint.save(want, checkpoint_id=folder, no_dist=True))
    if how == "torch":
        loaded = {"model": {name: torch.zeros_like(x) for name, x in want["model"].items()}}
        on_first(lambda: torch_checkpoint.load(loaded, checkpoint_id=path, no_dist=True))
        return
    if how == "convert":
        to_own(path, f"{path}/converted", trust=True)
    loads(f"{path}/converted" if how == "convert" else path)


def no_folder(path_of: Callable[[str], str]) -> None:
    path = saved("there")
    loads(path_of(path))


def folder_of_checkpoints(name_one: bool) -> None:
    path = fresh("several")
    st.save(f"{path}/step-1", model=linear(), step=1)
    loads(str(st.latest(path)) if name_one else path)


def over(url: str) -> None:
    """Save over a checkpoint in memory, which has no rename."""
    on_first(Folder("memory://fixes").remove)
    st.save("memory://fixes/step-1", extra=1)
    st.save(url, extra=2)


CASES: dict[str, Case] = {
    "over a checkpoint that no rename replaces": Case(
        lambda: over("memory://fixes/step-1"),
        {"choose another name": lambda: over("memory://fixes/step-2")},
    ),
    "a manifest that is not text": damaged("text", lambda c: (c / "checkpoint.json").write_bytes(b"\xff")),
    "a manifest that is cut": damaged(
        "cut", lambda c: (c / "checkpoint.json").write_bytes((c / "checkpoint.json").read_bytes()[:-9])
    ),
    "a manifest that was edited": damaged("edited", edit),
    "a manifest whose numbers do not fit": damaged(
        "numbers", lambda c: resign(c, lambda t: t["tensors"]["model/0.weight"].update(dtype="float33"))
    ),
    "another manifest": Case(
        lambda: loads(of_another_kind("manifest", lambda c: (c / "checkpoint.json").write_text("{}"))),
        {"name the folder of a checkpoint": lambda: loads(saved("manifest"))},
    ),
    "another version": Case(
        lambda: of_another_version(True),
        {"load it with the version of shardtensor that saved it": lambda: of_another_version(False)},
    ),
    "values that changed on the disk": damaged("values", lambda c: flip(model_file(c), -1)),
    "a header that changed": damaged("header", another_checksum),
    "a header that is none": damaged("no header", lambda c: flip(model_file(c), 8)),
    "a file that is cut": damaged("shorter", lambda c: os.truncate(model_file(c), 100)),
    "a file that is missing": damaged("missing", lambda c: model_file(c).unlink()),
    "a tensor that is not in its file": Case(
        lambda: in_the_file_of_another(True), {"load an earlier checkpoint": lambda: in_the_file_of_another(False)}
    ),
    "no folder": Case(
        lambda: no_folder(lambda path: f"{path}s"),
        {"name the folder that save() was given": lambda: no_folder(lambda path: path)},
    ),
    "a folder of checkpoints": Case(
        lambda: folder_of_checkpoints(False), {"load(latest(folder), ...)": lambda: folder_of_checkpoints(True)}
    ),
    "a folder of something else": Case(
        lambda: loads(of_another_kind("else", lambda folder: (folder / "notes.txt").write_text("mine"))),
        {"load an earlier one": lambda: loads(saved("else"))},
    ),
    "a folder of pickles": Case(
        lambda: pickled(False), {"run `shardtensor ckpt convert` on the file": lambda: pickled(True)}
    ),
    "a checkpoint of torch": Case(
        lambda: of_torch("load"),
        {
            "run `shardtensor ckpt convert`": lambda: of_torch("convert"),
            "torch.distributed.checkpoint.load takes sharded tensors as they are": lambda: of_torch("torch"),
        },
    ),
}
