"""Errors of the conversion of checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import shardtensor as st
from fixes.case import Case
from shardtensor.checkpoint.converting import convert

STATE = {"w": torch.arange(3.0)}
OWN = {"state": {0: {"m": torch.ones(3)}}, "param_groups": [{"params": [0], "param_names": ["w"], "rate": 1}]}
ODD = {"w": torch.ones(2, dtype=torch.complex128)}
UNHELD = {"w": torch.ones(2, dtype=torch.uint16).view(torch.bits16)}


class Anything:
    pass


def converted(state: Any, to: str = "shardtensor", target: str = "out", **options: Any) -> Callable[[], None]:
    """Convert a file of ``torch.save``."""

    def act() -> None:
        with TemporaryDirectory() as folder:
            torch.save(state, Path(folder, "a.pt"))
            convert(
                Path(folder, "a.pt"), target.format(folder) if "://" in target else Path(folder, target), to, **options
            )

    return act


def of_dcp(**options: Any) -> None:
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": STATE}, checkpoint_id=f"{folder}/a", no_dist=True)
        convert(f"{folder}/a", f"{folder}/b", "shardtensor", **options)
        assert [row.name for row in st.inspect(f"{folder}/b").tensors] == ["model/w"]


def over(target: str, *, is_removed: bool = False) -> None:
    with TemporaryDirectory() as folder:
        torch.save(STATE, Path(folder, "a.pt"))
        Path(folder, "there").write_text("")
        if is_removed:
            Path(folder, "there").unlink()
        convert(Path(folder, "a.pt"), Path(folder, target), "hf")


CASES: dict[str, Case] = {
    "no such kind": Case(
        converted(STATE, "npz"), {"write one of shardtensor, dcp, hf, torch": converted(STATE, "hf")}, mesh=""
    ),
    "something at the target": Case(
        lambda: over("there"),
        {"choose another name, or remove it": lambda: [over("here"), over("there", is_removed=True)]},
        mesh="",
    ),
    "a URL as the target": Case(
        converted(STATE, "torch", "memory://a/b"), {"name a local path": converted(STATE, "torch")}, mesh=""
    ),
    "a target that cannot be written": Case(
        lambda: over("there/out"),
        {"choose a folder that this process may write, on a disk with space": lambda: over("out")},
        mesh="",
    ),
    "pickled metadata": Case(of_dcp, {"convert it with --trust": lambda: of_dcp(trust=True)}, mesh=""),
    "a pickle of objects": Case(
        converted({"w": torch.ones(2), "model": Anything()}),
        {"save the state dicts alone": converted(STATE)},
        mesh="",
    ),
    "a dtype that Hugging Face has not": Case(
        converted(ODD, "hf"),
        {"convert it with --to torch, or --to dcp": lambda: [converted(ODD, to)() for to in ("torch", "dcp")]},
        mesh="",
    ),
    "a dtype that no file of ours has": Case(
        converted(UNHELD), {"convert it with --to torch": converted(UNHELD, "torch")}, mesh=""
    ),
    "an optimizer of the user's": Case(
        converted({"model": STATE, "optimizer": OWN}),
        {"name it: --optimizer AdamW": converted({"model": STATE, "optimizer": OWN}, optimizer="Own")},
        mesh="",
    ),
}
