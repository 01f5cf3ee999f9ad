"""The plan files of model families against the tensors, classes and attributes of real public models."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import attrs
import pytest
from recorded_models import FROM_DIMS, MORE_WORLDS, OTHERS, case_id, config_path, recorded, resolved_for

from shardtensor.errors import SpecError
from shardtensor.plan.findings.checking import check_plan
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import expanded, model_from_dims
from shardtensor.plan.models.model import Model
from shardtensor.plan.resolved import Resolved
from shardtensor.plan.text.formatting import format_plan
from shardtensor.plan.text.sources import PACKAGED
from shardtensor.spec.diagnostics import Source


def _alarms(resolved: Resolved) -> list[str]:
    return [str(finding) for finding in check_plan(resolved) if finding.severity != "note"]


@pytest.mark.parametrize(("plan", "model", "world", "params"), FROM_DIMS, ids=case_id)
def test_dims_are_exactly_the_tensors_of_the_model(plan, model, world, params):
    found = model_from_dims(load_plan(plan, config=config_path(model), world=world, **params))
    real = recorded(model)
    assert {t.name: (t.dtype, t.shape) for t in found.tensors} == {t.name: (t.dtype, t.shape) for t in real.tensors}


@pytest.mark.parametrize(("plan", "model", "world", "params"), FROM_DIMS, ids=case_id)
def test_dims_have_the_names_that_layers_of_the_class_give_them(plan, model, world, params):
    found = model_from_dims(load_plan(plan, config=config_path(model), world=world, **params))
    for tensor in recorded(model).tensors:
        if tensor.dims is not None:
            assert found.by_name[tensor.name].dims == tensor.dims, tensor.name


@pytest.mark.parametrize("from_dims", [True, False], ids=["dims", "module"])
@pytest.mark.parametrize(("plan", "model", "world", "params"), FROM_DIMS + MORE_WORLDS, ids=case_id)
def test_every_tensor_has_its_line_and_nothing_is_wrong(plan, model, world, params, from_dims):
    if from_dims and (plan, model) == ("fsdp", "mixtral-8x7b"):
        pytest.skip("fsdp.dims.shard names the tensors of a Llama")
    resolved = resolved_for(plan, model, world, params, from_dims=from_dims)
    assert not _alarms(resolved)
    assert set(resolved.tensors) == set(resolved.model.by_name)
    assert all(placed.line is not None or placed.tied_to for placed in resolved.tensors.values())


@pytest.mark.parametrize(("plan", "model", "world", "params"), OTHERS, ids=case_id)
def test_plans_fit_other_classes_and_published_files(plan, model, world, params):
    resolved = resolved_for(plan, model, world, params)
    assert not _alarms(resolved)
    assert set(resolved.tensors) == set(recorded(model).by_name)


@pytest.mark.parametrize(("plan", "model", "world", "params"), FROM_DIMS + OTHERS, ids=case_id)
def test_what_a_plan_names_of_code_is_there(plan, model, world, params):
    """Attributes after `local` and arguments after `in`, against the recorded classes; `resolve` asks the same."""
    if not recorded(model).modules:
        pytest.skip("a file has no classes")
    asked = 0
    for path, passing in resolved_for(plan, model, world, params).modules.items():
        module = recorded(model).modules[path]
        assert set(passing.locals) <= set(module.counts), path
        assert {name for name in passing.ins if name} <= set(module.arguments), path
        asked += len(passing.locals) + len(passing.ins)
    assert asked or plan == "fsdp"


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("plan", ["mlp", "vocab", "uneven"])
def test_plans_of_no_family_need_no_configuration(plan, world):
    if plan == "uneven":  # it names four devices
        world = 4
    if plan == "mlp" and world == 3:
        with pytest.raises(AssertionError, match="E205"):
            _clean(plan, world)
        return
    _clean(plan, world)


def _clean(plan: str, world: int) -> None:
    read = load_plan(plan, world=world)
    resolved = resolve(read, model_from_dims(read))
    assert not _alarms(resolved), _alarms(resolved)
    assert set(resolved.tensors) == set(resolved.model.by_name)


def test_uneven_heads_are_dealt_whole():
    read = load_plan("uneven", world=4)
    placed = resolve(read, model_from_dims(read)).tensors
    rows = [placed["h.0.attn.q.weight"].layout.boxes(rank)[0].sizes[0] for rank in range(4)]
    assert rows == [448, 384, 384, 384]


def test_grouped_heads_lie_on_the_ranks_that_use_them():
    resolved = resolved_for("llama", "llama3-8b", 16, {"tp": 16})
    keys = resolved.tensors["model.layers.3.self_attn.k_proj.weight"].layout
    query = resolved.tensors["model.layers.3.self_attn.q_proj.weight"].layout
    for rank in range(16):
        assert keys.boxes(rank)[0].offsets[0] // 128 == rank // 2
        assert query.boxes(rank)[0].offsets[0] // 128 // 4 == rank // 2  # four query heads to each


def test_a_tied_head_takes_the_layout_of_the_embedding():
    placed = resolved_for("llama", "qwen2-0.5b", 2, {"tp": 2}).tensors["lm_head.weight"]
    assert placed.tied_to == "model.embed_tokens.weight"


def test_dims_take_the_element_type_of_the_configuration():
    read = load_plan("llama", config={"num_hidden_layers": 1} | _tiny() | {"dtype": "float16"}, world=1, tp=1)
    assert {tensor.dtype for tensor in model_from_dims(read).tensors} == {"float16"}


def _tiny() -> dict[str, object]:
    return {"vocab_size": 8, "intermediate_size": 8, "hidden_size": 4, "num_attention_heads": 2}


def test_a_plan_without_dims_says_where_shapes_come_from():
    with pytest.raises(SpecError) as error:
        model_from_dims(load_plan("shard 1\nmesh (tp = 1)\nw: [tp]\n"))
    assert str(error.value) == (
        "nothing says which tensors the model has\n"
        "  looked for  dims lines\n"
        '  either      include the lines of a family, as in `include "llama.dims.shard"`\n'
        "  or          give --safetensors model.safetensors.index.json\n"
        "  or          give --module package.module:function"
    )


def test_a_copied_plan_may_include_the_dims_of_its_family(tmp_path):
    copied = tmp_path / "mine.shard"
    text = (PACKAGED / "llama.shard").read_text().replace("shard 1\n", 'shard 1\ninclude "llama.dims.shard"\n')
    copied.write_text(text)
    config = _tiny() | {"num_hidden_layers": 1}
    mine, theirs = (load_plan(plan, config, 2, tp=2) for plan in (copied, "llama"))
    assert model_from_dims(mine).tensors == model_from_dims(theirs).tensors


def test_two_sizes_of_one_tensor_are_an_error():
    text = "shard 1\nmesh (tp = 1)\ndims w (out = 4, in = 2)\ndims {v,w} (out = 4, in = 3)\n"
    with pytest.raises(SpecError) as error:
        model_from_dims(load_plan(text))
    assert str(error.value).splitlines()[0] == (
        "<plan>:4:6: error[E206]: w is (out=4, in=3) here, and (out=4, in=2) at <plan>:3:6"
    )


def test_a_model_of_too_many_tensors_is_refused_at_once():
    text = "shard 1\nmesh (tp = 1)\nlet N = 999999999999\ndims h.<N>.<N>.w (out = 4)\n"
    with pytest.raises(SpecError, match="more than 1048576 tensors"):
        model_from_dims(load_plan(text))


def test_dims_beside_an_own_plan_are_found_and_get_its_parameters(tmp_path: Path):
    (tmp_path / "own.shard").write_text('shard 1\nparam n = 2\nmesh (tp = 1)\ninclude "part.shard"\n')
    (tmp_path / "part.shard").write_text("shard 1\nh.*.w: replicate\n")
    (tmp_path / "own.dims.shard").write_text("shard 1\nparam n = 1\ndims h.<n>.w (out = 4)\n")
    (tmp_path / "part.dims.shard").write_text("shard 1\ndims bias (out = 4)\n")
    model = model_from_dims(load_plan(tmp_path / "own.shard", n=3))
    assert [tensor.name for tensor in model.tensors] == ["h.0.w", "h.1.w", "h.2.w", "bias"]


def test_numbers_and_braces_expand_in_order():
    assert list(expanded("a.<2>.{x,y}.<1>")) == ["a.0.x.0", "a.0.y.0", "a.1.x.0", "a.1.y.0"]


BUILT = "bloom", "deepseek_v3", "falcon", "gpt_oss", "mamba"


def test_every_family_is_named_as_its_files_are():
    """Each plan has dims beside it, or includes one that has, or is for models that transformers builds."""
    specs = Path(__file__).parents[2] / "specs"
    for path in specs.glob("*.shard"):
        if not path.name.endswith(".dims.shard") and path.stem not in ("llama_2d", *BUILT):
            assert path.with_name(f"{path.stem}.dims.shard").is_file()
        assert max(map(len, path.read_text().splitlines())) <= 160


def test_recorded_models_have_the_sizes_that_are_published():
    def billions(model: Model) -> float:
        tied = {name for names in model.tied for name in names[1:]}
        return sum(t.numel for t in model.tensors if t.name not in tied) / 1e9

    published = {
        "llama2-7b": 6.738, "llama3-8b": 8.030, "llama3.1-405b": 405.853, "mistral-7b": 7.242, "qwen2-7b": 7.616,
        "qwen2-0.5b": 0.494, "gpt2": 0.1244, "bert-base": 0.1095, "minilm": 0.0227, "t5-small": 0.0605,
        "mixtral-8x7b": 46.703, "mixtral-8x7b-file": 46.703, "vit-base": 0.0864,
    }  # fmt: skip
    for name, size in published.items():
        assert billions(recorded(name)) == pytest.approx(size, rel=0.001), name


def test_old_configurations_without_grouped_heads_are_read():
    """The first Llama's config.json has no num_key_value_heads."""
    config = dict(recorded("llama2-7b").config)
    del config["num_key_value_heads"]
    read = load_plan("llama", config=config, world=8)
    assert not _alarms(resolve(read, model_from_dims(read)))


