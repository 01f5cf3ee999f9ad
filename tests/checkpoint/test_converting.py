"""A checkpoint that is converted holds the values of the one it was made from: to every kind, and back, bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import weakref
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import device
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import shardtensor as st
from shardtensor.checkpoint import converting
from shardtensor.checkpoint.converting import convert
from shardtensor.comm.process_group import as_group

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PLAN = {"embed": "[tp balanced, -]", "mix": "[tp balanced, ...]"}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    """A tied vocabulary, a buffer without dims, values of several dtypes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(6, 5)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.coarse = nn.Parameter(torch.rand(3, 4, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(seed))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.mix(self.embed(ids)).sum() + self.coarse.float().square().sum()


def made(seed: int, kind: str = "AdamW", steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(seed)
    decay = [p for name, p in model.named_parameters() if "bias" not in name]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": [model.mix.bias], "lr": 0.5}]
    optimizer = getattr(torch.optim, kind)(groups, lr=0.1, **({"momentum": 0.9} if kind == "SGD" else {}))
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.arange(i, i + 5)).backward()
        optimizer.step()
    return model, optimizer


def named() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = made(0)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    model(torch.arange(5)).backward()
    optimizer.step()
    return model, optimizer


def assert_same(found: Any, want: Any) -> None:
    if isinstance(want, dict | list | tuple):
        keys = want if isinstance(want, dict) else range(len(want))
        assert len(found) == len(want)
        for key in keys:
            assert_same(found[key], want[key])
    elif isinstance(want, torch.Tensor):
        assert found.dtype == want.dtype and torch.equal(found, want)
    else:
        assert found == want


def loads_as(path: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None, kind: str = "AdamW") -> Any:
    """The ``extra`` of a checkpoint, which has the values of a model and of an optimizer."""
    fresh, its = made(1, kind, steps=1)
    extra = st.load(path, model=fresh, optimizer=its if optimizer is not None else None)
    assert_same(fresh.state_dict(), model.state_dict())
    if optimizer is not None:
        assert_same(its.state_dict(), optimizer.state_dict())
    return extra


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Adafactor", "RMSprop"])
def test_there_and_back_through_torch_distributed_checkpoint(tmp_path, kind):
    model, optimizer = made(0, kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    extra = {"loss": 0.5, "seen": torch.arange(4), "names": ["a", "b"]}
    st.save(tmp_path / "a", model=model, optimizer=optimizer, scheduler=scheduler, extra=extra, step=7)
    first = convert(tmp_path / "a", tmp_path / "b", "dcp")
    back = convert(tmp_path / "b", tmp_path / "c", "shardtensor", trust=True)
    assert (first.source, first.target, back.source) == ("shardtensor", "dcp", "dcp")
    assert first.parts == back.parts == ("model", "optimizer", "scheduler", "extra")
    assert_same(loads_as(tmp_path / "c", model, optimizer, kind), extra)
    assert st.inspect(tmp_path / "c").step == 7
    fresh = torch.optim.lr_scheduler.StepLR(made(1, kind)[1], 3)
    st.load(tmp_path / "c", scheduler=fresh)
    assert fresh.state_dict() == scheduler.state_dict()


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_what_get_state_dict_gives_is_read_and_written(tmp_path, flat):
    """Saved through torch's functions and loaded by ours; saved by ours and loaded through torch's functions."""
    options = FLAT if flat else StateDictOptions()
    model, optimizer = made(0)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
        "step": 3,
    }
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    convert(tmp_path / "theirs", tmp_path / "ours", "shardtensor", trust=True)
    loads_as(tmp_path / "ours", model, optimizer)
    assert st.inspect(tmp_path / "ours").step == 3

    convert(tmp_path / "ours", tmp_path / "back", "dcp")
    fresh, its = made(1)
    given = {
        "model": get_model_state_dict(fresh),
        "optim": get_optimizer_state_dict(fresh, its, options=options),
    }
    dcp.load(given, checkpoint_id=tmp_path / "back", no_dist=True)
    set_optimizer_state_dict(fresh, its, given["optim"], options=options)
    assert_same(fresh.state_dict(), model.state_dict())
    assert_same(its.state_dict(), optimizer.state_dict())


def saved_by_ranks(folder: str) -> Any:
    model, _ = made(0, steps=0)
    st.shard_module(model.to(device()), PLAN)
    optimizer = st.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    value = model(torch.arange(5, device=device()))
    (value.full_tensor() if isinstance(value, st.ShardedTensor) else value).backward()
    optimizer.step()
    st.save(f"{folder}/ours", model=model, optimizer=optimizer, layout="as is")
    state = {"model": model.state_dict(), "optim": st.optim_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/theirs")
    return st.full_state_dict(model, cpu_offload=True), st.full_state_dict(state["optim"]["state"], cpu_offload=True)


@pytest.mark.parametrize("source", ["ours", "theirs"])
@pytest.mark.filterwarnings("ignore::shardtensor.GatherWarning")
def test_what_many_ranks_saved_is_converted_in_one_process(world, tmp_path, source):
    want, state = world(saved_by_ranks, 3, folder=str(tmp_path))[0]
    convert(tmp_path / source, tmp_path / "once", "shardtensor", trust=True)
    convert(tmp_path / source, tmp_path / "dcp", "dcp", trust=True)
    convert(tmp_path / "dcp", tmp_path / "twice", "shardtensor", trust=True)
    for name in ("once", "twice"):
        model, _ = made(1, steps=0)
        optimizer = st.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
        st.load(tmp_path / name, model=model, optimizer=optimizer)
        assert_same(dict(model.state_dict()), want)
        assert_same(st.optim_state_dict(model, optimizer)["state"], state)


def loaded_by_ranks(folder: str) -> None:
    model, _ = made(1, steps=0)
    st.shard_module(model, PLAN)
    optimizer = st.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    st.load(folder, model=model, optimizer=optimizer)
    want, its = named()
    assert_same({k: v.cpu() for k, v in st.full_state_dict(model).items()}, dict(want.state_dict()))
    assert_same(
        st.optim_state_dict(model, optimizer, full=True)["state"], st.optim_state_dict(want, its, full=True)["state"]
    )
    assert as_group().size == 4


def test_a_converted_checkpoint_loads_into_any_layout(tmp_path):
    model, optimizer = named()
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "ours", "shardtensor", trust=True)
    st.simulate(4, loaded_by_ranks, str(tmp_path / "ours"))


@pytest.mark.parametrize("to", ["hf", "torch"])
def test_the_model_alone(tmp_path, to):
    model, optimizer = made(0)
    st.save(tmp_path / "a", model=model, optimizer=optimizer, extra={"epoch": 1})
    done = convert(tmp_path / "a", tmp_path / "b", to)
    assert done.parts == ("model",)
    assert done.left_out[1:] == ("optimizer", "extra")
    if to == "torch":
        found = torch.load(tmp_path / "b", weights_only=True)
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr(), "they are tied"
        assert_same(found, dict(model.state_dict()))
    else:
        found = load_file(tmp_path / "b" / "model.safetensors")
        assert_same(found, {name: x for name, x in model.state_dict().items() if name != "head.weight"})
        assert os.listdir(tmp_path / "b") == ["model.safetensors"]
    convert(tmp_path / "b", tmp_path / "c", "shardtensor")
    loads_as(tmp_path / "c", model, None)


@pytest.mark.parametrize("keys", [("model", "optimizer"), ("model_state_dict", "optimizer_state_dict")])
@pytest.mark.parametrize("mapped", [True, False])
def test_files_of_torch_save(tmp_path, keys, mapped):
    """With the state of an optimizer that has names; the others are left out, and said so."""
    model, optimizer = named()
    numbered = made(0)[1].state_dict()
    state = {keys[0]: model.state_dict(), keys[1]: optimizer.state_dict(), "epoch": 3, "optim.other": numbered}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=mapped)
    done = convert(tmp_path / "a.pt", tmp_path / "b", "shardtensor")
    assert done.left_out == ("optim.other: its state is by number, and nothing says which parameter has which",)
    fresh = Net(1)
    its = torch.optim.AdamW(fresh.named_parameters(), lr=0.5)
    assert st.load(tmp_path / "b", model=fresh, optimizer=its) == {"epoch": 3}
    assert_same(fresh.state_dict(), model.state_dict())
    assert_same(its.state_dict(), optimizer.state_dict())


