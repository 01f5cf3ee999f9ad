"""What the README and the pages beside it show is true: programs run, texts mean specs, errors and names are these."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from harness import device, every_size

import shardtensor
import shardtensor.fsdp
from shardtensor.cli.main import _parser, main
from shardtensor.rules.table import ROWS
from shardtensor.tensor.dispatch import HANDLERS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
LAYERS = (ROOT / "shardtensor/parallel/LAYERS.md").read_text()
BENCHMARKS = (ROOT / "benchmarks/README.md").read_text()
PAGES = [
    "README.md",
    "benchmarks/README.md",
    "shardtensor/README.md",
    "shardtensor/parallel/LAYERS.md",
    "shardtensor/fsdp/METHODS.md",
    "shardtensor/compat/DIFFERENCES.md",
]
MLP, SHARDED, ZERO, COMPILED, PLANS, TENSORS, SAVED = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
MODULES, FLOWS, RULES, LAYER, OPERATIONS = re.findall(r"```python\n(.*?)```", LAYERS, re.DOTALL)


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
    x, z, dense = names["x"], names["z"], torch.arange(24.0, device=device()).view(4, 6)
    assert torch.equal(x.full_tensor(), dense)
    assert torch.equal(z.full_tensor(), dense)
    assert [str(t.sharding_spec()) for t in (x, z)] == ["flat(tp)", "[-, tp balanced]"]
    return tuple(w.shape), tuple(w.local_tensor().shape)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_tensors_are_what_the_comments_say(world, size):
    assert world(tensors, size) == [((8, 6), (8 // size, 6))] * size


def compiled(is_dense: bool) -> list[list[float]]:
    torch.manual_seed(0)
    program = COMPILED
    if is_dense:
        program = "\n".join(line for line in program.splitlines() if not line.startswith(("@compile", "print")))
    names = _run(program)
    return [
        p.full_tensor().tolist() if isinstance(p, shardtensor.ShardedTensor) else p.tolist()
        for p in names["model"].parameters()
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_the_compiled_step_is_that_of_one_process(world, size, capsys):
    """All ranks have equal parts of the batch, so the mean is that of one part."""
    dense = compiled(is_dense=True)
    for found in world(compiled, size, is_dense=False):
        for a, b in zip(found, dense, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-5, atol=1e-6)


def layouts() -> None:
    _run(TENSORS.replace("8, 6", "9, 6"))


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [1, 3])
def test_the_steps_of_a_reshard_are_those_shown(world, size, capsys):
    world(layouts, size)
    shown = "\n".join(line[2:] for line in TENSORS.splitlines() if line.startswith("# "))
    assert capsys.readouterr().out == f"{shown}\n" * size


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


def planned(program: str, name: str) -> None:
    torch.manual_seed(0)
    names = _run(program)
    assert names["plan"].axes == shardtensor.load_plan("mlp").axes
    assert shardtensor.ShardedTensor in map(type, names[name].parameters())
    dense = shardtensor.unshard_module(names[name])
    x = torch.ones(2, 64, device=device())
    torch.testing.assert_close(names["y"], dense(x))


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_module_sharded_by_a_plan_gives_the_dense_result(world, size):
    world(planned, size, program=PLANS, name="model")
    world(planned, size, program=RULES, name="mlp")


def of_transformers() -> tuple:
    from transformers import LlamaConfig, LlamaForCausalLM

    (call,) = re.findall(r"`(st\.shard_module\(model, \"llama\"\))`", README)
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).to(device())
    ids = torch.arange(10, device=device()).view(2, 5)
    dense = model(ids).logits.detach()
    sharded = _whole(eval(call, {"st": shardtensor, "model": model})(ids).logits)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, shardtensor.ShardedTensor)
    return dense.tolist(), sharded.tolist()


@pytest.mark.worlds("gloo")
def test_a_model_of_transformers_is_sharded_by_the_name_of_a_plan(world):
    pytest.importorskip("transformers")
    for dense, sharded in world(of_transformers, 2):
        torch.testing.assert_close(torch.tensor(sharded), torch.tensor(dense), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("text", _table("text"))
def test_every_text_of_the_table_is_a_spec(text):
    spec = shardtensor.parse_spec(text)
    assert shardtensor.parse_spec(str(spec)) == spec


def test_the_error_of_a_plan_is_the_error_printed(tmp_path, monkeypatch, capsys):
    (shown,) = re.findall(r"```text\n(llama\.shard:.*?)\n```", README, re.DOTALL)
    (right,) = re.findall(r"```text\n(self_attn .*?)\n```", README, re.DOTALL)
    plan = (ROOT / "specs/llama.shard").read_text()
    for line in re.sub(r" +#.*", "", right).splitlines():
        assert line.strip() in plan
    wrong = plan.replace("colwise_shared(kvg, copies=kvr, unit=hd)", "colwise(tp, unit=hd)")
    (tmp_path / "llama.shard").write_text(wrong)
    (tmp_path / "llama.dims.shard").write_text((ROOT / "specs/llama.dims.shard").read_text())
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "tests/plan/models/llama3-8b/config.json")
    assert main(["check", "llama.shard", "--model", config, "--world", "16", "--set", "tp=16"]) == 1
    assert shown in capsys.readouterr().out


def test_a_text_and_a_spec_are_equal():
    (equation,) = re.findall(r"`(parse_spec\([^`]* == [^`]*)`", README)
    assert eval(equation, vars(shardtensor) | {"Spec": shardtensor.Spec, "parse_spec": shardtensor.parse_spec})


@pytest.mark.parametrize("line", sorted(set(re.findall(r"`(from shardtensor[^`.]* import [^`.]+)`", README))))
def test_every_import_line_works(line):
    exec(line)


def test_code_for_torchs_modules_finds_its_names_here():
    exec("from shardtensor import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved")
    found = re.findall(r"`from torch\.distributed\.(_shard|fsdp)(\S*) import ([^`]+)`", README)
    assert len(found) == 3
    for package, module, names in found:
        exec(f"from torch.distributed.{package}{module} import {names}")
        exec(f"from shardtensor{'' if package == '_shard' else '.' + package}{module} import {names}")


DTENSOR = re.findall(
    r"^\| `((?:distribute_tensor|DTensor|d\.|parallelize)[^`]*)` \| `([^`]+)` \|$", README, re.MULTILINE
)


def beside_dtensor() -> None:
    """Evaluate the rows of the table for DTensor, both columns, in one world and compare the global tensors."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    mesh = init_device_mesh(device().type, (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    x = torch.arange(24.0, device=device()).view(4, 6)
    theirs = vars(torch.distributed.tensor) | vars(parallel) | {"mesh": mesh, "x": x}
    ours = {name: getattr(shardtensor, name) for name in shardtensor.__all__} | {"mesh": mesh, "x": x}
    theirs["d"] = theirs["distribute_tensor"](x, mesh, [theirs["Shard"](0)])
    ours["t"] = shardtensor.distribute(x, "[tp, -]", process_group=mesh)
    for yours, here in DTENSOR:
        for names in (theirs, ours):
            torch.manual_seed(0)
            names["m"] = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).to(device())
        want, got = eval(yours, theirs), eval(here, ours)
        if isinstance(want, nn.Module):
            want, got = want(x), got(x)
        else:
            assert got.local_tensor().equal(want.to_local())
            want, got = want.full_tensor(), got.full_tensor()
        torch.testing.assert_close(_whole(got), want)


