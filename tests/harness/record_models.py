"""Records what plans are checked against: the names, shapes and classes of public models, with their config.json.

Run it when a model library renames something: ``python tests/harness/record_models.py``; needs transformers.
Models are built on the meta device from the configurations in tests/plan/models/*/config.json, which are the published
ones without their `task_specific_params`. Names that differ only in numbers are folded: ``layers.{0..31}.mlp``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers
from torch import nn

from shardtensor.parallel.model_info import model_info
from shardtensor.plan.models.model import Model, TensorInfo

MODELS = Path(__file__).parents[1] / "plan" / "models"

CLASSES: dict[str, str] = {
    "llama2-7b": "LlamaForCausalLM",
    "llama3-8b": "LlamaForCausalLM",
    "llama3.1-405b": "LlamaForCausalLM",
    "mistral-7b": "MistralForCausalLM",
    "qwen2-7b": "Qwen2ForCausalLM",
    "qwen2-0.5b": "Qwen2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert-base": "BertModel",
    "bert-base-mlm": "BertForMaskedLM",
    "minilm": "BertModel",
    "t5-small": "T5ForConditionalGeneration",
    "flan-t5-small": "T5ForConditionalGeneration",
    "mixtral-8x7b": "MixtralForCausalLM",
    "vit-base": "ViTModel",
    "vit-base-classifier": "ViTForImageClassification",
}
"""Folder -> the class that transformers gives it."""

PUBLISHED = {"gpt2-file": "gpt2", "mixtral-8x7b-file": "mixtral-8x7b", "vit-base-file": "vit-base"}
"""Folder -> the model whose published file has other names than the class: what a checkpoint's headers say."""


def build(folder: str) -> nn.Module:
    """One public model, on the meta device."""
    keys = json.loads((MODELS / folder / "config.json").read_text())
    cls = getattr(transformers, CLASSES[folder])
    dtype = getattr(torch, keys.get("torch_dtype", "float32"))
    with torch.device("meta"):
        model = cls(cls.config_class(**keys))
    model.tie_weights()
    return model.to(dtype)


def record(folder: str) -> None:
    """Write tensors.json beside a config.json."""
    found = model_info(build(folder))
    text = as_text(found, f"transformers {transformers.__version__}, {CLASSES[folder]}")
    (MODELS / folder / "tensors.json").write_text(text)


def record_published(folder: str) -> None:
    """Write the tensors.json of a published file, by what is known of how its names differ."""
    model = model_info(build(PUBLISHED[folder]))
    tensors = tuple(renamed for tensor in model.tensors for renamed in _RENAMED[folder](tensor))
    text = as_text(Model(tensors), f"the published file of {PUBLISHED[folder]}")
    (MODELS / folder / "tensors.json").write_text(text)


def _gpt2(tensor: TensorInfo) -> Iterator[TensorInfo]:
    if tensor.name == "lm_head.weight":  # tied, saved once
        return
    name = tensor.name.removeprefix("transformer.")
    if name.endswith(".attn.c_attn.weight"):  # the mask was saved, as other tensors are
        yield attrs.evolve(tensor, name=name.replace("c_attn.weight", "bias"), shape=(1, 1, 1024, 1024))
    yield attrs.evolve(tensor, name=name)


def _mixtral(tensor: TensorInfo) -> Iterator[TensorInfo]:
    block, found, name = tensor.name.partition(".mlp.")
    if not found:
        yield tensor
    elif name == "gate.weight":
        yield attrs.evolve(tensor, name=f"{block}.block_sparse_moe.gate.weight")
    else:
        experts, rows, columns = tensor.shape
        words, shape = (("w1", "w3"), (rows // 2, columns)) if "gate_up" in name else (("w2",), (rows, columns))
        for expert, word in product(range(experts), words):
            path = f"{block}.block_sparse_moe.experts.{expert}.{word}.weight"
            yield attrs.evolve(tensor, name=path, shape=shape)


def _vit(tensor: TensorInfo) -> Iterator[TensorInfo]:
    words = {"q_proj": "attention.query", "k_proj": "attention.key", "v_proj": "attention.value"}
    words |= {"attention.o_proj": "attention.output.dense", "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"}
    name = re.sub(r"^layers\.", "encoder.layer.", tensor.name)
    for word, published in words.items():
        name = name.replace(f".{word}.", f".{published}.")
    yield attrs.evolve(tensor, name=name)


_RENAMED = {"gpt2-file": _gpt2, "mixtral-8x7b-file": _mixtral, "vit-base-file": _vit}


def as_text(model: Model, source: str) -> str:
    """A model as JSON, one folded tensor or module a line."""

    def shape(sizes: tuple[int, ...]) -> str:
        return " x ".join(map(str, sizes))

    tensors = {t.name: f"{t.dtype} {shape(t.shape)}{' buffer' if t.is_buffer else ''}" for t in model.tensors}
    modules = {
        path: {
            "class": info.class_name,
            "forward": " ".join(info.arguments),
            **{name: count for name, count in info.counts.items() if name != "layer_idx"},  # else nothing folds
        }
        for path, info in model.modules.items()
    }
    sections: dict[str, Any] = {
        "source": source, "tied": [list(names) for names in model.tied],
        "tensors": folded(tensors), "modules": folded(modules),
    }  # fmt: skip
    rows = []
    for key, value in sections.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(said)}" for name, said in value.items())
            rows.append(f'"{key}": {{\n{inner}\n }}')
        else:
            rows.append(f'"{key}": {json.dumps(value)}')
    return "{\n " + ",\n ".join(rows) + "\n}\n"


def folded(named: Mapping[str, Any]) -> dict[str, Any]:
    """Names that differ only in a run of numbers as one, as long as all say the same.

    Example:
        >>> folded({"h.0.q": 1, "h.1.q": 1, "h.0.k": 2})
        {'h.{0..1}.q': 1, 'h.0.k': 2}
    """
    depth = max((name.count(".") + 1 for name in named), default=0)
    for at in range(depth - 1, -1, -1):
        groups: dict[tuple[Any, ...], list[int]] = {}
        for name, value in named.items():
            segments = name.split(".")
            is_number = at < len(segments) and segments[at].isdigit()
            number = [int(segments[at])] if is_number else []
            key = (*segments[:at], None, *segments[at + 1 :]) if is_number else tuple(segments)
            groups.setdefault((key, json.dumps(value)), []).extend(number)
        named = {
            _spelled(key, run): json.loads(text)
            for (key, text), numbers in groups.items()
            for run in _runs(numbers) or [(0, 0)]
        }
    return dict(named)


def _spelled(key: tuple[str | None, ...], run: tuple[int, int]) -> str:
    start, end = run
    number = str(start) if start == end else f"{{{start}..{end}}}"
    return ".".join(number if part is None else part for part in key)


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


if __name__ == "__main__":
    for folder in CLASSES:
        record(folder)
    for folder in PUBLISHED:
        record_published(folder)
