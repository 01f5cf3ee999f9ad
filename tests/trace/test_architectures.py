"""Models of transformers of many architectures: three steps of training with an imported plan, or fully sharded, give
the parameters of the dense model."""

from __future__ import annotations

import pytest
import torch
from harness import FULL
from harness.architectures import ARCHITECTURES, off_after_three_steps, small_model

from shardtensor.trace.imported import imported_plan

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: more threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SOME = """
    llama mixtral qwen2_moe qwen3 gemma2 phi phi3 deepseek_v3 gpt_neox gpt2 opt bloom bert vit t5 whisper clip stablelm
    gpt_oss apertus
""".split()


@pytest.mark.parametrize("size", [2, 4] if FULL else [2])
@pytest.mark.parametrize("how", ["imported", "fsdp"])
@pytest.mark.parametrize("name", ARCHITECTURES if FULL else SOME)
@pytest.mark.worlds("sim")
def test_three_steps_are_those_of_the_dense_model(world, name, how, size):
    module = small_model(name)
    for off in world(
        off_after_three_steps, size, module=module, text="fsdp" if how == "fsdp" else imported_plan(module).text
    ):
        assert off < 1e-5, "some of their code computes in float32"