@pytest.mark.worlds("gloo")
def test_dtensor_code_and_ours_hold_the_same_values(world):
    assert len(DTENSOR) == 4
    world(beside_dtensor, 2)


def _calls() -> list[str]:
    """The calls of public names in the text of the pages, outside of programs."""
    text = re.sub(r"```.*?```", "", README + LAYERS, flags=re.DOTALL)
    spans = {span.removeprefix("st.").removeprefix("shardtensor.") for span in re.findall(r"`([^`\n]+)`", text)}
    return sorted(span for span in spans if re.match(r"\w+\([^=]*(=[^=]+)*\)$", span) and _public(span.split("(")[0]))


def _public(name: str):
    """What users of the pages mean by the name of a function: ours, where there is one."""
    return getattr(shardtensor if name in shardtensor.__all__ else shardtensor.fsdp, name, None)


@pytest.mark.parametrize("call", _calls())
def test_every_call_in_the_text_fits_its_function(call):
    tree = ast.parse(call.replace("(...", "(module"), mode="eval").body
    positional, named = [None for _ in tree.args], {keyword.arg: None for keyword in tree.keywords}
    inspect.signature(_public(tree.func.id)).bind_partial(*positional, **named)


def test_options_of_classes_and_functions_in_the_text_exist():
    zero = inspect.signature(shardtensor.ZeroRedundancyOptimizer.__init__).parameters
    assert {"partition", "overlap_gradients", "module", "overlap_with_ddp", "offload_state"} <= set(zero)
    assert {"no_sync", "wait"} <= set(vars(shardtensor.ZeroRedundancyOptimizer))
    assert {"find_unused", "mesh"} <= set(inspect.signature(shardtensor.fully_shard).parameters)
    assert "layout" in inspect.signature(shardtensor.save).parameters
    assert {"strict", "cast"} <= set(inspect.signature(shardtensor.load).parameters)


