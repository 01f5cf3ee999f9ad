"""Parts of a model that may be sharded: found by shapes and classes, each with its choices, and never guessed."""

from __future__ import annotations

from shardtensor.plan.interop.derived import derived_parts
from shardtensor.plan.models.model import Model, ModuleInfo, TensorInfo


def model(shapes: dict[str, tuple[int, int]], **infos: ModuleInfo) -> Model:
    """A model of linear layers of shapes (out, in), and of modules around them."""
    tensors = tuple(TensorInfo(f"{path}.weight", shape, ("out", "in")) for path, shape in shapes.items())
    return Model(tensors, modules={"": ModuleInfo("Root"), **infos, **{path: ModuleInfo("Linear") for path in shapes}})


def attention(shapes: dict[str, tuple[int, int]], **counts: int) -> Model:
    layers = {f"layers.0.attn.{name}": shape for name, shape in shapes.items()}
    return model(layers, **{"layers.0.attn": ModuleInfo("OwnAttention", (), counts)})


SQUARE = dict.fromkeys("qkvo", (16, 16))


def choices(found: Model) -> list[str]:
    return [name for part in derived_parts(found) for name in part.choices]


def test_attention_is_sharded_by_heads_and_its_counts_are_shared_out():
    (part,) = derived_parts(attention(SQUARE, num_heads=4, width=16, layer_idx=0))
    assert part.choices["heads, numbers"] == {
        **{f"layers.*.attn.{name}": ["colwise(tp, unit=4)"] for name in "qkv"},
        "layers.*.attn.o": ["rowwise(tp, unit=4)"],
        "layers.*.attn": ["local num_heads: [tp]"],
    }
    assert part.choices["heads, numbers, width"]["layers.*.attn"][1] == "local width: [tp unit(4)]"


def test_fewer_key_heads_may_be_held_by_several_ranks():
    (part,) = derived_parts(attention(SQUARE | {"k": (8, 16), "v": (8, 16)}, num_heads=4, num_key_value_heads=2))
    rules = part.choices["shared heads, numbers"]
    assert rules["layers.*.attn.k"] == ["colwise_shared(kvg, copies=kvr, unit=4)"]
    assert "local num_key_value_heads: [kvg]" in rules["layers.*.attn"]


def test_one_product_of_q_k_and_v_has_two_orders():
    found = attention({"qkv": (48, 16), "o": (16, 16)}, num_heads=4)
    assert choices(found) == ["blocks, numbers", "side by side, numbers"]


def test_attention_of_other_shapes_or_without_heads_is_left_whole():
    assert not choices(attention(SQUARE | {"k": (12, 16)}, num_heads=4))
    assert not choices(attention(SQUARE, num_heads=3))
    assert not choices(attention(SQUARE))


def test_layers_of_one_pattern_and_other_shapes_are_left_whole():
    alike = {"layers.0.up": (32, 8), "layers.0.down": (8, 32)}
    assert choices(model(alike)) == ["columns and rows"]
    other = {"layers.1.up": (16, 8), "layers.1.down": (8, 16)}
    assert not choices(model(alike | other))


def test_gated_networks_in_two_layers_or_in_one():
    gated = {"layers.0.gate": (32, 8), "layers.0.up": (32, 8), "layers.0.down": (8, 32)}
    assert choices(model(gated)) == ["columns and rows"]
    assert choices(model({"layers.0.up": (64, 8), "layers.0.down": (8, 32)})) == [
        "two blocks and rows",
        "pairs and rows",
    ]
