"""Errors of the command line, and of the files that it reads the tensors of a model from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from plan.test_plan_mutations import MODELS
from safetensors.torch import save_file
from torch import nn

from fixes.case import Case
from shardtensor.cli.model_source import builder_of, model_of
from shardtensor.cli.plan import add_parser
from shardtensor.cli.plan_report import plan_report
from shardtensor.plan.loading import load_plan, read_config
from shardtensor.plan.models.safetensors_shapes import model_from_safetensors

PLAN = "shard 1\nmesh (tp = 2)\nunmatched: replicate\ndims 0.weight (out = 4, in = 4)\ndims 0.bias (out = 4)\n"
QUANTISED = {"quantization_config": {"quant_method": "awq"}}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))


def from_file(plan: Any, config: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        save_file(net().state_dict(), Path(folder, "model.safetensors"))
        model_of(plan, config=config, safetensors=Path(folder, "model.safetensors"))


def of(config: dict[str, Any], module: str | None = None) -> Callable[[], Any]:
    return lambda: model_of(load_plan(PLAN, config=config, world=2), config=config, module=module)


def of_family(module: str | None = None) -> None:
    """The tensors of the plan of Llama for a configuration that is of another family."""
    model_of(load_plan("llama", config=GPT, world=2), config=GPT, module=module)


def index(is_there: bool) -> None:
    """Read an index of a checkpoint of one file."""
    with TemporaryDirectory() as folder:
        if is_there:
            save_file({"w": torch.ones(2)}, Path(folder, "one.safetensors"))
        path = Path(folder, "model.safetensors.index.json")
        path.write_text(json.dumps({"metadata": {}, "weight_map": {"w": "one.safetensors"}}))
        model_from_safetensors(path)


def report(*options: str) -> dict[str, Any]:
    """The report of ``shardtensor plan`` for a model whose parameters four ranks shard."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    config = str(MODELS / "llama3-8b" / "config.json")
    return plan_report(parser.parse_args(["plan", "llama", "--model", config, "--world", "4", "--no-step", *options]))


def state_is_sharded() -> None:
    """A rank holds two numbers of AdamW for each element of its shards alone."""
    held = report()["memory"]["most"]
    assert held["optimizer"] == 2 * held["parameters"] < report("--set", "tp=1")["memory"]["most"]["optimizer"]


LLAMA = read_config(MODELS / "llama3-8b" / "config.json")[0]
GPT = dict(LLAMA) | {"model_type": "gpt_neox"}
MODULE = "fixes.command_cases:net"
CASES: dict[str, Case] = {
    "no module of that name": Case(
        lambda: builder_of("fixes.command_cases:nett"),
        {"write package.module:function": lambda: builder_of("fixes.command_cases:net")},
        mesh="",
    ),
    "a quantised model": Case(
        of(QUANTISED),
        {
            "give the model, --module package.module:function": of(QUANTISED, MODULE),
            "or its file, --safetensors model.safetensors.index.json": lambda: from_file(
                load_plan(PLAN, config=QUANTISED, world=2), QUANTISED
            ),
        },
        mesh="",
    ),
    "a model of another family": Case(
        of_family,
        {
            "for this plan or `fsdp`, give the model, --module package.module:function": lambda: [
                of_family(MODULE),
                from_file(load_plan("llama", config=GPT, world=2), GPT),
            ]
        },
        mesh="",
    ),
    "files that are not there": Case(
        lambda: index(False),
        {
            "put them beside it": lambda: index(True),
            "give --model config.json alone, if the plan has dims": of({}),
        },
        mesh="",
    ),
    "parts of parameters that are sharded": Case(
        lambda: report("--zero", "owners"),
        {"leave --zero out: sharded parameters have sharded state": state_is_sharded},
        mesh="",
    ),
}
NOT_FOLLOWED = {
    "trace/result.py:_not_run": "a general advice, where no change of one rule mends the step",
}
