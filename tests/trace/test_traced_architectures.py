"""What `trace_step` counts is what the ranks of a simulated world send, to the byte: models of transformers under their
imported plans, and tiny models under the plans of the package.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import FULL
from harness.architectures import small_model
from harness.quick import sampled
from harness.tiny import mixtral
from parallel.family_plans import FAMILIES, plan_for
from plan.configs import LLAMA_8B
from test_traced_step import _in_turn, of_family, traced, train
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.flop_counter import FlopCounterMode

import shardtensor as st
from shardtensor.cli.model_source import transformers_model
from shardtensor.comm.process_group import as_group
from shardtensor.errors import NotTraced
from shardtensor.parallel import expert_dispatch
from shardtensor.parallel.model_info import model_info
from shardtensor.plan.loading import load_plan
from shardtensor.plan.plan import Plan
from shardtensor.sim.simulate import SimGroup, simulate
from shardtensor.trace.example import example_step
from shardtensor.trace.kernels import FusedKernels
from shardtensor.trace.small import small_configs, with_layers
from shardtensor.trace.step import trace_step

pytestmark = pytest.mark.filterwarnings("ignore")

Calls = Counter[tuple[str, int, int, int]]

KINDS = """
afmoe arcee aria_text axk2 cohere cohere2 deepseek_v3 gemma gemma2 gemma3_text glm4_moe_lite gpt_neox gpt_oss granite
granitemoe helium llama minicpm3 mistral mixtral olmo2 olmoe phi3 phimoe qwen2 qwen3 qwen3_moe seed_oss smollm3 youtu
""".split()

PACKAGED = {
    "llama": ("llama", {}), "llama, sequence parallel": ("llama", {"sp": True}), "gpt2": ("gpt2", {}),
    "bert": ("bert", {}), "t5": ("t5", {}), "mixtral": ("mixtral_stacked", {"tp": 1, "ep": 2}), "vit": ("vit", {}),
    "fsdp": ("llama", {}), "llama_2d": ("llama_tied", {"tp": 2}),
}  # fmt: skip


@contextmanager
def sent() -> Iterator[dict[int, Calls]]:
    """Note every collective with values that a rank of a simulated world posts, and its bytes."""
    calls: dict[int, Calls] = defaultdict(Counter)
    post = SimGroup._post

    def noting(group: SimGroup, name: str, text: str, signature: tuple[Any, ...], data: Any, *args: Any) -> Any:
        size, own = group.size, group.index
        if name == "all_reduce":
            elements, dtype = signature[1:]
            moved = [-(-2 * elements * dtype.itemsize * (size - 1) // size)] * 2
        elif name in ("all_gather", "reduce_scatter"):
            counts, dtype = signature
            moved = [n * dtype.itemsize for n in (counts[own] * (size - 1), sum(counts) - counts[own])]
            moved = moved if name == "all_gather" else moved[::-1]
        elif name == "all_to_all":
            moved = [(sum(counts) - counts[own]) * signature[0].itemsize for counts in data[1:]]
        else:
            moved = [-1, -1]  # no other collective belongs to a step
        if name not in ("exchange", "exchange_objects", "barrier"):
            calls[group.rank][name, size, *moved] += 1
        return post(group, name, text, signature, data, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimGroup, "_post", noting)
        yield calls


def ran(world: int, start: Callable[[], Callable[[], None]]) -> dict[int, Calls]:
    """The calls of each rank in its second step: the first makes some that later ones do not."""

    def steps() -> None:
        step = start()
        step()
        as_group().barrier()
        calls.pop(as_group().rank, None)
        step()

    with sent() as calls:
        simulate(world, steps)
    return calls


def tiny(kind: str, ranks: int) -> dict[str, Any]:
    """The smallest configuration of two layers that the code of a model accepts."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    default = transformers.models.auto.CONFIG_MAPPING[kind]().to_dict()
    keys = default | {"model_type": kind, "architectures": [names[kind]], "dtype": "bfloat16"}
    for small, _ in small_configs(keys, ranks):
        try:
            few = with_layers(small, keys["num_hidden_layers"], 2)
            transformers_model(few)
        except ValueError:
            continue
        return few
    raise AssertionError(f"no small {kind}")


def imported_plan(keys: dict[str, Any], world: int) -> Plan:
    module = transformers_model(keys)
    return st.plan_from_hf(dict(module.tp_plan), config=keys, world=world, model=model_info(module))


def loss(module: torch.nn.Module) -> torch.Tensor:
    return example_step(module, 0, 8)


CASES = [(kind, world) for i, kind in enumerate(sampled(KINDS, 22)) for world in ((2, 4) if FULL else (2 << i % 2,))]


@pytest.mark.parametrize(("kind", "world"), CASES)
def test_calls_of_an_architecture_are_those_that_its_ranks_make(kind, world):
    keys = tiny(kind, world)
    plan = imported_plan(keys, world)
    calls = ran(world, train(plan, lambda: transformers_model(keys, "cpu"), loss))
    last = world - 1
    assert calls[last]
    assert traced(plan, transformers_model(keys), loss, last) == calls[last]


