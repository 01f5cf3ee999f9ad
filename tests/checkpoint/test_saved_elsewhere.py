"""Checkpoints and what others make: DTensors, folders of Hugging Face; some of the ranks; the memory of a load."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import device
from safetensors.torch import load_file, save_file
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trained import COLUMNS, ROWS, Net, adamw, assert_same, map_whole, save_columns, step, values

import shardtensor as st
from shardtensor.comm.process_group import as_group

sim = pytest.mark.worlds("sim")


# -- DTensors and groups -----------------------------------------------------------------------------------------------


def of_torch(seed: int) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = Net(seed)
    mesh = dist.init_device_mesh(device().type, (as_group().size,))
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh, ignored_params={model.scale})  # it does not take scalars


def with_dtensors(path: str, layout: str) -> None:
    model = of_torch(0)
    optimizer = optim.AdamW(model.parameters(), lr=0.25)
    step(model, optimizer, 0)
    st.save(path, model=model, optimizer=optimizer, layout=layout)
    fresh, ours = of_torch(5), st.shard_module(Net(6), COLUMNS)
    for each, its in ((fresh, optim.AdamW(fresh.parameters(), lr=0.5)), (ours, adamw(ours))):
        st.load(path, model=each, optimizer=its)
        assert_same(values(each, its), values(model, optimizer))
    st.save(path, model=ours, layout=layout)
    again = of_torch(7)
    st.load(path, model=again)
    assert_same(map_whole(again), map_whole(ours))


@pytest.mark.parametrize("layout", ["whole", "as is"])
def test_models_of_dtensors(world, tmp_path, layout):
    world(with_dtensors, 2, path=str(tmp_path / "c"), layout=layout)


def on_some_ranks(path: str, ranks: tuple[int, ...], layout: str) -> None:
    group = as_group().subgroup(ranks)
    if group.index < 0:
        return
    model = st.shard_module(Net(), COLUMNS, process_group=group)
    optimizer = adamw(model)
    step(model, optimizer, 0)
    st.save(path, model=model, optimizer=optimizer, layout=layout, process_group=group)
    fresh = st.shard_module(Net(4), ROWS, process_group=group)
    its = adamw(fresh)
    st.load(path, model=fresh, optimizer=its, process_group=group)
    assert_same(values(fresh, its), values(model, optimizer))


def then_alone(path: str) -> None:
    model = Net(4)
    optimizer = optim.AdamW(model.parameters())
    st.load(path, model=model, optimizer=optimizer)
    want, its = Net(), None
    its = optim.AdamW(want.parameters(), lr=0.25)
    step(want, its, 0)
    assert_same(values(model, optimizer), values(want, its))


@sim
@pytest.mark.parametrize("layout", ["whole", "as is"])
@pytest.mark.parametrize("ranks", [(0, 1), (1, 2), (0, 3)])
def test_some_of_the_ranks_save_and_load(world, tmp_path, ranks, layout):
    path = str(tmp_path / "c")
    world(on_some_ranks, 4, path=path, ranks=ranks, layout=layout)
    world(then_alone, 1, path=path)


# -- Hugging Face ------------------------------------------------------------------------------------------------------


def load_sharded(path: str, want: dict[str, torch.Tensor]) -> None:
    for make in (lambda: st.shard_module(Net(3), COLUMNS), lambda: st.fully_shard(Net(4)), lambda: Net(5)):
        model = make()
        st.load(path, model=model)
        assert_same(map_whole(model), want)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in Net(1).state_dict().items()}


@sim
@pytest.mark.parametrize("files", [1, 2])
def test_a_folder_of_hugging_face(world, tmp_path, weights, files):
    names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    names = names if files > 1 else ["model.safetensors"]
    for i, name in enumerate(names):
        save_file(dict(list(weights.items())[i::files]), tmp_path / name, {"format": "pt"})
    if files > 1:
        where = {key: names[i % files] for i, key in enumerate(weights)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
        save_file({"other": torch.ones(1)}, tmp_path / "consolidated.safetensors")  # the index does not name it
    world(load_sharded, 3, path=str(tmp_path), want=weights)


@sim
@pytest.mark.parametrize("name", ["weights.safetensors", "model.safetensors"])
def test_one_file_of_safetensors(world, tmp_path, weights, name):
    save_file(weights, tmp_path / name)
    world(load_sharded, 2, path=str(tmp_path / name), want=weights)


def test_others_read_what_is_saved(world, tmp_path):
    """Whole files: `safetensors` loads them as they are, and the names are those of the model."""
    path = tmp_path / "c"
    want = world(save_columns, 3, path=str(path))[0]
    found: dict[str, torch.Tensor] = {}
    files = sorted(Path(path).glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{i + 1:05d}-of-00003.safetensors" for i in range(3)]
    for file in files:
        found |= load_file(file)
    assert_same(found, {name: x for name, x in want.items() if "/" not in name})


# -- memory ------------------------------------------------------------------------------------------------------------


class Allocated(TorchDispatchMode):
    """Follows the memory of new tensors that are alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self._add(result.untyped_storage().nbytes())
            weakref.finalize(result, self._add, -result.untyped_storage().nbytes())
        return result

    def _add(self, count: int) -> None:
        self.now += count
        self.peak = max(self.peak, self.now)


def memory_of_a_load(path: str, with_optimizer: bool) -> int:
    model = st.shard_module(nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 512)), {"*.weight": "[tp, -]"})
    optimizer = adamw(model) if with_optimizer else None
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    if optimizer is not None:
        optimizer.step()
    st.save(path, model=model, optimizer=optimizer)
    with Allocated() as allocated:
        st.load(path, model=model, optimizer=optimizer)
    return allocated.peak


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_a_load_allocates_the_new_state_and_no_more(world, tmp_path, with_optimizer):
    """Of 12 MiB in the model a rank holds half; AdamW has twice that. A rank never holds all of a tensor, and
    compares fingerprints in pieces of 4 MiB."""
    found = world(memory_of_a_load, 2, path=str(tmp_path / "c"), with_optimizer=with_optimizer)
    assert max(found) < (12 << 20) * with_optimizer + (5 << 20), found
