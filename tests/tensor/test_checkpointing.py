"""``torch.distributed.checkpoint``: saved in any layout by any number of ranks, loaded in any other, bit for bit."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import FULL, SIZES, device
from test_reshard import specs
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.mesh import Mesh

DENSE = {
    "matrix": torch.arange(30.0).view(5, 6),
    "cube": torch.arange(24).view(3, 2, 4),
    "row": torch.arange(7, dtype=torch.bfloat16).view(1, 7),
    "nothing": torch.zeros(0, 3),
    "number": torch.tensor(3.5, dtype=torch.float64),
}


def on_grid(size: int) -> tuple[object, list[str]]:
    """A group of two axes where the world has them, and specs over both: grids, copies along one, flat after a cut."""
    if size % 2:
        return None, []
    group = as_group().on_mesh(Mesh((("dp", size // 2), ("tp", 2))), {})
    texts = ["[tp balanced, ...]", "[dp balanced, ...]", "flat(tp*dp)", "[tp balanced, ...] flat(dp)", "flat(dp)"]
    return group, [*texts, "[dp balanced, tp balanced, ...]", "[..., dp balanced] flat(tp)"]


def laid_out(size: int, name: str) -> list[st.ShardedTensor]:
    """A tensor of `DENSE` in every layout that it can have on the ranks of this world."""
    dense, found = DENSE[name].to(device()), []
    group, texts = on_grid(size)
    pairs = [(None, text) for text in specs(dense.dim(), size) if "partial" not in text]
    for where, text in pairs + [(group, text) for text in texts]:
        try:
            found.append(st.distribute(dense, text, process_group=where))
        except (st.LayoutError, st.SpecError):  # a dim that the tensor lacks, blocks that do not fit
            continue
    if dense.dim() == 2 and size > 1:
        rows, columns = dense.shape
        half = f'enum([0:{rows}, 0:2] @ "rank:1/cpu", [0:{rows}, 2:{columns}] @ "rank:0/cpu")'
        found.append(st.distribute(dense, half if dense.numel() else "replicate"))
    return found


def save(folder: str) -> int:
    size = as_group().size
    state = {f"{name}.{i}": x for name in DENSE for i, x in enumerate(laid_out(size, name))}
    dcp.save(state, checkpoint_id=folder)
    return len(state)


def load(folder: str, rounds: int) -> None:
    size = as_group().size
    choices = {name: laid_out(size, name) for name in DENSE}
    saved = {key: md.size for key, md in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items()}
    for turn in range(rounds):
        targets = {}
        for key in saved:
            name, _, number = key.partition(".")
            targets[key] = choices[name][(int(number) + turn) % len(choices[name])].clone().zero_()
        dcp.load(targets, checkpoint_id=folder)
        for key, x in targets.items():
            assert torch.equal(x.full_tensor(), DENSE[key.partition(".")[0]].to(device())), (key, x)
    whole = {key: torch.zeros_like(DENSE[key.partition(".")[0]]) for key in saved}
    dcp.load(whole, checkpoint_id=folder)
    for key, x in whole.items():
        assert torch.equal(x, DENSE[key.partition(".")[0]]), key


@pytest.mark.parametrize(("before", "after"), list(product(SIZES, SIZES)) if FULL else [(2, 3), (4, 2)])
def test_any_layout_to_any_other(world, tmp_path, before, after):
    folder = str(tmp_path / "saved")
    assert world(save, before, folder=folder)[0] > 20
    world(load, after, folder=folder, rounds=20 if FULL else 2)


def dense_and_dtensor(folder: str) -> None:
    size = as_group().size
    mesh = dist.init_device_mesh(device().type, (size,), mesh_dim_names=("tp",))
    dense = DENSE["matrix"].to(device())
    dtensor = distribute_tensor(dense, mesh, [Shard(1)])
    dcp.save({"dtensor": dtensor, "dense": dense, "ours": st.distribute(dense, "flat(tp)")}, checkpoint_id=folder)
    ours = {key: st.zeros("[tp balanced, -]", 5, 6) for key in ("dtensor", "dense")}
    dcp.load(ours, checkpoint_id=folder)
    assert torch.equal(ours["dtensor"].full_tensor(), dense) and torch.equal(ours["dense"].full_tensor(), dense)
    theirs = {"ours": distribute_tensor(torch.zeros_like(dense), mesh, [Replicate()])}
    dcp.load(theirs, checkpoint_id=folder)
    assert torch.equal(theirs["ours"].full_tensor(), dense)


def test_files_are_those_of_plain_tensors_and_dtensors(world, tmp_path):
    world(dense_and_dtensor, 3, folder=str(tmp_path))


def written_once(folder: str) -> list[int]:
    group, texts = on_grid(as_group().size)
    state = {text: st.distribute(DENSE["matrix"].to(device()), text, process_group=group) for text in texts}
    state["replicate"] = st.distribute(DENSE["matrix"].to(device()), "replicate")
    found = dcp.save(state, checkpoint_id=folder).state_dict_metadata
    return [sum(math.prod(chunk.sizes) for chunk in md.chunks) for md in found.values()]


def test_copies_are_written_by_one_rank(world, tmp_path):
    assert world(written_once, 4, folder=str(tmp_path))[0] == [30] * 8


def refused(folder: str) -> list[str]:
    partials = st.reshard(st.zeros("replicate", 4, 6), "replicate partial(tp)")
    dcp.save({"w": torch.zeros(4, 6)}, checkpoint_id=folder)
    texts = []
    for act, tensor in ((dcp.save, partials), (dcp.load, partials), (dcp.load, st.zeros("[tp]", 4))):
        with pytest.raises(CheckpointException) as caught:
            act({"w": tensor}, checkpoint_id=folder + ("/other" if act is dcp.save else ""))
        texts.append("\n".join(str(error) for error, _ in caught.value.failures.values()))
    return texts


def test_what_cannot_be_saved_or_loaded_raises_on_every_rank(world, tmp_path):
    first, *others = world(refused, 2, folder=str(tmp_path))
    assert others == [first]
    partials, loaded, shape = first
    assert partials.startswith("a checkpoint takes no tensor that is still to be reduced\n  tensor  w\n  spec ")
    assert partials.splitlines()[3].startswith("  fix     reduce it first")
    assert loaded.startswith("a checkpoint takes no tensor that is still to be reduced")
    assert "Size mismatch" in shape
