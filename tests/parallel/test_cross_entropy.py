"""Parallel cross entropy against torch's of the whole logits: every option, cuts of every kind, and what it costs."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from harness import device, every_size

import shardtensor as st
from shardtensor.comm import collectives
from shardtensor.comm.process_group import as_group
from shardtensor.errors import RuleError
from shardtensor.parallel import cross_entropy
from shardtensor.parallel.cross_entropy import ParallelCrossEntropy, classes_of


def parallel_cross_entropy(logits, target, weight=None, *, num_classes, spec="[..., tp]", **options):
    """One call of a loss that is made for it."""
    return ParallelCrossEntropy(num_classes, spec, weight=weight, **options)(logits, target)


CUTS = [
    (12, "[..., tp]"),
    (12, "[-, -, tp unit(1)]"),
    (11, "[..., tp balanced]"),
    (3, "[tp balanced]"),  # ranks without a class
    (13, "[..., tp pad(8)]"),  # with 3 ranks or more, one of padding alone
]


def draw(count: int, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (2, 7)):
    """Logits, targets (the first is the one to ignore) and weights, equal on all ranks."""
    generator = torch.Generator().manual_seed(count)
    logits = 3 * torch.randn(*shape, count, generator=generator, dtype=torch.float64)
    target = torch.randint(0, count, shape, generator=generator)
    weight = torch.rand(count, generator=generator, dtype=torch.float64)
    target.view(-1)[:1] = 1
    return logits.to(device(), dtype), target.to(device()), weight.to(device(), dtype)


def dense(logits, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, z_loss=0.0):
    """torch's own, and the z-loss."""
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), weight, reduction=reduction, **options)
    loss = loss.view(target.shape) if reduction == "none" else loss
    live = target != ignore_index
    share = (live if weight is None else weight[target.where(live, 0)] * live).to(logits.dtype)
    z = z_loss * share * logits.logsumexp(-1).square()
    return loss + {"none": z, "sum": z.sum(), "mean": z.sum() / share.sum()}[reduction]


def columns(whole: torch.Tensor, count: int, spec: str, filling: float | None = None) -> torch.Tensor:
    """This rank's columns; with a `filling`, those of padding too."""
    classes = classes_of(count, spec, as_group())
    local = whole.detach()[..., classes.start : classes.start + classes.held].clone()
    return local if filling is None else F.pad(local, (0, classes.padded - classes.held), value=filling)


def check_one(count, spec, dtype=torch.float64, filling=None, tolerance=1e-12, weighted=False, **options) -> None:
    whole, target, weight = draw(count, dtype)
    weight = weight if weighted else None
    whole.requires_grad_()
    local = columns(whole, count, spec, filling).requires_grad_()
    expected = dense(whole, target, weight, **options)
    loss = parallel_cross_entropy(local, target, weight, num_classes=count, spec=spec, **options)
    assert loss.dtype == dtype and loss.shape == expected.shape
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    upstream = torch.linspace(0.5, 2, max(loss.numel(), 1), dtype=dtype, device=device()).view(loss.shape)
    (local_grad,) = torch.autograd.grad(loss, local, upstream)
    (grad,) = torch.autograd.grad(expected, whole, upstream)
    torch.testing.assert_close(local_grad, columns(grad, count, spec, filling and 0.0), rtol=tolerance, atol=tolerance)
    padding = local_grad[..., columns(grad, count, spec).shape[-1] :]
    assert not padding.any(), "the gradient of padding is exactly 0"


OPTIONS = [
    {"reduction": reduction, "label_smoothing": smoothing, "weighted": weighted, "ignore_index": ignore, "z_loss": z}
    for reduction, smoothing, weighted, ignore, z in itertools.product(
        ("none", "sum", "mean"), (0.0, 0.2), (False, True), (-100, 1), (0.0, 0.1)
    )
]


def check_all(cuts, every=1) -> None:
    for count, spec in cuts:
        for options in OPTIONS[::every]:
            check_one(count, spec, **options)
    check_one(12, "[..., tp]", torch.float32, tolerance=2e-6, weighted=True, label_smoothing=0.1, z_loss=0.1)


@pytest.mark.worlds("sim")
@every_size
def test_it_equals_torch_under_every_option(world, size):
    world(check_all, size, cuts=CUTS, every=1 if size == 3 else 5)


@pytest.mark.worlds("gloo")
def test_it_equals_torch_between_processes(world):
    world(check_all, 3, cuts=CUTS[2:], every=7)


def check_padding() -> None:
    for filling in (0.0, 1e30, math.inf, -math.inf, math.nan):
        for options in OPTIONS[::5]:
            check_one(13, "[..., tp pad(8)]", filling=filling, **options)


