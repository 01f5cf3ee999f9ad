"""``torch.distributed.checkpoint`` of models and their optimizers: saved by one world in one way, loaded by another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import device
from torch import nn
from torch.distributed.checkpoint import state_dict as of_torch
from twins import ids_of, loss_of, net, shard

import shardtensor as st

WAYS = ("plain", "tp", "fsdp", "rows")


def made(way: str, seed: int = 0) -> Any:
    model = net(seed)
    if way == "tp":
        st.shard_module(model, {"blocks.*.up": "[tp balanced, ...]", "**.{down,head}.weight": "[-, tp balanced]"})
    elif way != "plain":
        shard(model, shard_placement_fn=(lambda p: "flat(dp, unit=row)") if way == "rows" else None)
    return model


def stepped(model: nn.Module, steps: int = 2, *, plain_batch: bool) -> Any:
    """Train on the whole batch; fully sharded models take this rank's part."""
    optimizer = st.ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
    for step in range(steps):
        whole, part = ids_of(step)
        loss_of(model(whole if plain_batch else part)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def is_fully(way: str) -> bool:
    return way in ("fsdp", "rows")


def everything(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": st.optim_state_dict(model, optimizer)}


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return value.full_tensor() if isinstance(value, st.ShardedTensor) else value


def versions(model: nn.Module) -> list[int]:
    return [p._version for p in model.parameters() if getattr(p, "_local", p).numel()]


def save(folder: str, way: str) -> Any:
    model = made(way)
    optimizer = stepped(model, plain_batch=not is_fully(way))
    state = everything(model, optimizer)
    dcp.save(state, checkpoint_id=folder)
    return whole(state)


def load(folder: str, way: str) -> Any:
    model = made(way, seed=1)
    optimizer = stepped(model, 1, plain_batch=not is_fully(way))  # has state to load into, and gathered copies
    with torch.no_grad():
        model(torch.arange(7, device=device()))  # units stay gathered after it
    state, before = everything(model, optimizer), versions(model)
    dcp.load(state, checkpoint_id=folder)
    if is_fully(way):  # it was written in place, which the next forward has to notice
        assert all(new > old for old, new in zip(before, versions(model), strict=True))
    else:
        model.load_state_dict(state["model"])
    optimizer.load_state_dict(st.optim_state_dict_to_load(model, optimizer, state["optim"]))
    with torch.no_grad():
        output = model(torch.arange(7, device=device()))
    output = output.full_tensor() if isinstance(output, st.ShardedTensor) else output
    return whole(everything(model, optimizer)), output


@pytest.mark.parametrize("way", WAYS)
def test_saved_in_one_way_and_loaded_in_all_others(world, tmp_path, way):
    saved = world(save, 2, folder=str(tmp_path), way=way)[0]
    dense = made("plain")
    dense.load_state_dict(saved["model"])
    with torch.no_grad():
        want = dense(torch.arange(7, device=device()))
    for size, other in zip((3, 4, 3, 1), WAYS, strict=True):
        for found, output in world(load, size, folder=str(tmp_path), way=other):
            assert_same(found, saved)
            assert torch.equal(output, want) if other != "tp" else torch.allclose(output, want)


def by_torch(folder: str, way: str, *, is_saved: bool) -> Any:
    """The same through torch's own functions for state dicts, with an optimizer of torch's."""
    model = made(way, seed=int(not is_saved))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    whole_batch, part = ids_of(0)
    loss_of(model(part if is_fully(way) else whole_batch)).backward()
    optimizer.step()
    state = {
        "model": of_torch.get_model_state_dict(model),
        "optim": of_torch.get_optimizer_state_dict(model, optimizer),
    }
    if is_saved:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        of_torch.set_model_state_dict(model, state["model"])
        of_torch.set_optimizer_state_dict(model, optimizer, state["optim"])
    return whole(everything(model, optimizer))


@pytest.mark.parametrize("way", ["tp", "fsdp"])
def test_through_the_state_dicts_of_torch(world, tmp_path, way):
    saved = world(by_torch, 2, folder=str(tmp_path), way=way, is_saved=True)[0]
    for other in WAYS:
        for found in world(by_torch, 3, folder=str(tmp_path), way=other, is_saved=False):
            assert_same(found, saved)


def assert_same(found: Any, want: Any, where: str = "") -> None:
    if isinstance(want, dict):
        assert found.keys() == want.keys(), where
        for key in want:
            assert_same(found[key], want[key], f"{where}.{key}")
    elif isinstance(want, torch.Tensor):
        assert torch.equal(found, want), where
    else:
        assert found == want or where.endswith("param_groups"), where
