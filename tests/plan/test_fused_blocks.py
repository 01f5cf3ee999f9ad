"""Blocks laid end to end: pieces that reach code hold a share of each block, whoever says that there are blocks."""

from __future__ import annotations

import json

import attrs
import pytest
from recorded_models import config_path, recorded

from shardtensor.errors import SpecError
from shardtensor.plan.flows.gradients import check_flows
from shardtensor.plan.interop.hugging_face import plan_text_from_hf
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import model_from_dims
from shardtensor.plan.models.model import Model, ModuleInfo, TensorInfo, blocks_of
from shardtensor.plan.models.safetensors_shapes import with_dim_names
from shardtensor.plan.text.reading import read_plan
from shardtensor.plan.text.sources import PACKAGED

TEXT = """shard 1
mesh (dp = 1, tp = {tp})
data dp
qkv {{
    weight: {weight}
    bias:   {bias}
    {flows}
}}
o.weight: [-, tp]
o {{
    in: [..., tp]
    out: partial(tp) -> replicate
}}
dims qkv.weight (out = {out}, in = 64)
dims qkv.bias   (out = {out})
dims o.weight   (out = 64, in = 64)
"""
LEAVES_CUT = "in: replicate\n    out: [..., tp]"
GATHERED = "in: replicate\n    out: [..., tp] -> replicate"
EQUAL, GROUPED = "(64, 64, 64)", "(64, 32, 32)"


def told(weight: str, bias: str, out: str, flows: str = LEAVES_CUT, tp: int = 4) -> list[str]:
    """The tensors whose blocks are cut wrongly."""
    plan = read_plan(TEXT.format(weight=weight, bias=bias, flows=flows, out=out, tp=tp), world=tp)
    resolved = resolve(plan, model_from_dims(plan))
    assert not resolved.errors
    return [finding.tensor for finding in check_flows(resolved) if finding.code == "E206"]


@pytest.mark.parametrize(
    ("cut", "out", "is_right"),
    [
        ("tp", "192", True),
        ("tp", EQUAL, False),
        ("tp blocks(3)", EQUAL, True),
        ("tp blocks(6)", EQUAL, True),  # finer blocks hold a share of each, too
        ("tp blocks(2)", EQUAL, False),
        ("tp unit(16)", EQUAL, False),
        ("tp", GROUPED, False),
        ("tp blocks(4)", GROUPED, True),
    ],
)
def test_a_piece_holds_a_share_of_each_block(cut, out, is_right):
    right = "tp blocks(4)" if out == GROUPED else "tp blocks(3)"
    assert told(f"[{cut}, -]", f"[{cut}]", out) == ([] if is_right else ["qkv.weight", "qkv.bias"])
    assert told(f"[{right}, -]", f"[{cut}]", out) == ([] if is_right else ["qkv.bias"])


def test_what_no_code_meets_in_pieces_may_be_cut_as_one():
    assert not told("[tp, -]", "[tp]", EQUAL, GATHERED), "it leaves whole"
    assert not told("[tp, -]", "[tp]", EQUAL, "# no flow: it works on ShardedTensors")
    assert not told("replicate", "replicate", EQUAL, "in: replicate\n    out: replicate")
    assert not told("[tp, -]", "[tp]", EQUAL, tp=1), "one piece is the whole"


@pytest.mark.parametrize("model", ["gpt2", "gpt2-file"])
def test_modules_files_and_dims_know_the_blocks_of_gpt2(model, tmp_path):
    """Of a file, the dims beside the plan do."""
    plan = tmp_path / "gpt2.shard"
    plan.write_text((PACKAGED / "gpt2.shard").read_text().replace(", blocks=3", ""))
    (tmp_path / "gpt2.dims.shard").write_text((PACKAGED / "gpt2.dims.shard").read_text())
    read = load_plan(plan, config=config_path("gpt2"), world=4)
    named = model_from_dims(read)
    real = recorded(model) if recorded(model).modules else with_dim_names(recorded(model), named)
    for each in (named, real):
        found = [finding for finding in check_flows(resolve(read, each)) if finding.code == "E206"]
        assert len(found) == 24, "weights and biases of 12 layers"
        assert {finding.origin.text for finding in found} == {"colwise(tp, unit=hd)"}