@pytest.mark.worlds("sim")
@every_size
def test_columns_of_padding_count_for_nothing_whatever_is_in_them(world, size):
    world(check_padding, size)


def check_extremes() -> None:
    whole, target, _ = draw(12)
    at_target = F.one_hot(target, 12).bool()
    lower = torch.arange(12, device=device()) < 6
    cases = {
        "a rank has no class that may be chosen": (whole.masked_fill(lower & ~at_target, -math.inf)),
        "large logits": whole + 1e6,
        "one logit stands out": whole.masked_fill(at_target, 1e4),
        "the target is out of the question": whole.masked_fill(at_target, -math.inf),
    }
    for name, logits in cases.items():
        logits = logits.requires_grad_()
        local = columns(logits, 12, "[..., tp]").requires_grad_()
        for options in ({}, {"z_loss": 0.1}, {"reduction": "none"}):
            expected = dense(logits, target, **options)
            loss = parallel_cross_entropy(local, target, num_classes=12, **options)
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12, equal_nan=True, msg=name)
            (grad,) = torch.autograd.grad(expected.sum(), logits)
            (local_grad,) = torch.autograd.grad(loss.sum(), local)
            torch.testing.assert_close(local_grad, columns(grad, 12, "[..., tp]"), rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_infinite_and_large_logits(world, size):
    world(check_extremes, size)


def check_nothing_live() -> None:
    for shape in ((2, 7), (0, 7), (1,)):
        whole, target, _ = draw(12, shape=shape)
        local = columns(whole, 12, "[..., tp]").requires_grad_()
        loss = parallel_cross_entropy(local, torch.full_like(target, -100), num_classes=12)
        assert loss.isnan()
        loss.backward()
        assert torch.equal(local.grad, torch.zeros_like(local))
        assert parallel_cross_entropy(local, torch.full_like(target, -100), num_classes=12, reduction="sum") == 0
    whole, target, _ = draw(12)
    whole[target == 3] = math.nan
    loss = parallel_cross_entropy(columns(whole, 12, "[..., tp]"), target, num_classes=12, ignore_index=3)
    assert loss == F.cross_entropy(whole.flatten(0, 1), target.flatten(), ignore_index=3).isfinite() * loss


@pytest.mark.worlds("sim")
@every_size
def test_a_mean_over_nothing_is_nan_and_ignored_rows_may_hold_anything(world, size):
    world(check_nothing_live, size)


def check_halves(dtype: torch.dtype) -> None:
    """As good as from the same logits in float32; the gradient is rounded once."""
    whole, target, weight = draw(12, dtype)
    wide = whole.float().requires_grad_()
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.1}, {"reduction": "sum"}):
        for w in (None, weight):
            local = columns(whole, 12, "[..., tp]").requires_grad_()
            loss = parallel_cross_entropy(local, target, w, num_classes=12, **options)
            expected = dense(wide, target, None if w is None else w.float(), **options)
            assert loss.dtype == torch.float32
            torch.testing.assert_close(loss, expected, rtol=2e-6, atol=2e-6)
            loss.backward()
            (grad,) = torch.autograd.grad(expected, wide)
            assert local.grad.dtype == dtype
            bound = torch.finfo(dtype).eps / 2 * 1.01
            torch.testing.assert_close(
                local.grad.float(), columns(grad, 12, "[..., tp]"), rtol=bound, atol=torch.finfo(dtype).smallest_normal
            )


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_are_summed_in_float32(world, dtype):
    world(check_halves, 4, dtype=dtype)


def check_integer_kinds() -> None:
    whole, target, _ = draw(200)
    local = columns(whole, 200, "[..., tp]")
    target.view(-1)[1] = 156  # -100 modulo 256
    expected = parallel_cross_entropy(local, target, num_classes=200)
    assert parallel_cross_entropy(local, target.int(), num_classes=200) == expected
    assert parallel_cross_entropy(local, target.to(torch.uint8), num_classes=200) == expected


@pytest.mark.worlds("sim")
def test_targets_of_any_integer_dtype(world):
    world(check_integer_kinds, 4)


def check_turns() -> None:
    for options in OPTIONS[::7]:
        check_one(11, "[..., tp balanced]", **options)
    check_halves(torch.bfloat16) if as_group().size == 4 else None