COMMANDS = re.findall(r"[`\n]shardtensor ((?:demo|ops|check|plan|show|import|fmt|ckpt) [^`\n#]*)", README + LAYERS)


@pytest.mark.parametrize("options", sorted(set(COMMANDS)))
def test_every_command_has_these_options(options):
    needed = {"check --numeric": " llama", "ckpt inspect": " run"}
    options = options.strip()
    assert _parser().parse_args((options + needed.get(options, "")).split()).command == options.split()[0]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target
    headings = {re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in re.findall(r"^#+ (.*)$", text, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


def _measured() -> dict[str, str]:
    """The text below each command on the page of benchmarks, by script."""
    parts = re.split(r"^`python benchmarks/(\w+\.py)`", BENCHMARKS, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_table_of_figures_has_a_command_that_prints_it():
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert set(re.findall(r"`python benchmarks/(\w+\.py)`", BENCHMARKS)) == scripts
    before = re.split(r"^`python benchmarks/\w+\.py`", BENCHMARKS, flags=re.MULTILINE)[0]
    assert "|--:" not in before
    for heading in re.findall(r"^## .*?(?=^## |\Z)", BENCHMARKS, re.MULTILINE | re.DOTALL):
        table, command = heading.find("|--:"), heading.find("`python benchmarks/")
        assert table == -1 or 0 <= command < table, heading.splitlines()[0]


def test_the_costs_in_the_readme_are_those_of_the_benchmarks():
    rows = README.split("## What it costs", 1)[1].split("\n\n", 2)[1].splitlines()[2:]
    assert len(rows) >= 5
    measured, script = _measured(), ""
    for row in rows:
        _, what, *figures, _ = row.split("|")
        (script,) = re.findall(r"`(\w+\.py)`", what) or [script]
        for figure in re.findall(r"(?<![\w.])\d[\d.,]*\d", " ".join(figures)):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", measured[script]), (script, figure)


def run_is_saved(folder: str) -> tuple:
    names = _run(SAVED.replace('"run', f'"{folder}/run'))
    return names["extra"], names["resumed"].param_groups[0]["lr"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_run_is_saved_and_resumed(world, tmp_path, size):
    assert world(run_is_saved, size, folder=str(tmp_path)) == [({"epoch": 3}, 1e-3)] * size
