"""What the README shows is true: its programs run, its texts mean specs, its error is the one that is raised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from harness import device, every_size

import shardtensor
from shardtensor.cli.main import _parser
from shardtensor.rules.table import ROWS
from shardtensor.tensor.dispatch import HANDLERS

README = (Path(__file__).parent.parent / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
MLP, TENSORS, LAYOUTS, WORLD, OPERATIONS, MODULES, FLOWS, LAYER, SHARDED, PLANS, ZERO, SAVED = PROGRAMS


def _run(program: str) -> dict:
    names: dict = {}
    with torch.device(device()):
        exec(program, names)
    return names


def _loss(*dropped: str) -> float:
    """The last loss of the first program, without the lines that begin so; the harness has made the world already."""
    lines = [line for line in MLP.splitlines() if not line.startswith(("dist.init_process_group", "print", *dropped))]
    return _run("\n".join(lines))["loss"].item()


def sharded_loss() -> float:
    return _loss()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_mlp_has_the_loss_of_the_dense_model_on_every_rank(world, size):
    dense = _loss("shard_parameter")
    for loss in world(sharded_loss, size):
        assert loss == pytest.approx(dense, rel=1e-4)


def tensors() -> tuple:
    torch.manual_seed(5)
    dense = torch.rand(8, 6, device=device())
    torch.manual_seed(5)
    names = _run(TENSORS)
    w, y = names["w"], names["y"]
    assert torch.equal(w.full_tensor(), dense)
    want = (dense * 2 + 1).softmax(-1) @ torch.ones(6, 3, device=device())
    assert torch.allclose(y.full_tensor() if isinstance(y, shardtensor.ShardedTensor) else y, want)
    assert type(y.sum()) is torch.Tensor
    return tuple(w.shape), tuple(w.local_tensor().shape)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_tensors_are_what_the_comments_say(world, size):
    assert world(tensors, size) == [((8, 6), (8 // size, 6))] * size


def layouts() -> None:
    names = _run(LAYOUTS)
    x, y, dense = names["x"], names["y"], torch.arange(24.0, device=device()).view(4, 6)
    assert torch.equal(x.full_tensor(), dense)
    assert torch.equal(y.full_tensor(), dense)
    assert [str(t.sharding_spec()) for t in (x, y)] == ["flat(tp)", "[-, tp balanced]"]


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [1, 3])
def test_a_reshard_moves_and_its_steps_are_those_shown(world, size, capsys):
    world(layouts, size)
    shown = "\n".join(line[2:] for line in LAYOUTS.splitlines() if line.startswith("# "))
    assert capsys.readouterr().out == f"{shown}\n" * size


def test_a_world_in_one_process(capsys):
    names = _run(WORLD)
    assert [tuple(shape) for shape in names["shapes"]] == [(2, 6)] * 4
    assert "all_gather" in capsys.readouterr().out


def operations() -> None:
    torch.manual_seed(5)
    dense = torch.rand(6, 8, device=device())
    torch.manual_seed(5)
    names = _run(OPERATIONS)
    x = torch.ones(3, 8, device=device())
    assert torch.allclose(names["y"], x @ dense.t())
    assert names["a"].sharding_spec() == names["keys"].sharding_spec()
    assert torch.allclose(names["a"].full_tensor(), torch.special.airy_ai(dense))


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_operation_of_ones_own_gives_the_dense_result(world, size):
    kept = dict(HANDLERS), dict(ROWS)
    try:
        world(operations, size)
    finally:
        HANDLERS.clear(), ROWS.clear()
        HANDLERS.update(kept[0])
        ROWS.update(kept[1])


def fully_sharded() -> tuple[str, float]:
    torch.manual_seed(0)
    names = _run(SHARDED.replace("print(", "shown = ("))
    return str(names["shown"].sharding_spec()), names["loss"].item()


@pytest.mark.parametrize("size", [1, 2])
def test_a_fully_sharded_model_has_the_loss_of_the_model(world, size):
    torch.manual_seed(0)
    dense = _run(
        SHARDED.replace("    fully_shard(", "    str(")
        .replace("\nfully_shard(", "\nstr(")
        .replace(", mp_policy=policy", "")
    )
    for spec, loss in world(fully_sharded, size):
        assert spec.startswith("flat(dp, sizes=(")
        assert loss == pytest.approx(dense["loss"].item(), rel=0.02)  # of products in bfloat16


def partitioned() -> list:
    torch.manual_seed(0)
    names = _run(ZERO)
    names["optimizer"].wait()
    return [param.detach().tolist() for param in names["model"].parameters()]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_partitioned_optimizer_steps_as_the_plain_one(world, size):
    torch.manual_seed(0)
    lines = [line for line in ZERO.splitlines() if not line.strip().startswith(("overlap_gradients", "module="))]
    program = "\n".join(lines).replace("ZeroRedundancyOptimizer(", "torch.optim.AdamW(")
    dense = _run(program.replace("torch.optim.AdamW, lr", "lr"))
    for found in world(partitioned, size):
        for param, want in zip(found, dense["model"].parameters(), strict=True):
            assert torch.allclose(torch.tensor(param), want, atol=1e-5)


def whole_modules() -> tuple:
    torch.manual_seed(0)
    names = _run(MODULES)
    assert not any(isinstance(param, shardtensor.ShardedTensor) for param in names["mlp"].parameters())
    return names["y"].detach().tolist(), names["mlp"](torch.ones(3, 8)).detach().tolist()


@every_size
def test_a_module_sharded_by_rules_gives_the_dense_result(world, size):
    for sharded, dense in world(whole_modules, size):
        torch.testing.assert_close(torch.tensor(sharded), torch.tensor(dense))


def with_flows() -> None:
    torch.manual_seed(0)
    names = _run(FLOWS)
    model, ids = names["model"], names["ids"]
    found = {name: _whole(param.grad) for name, param in model.named_parameters()}
    dense = shardtensor.unshard_module(model)
    dense.zero_grad()
    loss = torch.nn.functional.cross_entropy(dense(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    torch.testing.assert_close(names["loss"], loss)
    torch.testing.assert_close(found, {name: param.grad for name, param in dense.named_parameters()})


def _whole(x):
    return x.full_tensor() if isinstance(x, shardtensor.ShardedTensor) else x


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_module_with_flows_has_the_dense_loss_and_gradients(world, size):
    world(with_flows, size)


def of_ones_own() -> None:
    names = _run(LAYER)
    torch.manual_seed(0)
    down, up = (torch.empty(*shape, device=device()).normal_(std=0.1) for shape in ((20, 8), (8, 20)))
    down, up = down.requires_grad_(), up.requires_grad_()
    x = torch.ones(3, 8, device=device())
    y = x + torch.relu(x @ down.t()) @ up.t()
    y.square().sum().backward()
    torch.testing.assert_close(names["y"], y)
    torch.testing.assert_close(_whole(names["adapter"].down.grad), down.grad)
    torch.testing.assert_close(_whole(names["adapter"].up.grad), up.grad)


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [1, 3])
def test_a_layer_of_ones_own_is_short_and_gives_the_dense_result(world, size):
    assert len(LAYER.split("torch.manual_seed")[0].splitlines()) < 30
    world(of_ones_own, size)


def _table(heading: str) -> list[str]:
    rows = README.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0]
    return [cell for row in rows.splitlines()[2:] for cell in re.findall("`([^`]+)`", row.split("|")[1])]


def planned() -> None:
    torch.manual_seed(0)
    names = _run(PLANS)
    dense = shardtensor.unshard_module(names["model"])
    x = torch.ones(2, 64, device=device())
    torch.testing.assert_close(names["y"], dense(x))
    assert names["same"].axes == names["plan"].axes


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_module_sharded_by_a_plan_gives_the_dense_result(world, size):
    world(planned, size)


@pytest.mark.parametrize("text", _table("text"))
def test_every_text_of_the_table_is_a_spec(text):
    spec = shardtensor.parse_spec(text)
    assert shardtensor.parse_spec(str(spec)) == spec


def test_the_error_shown_is_the_error_raised():
    (shown,) = re.findall(r"```text\n(<spec>.*?)\n```", README, re.DOTALL)
    with pytest.raises(shardtensor.SpecError) as caught:
        shardtensor.parse_spec("[tp unti(128), -]")
    assert str(caught.value) == shown
    assert shardtensor.parse_spec("[tp, -]") == shardtensor.Spec("tp", None)


@pytest.mark.parametrize("line", sorted(set(re.findall(r"`(from shardtensor[^`.]* import [^`]+)`", README))))
def test_every_import_line_works(line):
    exec(line)


def test_code_for_torchs_module_finds_its_names_here():
    for theirs in re.findall(r"`from torch.distributed._shard(\S*) import ([^`]+)`", README):
        exec(f"from shardtensor{theirs[0]} import {theirs[1]}")


@pytest.mark.parametrize("options", re.findall(r"`shardtensor ((?:demo|ops|check|plan|show|import|fmt)[^`]*)`", README))
def test_every_command_has_these_options(options):
    assert _parser().parse_args(options.split()).command == options.split()[0]


def run_is_saved(folder: str) -> tuple:
    names = _run(SAVED.replace('"run', f'"{folder}/run'))
    return names["extra"], names["resumed"].param_groups[0]["lr"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_run_is_saved_and_resumed(world, tmp_path, size):
    assert world(run_is_saved, size, folder=str(tmp_path)) == [({"epoch": 3}, 1e-3)] * size
