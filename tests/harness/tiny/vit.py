"""ViT, with the names of two generations."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness.tiny.attention import attend, heads_of
from harness.tiny.bert import BertEncoder, BertIntermediate, BertPooler, BertSelfAttention
from harness.tiny.names import ending, shape_of
from harness.tiny.sizes import Sizes
from shardtensor.plan.models.model import Model

DEFAULTS: dict[str, Any] = {
    "width": 16, "heads": 4, "hidden": 32, "layers": 2, "channels": 3, "patch": 4, "image": 8,
    "qkv_bias": True, "pooled": 0, "published": True,
}  # fmt: skip


class ViTPatchEmbeddings(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.projection = nn.Conv2d(c.channels, c.width, c.patch, c.patch)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.projection(pixel_values).flatten(2).transpose(1, 2)


class ViTEmbeddings(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, c.width))
        self.position_embeddings = nn.Parameter(torch.randn(1, (c.image // c.patch) ** 2 + 1, c.width))
        self.patch_embeddings = ViTPatchEmbeddings(c)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.patch_embeddings(pixel_values)
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.position_embeddings


# -- published files ---------------------------------------------------------------------------------------------------


class ViTSelfOutput(nn.Module):
    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.dense(hidden_states)


class ViTAttentionOfFiles(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.attention, self.output = BertSelfAttention(c.width, c.heads, c.qkv_bias), ViTSelfOutput(c.width, c.width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.output(self.attention(hidden_states))


class ViTLayerOfFiles(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.attention, self.intermediate = ViTAttentionOfFiles(c), BertIntermediate(c.width, c.hidden)
        self.output = ViTSelfOutput(c.hidden, c.width)
        self.layernorm_before, self.layernorm_after = nn.LayerNorm(c.width), nn.LayerNorm(c.width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states + self.attention(self.layernorm_before(hidden_states))
        return x + self.output(self.intermediate(self.layernorm_after(x)))


# -- newer classes -----------------------------------------------------------------------------------------------------


class ViTAttention(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.num_attention_heads, self.head_dim = c.heads, c.width // c.heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(c.width, c.width, c.qkv_bias) for _ in range(3))
        self.o_proj = nn.Linear(c.width, c.width)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        q, k, v = (heads_of(f(hidden_states), self.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(q, k, v))


class ViTMLP(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(c.width, c.hidden), nn.Linear(c.hidden, c.width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(hidden_states)))


class ViTLayer(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.attention, self.mlp = ViTAttention(c), ViTMLP(c)
        self.layernorm_before, self.layernorm_after = nn.LayerNorm(c.width), nn.LayerNorm(c.width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states + self.attention(self.layernorm_before(hidden_states))
        return x + self.mlp(self.layernorm_after(x))


class ViTPooler(BertPooler):
    def __init__(self, width: int, pooled: int) -> None:
        super().__init__(width)
        self.dense = nn.Linear(width, pooled)


class ViTModel(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.config, self.embeddings = c, ViTEmbeddings(c)
        if c.published:
            self.encoder = BertEncoder([ViTLayerOfFiles(c) for _ in range(c.layers)])
        else:
            self.layers = nn.ModuleList(ViTLayer(c) for _ in range(c.layers))
        self.layernorm = nn.LayerNorm(c.width)
        self.pooler = ViTPooler(c.width, c.pooled) if c.pooled else None

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.embeddings(pixel_values)
        x = self.encoder(x) if self.config.published else x
        for layer in () if self.config.published else self.layers:
            x = layer(x)
        x = self.layernorm(x)
        return x, self.pooler(x) if self.pooler is not None else None


class ViTForImageClassification(nn.Module):
    def __init__(self, labels: int = 3, **sizes: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_size=0, **(DEFAULTS | sizes))
        self.config.image_size = self.config.image
        self.vit, self.classifier = ViTModel(self.config), nn.Linear(self.config.width, labels)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.vit(pixel_values)[0][:, 0])


def shrink(config: Mapping[str, Any], model: Model, sizes: Sizes) -> dict[str, Any]:
    width, channels = shape_of(model, "patch_embeddings.projection.weight")[:2]
    heads = config.get("num_attention_heads", 4)
    small = sizes.of_heads(heads, width)
    hidden = ending(model, "mlp.fc1.weight") or ending(model, "intermediate.dense.weight")
    found = {
        "num_attention_heads": heads,
        "hidden_size": small,
        "intermediate_size": sizes.width(model.by_name[hidden].shape[0], unlike=small),
        "num_hidden_layers": sizes.layers,
        "num_channels": channels,
        "patch_size": 2,
        "image_size": 4,
    }
    pooled = ending(model, "pooler.dense.weight")
    return found | ({"pooler_output_size": sizes.width(model.by_name[pooled].shape[0])} if pooled else {})


def make(config: Mapping[str, Any], model: Model) -> nn.Module:
    said = {
        "width": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "hidden": config["intermediate_size"],
        "layers": config["num_hidden_layers"],
        "channels": config["num_channels"],
        "patch": config["patch_size"],
        "image": config["image_size"],
        "qkv_bias": bool(ending(model, "query.bias") or ending(model, "q_proj.bias")),
        "pooled": config["pooler_output_size"] if ending(model, "pooler.dense.weight") else 0,
        "published": bool(ending(model, "attention.attention.query.weight")),
    }
    classes = ending(model, "classifier.weight")
    if classes:
        return ViTForImageClassification(model.by_name[classes].shape[0], **said)
    return ViTModel(SimpleNamespace(image_size=said["image"], **said))
