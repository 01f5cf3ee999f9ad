"""Modules built and sharded on the meta device: memory by parts, the dense numbers, all or nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import device, every_size
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.mesh import Mesh

RULES = {
    "embed.weight": "[tp balanced, -]",
    "fc.weight": "[tp balanced, -]",
    "fc.bias": "[tp balanced]",
    "attention.in_proj_weight": "[-, tp balanced]",
    "attention.out_proj.bias": "[tp balanced]",
    "conv.weight": "[tp balanced, ...]",
    "norm.running_mean": "[tp balanced]",
    "layers.*.weight": "flat(tp)",
    "layers.1.bias": "[tp balanced]",
    "head.weight": "[-, tp balanced]",
}


class Stock(nn.Module):
    """A little of everything that torch builds and resets by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=3)
        self.fc = nn.Linear(6, 7)
        self.attention = nn.MultiheadAttention(6, 2)
        self.conv = nn.Conv1d(3, 5, 2)
        self.norm = nn.BatchNorm1d(5)
        self.lstm = nn.LSTM(2, 3)
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(2))
        self.head = nn.Linear(7, 11, bias=False)


def built(make: Callable[[], nn.Module], rules: dict[str, str], *, seed: int | None = 5, **how: Any) -> nn.Module:
    """A module built and sharded on the meta device, then materialised."""
    with torch.device("meta"):
        module = st.shard_module(make(), rules)
    if seed is not None:
        torch.manual_seed(seed + 3 * as_group().index)  # the first rank's is the one that counts
    return st.materialize(module, device(), **how)


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, st.ShardedTensor) else x).detach()


def assert_same(module: nn.Module, dense: nn.Module) -> None:
    pairs = zip(tensors(module).items(), tensors(dense).items(), strict=True)
    for (name, x), (other, y) in pairs:
        assert name == other
        assert not x.is_meta, name
        assert torch.equal(whole(x), whole(y)), name


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def cut_names(module: nn.Module) -> set[str]:
    return {name for name, x in tensors(module).items() if isinstance(x, st.ShardedTensor)}


def stock() -> None:
    module = built(Stock, RULES)
    end = torch.get_rng_state()
    torch.manual_seed(5)
    with torch.device(device()):
        dense = Stock()
    assert_same(module, dense)
    assert torch.equal(end, torch.get_rng_state())
    assert cut_names(module) == {*RULES, "layers.0.weight", "layers.1.weight"} - {"layers.*.weight"}
    assert all(x.device == device() for x in tensors(module).values())
    y, _ = module.lstm(torch.ones(2, 1, 2, device=device()))
    torch.testing.assert_close(whole(y), dense.lstm(torch.ones(2, 1, 2, device=device()))[0].detach())


@pytest.mark.worlds("sim")
@every_size
def test_the_numbers_are_those_of_building_the_module_at_once(world, size):
    world(stock, size)


@pytest.mark.worlds("gloo")
def test_on_real_processes(world):
    world(stock, 2)


def on_a_mesh() -> None:
    mesh = as_group().on_mesh(Mesh((("dp", 2), ("tp", 2))), {})
    with torch.device("meta"):
        module = Wide()
    st.shard_module(module, {"layers.*.weight": "[tp, -]", "embed": "[tp, dp]"}, process_group=mesh)
    torch.manual_seed(6 + mesh.index)
    st.materialize(module, device())
    torch.manual_seed(6)
    with torch.device(device()):
        assert_same(module, Wide())


@pytest.mark.worlds("sim")
def test_on_a_grid_of_ranks(world):
    world(on_a_mesh, 4)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.norm = nn.LayerNorm(4)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(ids)))


def step(module: nn.Module) -> list[torch.Tensor]:
    optimizer = st.ShardedOptimizer(module, torch.optim.SGD, lr=0.5)
    ids = torch.arange(7, device=device())
    loss = nn.functional.cross_entropy(whole_with_grad(module(ids)), ids)
    loss.backward()
    grads = [whole(p.grad) for p in module.parameters()]
    optimizer.step()
    return [loss.detach(), *grads, *map(whole, module.parameters())]


