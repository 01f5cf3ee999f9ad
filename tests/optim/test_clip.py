"""Global norms over mixed layouts count every element once and are equal on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import device, every_size
from models import assert_equal, dense, set_grads, shard, sharded, whole

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.ops.foreach import global_norm

CLIPS = {"ours": st.clip_grad_norm_, "torch": torch.nn.utils.clip_grad_norm_}


def collectives():
    return dist.group.WORLD._get_sequence_number_for_group()


def norms(clip):
    oracle = dense()
    model = sharded(oracle)
    for norm_type in (1.0, 2.0, 3.0, float("inf"), "inf", 0.5):
        set_grads(0, oracle, model)
        before = collectives()
        total = CLIPS[clip]((p for p in model.values()), 0.5, norm_type)
        assert dist.get_world_size() == 1 or collectives() == before + 1
        want = torch.nn.utils.clip_grad_norm_(oracle.values(), 0.5, norm_type)
        assert type(total) is torch.Tensor
        torch.testing.assert_close(total, want)
        for name, param in oracle.items():
            torch.testing.assert_close(whole(model[name].grad), param.grad)
    empty = {"rows": model["rows"]}
    st.clip_grad_norm_(empty["rows"], 1.0)
    assert st.clip_grad_norm_([], 1.0).item() == 0.0
    return total.item()


@every_size
@pytest.mark.parametrize("clip", CLIPS)
def test_norms_and_scaled_gradients_are_the_dense_ones(world, size, clip):
    assert len(set(world(norms, size, clip=clip))) == 1


def not_finite(clip):
    for value in (torch.nan, torch.inf):
        for norm_type in (2.0, float("inf")):
            model = sharded(dense())
            set_grads(0, model)
            if dist.get_rank() == 0:
                model["rows"]._local.grad[0, 0] = value
            kept = model["vector"]._local.grad.clone()
            with pytest.raises(RuntimeError, match=f"norm of order {float(norm_type)} .* is non-finite"):
                CLIPS[clip](model.values(), 1.0, norm_type, error_if_nonfinite=True)
            assert torch.equal(model["vector"]._local.grad, kept)
            total = CLIPS[clip](model.values(), 1.0, norm_type)
            assert total.isnan() if value != value else total.isinf()


@pytest.mark.parametrize("clip", CLIPS)
def test_a_nan_on_one_rank_is_seen_by_all(world, clip):
    world(not_finite, 3, clip=clip)


def b26(variant, clip, many):
    p_spec, q_spec, group_p, group_q = "[tp, -]", "replicate", None, None
    kind = device().type
    if variant == "plain":
        q_spec = None
    elif variant == "other ranks":
        p_spec = f'chunk(dim=0, placements=["rank:0-1/{kind}"])'
        q_spec = f'chunk(dim=0, placements=["rank:2-3/{kind}"])'
    elif variant == "other groups":
        mesh = dist.init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "tp"))
        group_p, group_q = mesh["tp"], mesh["dp"]
        q_spec = "[dp balanced]"
    elif variant == "grid":
        group_p = group_q = dist.init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "tp"))
        p_spec, q_spec = "[tp, dp]", "[-]"
    p = shard(torch.zeros(2, 2), p_spec, process_group=group_p)
    q = shard(torch.zeros(1), q_spec, **({} if q_spec is None else {"process_group": group_q}))
    p.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]], device=device())
    q.grad = torch.tensor([12.0], device=device())
    params = [p, q] if many == "list" else (x for x in [p, q])
    total = CLIPS[clip](params, 1.0)
    assert type(total) is torch.Tensor
    assert (total.dim(), total.item()) == (0, 13.0)
    torch.testing.assert_close(whole(p.grad).cpu(), torch.tensor([[0.2307692, 0], [0, 0.3076923]]))
    torch.testing.assert_close(whole(q.grad).cpu(), torch.tensor([0.9230769]))
    assert CLIPS[clip]([p, q], 10.0).item() == pytest.approx(1.0)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("many", ["list", "generator"])
@pytest.mark.parametrize(
    ("variant", "size"), [("copied", 2), ("plain", 2), ("other ranks", 4), ("other groups", 4), ("grid", 4)]
)
def test_b26_clip_grad_norm_over_mixed_layouts(world, variant, size, clip, many):
    world(b26, size, variant=variant, clip=clip, many=many)


def mixed_dtypes():
    half = shard(torch.zeros(4, dtype=torch.bfloat16), "[tp]")
    half.grad = torch.full((4,), 2.0, dtype=torch.bfloat16, device=device())
    full = shard(torch.zeros(4), "[tp]")
    full.grad = torch.full((4,), 4.0, device=device())
    tied = [half, full, full]
    before = collectives()
    total = st.clip_grad_norm_(tied, 100.0)
    assert collectives() == before + 1
    assert (total.dtype, total.item()) == (torch.float32, pytest.approx(80**0.5))


def test_mixed_dtypes_take_one_collective_and_a_tied_gradient_counts_once(world):
    world(mixed_dtypes, 2)


def values():
    oracle = dense()
    model = sharded(oracle)
    set_grads(0, oracle, model)
    torch.nn.utils.clip_grad_value_(oracle.values(), 0.3)
    before = collectives()
    st.clip_grad_value_(model.values(), 0.3)
    assert collectives() == before
    assert_equal({k: p.grad for k, p in model.items()}, {k: p.grad for k, p in oracle.items()})


@every_size
def test_clip_by_value(world, size):
    world(values, size)


def total_norm():
    oracle = dense()
    model = sharded(oracle)
    for ord in (1.0, 2.0, float("inf")):
        want = torch.nn.utils.get_total_norm(list(oracle.values()), ord)
        with torch.no_grad():
            torch.testing.assert_close(torch.nn.utils.get_total_norm(model.values(), ord), want.detach())
            torch.testing.assert_close(torch.nn.utils.get_total_norm(model.values(), ord, foreach=True), want.detach())


def test_torch_get_total_norm(world):
    world(total_norm, 3)


def one_number(many):
    class Seen(type(as_group())):
        def all_reduce(self, t, op="sum"):
            counts.append((t.numel(), t.dtype))
            return super().all_reduce(t, op)

    counts = []
    grads = [st.distribute(torch.ones(5, 3), "[tp balanced, -]") for _ in range(many)]
    for grad in grads:
        grad._group.__class__ = Seen
    try:
        assert global_norm(grads, 2.0, torch.float32).item() == pytest.approx((15 * many) ** 0.5)
    finally:
        grads[0]._group.__class__ = Seen.__mro__[1]
    return counts


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("many", [1, 3])
def test_ranks_send_one_number_whatever_the_number_of_parameters(world, many):
    assert world(one_number, 3, many=many) == [[(1, torch.float64)]] * 3


def one_for_the_same_ranks():
    mesh = dist.init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    p, q = (shard(torch.zeros(8), spec, process_group=group) for spec, group in (("[tp]", None), ("[dp*tp]", mesh)))
    p.grad, q.grad = (torch.full((8,), n, device=device()) for n in (3.0, 4.0))
    before = collectives()
    assert st.clip_grad_norm_([p, q], 1.0).item() == pytest.approx(200**0.5)
    assert collectives() == before + 1


def test_groups_of_the_same_ranks_take_one_collective(world):
    world(one_for_the_same_ranks, 4)