@pytest.mark.worlds("sim")
def test_rows_that_are_taken_in_turns(world, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_TURN", 15)
    world(check_turns, 4)


# -- what it costs ---------------------------------------------------------------------------------------------------


def on_meta(backward: bool, **options) -> None:
    with torch.device("meta"):
        logits, target = torch.empty(8, 100, 25, requires_grad=True), torch.empty(8, 100, dtype=torch.long)
    loss = parallel_cross_entropy(logits, target, num_classes=100, **options)
    if backward:
        loss.backward()
        assert logits.grad.shape == logits.shape


@pytest.mark.parametrize(("options", "rows"), [({}, 3), ({"label_smoothing": 0.1, "z_loss": 0.1}, 4)])
def test_two_all_reduces_forward_and_none_backward(options, rows):
    for backward in (False, True):
        traffic = st.count_bytes(4, on_meta, backward, **options)
        assert traffic.calls == 2
        assert {line.collective for line in traffic.lines} == {"all_reduce"}
        assert traffic.sent_bytes == rows * 800 * 4 * 2 * 3 // 4


def test_a_mean_over_data_axes_costs_one_more_all_reduce_of_a_number():
    traffic = st.count_bytes("dp=8, tp=4", on_meta, True, data_axes="dp")
    assert traffic.calls == 3
    assert sum(line.sent_bytes for line in traffic.lines if line.group == "dp=8") == 7


def check_saved() -> None:
    whole, target, _ = draw(1000, torch.float32)
    local = columns(whole, 1000, "[..., tp]").requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = parallel_cross_entropy(local, target, num_classes=1000, label_smoothing=0.1)
    large = [t for t in saved if t.numel() >= local.numel()]
    assert [t.data_ptr() for t in large] == [local.data_ptr()], "only the logits themselves"
    assert sum(t.numel() for t in saved if t is not large[0]) <= 8 * target.numel()
    loss.backward()


@pytest.mark.worlds("sim")
def test_nothing_of_the_size_of_the_logits_is_saved_but_they(world):
    world(check_saved, 4)


# -- in its place ----------------------------------------------------------------------------------------------------


def check_data_axes() -> None:
    """Two data coordinates, unequal numbers of live targets: averages of losses and gradients are the dense ones."""
    group = as_group()
    whole, target, weight = draw(12, shape=(6, 7))
    target[:2] = -100
    target[2, :5] = -100
    place = group.mesh.coordinate(group.rank)[0]
    for w in (None, weight):
        whole = whole.detach().requires_grad_()
        expected = dense(whole, target, w, label_smoothing=0.1)
        expected.backward()
        rows = slice(3 * place, 3 * place + 3)
        head = ParallelCrossEntropy(12, weight=w, data_axes="dp", label_smoothing=0.1)
        local = columns(whole, 12, "[..., tp]")[rows].clone().requires_grad_()
        loss = head(local, target[rows])
        loss.backward()
        mean = group.axis("dp").all_reduce(loss.detach().clone(), "avg")
        torch.testing.assert_close(mean, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(local.grad / 2, columns(whole.grad, 12, "[..., tp]")[rows], rtol=1e-12, atol=1e-12)


def test_a_mean_over_data_axes_is_the_mean_over_all_targets():
    st.simulate("dp=2, tp=2", check_data_axes)


def stray_on_one_coordinate() -> list[tuple[str, str]]:
    group = as_group()
    whole, target, _ = draw(12)
    target = target + 12 * group.mesh.coordinate(group.rank)[0]
    local = columns(whole, 12, "[..., tp]")
    return errors_of(lambda: parallel_cross_entropy(local, target, num_classes=12, data_axes="dp"))


def test_a_target_out_of_bounds_on_one_data_coordinate_is_said_on_all():
    found = st.simulate("dp=2, tp=2", stray_on_one_coordinate)
    assert len(set(map(str, found))) == 1 and "is out of bounds" in str(found[0])


def check_behind_a_head() -> None:
    """Input and weight of a column-parallel head get the dense gradients."""
    group = as_group()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(11, 4, generator=generator, dtype=torch.float64)
    target = torch.randint(0, 11, (5,), generator=generator)
    whole = [t.clone().requires_grad_() for t in (x, weight)]
    F.cross_entropy(F.linear(*whole), target).backward()
    classes = classes_of(11, "[tp balanced]", group)
    held = slice(classes.start, classes.start + classes.held)
    x, part = x.requires_grad_(), weight[held].clone().requires_grad_()
    loss = ParallelCrossEntropy(11, "[..., tp balanced]")
    loss(F.linear(collectives.sum_gradient(x, group), part), target).backward()
    torch.testing.assert_close(x.grad, whole[0].grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part.grad, whole[1].grad[held], rtol=1e-12, atol=1e-12)


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("size", [2, 3])
def test_behind_a_column_parallel_head(world, size):
    world(check_behind_a_head, size)


def test_the_module():
    loss = ParallelCrossEntropy(12, weight=torch.ones(12), ignore_index=3, reduction="sum", z_loss=1e-4)
    assert repr(loss) == "ParallelCrossEntropy(12, '[..., tp]', ignore_index=3, reduction='sum', z_loss=0.0001)"
    assert list(loss.state_dict()) == ["weight"]
    logits, target, _ = draw(12)
    assert torch.equal(copy.deepcopy(loss).double()(logits, target), loss(logits, target))


def check_compiled() -> None:
    smooth = {"label_smoothing": 0.1, "z_loss": 0.1, "reduction": "none"}
    for options, dtype in (({}, torch.float32), (smooth, torch.bfloat16)):
        loss = ParallelCrossEntropy(13, "[..., tp pad(8)]", **options)
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        whole, target, _ = draw(13, dtype)
        results = []
        for run, stance in ((loss, "default"), (compiled, "default"), (compiled, "fail_on_recompile")):
            local = columns(whole, 13, "[..., tp pad(8)]", 7.0).requires_grad_()
            with torch.compiler.set_stance(stance):
                found = run(local * 1, target)
            found.sum().backward()
            results.append((found.detach(), local.grad))
        for again in results[1:]:
            assert torch.equal(again[0], results[0][0])
            assert torch.equal(again[1], results[0][1])


def test_compiled_it_is_one_graph_with_the_same_values(world):
    world(check_compiled, 2, timeout_s=180.0)


# -- what is refused -------------------------------------------------------------------------------------------------


def errors_of(*calls) -> list[tuple[str, str]]:
    found = []
    for call in calls:
        with pytest.raises(Exception) as caught:
            call()
        found.append((type(caught.value).__name__, str(caught.value)))
    return found


def bad_calls() -> tuple[bool, list[tuple[str, str]]]:
    group = as_group()
    whole, target, weight = draw(12)
    logits = columns(whole, 12, "[..., tp]")

    def call(x=logits, t=target, w=None, **options):
        return lambda: parallel_cross_entropy(x, t, w, **{"num_classes": 12, **options})

    wrong_here = logits[..., :-1] if group.index == 1 else logits
    strays = [
        call(t=target.clamp(min=5).where(target != 1, 12)),
        call(t=target.where(target != 1, -1), ignore_index=-100),
        call(x=wrong_here),
    ]
    return (
        logits.is_cpu,
        errors_of(
            *(strays if logits.is_cpu else ()),  # a card only asserts, and is of no use to this process then
            call(num_classes=16),
            call(num_classes=13),
            call(num_classes=0),
            call(t=target.view(-1)),
            call(t=whole),
            call(x=logits.long()),
            call(w=weight[:5]),
            call(w=weight.clone().requires_grad_()),
            call(x=st.distribute(whole, "[-, -, tp]")),
            call(spec="[tp, ...]"),
            call(spec="[dp, tp]"),
            call(spec="replicate"),
            call(spec="chunk(dim=0, placements=[rank:0/cpu])"),
            call(spec="[..., tp blocks(2)]"),
            call(data_axes="dp"),
            call(reduction="max"),
            call(label_smoothing=2.0),
        ),
    )


@pytest.mark.worlds("sim", "gloo")
def test_what_is_wrong_is_said_on_every_rank(world):
    found = world(bad_calls, 4)
    assert found[0] == found[1] == found[2] == found[3]
    is_on_cpu, errors = found[0]
    kinds, texts = zip(*errors, strict=True)
    assert (
        kinds
        == (
            *("IndexError", "IndexError", "LayoutError", "LayoutError", "LayoutError", "LayoutError", "LayoutError"),
            *(
                "RuleError",
                "RuleError",
                "LayoutError",
                "LayoutError",
                "RuleError",
                "RuleError",
                "RuleError",
                "RuleError",
            ),
            *("SpecError", "RuleError", "LayoutError", "ValueError", "ValueError"),
        )[0 if is_on_cpu else 3 :]
    )
    if not is_on_cpu:
        return
    assert texts[:2] == ("Target 12 is out of bounds.", "Target -1 is out of bounds.")
    assert texts[2] == (
        "ParallelCrossEntropy: rank 1 has a fault, so nothing was done on any rank\n"
        "  rank 1  the logits have 2 columns where 3 of the 12 classes are\n"
        "            spec          [..., tp]\n"
        "            classes here  3 to 5\n"
        "            fix           give num_classes and the spec in which the head leaves its logits"
    )


def twice() -> None:
    whole, target, _ = draw(12)
    local = columns(whole, 12, "[..., tp]").requires_grad_()
    loss = parallel_cross_entropy(local, target, num_classes=12)
    (once,) = torch.autograd.grad(loss, local, retain_graph=True)
    (grad,) = torch.autograd.grad(loss, local, create_graph=True)
    assert torch.equal(grad, once)
    with pytest.raises(RuleError, match="can be differentiated once"):
        (grad.sum() + local.sum()).backward()  # the other term alone would go through


@pytest.mark.worlds("sim")
def test_a_second_derivative_is_refused_and_not_taken_for_zero(world):
    world(twice, 2)
