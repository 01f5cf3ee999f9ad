"""Every nn.Module method on modules with sharded parameters."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch
from harness import device, every_size
from torch import nn
from torch.nn.utils import parametrize

import shardtensor as st
from shardtensor import GatherWarning


def net(cut: str | None = "[tp balanced, -]", where: str | torch.device | None = None, seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(where or device())
    if cut is not None:
        st.shard_parameter(module, "0.weight", cut)
    return module


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor().detach() if isinstance(x, st.ShardedTensor) else x.detach()


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(m == n and torch.equal(whole(x), whole(y)) for (m, x), (n, y) in pairs)


def backward(module: nn.Module) -> None:
    x = torch.ones(2, 3, device=device(), dtype=next(module.parameters()).dtype)
    whole(module(x)), (module(x) * 1).sum().backward()


def check_conversions(swaps: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        for name in ("half", "double", "float", "bfloat16", "to", "cpu"):
            module, dense = net(), net(None)
            for m in (module, dense):
                backward(m)
            weight = module[0].weight
            seen = []
            if not swaps:
                weight.register_post_accumulate_grad_hook(seen.append)
            for m in (module, dense):
                m.to(device(), torch.float64) if name == "to" else getattr(m, name)()
            assert module[0].weight is weight and isinstance(weight, nn.Parameter) and weight.requires_grad
            assert weight.dtype == dense[0].weight.dtype == weight._local.dtype == weight.grad.dtype
            assert torch._C.TensorBase.dtype.__get__(weight) == weight.dtype, "what C code sees"
            assert same(module, dense) and torch.equal(whole(weight.grad), dense[0].weight.grad)
            if name in ("double", "float"):
                backward(module), backward(dense)
                torch.testing.assert_close(whole(weight.grad), dense[0].weight.grad)
                assert swaps or seen == [weight]
            module.zero_grad(set_to_none=False)
            assert not whole(weight.grad).any()
            module.zero_grad()
            assert weight.grad is None
            module.requires_grad_(False)
            assert not weight.requires_grad and not torch._C.TensorBase.requires_grad.__get__(weight)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@every_size
@pytest.mark.parametrize("swaps", [False, True])
def test_conversions_keep_the_parameter_and_follow_the_dense_module(world, size, swaps):
    world(check_conversions, size, swaps=swaps)


def check_meta() -> None:
    module = net(where="meta")
    before = module[0].weight
    assert before.is_meta and before._local.is_meta
    module.to_empty(device=device())
    weight = module[0].weight
    assert isinstance(weight, st.ShardedTensor) and isinstance(weight, nn.Parameter) and weight.device == device()
    module.load_state_dict(net(None, seed=5).state_dict())
    assert same(module, net(None, seed=5))
    module.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
    torch.manual_seed(9)
    module.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
    dense = net(None)
    torch.manual_seed(9)
    dense.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
    assert same(module, dense)


def test_meta_becomes_real_and_init_is_dense_init(world):
    world(check_meta, 3)


def check_load() -> None:
    for cut in ("[tp balanced, -]", "[-, tp balanced]", "flat(tp)", "replicate", None):
        for strict in (True, False):
            module = net()
            weight, leaf = module[0].weight, module[0].weight._local
            result = module.load_state_dict(net(cut, seed=2).state_dict(), strict=strict)
            assert not result.missing_keys and same(module, net(None, seed=2)), cut
            assert module[0].weight is weight and weight._local is leaf
        if cut is None:
            continue
        module, source = net(), net(cut, seed=2).state_dict()
        module.load_state_dict(source, assign=True)
        assert same(module, net(None, seed=2)) and module[0].weight.requires_grad
        assert isinstance(module[0].weight, nn.Parameter)
        assert str(module[0].weight.sharding_spec()) == str(source["0.weight"].sharding_spec())
        dense = net(None)
        dense.load_state_dict({k: whole(v) for k, v in source.items()})
        assert same(dense, net(None, seed=2))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for cut in ("[tp balanced, -]", "[-, tp balanced]", None):
            module = net()
            weight = module[0].weight
            module.load_state_dict(net(cut, seed=2).state_dict())
            assert module[0].weight is weight and str(weight.sharding_spec()) == "[tp balanced, -]"
            assert same(module, net(None, seed=2))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@every_size
def test_load_state_dict_takes_any_layout_and_dense(world, size):
    world(check_load, size)


def check_bad_load() -> None:
    module = net()
    good = net(None).state_dict()
    bad = dict(good, **{"0.weight": torch.ones(5, 4, device=device())})
    with pytest.raises(
        RuntimeError, match=r"size mismatch for 0.weight: copying a param with shape torch.Size\(\[5, 4\]\)"
    ):
        module.load_state_dict(bad)
    local = dict(good, **{"0.weight": torch.ones(module[0].weight._local.shape, device=device())})
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        module.load_state_dict(local)
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({k: v for k, v in good.items() if k != "0.weight"})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict(dict(good, more=torch.ones(1)))
    with pytest.raises(RuntimeError, match=r"expected torch\.Tensor"):
        module.load_state_dict(dict(good, **{"0.weight": "text"}))
    assert same(module, net(None))


def test_bad_state_dicts_are_torchs_errors_and_change_nothing_sharded(world):
    world(check_bad_load, 2)


def check_names() -> None:
    module = net()
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in net(None).named_parameters()]
    assert sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in net(None).parameters())
    module.register_parameter("extra", nn.Parameter(st.ones("[tp balanced]", 7, dtype=torch.float64)))
    module.register_buffer("table", st.zeros("[tp balanced]", 7))
    assert "extra" in dict(module.named_parameters()) and "table" in dict(module.named_buffers())
    assert "ShardedTensor" not in repr(module)
    del module.extra, module.table
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GatherWarning)
        flat = nn.utils.parameters_to_vector(module.parameters())
        assert torch.equal(whole(flat), whole(nn.utils.parameters_to_vector(net(None).parameters())))
        try:
            nn.utils.vector_to_parameters(whole(flat) + 1, module.parameters())
        except RuntimeError:
            assert same(module, net(None))
        else:
            assert torch.equal(whole(nn.utils.parameters_to_vector(module.parameters())), whole(flat) + 1)
    assert same(pickle.loads(pickle.dumps(module)), module)


def test_names_counts_and_vectors(world):
    world(check_names, 2)


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def check_parametrized() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.ones(2, 3, device=device())
        for parametrization in (
            lambda m: parametrize.register_parametrization(m[0], "weight", Double()),
            lambda m: nn.utils.parametrizations.weight_norm(m[0]),
            lambda m: (torch.manual_seed(0), nn.utils.parametrizations.spectral_norm(m[0])),
            lambda m: nn.utils.parametrizations.orthogonal(m[0]),
        ):
            module, dense = net(), net(None)
            parametrization(dense)
            try:
                parametrization(module)
            except RuntimeError:
                continue
            torch.testing.assert_close(whole(module(x)), whole(dense(x)))
        a, b = st.zeros("[tp balanced]", 5), st.ones("[tp balanced]", 5)
        leaf = a._local
        assert a.set_(b) is a and a._local is leaf and a._local.data_ptr() == b._local.data_ptr()
        for source in (torch.ones(5), st.ones("flat(tp)", 5), torch.ones(5).untyped_storage()):
            with pytest.raises(st.RuleError, match="set_ needs two ShardedTensors of one layout"):
                a.set_(source)


def test_set_and_parametrizations_are_right_or_refused(world):
    world(check_parametrized, 2)


def running_statistics() -> None:
    warnings.simplefilter("ignore", GatherWarning)
    for kind in (nn.BatchNorm1d, nn.InstanceNorm1d):
        dense, sharded = (kind(5, track_running_stats=True).to(device()) for _ in range(2))
        for name in ("running_mean", "running_var"):
            st.shard_parameter(sharded, name, "[tp balanced]")
        x = torch.arange(30.0, device=device()).view(2, 5, 3)
        for _ in range(2):
            torch.testing.assert_close(sharded(x), dense(x))
        sharded.eval(), dense.eval()
        torch.testing.assert_close(sharded(x), dense(x))
        assert same(sharded, dense)


@every_size
def test_sharded_running_statistics_are_written(world, size):
    world(running_statistics, size)
