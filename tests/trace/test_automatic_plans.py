"""The plan "auto" and models of peft: the package's plan or the imported one, LoRA layers beside their layers; what
cannot be sharded is refused on every rank, and nothing changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness.architectures import off_after_three_steps, small_model
from torch import nn

import shardtensor as st
from shardtensor.parallel.model_info import model_info
from shardtensor.plan.interop.adapters import resolve_with_adapters
from shardtensor.trace.example import example_step
from shardtensor.trace.imported import automatic_plan, imported_plan

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: more threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def layouts(plan: st.Plan, module: Any) -> dict[str, str]:
    tensors = resolve_with_adapters(plan, model_info(module)).tensors
    return {name: str(placed.spec) for name, placed in tensors.items()}


def test_the_package_s_plan_is_taken_where_it_fits_and_else_the_imported_one():
    llama, opt = small_model("llama"), small_model("opt")
    packaged = st.load_plan("llama", config=llama.config, world=2)
    assert layouts(automatic_plan(llama, 2), llama) == layouts(packaged, llama)
    assert layouts(st.load_plan("auto", config=llama.config, world=2), llama) == layouts(packaged, llama)
    assert layouts(automatic_plan(opt, 2), opt)["model.decoder.layers.0.fc1.weight"] == "[tp, -]"
    with pytest.raises(st.SpecError, match='no plan for the model_type "opt"'):
        st.load_plan("auto", config=opt.config, world=2)


def trained_automatically(name: str) -> float:
    return off_after_three_steps(small_model(name), "auto")


@pytest.mark.parametrize("name", ["qwen2", "opt"])
@pytest.mark.worlds("sim", "gloo")
def test_auto_trains_as_the_dense_model(world, name):
    for off in world(trained_automatically, 2, name=name):
        assert off < 1e-5


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def cut_in_a_wrapper(name: str) -> bool:
    wrapper = st.shard_module(Wrapper(small_model(name)), "auto")
    return any(isinstance(parameter, st.ShardedTensor) for parameter in wrapper.parameters())


@pytest.mark.worlds("sim")
def test_a_wrapper_has_the_plan_of_its_module(world):
    assert all(world(cut_in_a_wrapper, 2, name="qwen2"))


def test_what_ranks_cannot_share_stays_whole():
    opt = small_model("opt")  # 8 heads and 96 hidden features on 3 ranks
    plan = imported_plan(opt, 3)
    assert list(plan.whole) == ["model.decoder.layers.*.self_attn"]
    assert "cannot be split evenly over tp=3" in " ".join(plan.whole.values())
    found = layouts(st.load_plan(plan.text, config=opt.config, world=3), opt)
    assert found["model.decoder.layers.0.fc1.weight"] == "[tp, -]"
    assert found["model.decoder.layers.0.self_attn.q_proj.weight"] == "replicate"


@pytest.mark.worlds("sim")
def test_more_ranks_than_key_heads_share_them(world):
    module = small_model("qwen3")  # 4 key heads
    text = imported_plan(module).text
    for off in world(off_after_three_steps, 8, module=module, text=text):
        assert off < 1e-5


def lora(name: str, **options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **options}
        return peft.get_peft_model(small_model(name), peft.LoraConfig(**options)).double()


def off_the_dense_gradients(module: Any, plan: str, params: dict[str, Any]) -> float:
    from shardtensor.comm.process_group import as_group

    oracle, module = copy.deepcopy(module), copy.deepcopy(module)
    config = module.get_base_model().config
    given = st.load_plan(plan, config=config, world=as_group().size, **params) if params else plan
    assert st.shard_module(module, given) is module
    example_step(oracle.get_base_model(), 0, 8).backward()
    example_step(module.get_base_model(), 0, 8).backward()
    worst = 0.0
    for want, got in zip(oracle.parameters(), module.parameters(), strict=True):
        assert (want.grad is None) == (got.grad is None)
        if want.grad is not None:
            grad = got.grad.full_tensor() if isinstance(got.grad, st.ShardedTensor) else got.grad
            worst = max(worst, float((grad - want.grad).norm() / want.grad.norm()))
    return worst


@pytest.mark.parametrize(
    ("name", "plan", "params", "ranks"),
    [
        ("llama", "auto", {}, 2),
        ("llama", "llama", {"sp": True}, 2),
        ("llama", "llama", {"tp": 8}, 8),
        ("qwen3", "auto", {}, 8),
        ("opt", "auto", {}, 2),
        ("gpt2", "gpt2", {}, 2),
    ],
)
@pytest.mark.worlds("sim")
def test_lora_layers_get_the_dense_gradients(world, name, plan, params, ranks):
    module = lora(name)
    for off in world(off_the_dense_gradients, ranks, module=module, plan=plan, params=params):
        assert off < 1e-5


def refused(module: Any, plan: Any) -> tuple[str, bool]:
    module = copy.deepcopy(module)
    before = [type(parameter) for parameter in module.parameters()]
    with pytest.raises(st.PlanError) as caught:
        st.shard_module(module, plan)
    return str(caught.value).partition("\n")[0], before == [type(parameter) for parameter in module.parameters()]


@pytest.mark.parametrize(
    ("make", "plan", "fault"),
    [
        (lambda: lora("llama", use_dora=True), "llama", "is sharded, and how its adapters are is not known"),
        (lambda: nn.Linear(4, 4), "auto", '"auto" is for models of transformers'),
    ],
    ids=["DoRA", "no configuration"],
)
@pytest.mark.worlds("sim")
def test_every_rank_refuses_with_one_error_and_nothing_changes(world, make, plan, fault):
    for error, is_unchanged in world(refused, 2, module=make(), plan=plan):
        assert fault in error and is_unchanged