def whole_with_grad(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def ties() -> None:
    with torch.device("meta"):
        module = Tied()
        module.embed.weight.tag = "vocabulary"
        module.norm.bias.requires_grad_(False)
        objects = dict(module.named_parameters())
        st.shard_module(module, {"embed": "[tp balanced, -]"})
        torch.manual_seed(2)
        st.materialize(module, device())  # what is in force for tensors that are made does not matter
    assert dict(module.named_parameters()).keys() == objects.keys()
    assert all(param is objects[name] for name, param in module.named_parameters())
    assert module.head.weight is module.embed.weight
    assert module.embed.weight.tag == "vocabulary"
    assert [p.requires_grad for p in module.parameters()] == [True, True, False]
    dense = Tied().to(device())
    torch.manual_seed(2)
    for layer in (dense.embed, dense.head, dense.norm):
        layer.reset_parameters()
    dense.norm.bias.requires_grad_(False)
    assert_same(module, dense)
    for net in (module, dense):
        net.norm.bias.requires_grad_()
    for found, want in zip(step(module), step(dense), strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.worlds("sim")
@every_size
def test_parameters_stay_the_same_objects_and_ties_stay(world, size):
    world(ties, size)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def frequencies(self) -> torch.Tensor:
        return 1.0 / 10000 ** (torch.arange(0, 12, 2) / 12)


class Decoder(nn.Module):
    """As model libraries write them: one method, applied to every submodule, that writes through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6, padding_idx=8)
        self.rotary = Rotary()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(6))
        self.norm = nn.LayerNorm(6)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.weight.data[module.padding_idx].zero_()
        elif isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)
        elif isinstance(module, Rotary):
            module.inv_freq = module.frequencies()
            module.scale.copy_(torch.full((3,), 2.0))
        elif isinstance(module, Decoder):
            nn.init.ones_(module.gain)
            for name, param in module.named_parameters():
                if name.endswith("1.weight"):
                    param.data.normal_(std=0.01)


DECODER = {
    "embed": "[-, tp balanced]",
    "layers.*.weight": "[tp balanced, -]",
    "gain": "[tp balanced]",
    "rotary.inv_freq": "[tp balanced]",
}


DECODER_CUT = {"embed.weight", "layers.0.weight", "layers.1.weight", "gain", "rotary.inv_freq"}


def by_init() -> None:
    with torch.device("meta"):
        module = st.shard_module(Decoder(), DECODER)
    torch.manual_seed(4)
    st.materialize(module, device(), init=module._init_weights)
    with torch.device(device()):
        dense = Decoder()
    torch.manual_seed(4)
    with torch.device(device()):
        dense.apply(dense._init_weights)
    assert_same(module, dense)
    assert cut_names(module) == DECODER_CUT


@pytest.mark.worlds("sim")
@every_size
def test_init_gives_what_apply_gives(world, size):
    world(by_init, size)


NO_RESET = """\
modules hold tensors without values and have no reset_parameters()
  the module (Decoder)  gain
  rotary (Rotary)       inv_freq, scale
  either                materialize(module, init=function), which is called with each submodule and sets its tensors
  or                    give the module's class a reset_parameters() that sets them
  or                    build the module's buffers outside torch.device('meta'): they keep their values"""


def refused() -> list[str]:
    with torch.device("meta"):
        module = st.shard_module(Decoder(), DECODER)
    before = tensors(module)
    texts = []
    for how in (
        {},
        {"init": lambda m: m.reset_parameters() if isinstance(m, nn.Linear | nn.Embedding) else None},
        {"init": fails},
        {"device": "meta", "init": fails},
        {"device": "cuda:99", "init": fails},
    ):
        with pytest.raises((st.ShardTensorError, ZeroDivisionError)) as caught:
            st.materialize(module, **how)
        texts.append(str(caught.value))
        now = tensors(module)
        assert now.keys() == before.keys()
        assert all(now[name] is x and x.is_meta for name, x in before.items())
        assert cut_names(module) == DECODER_CUT
    return texts


def fails(module: nn.Module) -> None:
    if isinstance(module, Rotary):
        module.inv_freq = torch.ones(6)
    if isinstance(module, nn.LayerNorm):
        raise ZeroDivisionError("as an example")


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [1, 3])
def test_what_cannot_be_done_is_told_alike_and_changes_nothing(world, size):
    first, *others = world(refused, size)
    assert all(texts == first for texts in others)
    assert first[0] == NO_RESET
    assert first[1] == (
        "init left tensors without values\n"
        "  tensors  gain, rotary.inv_freq, rotary.scale, norm.weight, norm.bias\n"
        "  fix      let init set them too: `module.name.copy_(...)`, or `module.name = ...`"
    )
    assert first[2].startswith("as an example")
    assert first[3].startswith("tensors on the meta device have no memory")
    assert first[4].startswith("there is no device cuda:99 here")


class Lazy(nn.Linear):
    """Forgets its bias."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def forgetful() -> str:
    with pytest.raises(st.PlanError) as caught:  # a rank whose part is empty cannot tell; it is told
        built(lambda: Lazy(3, 1), {"bias": "[tp balanced]"})
    return str(caught.value)


@pytest.mark.worlds("sim")
def test_a_reset_that_forgets_a_tensor_is_told_on_every_rank(world):
    texts = world(forgetful, 2)
    assert len(set(texts)) == 1
    assert "reset_parameters() left tensors without values" in texts[0]
    assert "bias" in texts[0]


class Above(nn.Module):
    """Sets the tensors of what it holds, which cannot do so itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.rows = nn.ParameterList(torch.zeros(4, 3) for _ in range(2))

    def reset_parameters(self) -> None:
        self.rotary.inv_freq = self.rotary.frequencies()
        self.rotary.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        for row in self.rows:
            nn.init.normal_(row)


def from_above() -> None:
    module = built(Above, {"rows": "[tp balanced, -]", "rotary.inv_freq": "[tp balanced]"})
    torch.manual_seed(5)
    with torch.device(device()):
        dense = Above()
        dense.reset_parameters()
    assert_same(module, dense)


@pytest.mark.worlds("sim")
def test_a_module_above_may_set_the_values(world):
    world(from_above, 3)


def some_on_meta(which: str) -> str:
    with torch.device("meta" if as_group().index else device()):
        module = nn.Linear(4, 4)
    shard = (lambda m: st.shard_module(m, {"weight": "[tp, -]"})) if which == "module" else by_parameter
    with pytest.raises(st.DisagreementError) as caught:
        shard(module)
    return str(caught.value)


def by_parameter(module: nn.Module) -> None:
    st.shard_parameter(module, "weight", "[tp, -]")


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("which", ["module", "parameter"])
def test_some_ranks_on_meta_is_a_disagreement(world, which):
    first, second = world(some_on_meta, 2, which=which)
    assert first == second
    assert "meta" in first


def partly() -> None:
    with torch.device("meta"):
        module = Tied()
    kept = nn.Parameter(torch.arange(4.0, device=device()))
    module.norm.weight = kept
    st.shard_module(module, {"embed": "[tp balanced, -]", "norm.weight": "[tp balanced]"})
    st.materialize(module)
    assert module.norm.weight is kept
    assert whole(kept).tolist() == [0, 1, 2, 3]
    assert whole(module.norm.bias).tolist() == [0] * 4
    before = {name: whole(x).clone() for name, x in tensors(module).items()}
    st.materialize(module)
    assert all(torch.equal(whole(x), before[name]) for name, x in tensors(module).items())


@pytest.mark.worlds("sim")
def test_values_that_are_there_stay(world):
    world(partly, 2)


def state(cut: str | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(8)
    values = Decoder().to(device()).state_dict()
    for name in ("embed.weight", "layers.0.weight") if cut is not None else ():
        values[name] = st.distribute(values[name], cut)
    return values


def loaded(assign: bool) -> None:
    for cut in (None, "[tp balanced, -]", "[-, tp balanced]"):
        with torch.device("meta"):
            module = st.shard_module(Decoder(), DECODER)
        objects = dict(module.named_parameters())
        given = state(cut)
        result = module.load_state_dict(given, assign=assign)
        assert not result.missing_keys
        assert all(isinstance(given[name], st.ShardedTensor) == (cut is not None) for name in ["embed.weight"])
        for name, x in module.named_parameters():
            assert assign or x is objects[name]
            assert torch.equal(whole(x), whole(given[name])), name
            assert x.requires_grad
            assert not isinstance(x, st.ShardedTensor) or x._local.untyped_storage().nbytes() == 4 * x._local.numel()
        assert cut_names(module) == DECODER_CUT
        assert str(module.layers[0].weight.sharding_spec()) == "[tp balanced, -]"
        assert module.rotary.inv_freq.is_meta  # no checkpoint has it
        st.materialize(module, device(), init=buffers)
        torch.testing.assert_close(whole(module.rotary.inv_freq), Rotary().frequencies().to(device()))
        assert all(torch.equal(whole(x), whole(given[name])) for name, x in module.named_parameters())
        assert_same(pickle.loads(pickle.dumps(module)), module)
        st.unshard_module(module)
        assert not any(owner._load_state_dict_pre_hooks for owner in module.modules())


def buffers(module: nn.Module) -> None:
    if isinstance(module, Rotary):
        module.inv_freq, module.scale = module.frequencies(), torch.full((3,), 2.0)


@pytest.mark.worlds("sim")
@every_size
@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_gives_memory_and_values(world, size, assign):
    world(loaded, size, assign=assign)


def loaded_parameter() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 4))
    for name in ("0.weight", "0.bias"):
        st.shard_parameter(module, name, "[tp balanced, ...]")
    values = nn.Sequential(nn.Linear(3, 4)).state_dict()
    for assign in (False, True):
        module.load_state_dict(values, assign=assign)
        assert cut_names(module) == {"0.weight", "0.bias"}
        assert all(torch.equal(whole(x), values[name]) for name, x in tensors(module).items())


