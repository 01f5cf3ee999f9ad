"""Models of transformers: what ranks save is a folder of Hugging Face, and a folder of Hugging Face loads into them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import shardtensor as st
from shardtensor.checkpoint.converting import convert

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::shardtensor.GatherWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

IDS = torch.arange(10).view(2, 5)
PLAN = {
    "model.embed_tokens.weight": "[tp, -]",
    "model.layers.*.self_attn.{q_proj,k_proj,v_proj}.weight": "[tp, -]",
    "model.layers.*.self_attn.o_proj.weight": "[-, tp]",
    "model.layers.*.mlp.{gate_proj,up_proj}.weight": "[tp, -]",
    "model.layers.*.mlp.down_proj.weight": "[-, tp]",
}
FAMILIES = ("Llama", "Qwen2")
WAYS = ("tp", "fsdp")


def config(family: str, *, tied: bool) -> Any:
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": tied,
    }  # fmt: skip
    return getattr(transformers, f"{family}Config")(**sizes)


def made(family: str, *, tied: bool, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return getattr(transformers, f"{family}ForCausalLM")(config(family, tied=tied)).eval()


def sharded(model: nn.Module, way: str) -> nn.Module:
    if way == "tp":
        return st.shard_module(model, PLAN)
    for layer in model.model.layers:
        st.fully_shard(layer)
    return st.fully_shard(model)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found = model(IDS).logits
    return found.full_tensor() if isinstance(found, st.ShardedTensor) else found


def assert_same_state(found: Any, want: Any) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(found[name], value), name


def saved(folder: str, family: str, way: str, tied: bool) -> None:
    st.save(folder, model=sharded(made(family, tied=tied), way))


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_ranks_save_is_a_folder_of_hugging_face(world, tmp_path, family, way, tied):
    path = str(tmp_path / "saved")
    world(saved, 4, folder=path, family=family, way=way, tied=tied)
    found = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    want = made(family, tied=tied)
    assert_same_state(found.state_dict(), want.state_dict())
    assert torch.equal(logits(found), logits(want))
    assert (found.lm_head.weight is found.model.embed_tokens.weight) is tied


def loaded(folder: str, family: str, way: str, tied: bool, on_meta: bool) -> None:
    want = made(family, tied=tied)
    with torch.device("meta" if on_meta else "cpu"):
        model = made(family, tied=tied, seed=1)
    model = sharded(model, way)
    if on_meta:
        with pytest.raises(st.CheckpointError, match="rotary_emb"):
            st.load(folder, model=model)  # no file has such buffers
        st.materialize(model, init=model._init_weights)
    st.load(folder, model=model)
    assert_same_state(st.full_state_dict(model), want.state_dict())
    if way == "fsdp":
        assert torch.equal(logits(model), logits(want))


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("on_meta", [False, True], ids=["", "meta"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_hugging_face_loads_into_sharded_models(world, tmp_path, family, way, tied, on_meta):
    made(family, tied=tied).save_pretrained(tmp_path, max_shard_size="20KB")
    assert Path(tmp_path, "model.safetensors.index.json").exists()
    world(loaded, 3 if way == "fsdp" else 4, folder=str(tmp_path), family=family, way=way, tied=tied, on_meta=on_meta)


def test_the_reader_of_torch_distributed_checkpoint_reads_what_ranks_save(tmp_path):
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    path = str(tmp_path / "saved")
    st.simulate(4, saved, path, "Llama", "tp", False)
    want = made("Llama", tied=False).state_dict()
    state = {name: torch.zeros_like(x) for name, x in want.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    assert_same_state(state, want)


def saved_after_a_step(folder: str) -> None:
    model = sharded(made("Qwen2", tied=True), "fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    st.save(folder, model=model, optimizer=optimizer, step=1)


def test_a_training_run_is_a_folder_of_hugging_face_too(tmp_path):
    """With an optimizer in it; and converted, it is that of one process."""
    st.simulate(2, saved_after_a_step, str(tmp_path / "a"))
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a").eval()
    convert(tmp_path / "a", tmp_path / "b", "hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert not torch.equal(logits(found), logits(made("Qwen2", tied=True)))
    assert torch.equal(logits(found), logits(again))
    assert json.loads((tmp_path / "b" / "config.json").read_text())["model_type"] == "qwen2"


# -- adapters ----------------------------------------------------------------------------------------------------------


def with_adapter(seed: int) -> nn.Module:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = made("Llama", tied=False)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it calls what transformers renames
        return peft.get_peft_model(model, options).eval()


LORA = {
    "**.q_proj.base_layer.weight": "[tp, -]",
    "**.q_proj.lora_B.default.weight": "[tp, -]",
    "**.down_proj.base_layer.weight": "[-, tp]",
}


def saved_adapter(folder: str) -> None:
    from peft import get_peft_model_state_dict

    model = st.shard_module(with_adapter(0), LORA)
    adapter = get_peft_model_state_dict(model)
    assert sum(isinstance(x, st.ShardedTensor) for x in adapter.values()) == len(model.model.model.layers)
    st.save(f"{folder}/whole", model=model)
    st.save(f"{folder}/adapter", model=adapter)


def loaded_adapter(folder: str) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    want = with_adapter(0)
    model = st.shard_module(with_adapter(1), LORA)
    st.load(f"{folder}/whole", model=model)
    assert_same_state(st.full_state_dict(model), want.state_dict())
    model = st.shard_module(with_adapter(2), LORA)
    state = get_peft_model_state_dict(model)
    st.load(f"{folder}/adapter", model=state)
    set_peft_model_state_dict(model, state)
    assert_same_state(st.full_state_dict(model), want.state_dict())


@pytest.mark.worlds("sim", "gloo")
def test_adapters_are_saved_and_loaded_with_their_model_or_alone(world, tmp_path):
    pytest.importorskip("peft")
    world(saved_adapter, 4, folder=str(tmp_path))
    world(loaded_adapter, 2, folder=str(tmp_path))
    files = Path(tmp_path, "adapter").glob("*.safetensors")
    adapter = {name: x for file in files for name, x in load_file(file).items()}
    model = with_adapter(3)
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, adapter)
    assert torch.equal(logits(model), logits(with_adapter(0)))