def test_classes_that_lay_heads_side_by_side_are_one_block():
    """GPT-NeoX and Falcon keep q, k and v of a head together, under the name that others give to three blocks."""
    for owner, name in (("GPTNeoXAttention", "query_key_value"), ("FalconAttention", "query_key_value")):
        assert blocks_of(owner, name, 192, {"split_size": 64, "head_dim": 16, "num_key_value_heads": 4}) == ()


@pytest.mark.parametrize(
    ("counts", "blocks"),
    [
        ({"head_dim": 16, "num_key_value_heads": 4}, (64, 64, 64)),
        ({"head_dim": 16, "num_key_value_heads": 2}, (128, 32, 32)),
        ({"head_dim": 16}, ()),
        ({}, ()),
        ({"head_dim": 16, "num_key_value_heads": 8}, ()),
    ],
)
def test_blocks_are_known_from_what_a_class_counts_or_not_at_all(counts, blocks):
    assert blocks_of("Phi3Attention", "qkv_proj", 192, counts) == blocks


def test_an_imported_plan_that_gathers_fused_products_is_told_nothing():
    """Phi-3's plan gathers qkv and splits what goes on: cut as one is right there."""
    rules = {
        "layers.*.self_attn.qkv_proj": "colwise_gather_output",
        "layers.*.self_attn.o_proj": "rowwise_split_input",
        "layers.*.mlp.gate_up_proj": "colwise_gather_output",
        "layers.*.mlp.down_proj": "rowwise_split_input",
    }
    shapes = {
        "self_attn.qkv_proj": (192, 64),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_up_proj": (512, 64),
        "mlp.down_proj": (64, 256),
    }
    tensors = tuple(TensorInfo(f"model.layers.0.{name}.weight", shape, ("out", "in")) for name, shape in shapes.items())
    counts = {"head_dim": 16, "num_key_value_heads": 4}
    modules = {path: ModuleInfo("Module") for path in ("", "model", "model.layers", "model.layers.0")}
    modules |= {
        "model.layers.0.self_attn": ModuleInfo("Phi3Attention", counts=counts),
        "model.layers.0.mlp": ModuleInfo("Phi3MLP"),
    }
    modules |= {f"model.layers.0.{name}": ModuleInfo("Linear") for name in shapes}
    model = Model(tensors, "", modules)
    assert model.blocks("model.layers.0.self_attn.qkv_proj.weight") == {"out": (64, 64, 64)}
    for word, is_right in (("colwise_gather_output", True), ("colwise", False)):
        text = plan_text_from_hf(
            {f"model.{rule}": said.replace("colwise_gather_output", word) for rule, said in rules.items()}
        )
        resolved = resolve(read_plan(text, world=4, params={"tp": 4}), model)
        assert not resolved.errors
        assert ("E206" not in {finding.code for finding in check_flows(resolved)}) == is_right


def test_two_lines_that_disagree_about_blocks_are_an_error():
    plan = read_plan("shard 1\nmesh (tp = 1)\ndims a (out = (4, 4), in = 2)\ndims a (out = 8, in = 2)\n")
    with pytest.raises(SpecError, match=r"out=\(4, 4\)"):
        model_from_dims(plan)


def test_blocks_add_up_to_the_shape():
    plan = read_plan("shard 1\nmesh (tp = 1)\nlet n = 3\ndims a (out = (4, 2 * n, 0), in = n)\n")
    (tensor,) = model_from_dims(plan).tensors
    assert (tensor.shape, tensor.blocks) == ((10, 3), (("out", (4, 6, 0)),))
    assert json.dumps(attrs.asdict(tensor))
