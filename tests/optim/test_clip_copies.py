"""Clipping counts each element of the model once, whatever the mesh copies it over; simulated ranks."""

from __future__ import annotations

import warnings

import pytest
import torch

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.mesh import Mesh
from shardtensor.optim.clip import clip_grad_norm_, clip_grad_value_

CLIPS = {"ours": clip_grad_norm_, "torch": torch.nn.utils.clip_grad_norm_}
SPECS = ["[tp, -]", "[dp, -]", "[-, tp balanced]", "replicate", "flat(tp)", "[dp, -] flat(tp)", "[dp, tp]", None]
SHAPE = (4, 6)


def parameters(specs: list[str | None], dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[torch.Tensor]:
    """Dense gradients differ from one to the next; each is under a parameter of its layout."""
    grid = as_group().on_mesh(Mesh((("dp", 2), ("tp", 2))), {})
    params = []
    for i, spec in enumerate(specs):
        dtype = dtypes[i % len(dtypes)]
        value = torch.zeros(SHAPE, dtype=dtype)
        param = (
            value.requires_grad_()
            if spec is None
            else st.distribute(value, spec, process_group=grid, requires_grad=True)
        )
        param.grad = dense(i, dtype)
        params.append(param)
    return params


def dense(i: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(24.0).view(SHAPE) % (i + 3) - 1).to(dtype)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


@pytest.mark.parametrize("clip", CLIPS)
def test_copies_along_an_axis_count_once(clip):
    def body() -> None:
        for specs in (*([spec] for spec in SPECS), SPECS, SPECS[:2], SPECS[3:]):
            for norm, most in ((2.0, 1.0), (1.0, 0.5), (float("inf"), 0.25), (2.0, 1e6), (3.0, torch.tensor(2.0))):
                params = parameters(specs)
                twins = [torch.zeros(SHAPE, requires_grad=True) for _ in specs]
                for i, twin in enumerate(twins):
                    twin.grad = dense(i)
                total = CLIPS[clip](params, most, norm)
                wanted = torch.nn.utils.clip_grad_norm_(twins, most, norm)
                torch.testing.assert_close(total, wanted)
                for param, twin in zip(params, twins, strict=True):
                    torch.testing.assert_close(whole(param.grad), twin.grad)

    st.simulate(4, body)


def test_a_gradient_under_two_parameters_is_clipped_once():
    def body() -> None:
        param, plain = parameters(["[tp, -]", None])
        for each in (param, plain):
            other = torch.zeros(SHAPE, requires_grad=True) if each is plain else param
            other.grad = each.grad
            first = float(torch.linalg.vector_norm(whole(each.grad)))
            assert clip_grad_norm_([each, other, each], first / 2).item() == pytest.approx(first)
            assert float(torch.linalg.vector_norm(whole(each.grad))) == pytest.approx(first / 2, rel=1e-5)

    st.simulate(4, body)


def test_gradients_of_several_dtypes_and_none():
    def body() -> None:
        kinds = (torch.float32, torch.float64, torch.bfloat16)
        params = parameters(SPECS, kinds)
        everything = torch.cat([dense(i, kinds[i % 3]).double().flatten() for i in range(len(SPECS))])
        params[2].grad = None
        kept = everything.view(len(SPECS), -1)[[i for i in range(len(SPECS)) if i != 2]]
        total = clip_grad_norm_(params, 1.0)
        assert total.dtype == torch.float64
        torch.testing.assert_close(total, torch.linalg.vector_norm(kept), rtol=1e-6, atol=0)
        after = torch.cat([whole(p.grad).double().flatten() for p in params if p.grad is not None])
        torch.testing.assert_close(after, kept.flatten() / total, rtol=0.01, atol=1e-3)
        params[2].grad = None
        assert clip_grad_norm_([], 1.0).item() == clip_grad_norm_(params[2], 1.0).item() == 0.0
        complexes = torch.zeros(2, dtype=torch.complex64, requires_grad=True)
        complexes.grad = torch.tensor([3.0 + 4.0j, 0.0])
        assert clip_grad_norm_(complexes, 1.0).dtype == torch.float32

    st.simulate(4, body)


def test_values_are_clamped_in_every_layout():
    def body() -> None:
        params = parameters(SPECS, (torch.float32, torch.float64))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", st.GatherWarning)
            copies = [(p.grad.reshape(-1), p.grad.view(3, 8)) for p in params]
        clip_grad_value_((p for p in params), torch.tensor(0.5))
        for i, param in enumerate(params):
            wanted = dense(i, param.dtype).clamp(-0.5, 0.5)
            assert torch.equal(whole(param.grad), wanted)
            for copy in copies[i]:
                if isinstance(copy, st.ShardedTensor) and copy._copied is not None:  # in place of a view
                    with pytest.raises(st.RuleError, match="used after its source was written"):
                        whole(copy)
                else:
                    assert torch.equal(whole(copy).view(SHAPE), wanted)

    st.simulate(4, body)


def test_copies_in_place_of_views_are_not_read_after_the_norm_was_clipped():
    def body() -> None:
        (param,) = parameters(["[-, tp balanced]"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", st.GatherWarning)
            flat = param.grad.reshape(-1)
        clip_grad_norm_(param, 0.5)
        with pytest.raises(st.RuleError, match="used after its source was written"):
            whole(flat)
        assert float(torch.linalg.vector_norm(whole(param.grad))) == pytest.approx(0.5, rel=1e-5)

    st.simulate(4, body)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_on_all_ranks_where_asked(value):
    def body() -> str:
        params = parameters(["[tp, -]", "replicate"])
        if as_group().rank in (1, 3):
            params[0]._local.grad[0, 0] = value
        kept = [whole(p.grad).clone() for p in params]
        with pytest.raises(RuntimeError, match=r"The total norm of order 2\.0 .* is non-finite") as caught:
            clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
        assert all(torch.equal(whole(p.grad).nan_to_num(), k.nan_to_num()) for p, k in zip(params, kept, strict=True))
        assert not clip_grad_norm_(params, 1.0).isfinite()
        return str(caught.value)

    assert len(set(st.simulate(4, body))) == 1