@pytest.mark.parametrize("kind", ["bloom", "deepseek_v3", "falcon", "gpt_oss", "mamba"])
def test_calls_of_a_plan_for_an_architecture_are_those_that_its_ranks_make(kind):
    pytest.importorskip("transformers", reason="transformers is not installed")
    small = small_model(kind)
    keys = small.config.to_dict() | {"architectures": [type(small).__name__], "dtype": "bfloat16"}
    plan = load_plan(kind, config=keys, world=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_dispatch, "chosen", _in_turn)
        calls = ran(2, train(plan, lambda: transformers_model(keys, "cpu"), loss))
    assert calls[1]
    assert traced(plan, transformers_model(keys), loss, 1) == calls[1]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", PACKAGED)
def test_calls_of_a_plan_of_the_package_are_those_that_its_ranks_make(name, world):
    family, params = PACKAGED[name]
    plan = plan_for(name.partition(",")[0], family, world, **params)
    make, loss = FAMILIES[family].make, of_family(family, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixtral, "routed", _in_turn)  # as a trace counts: each expert is chosen equally often
        patch.setattr(expert_dispatch, "chosen", _in_turn)
        calls = ran(world, train(plan, make, loss))
    assert any(calls.values())
    for rank in range(world):
        assert traced(plan, make(), loss, rank) == calls[rank]


def checkpointing(plan: Plan, make: Callable[[], torch.nn.Module], loss: Callable[..., torch.Tensor]) -> Any:
    """A step of a sharded model with checkpointed layers."""
    module = st.shard_module(make(), plan)
    apply_activation_checkpointing(module, check_fn=lambda part: type(part).__name__.endswith("DecoderLayer"))

    def step() -> None:
        loss(module).backward()
        for param in module.parameters():
            param.grad = None

    return step


@pytest.mark.parametrize("name", ["llama", "llama, sequence parallel", "fsdp"])
def test_calls_of_checkpointed_layers_are_those_that_ranks_make(name):
    family, params = PACKAGED[name]
    plan = plan_for(name.partition(",")[0], family, 4, **params)
    make, loss = FAMILIES[family].make, of_family(family, 2)
    calls = ran(4, lambda: checkpointing(plan, make, loss))
    full, again = (trace_step(make(), plan, loss, checkpointed=pattern) for pattern in (None, ""))
    found: Calls = Counter()
    for each in again.collectives:
        found[each.kind, each.group_size, each.sent_bytes, each.received_bytes] += each.calls
    assert found == calls[0]
    assert 0 < again.recomputed_flops == again.flops - full.flops
    assert sum(size for _, size in again.kept) < again.activation_bytes < full.activation_bytes


def test_chosen_modules_are_checkpointed_and_nothing_of_a_module_stays():
    plan, make, loss = plan_for("llama", "llama", 2), FAMILIES["llama"].make, of_family("llama", 2)
    module = make()
    before = [set(vars(each)) for each in module.modules()]
    full, some, every = (trace_step(module, plan, loss, checkpointed=each) for each in (None, "**.mlp", ""))
    assert full.activation_bytes > some.activation_bytes
    assert 0 < some.recomputed_flops < every.recomputed_flops
    assert "model.layers.*.mlp.down_proj" in dict(full.kept) and "model.layers.*.mlp.down_proj" not in dict(some.kept)
    with pytest.raises(NotTraced, match=r"no module matches `\*\*.nothing`"):
        trace_step(module, plan, loss, checkpointed="**.nothing")
    assert before == [set(vars(each)) for each in module.modules()]


def test_flops_are_the_same_with_sequence_parallelism():
    """Without it large products of one input add to one gradient."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    keys = LLAMA_8B | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}
    plans = [load_plan("llama", config=keys, world=8, tp=8, sp=sp) for sp in (False, True)]
    steps = [trace_step(transformers_model(keys), plan, lambda m: example_step(m, 0, 2048)) for plan in plans]
    assert steps[0].flops == steps[1].flops


def test_products_of_groups_count_as_one_product():
    x, weight = (torch.empty(*shape, device="meta", requires_grad=True) for shape in ((6, 10), (3, 10, 7)))
    with FlopCounterMode(display=False) as counter, FusedKernels():
        y = torch.nn.functional.grouped_mm(x, weight, offs=torch.empty(3, dtype=torch.int32, device="meta"))
    assert (y.shape, counter.get_total_flops()) == ((6, 7), 2 * 6 * 10 * 7)


def test_attention_with_values_of_another_length_is_fused():
    q, v = (torch.empty(1, 2, 16, length, device="meta", requires_grad=True) for length in (24, 16))
    kept: list[int] = []
    with FusedKernels(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()), lambda _: q):
        y = torch.nn.functional.scaled_dot_product_attention(q, q, v, is_causal=True)
    assert y.shape == (1, 2, 16, 16)
    assert max(kept) == q.numel()
