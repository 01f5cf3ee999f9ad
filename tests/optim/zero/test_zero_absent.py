"""A rank that does not take part, or fails in a step: the others raise an error within the timeout of the group."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist
from harness import FULL
from harness.quick import sampled
from torch import optim
from zero_models import MODES, set_grads, twins, zero

import shardtensor as st
from shardtensor.comm.process_group import as_group

SHORT_S = 0.7
NAMES = ["matrix", "bias", "last", "cube"]

on_cpu = pytest.mark.skipif(os.environ.get("SHARDTENSOR_TEST_DEVICE") == "cuda", reason="NCCL ends the process instead")


class Breaks(optim.SGD):
    """Raises in a step, where it is told to."""

    broken = False

    @torch.no_grad()
    def step(self, closure=None):
        if self.broken:
            raise ZeroDivisionError("in the step of one rank")
        return super().step(closure)


def act(how, mode):
    """Rank 1 is absent or fails; the others raise in time."""
    group = dist.new_group(timeout=timedelta(seconds=SHORT_S))
    model, _ = twins(NAMES)
    ours = zero(model, Breaks, mode, process_group=group, lr=0.1)
    set_grads(0, model)
    ours.step()
    dist.barrier()
    start = time.monotonic()
    calls = {"step": ours.step, "breaks": ours.step, "consolidate": lambda: ours.consolidate_state_dict(to=0)}
    if dist.get_rank() != 1:
        with pytest.raises(st.AbsentRankError):
            calls[how]()
        assert time.monotonic() - start < SHORT_S + 3
    elif how == "breaks":
        ours.optim.broken = True
        with pytest.raises(ZeroDivisionError):
            ours.step()
    as_group().barrier()  # of the world: rank 1 stays until the others have their errors


HOW = ["step", "breaks", "consolidate"]
CASES = list(product(HOW, MODES)) if FULL else list(zip(HOW, ["owners", "ranges", "views"], strict=True))


@on_cpu
@pytest.mark.parametrize(("how", "mode"), CASES)
def test_one_rank_does_not_take_part(world, how, mode):
    world(act, 3, how=how, mode=mode)


PROGRAM = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import shardtensor as st

out, into = os.pipe()
rank = 0 if os.fork() else 1
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(into, b"%05d" % store.port)
else:
    store = dist.TCPStore("127.0.0.1", int(os.read(out, 5)), is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))

class Dies(torch.optim.SGD):
    def step(self, closure=None):
        if rank == 1 and self.state:
            os._exit(0)
        return super().step(closure)

params = [torch.nn.Parameter(torch.ones(n)) for n in (4, 4, 3)]
zero = st.ZeroRedundancyOptimizer(params, Dies, lr=0.1, momentum=0.9, partition=sys.argv[1])
for param in params:
    param.grad = torch.ones_like(param)
zero.step()
start = time.monotonic()
try:
    zero.step()
except st.AbsentRankError as error:
    print("AbsentRankError", time.monotonic() - start < 15)
os._exit(0)
"""


@on_cpu
def test_a_rank_that_dies_in_a_step():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    programs = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, how], **pipes) for how in sampled(("owners", "ranges"), 1)
    ]
    for program in programs:
        out, err = program.communicate(timeout=60)
        assert out.splitlines() == ["AbsentRankError True"], err


def alone():
    """In a simulated world nobody waits for a timeout."""
    model, _ = twins(NAMES)
    ours = zero(model, optim.SGD, lr=0.1)
    set_grads(0, model)
    if as_group().rank != 1:
        ours.step()


@pytest.mark.worlds("sim")
def test_a_simulated_rank_that_does_not_step(world):
    with pytest.raises(st.ShardTensorError):
        world(alone, 3)
