"""A graphed step trains as the step does; what a replay would not do is done by a call, or refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import device
from harness.recorded_ops import RecordedOps
from torch import nn

import shardtensor as st
from shardtensor.comm import process_group
from shardtensor.errors import CaptureError
from shardtensor.optim import graphs


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[RecordedOps]:
    """Graphed steps are played on the CPU; the list has what each made."""
    made: list[RecordedOps] = []

    def make(device: torch.device) -> RecordedOps:
        made.append(RecordedOps())
        return made[-1]

    monkeypatch.setattr(graphs, "_recorder_on", make)
    monkeypatch.setattr(process_group, "_live", set())
    return made


def rate(i: int) -> float:
    return torch.tensor(0.1 / (1 + i)).item()  # a number that float32 holds


class Training:
    """A sharded MLP, its optimizer, and one step of it."""

    def __init__(self, make: Any = torch.optim.AdamW, *, is_sharded: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)).to(device())
        options = {"lr": rate(0), "fused": True, **options}
        if is_sharded:
            st.shard_module(self.model, {"0.weight": "[tp, -]", "0.bias": "[tp]", "2.weight": "[-, tp]"})
            self.optimizer = st.ShardedOptimizer(self.model, make, **options)
        else:
            self.optimizer = make(self.model.parameters(), **options)
        self.calls = 0

    def step(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y) * scale
        loss.backward()
        st.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss

    def values(self) -> list[torch.Tensor]:
        return [
            (p.full_tensor() if isinstance(p, st.ShardedTensor) else p).detach().clone()
            for p in self.model.parameters()
        ]


def batch(i: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(i)
    x, y = torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator)
    return x.to(device()), y.to(device())


def graphed(step: Any, **options: Any) -> Any:
    return st.graphed_step(step, device="cpu", **options)


def assert_same(a: Training, b: Training) -> None:
    for x, y in zip(a.values(), b.values(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("make", "options", "is_sharded", "steps"),
    [
        (torch.optim.AdamW, {}, True, 50),
        (torch.optim.AdamW, {}, False, 12),
        (torch.optim.Adam, {"amsgrad": True}, True, 12),
        (torch.optim.SGD, {"momentum": 0.9}, True, 12),
        (torch.optim.Adagrad, {}, True, 12),
    ],
)
def test_steps_are_those_of_the_step(recorders, make, options, is_sharded, steps):
    eager, other = (Training(make, is_sharded=is_sharded, **options) for _ in range(2))
    train = graphed(other.step)
    schedules = [torch.optim.lr_scheduler.LambdaLR(t.optimizer, lambda i: rate(i) / rate(0)) for t in (eager, other)]
    for i in range(steps):
        loss = train(*batch(i))
        assert torch.equal(loss, eager.step(*batch(i)))
        for schedule in schedules:
            schedule.step()
        for t in (eager, other):
            t.optimizer.param_groups[0]["lr"] = rate(i)  # what float32 holds
    assert_same(eager, other)
    [recorder] = recorders
    assert (recorder.runs, recorder.captures, recorder.replays, other.calls) == (3, 1, steps - 3, 4)
    assert other.optimizer.param_groups[0]["lr"] == rate(steps - 1)
    assert other.optimizer.param_groups[0].get("capturable", False) is False
    state = other.optimizer.state_dict()["state"]
    assert make is torch.optim.SGD or all(entry["step"] == steps for entry in state.values())


def test_calls_that_warm_up_are_steps(recorders):
    eager, other = Training(), Training()
    train = graphed(other.step, warmup=2)
    for i in range(3):
        assert train.is_captured is False
        train(*batch(i))
        eager.step(*batch(i))
        assert_same(eager, other)
    assert train.is_captured


def test_outputs_are_the_callers_unless_they_are_not_cloned(recorders):
    def step(x: torch.Tensor) -> Any:
        return {"sum": x.sum(), "name": "n", "pair": (x + 1, [x])}

    train = graphed(step, warmup=1)
    outs = [train(torch.full((2,), float(i))) for i in range(4)]
    assert [out["sum"].item() for out in outs] == [0.0, 2.0, 4.0, 6.0]
    assert outs[3]["name"] == "n"
    assert torch.equal(outs[2]["pair"][0], torch.tensor([3.0, 3.0]))
    assert torch.equal(outs[1]["pair"][1][0], torch.tensor([1.0, 1.0]))
    train = graphed(step, warmup=1, clone_outputs=False)
    outs = [train(torch.full((2,), float(i))) for i in range(4)]
    assert [out["sum"].item() for out in outs] == [0.0, 6.0, 6.0, 6.0]
    assert not graphed(lambda x: x * 2)(torch.ones(1, requires_grad=True)).requires_grad


def test_inputs_are_copied_from_any_structure(recorders):
    def step(pair: Any, *, more: dict[str, torch.Tensor], n: int) -> torch.Tensor:
        return pair[0] * n + pair[1] + more["z"]

    train = graphed(step, warmup=1)
    sharded = st.distribute(torch.arange(2.0), "[tp]")
    for i in range(4):
        x = torch.full((2,), float(i))
        out = train((x, x.t()), more={"z": sharded * i}, n=3)
        assert torch.equal(out, 4 * x + torch.arange(2.0) * i)


@pytest.mark.parametrize(
    ("args", "fault", "captured", "found"),
    [
        (batch(0, rows=5), "input 0", "4 x 3 torch.float32", "5 x 3 torch.float32"),
        ((batch(0)[0].double(), batch(0)[1]), "input 0", "4 x 3 torch.float32", "4 x 3 torch.float64"),
        ((batch(0)[0], 1.0), "arguments", "2 tensors", None),
        (batch(0)[:1], "arguments", "2 tensors", "1 tensors"),
    ],
)
def test_other_inputs_are_refused_before_anything_runs(recorders, args, fault, captured, found):
    training = Training()
    train = graphed(training.step, warmup=1)
    train(*batch(0)), train(*batch(1))
    before = training.values()
    with pytest.raises(CaptureError, match=f"^{fault} of a graphed step: not as in the capture; nothing") as told:
        train(*args)
    assert f"captured  {captured}\n" in str(told.value)
    assert found is None or f"found     {found}\n" in str(told.value)
    assert all(torch.equal(x, y) for x, y in zip(before, training.values(), strict=True))
    train(*batch(2))


def test_a_value_that_is_no_tensor_is_baked_in(recorders):
    training = Training()
    train = graphed(training.step, warmup=1)
    train(*batch(0), 2.0), train(*batch(1), 2.0), train(*batch(2), 2.0)
    with pytest.raises(CaptureError) as told:
        train(*batch(3), 3.0)
    assert str(told.value) == (
        "input 2 of a graphed step: not as in the capture; nothing has run\n"
        "  captured  2.0\n"
        "  found     3.0\n"
        "  either    call the step itself, without a graph, for a batch of another shape\n"
        "  or        make another graphed_step of it; what changes from call to call has to be in tensors"
    )


def load(training: Training) -> None:
    training.optimizer.load_state_dict(training.optimizer.state_dict())


def set_decay(training: Training) -> None:
    training.optimizer.param_groups[0]["weight_decay"] = 0.25


def move(training: Training) -> None:
    weight = training.model[2].bias
    weight.data = weight.data.clone()


def add_group(training: Training) -> None:
    training.optimizer.add_param_group({"params": {"more": nn.Parameter(torch.ones(1))}, "lr": 0.5})


@pytest.mark.parametrize("change", [load, set_decay, move, add_group])
def test_what_a_replay_would_not_see_is_captured_anew(recorders, change):
    eager, other = Training(), Training()
    train = graphed(other.step, warmup=1)
    for i in range(9):
        if i == 4:
            change(eager), change(other)
        assert torch.equal(train(*batch(i)), eager.step(*batch(i)))
    assert_same(eager, other)
    [recorder] = recorders
    assert (recorder.runs, recorder.captures, recorder.replays) == (2, 2, 7)


def test_a_learning_rate_may_be_a_tensor(recorders):
    eager, other = (Training(lr=torch.tensor(rate(0))) for _ in range(2))
    train = graphed(other.step, warmup=1)
    for i in range(6):
        for t in (eager, other):
            if i == 4:
                t.optimizer.param_groups[0]["lr"] = torch.tensor([rate(7)])
            else:
                t.optimizer.param_groups[0]["lr"].fill_(rate(i))
        assert torch.equal(train(*batch(i)), eager.step(*batch(i)))
    assert_same(eager, other)
    assert torch.equal(other.optimizer.param_groups[0]["lr"], torch.tensor([rate(5)]))


def test_groups_have_rates_of_their_own(recorders):
    trainings = []
    for _ in range(2):
        training = Training(is_sharded=False)
        first, *rest = training.model.parameters()
        training.optimizer = torch.optim.AdamW([{"params": [first], "lr": rate(3)}, {"params": rest}], fused=True)
        trainings.append(training)
    eager, other = trainings
    train = graphed(other.step, warmup=1)
    for i in range(5):
        for t in trainings:
            t.optimizer.param_groups[1]["lr"] = rate(i)
        assert torch.equal(train(*batch(i)), eager.step(*batch(i)))
    assert_same(eager, other)


def test_two_optimizers_step_in_one_graph(recorders):
    trainings = []
    for _ in range(2):
        training = Training(is_sharded=False)
        first, second, third, last = training.model.parameters()
        training.optimizer = torch.optim.AdamW([first, last], lr=rate(1), fused=True)
        training.more = torch.optim.SGD([second, third], lr=rate(2), fused=True)
        trainings.append(training)

    def step_of(t: Any) -> Any:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            t.more.zero_grad()
            loss = t.step(x, y)
            t.more.step()
            return loss

        return step

    eager, other = map(step_of, trainings)
    train = graphed(other, warmup=1)
    for i in range(5):
        for t in trainings:
            t.more.param_groups[0]["lr"] = rate(i)
        assert torch.equal(train(*batch(i)), eager(*batch(i)))
    assert_same(*trainings)


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["zeroed in place", "dropped at the end"])
def test_gradients_may_be_cleared_in_other_ways(recorders, place):
    def step_of(t: Training) -> Any:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if place == "zeroed in place":
                t.optimizer.zero_grad(set_to_none=False)
            loss = F.mse_loss(t.model(x), y)
            loss.backward()
            t.optimizer.step()
            if place == "dropped at the end":
                t.optimizer.zero_grad()
            return loss

        return step

    eager, other = Training(), Training()
    train, plain = graphed(step_of(other), warmup=2), step_of(eager)
    for i in range(6):
        assert torch.equal(train(*batch(i)), plain(*batch(i)))
    assert_same(eager, other)
    if place == "zeroed in place":  # the graph adds to gradients that someone drops
        other.optimizer.zero_grad()
        eager.optimizer.zero_grad()
        for i in range(4):
            assert torch.equal(train(*batch(i)), plain(*batch(i)))
        assert_same(eager, other)
        assert recorders[0].captures == 2


def test_gradients_that_outlive_a_call_are_refused(recorders):
    training = Training()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(training.model(x), y)
        loss.backward()
        training.optimizer.step()
        return loss

    train = graphed(step, warmup=1)
    train(*batch(0))
    training.optimizer.zero_grad()
    before = training.values()
    with pytest.raises(CaptureError, match="replays would not add to them"):
        train(*batch(1))
    assert all(torch.equal(x, y) for x, y in zip(before, training.values(), strict=True))
    assert all(p.grad is None for p in training.model.parameters())


# -- what cannot be captured -----------------------------------------------------------------------------------------


def test_optimizers_that_step_with_numbers_of_the_host_are_refused(recorders):
    for is_sharded in (True, False):
        training = Training(is_sharded=is_sharded, fused=None)
        with pytest.raises(CaptureError) as told:
            graphed(training.step)(*batch(0))
        assert str(told.value) == (
            "AdamW with these options reads numbers on the host, so every replay would repeat those of the capture\n"
            "  found   fused=None, capturable=False\n"
            "  either  AdamW(..., fused=True)\n"
            "  or      AdamW(..., capturable=True)"
        )
        assert training.optimizer.param_groups[0]["lr"] == rate(0)


def test_a_fix_names_only_what_the_class_takes(recorders):
    for make, way in ((torch.optim.SGD, "SGD(..., fused=True)"), (torch.optim.NAdam, "NAdam(..., capturable=True)")):
        training = Training(is_sharded=False)
        training.optimizer = make(training.model.parameters())
        with pytest.raises(CaptureError, match="reads numbers on the host") as told:
            graphed(training.step)(*batch(0))
        assert str(told.value).endswith(f"  fix    {way}")
    training.optimizer = torch.optim.Adafactor(training.model.parameters())
    with pytest.raises(CaptureError, match="Adafactor computes its step on the host"):
        graphed(training.step)(*batch(0))


def test_low_precision_needs_a_fused_step(recorders):
    training = Training(is_sharded=False)
    training.model.bfloat16()
    training.optimizer = torch.optim.AdamW(training.model.parameters(), capturable=True)
    x, y = (t.bfloat16() for t in batch(0))
    with pytest.raises(CaptureError) as told:
        graphed(training.step)(x, y)
    assert str(told.value) == (
        "AdamW would round the learning rate to the parameters' dtype in a CUDA graph, unlike in a call\n"
        "  dtype   torch.bfloat16\n"
        "  either  AdamW(..., fused=True)\n"
        "  or      parameters in float32"
    )


def test_reading_a_number_is_told_with_ways_out(recorders):
    training = Training()
    train = graphed(lambda x, y: training.step(x, y).item(), warmup=1)
    assert isinstance(train(*batch(0)), float)
    before = training.values()
    with pytest.raises(CaptureError) as told:
        train(*batch(1))
    assert str(told.value) == (
        "the step could not be captured in a CUDA graph; nothing of it ran\n"
        "  said    operation not permitted when stream is capturing\n"
        "  either  leave out what reads a tensor on the host: item(), tolist(), cpu(), print, `if tensor:`\n"
        "  or      leave out what copies from the host: torch.tensor(..., device=...); pass it as an argument"
    )
    assert all(torch.equal(x, y) for x, y in zip(before, training.values(), strict=True))
    assert training.optimizer.param_groups[0]["lr"] == rate(0)


def test_state_made_by_the_capture_is_refused(recorders):
    training = Training()
    calls = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        if len(calls) == 1:
            return F.mse_loss(training.model(x), y)
        return training.step(x, y)

    train = graphed(step, warmup=1)
    train(*batch(0))
    with pytest.raises(CaptureError, match=r"made new state while the step was captured"):
        train(*batch(1))


def test_a_scheduler_inside_the_step_is_refused(recorders):
    training = Training()
    schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = training.step(x, y)
        schedule.step()
        return loss

    with pytest.raises(CaptureError, match="a learning rate was changed inside the step"):
        graphed(step)(*batch(0))


def test_there_is_a_call_before_the_capture():
    with pytest.raises(ValueError, match="warmup is 0"):
        st.graphed_step(print, warmup=0)


# -- the end ---------------------------------------------------------------------------------------------------------


def test_a_closed_step_lets_go_and_is_not_called(recorders):
    eager, other = Training(), Training()
    with graphed(other.step, warmup=1) as train:
        for i in range(3):
            train(*batch(i)), eager.step(*batch(i))
    assert recorders[0].resets == 1
    with pytest.raises(CaptureError, match="this graphed step was closed"):
        train(*batch(0))
    other.step(*batch(4)), eager.step(*batch(4))  # what it stepped is as usable as before
    assert_same(eager, other)
    load(other)
    train.close()
    assert recorders[0].resets == 1


def destroy_a_group() -> None:
    if device().type == "cuda":  # backward has a thread of its own there, in which nothing is written down
        return
    made: list[RecordedOps] = []
    usual = graphs._recorder_on
    graphs._recorder_on = lambda device: made.append(RecordedOps()) or made[-1]
    try:
        eager, other = Training(is_sharded=False), Training(is_sharded=False)
        train = graphed(other.step, warmup=1)
        group = dist.new_group([0, 1])
        for i in range(6):
            if i == 3:
                assert train.is_captured
                dist.destroy_process_group(group)
                assert not train.is_captured
            assert torch.equal(train(*batch(i)), eager.step(*batch(i)))
        assert train.is_captured
        assert made[0].resets == 1
        train.close()
    finally:
        graphs._recorder_on = usual


def test_graphs_are_gone_before_a_group_is_destroyed(world):
    world(destroy_a_group, 2)


def on_the_cpu() -> None:
    trainings = [Training() for _ in range(2)]
    train = st.graphed_step(trainings[0].step, device="cpu")
    for i in range(3):
        loss = train(*batch(i))
        assert torch.equal(loss, trainings[1].step(*batch(i)))
        assert not loss.requires_grad
    assert not train.is_captured
    assert_same(*trainings)
    train.close()


@pytest.mark.worlds("sim")
def test_without_cuda_calls_run_the_step(world):
    world(on_the_cpu, 2)


def on_gpus() -> None:
    eager, other = (Training(lr=torch.tensor(rate(0), device=device())) for _ in range(2))
    with st.graphed_step(other.step) as train:
        for i in range(50):
            for t in (eager, other):
                t.optimizer.param_groups[0]["lr"].fill_(rate(i))
            assert torch.equal(train(*batch(i)), eager.step(*batch(i)))
            if i == 30:
                load(other)
            assert train.is_captured == (i > 2 and i != 31)  # the call after a load runs as it is
        assert_same(eager, other)
        group = dist.new_group(range(dist.get_world_size()))
        dist.destroy_process_group(group)
        assert not train.is_captured


@pytest.mark.gpu
def test_replays_on_nccl_are_the_steps(gpu_world):
    gpu_world(on_gpus, 2)


def test_clipping_reads_nothing_on_the_host():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = [nn.Parameter(torch.ones(3)) for _ in range(2)] + [st.distribute(torch.ones(4), "[tp]")]
        params[2].requires_grad_()
        params.append(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))
        for p in params:
            p.grad = torch.ones_like(p)
        RecordedOps().capture(lambda: st.clip_grad_norm_(params, 1.0))