@pytest.mark.worlds("sim")
def test_a_checkpoint_fills_what_shard_parameter_cut(world):
    world(loaded_parameter, 2)


def silent() -> None:
    with torch.device("meta"):
        module = Wide()
    st.shard_module(module, {"layers": "[tp, ...]"})
    for name in ("embed.weight", "norm.bias"):
        st.shard_parameter(module, name, "[tp, ...]")


def test_sharding_on_meta_sends_the_agreement_alone():
    traffic = st.count_bytes(4, silent)
    assert {line.collective for line in traffic.lines} == {"exchange"}
    assert traffic.sent_bytes <= 3 * 3 * 64  # three calls, to three ranks


def bad_load() -> None:
    with torch.device("meta"):
        module = st.shard_module(Decoder(), DECODER)
    with pytest.raises(RuntimeError, match=r"size mismatch for gain"):
        module.load_state_dict({**state(None), "gain": torch.ones(2)})
    assert module.gain.is_meta
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({k: v for k, v in state(None).items() if k != "gain"})


@pytest.mark.worlds("sim")
def test_bad_checkpoints_are_torchs_errors(world):
    world(bad_load, 2)


class Live(TorchDispatchMode):
    """The most bytes of memory that were held at once, by tensors made while this is on."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                storage = x.untyped_storage()
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.held = {key: (ref, size) for key, (ref, size) in self.held.items() if not ref.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self.held.values()))
        return result


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, 512)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))
        self.norm = nn.LayerNorm(512)


def peak() -> None:
    rules = {"embed": "[tp, -]", "layers.*.weight": "[-, tp]", "layers.*.bias": "[tp]"}
    with Live() as live:
        module = built(Wide, rules)
    sizes = [x._local.numel() if isinstance(x, st.ShardedTensor) else x.numel() for x in module.parameters()]
    shards_bytes, largest_bytes = 4 * sum(sizes), 4 * 1024 * 512
    scratch_bytes = 4 * 65536 + (1 << 16) if device().type == "cpu" else 1 << 24  # a card draws a million at once
    assert shards_bytes <= live.peak_bytes <= shards_bytes + largest_bytes + scratch_bytes
    assert live.peak_bytes <= shards_bytes + largest_bytes // 4 + scratch_bytes, "no more than a part a second time"
    with Live() as live:
        built(Wide, {}, seed=None)
    assert live.peak_bytes > 3 * shards_bytes, "what the dense module takes"


@pytest.mark.worlds("sim")
def test_a_rank_holds_its_parts_and_little_more(world):
    world(peak, 4)


def test_tensors_of_other_libraries_are_refused():
    module = nn.Module()
    module.weight = nn.Parameter(Twice(torch.ones(2, device="meta")))
    with pytest.raises(st.LayoutError, match="`weight` is a Twice, whose parts are not ours to make"):
        st.materialize(module)


class Twice(torch.Tensor):
    """A wrapper over another tensor, as DTensor is."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(args[0].inner.detach())


def no_groups() -> None:
    module = nn.Linear(3, 2, device="meta")
    torch.manual_seed(1)
    assert st.materialize(module) is module
    torch.manual_seed(1)
    assert_same(module, nn.Linear(3, 2))


def test_a_module_without_shards_needs_no_ranks():
    no_groups()