def test_a_drifted_attribute_name_is_found():
    """What these tests are for: a class that renames what `local` names."""
    real = recorded("gpt2")
    drifted = {path: attrs.evolve(m, counts={re.sub("split_size", "split", k): n for k, n in m.counts.items()})
               for path, m in real.modules.items()}  # fmt: skip
    read = load_plan("gpt2", config=config_path("gpt2"), world=4)
    found = resolve(read, attrs.evolve(real, modules=drifted)).findings
    assert {finding.code for finding in found if finding.severity == "error"} == {"E303"}


def test_every_plan_is_installed_with_the_package():
    """`shardtensor/specs` is a link to specs/: an editable install follows it, a wheel holds what it leads to."""
    root = Path(__file__).parents[2]
    assert PACKAGED.resolve() == root / "specs"
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["shardtensor"]
    held = {path.resolve() for pattern in patterns for path in (root / "shardtensor").glob(pattern)}
    assert {*(root / "specs").glob("*.shard"), *(root / "specs/std").glob("*.shard")} <= held


def test_plans_that_come_with_the_package_are_canonical():
    for path in (*PACKAGED.glob("*.shard"), *PACKAGED.glob("std/*.shard")):
        text = path.read_text()
        assert format_plan(Source(text, path.name)) == text, path.name