def test_names_do_not_depend_on_wrappers(tmp_path):
    model, _ = made(0)
    wrapped = {f"module._orig_mod.{name}": x for name, x in model.state_dict().items()}
    torch.save(wrapped, tmp_path / "a.pt")
    dcp.save({"app": {"model": wrapped}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for i, name in enumerate(("a.pt", "dcp")):
        convert(tmp_path / name, tmp_path / str(i), "shardtensor", trust=True)
        loads_as(tmp_path / str(i), model, None)


def test_several_files_of_pickled_weights(tmp_path):
    """As Hugging Face wrote them before safetensors; their names may begin with ``model.``"""
    model, _ = made(0)
    state = {f"model.{name}": x for name, x in model.state_dict().items() if name != "head.weight"}
    (tmp_path / "a").mkdir()
    for i, (name, value) in enumerate(state.items()):
        torch.save({name: value}, tmp_path / "a" / f"pytorch_model-{i + 1:05d}-of-00005.bin")
    (tmp_path / "a" / "config.json").write_text("{}")
    convert(tmp_path / "a", tmp_path / "b", "hf")
    assert_same(load_file(tmp_path / "b" / "model.safetensors"), state)
    assert (tmp_path / "b" / "config.json").read_text() == "{}"


@pytest.mark.parametrize("to", ["hf", "shardtensor"])
def test_large_models_become_several_files_with_an_index(tmp_path, monkeypatch, to):
    model, optimizer = made(0)
    st.save(tmp_path / "a", model=model, optimizer=optimizer)
    monkeypatch.setattr(converting, "FILE_BYTES", 200)
    convert(tmp_path / "a", tmp_path / "b", to)
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 2
    for name, file in index["weight_map"].items():
        assert_same(load_file(tmp_path / "b" / file)[name], model.state_dict()[name])
    loads_as(tmp_path / "b", model, optimizer if to == "shardtensor" else None)


def test_several_models_and_optimizers(tmp_path):
    models = {"gen": made(0)[0], "judge": made(1)[0]}
    optimizers = {key: torch.optim.SGD(each.parameters(), lr=0.1) for key, each in models.items()}
    st.save(tmp_path / "a", model=models, optimizer=optimizers)
    convert(tmp_path / "a", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "b", "shardtensor", trust=True)
    convert(tmp_path / "a", tmp_path / "c.pt", "torch")
    fresh = {"gen": Net(5), "judge": Net(6)}
    its = {key: torch.optim.SGD(each.parameters(), lr=0.5) for key, each in fresh.items()}
    st.load(tmp_path / "b", model=fresh, optimizer=its)
    for key, each in models.items():
        assert_same(fresh[key].state_dict(), each.state_dict())
        assert its[key].param_groups[0]["lr"] == 0.1
        assert_same(torch.load(tmp_path / "c.pt")[key], dict(each.state_dict()))


def test_few_tensors_are_in_memory_at_a_time(tmp_path, monkeypatch):
    """However large a checkpoint is: those of the file that is written, and of the next one."""
    model, optimizer = made(0)
    st.save(tmp_path / "a", model=model, optimizer=optimizer)
    largest = max(x.bytes for x in st.inspect(tmp_path / "a").tensors)
    monkeypatch.setattr(converting, "FILE_BYTES", largest)
    known: list[Any] = []
    most: list[int] = []
    opened = converting.open_source

    def watched(*args: Any, **options: Any) -> Any:
        found = opened(*args, **options)

        def read(names: Any) -> Any:
            tensors = found.read(names)
            known.extend(map(weakref.ref, tensors.values()))
            most.append(sum(x.nbytes for x in (each() for each in known) if x is not None))
            return tensors

        return attrs.evolve(found, read=read)

    monkeypatch.setattr(converting, "open_source", watched)
    for source, target, to in (("a", "dcp", "dcp"), ("dcp", "b", "shardtensor"), ("dcp", "c", "hf")):
        known.clear(), most.clear()
        done = convert(tmp_path / source, tmp_path / target, to, trust=True)
        numbers = 4 * 4  # ``step`` of each parameter
        assert max(most) <= 2 * largest + numbers < done.bytes


def test_the_target_is_complete_or_absent(tmp_path):
    model, _ = made(0)
    st.save(tmp_path / "a", model=model)
    [file] = Path(tmp_path, "a").glob("model*")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for to in ("shardtensor", "dcp", "hf", "torch"):
        with pytest.raises(st.CheckpointError, match=r"damaged|not those that were saved"):
            convert(tmp_path / "a", tmp_path / "b", to)
        assert os.listdir(tmp_path) == ["a"]


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_of_a_pickle_is_run(tmp_path):
    runs = Runs(tmp_path / "it was run")
    torch.save({"w": torch.ones(2), "evil": runs}, tmp_path / "a.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(runs))
    with pytest.raises(st.CheckpointError, match="holds more than tensors and plain values; nothing was run"):
        convert(tmp_path / "a.pt", tmp_path / "b", "hf", trust=True)
    with pytest.raises(st.CheckpointError, match=r"is a pickle(.|\n)*--trust"):
        convert(tmp_path / "dcp", tmp_path / "b", "hf")
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "dcp"]


@pytest.mark.parametrize("key", ["model...", "model.../../out", "model./tmp"])
@pytest.mark.parametrize("to", ["hf", "shardtensor"])
def test_nothing_is_written_outside_of_the_target(tmp_path, key, to):
    torch.save({key: {"w": torch.ones(2)}}, tmp_path / "a.pt")
    with pytest.raises(st.CheckpointError, match="a name that no folder can have"):
        convert(tmp_path / "a.pt", tmp_path / "in" / "b", to)
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_what_safetensors_does_not_hold(tmp_path):
    odd = {"x": torch.ones(2, dtype=torch.complex128), "y": torch.ones(2)}
    torch.save(odd, tmp_path / "a.pt")
    with pytest.raises(st.CheckpointError, match="no tensor of this dtype"):
        convert(tmp_path / "a.pt", tmp_path / "b", "hf")
    convert(tmp_path / "a.pt", tmp_path / "own", "shardtensor")
    convert(tmp_path / "own", tmp_path / "b.pt", "torch")
    assert_same(torch.load(tmp_path / "b.pt"), odd)


def test_damage_of_a_source_is_told(tmp_path):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    [file] = (tmp_path / "dcp").glob("*.distcp")
    file.write_bytes(b"")
    with pytest.raises(st.CheckpointError, match="cannot do it"):
        convert(tmp_path / "dcp", tmp_path / "b", "hf", trust=True)
    (tmp_path / "dcp" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(st.CheckpointError, match="cannot be read"):
        convert(tmp_path / "dcp", tmp_path / "b", "hf", trust=True)
    (tmp_path / "list.pt").write_bytes(b"no pickle")
    with pytest.raises(st.CheckpointError, match="is no file of"):
        convert(tmp_path / "list.pt", tmp_path / "b", "hf")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(st.CheckpointError, match="the file holds no dict"):
        convert(tmp_path / "list.pt", tmp_path / "b", "hf")
    assert not (tmp_path / "b").exists()


def test_a_folder_of_safetensors_is_a_source(tmp_path):
    model, _ = made(0)
    state = {name: x for name, x in model.state_dict().items() if name != "head.weight"}
    (tmp_path / "a").mkdir()
    save_file(state, tmp_path / "a" / "model.safetensors")
    convert(tmp_path / "a", tmp_path / "dcp", "dcp")
    found = {"model": {name: torch.zeros_like(x) for name, x in state.items()}}
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same(found["model"], state)
