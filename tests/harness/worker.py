"""The child's side of the pool: join a world, run a body, say how it went."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import pickle
import random
import signal
import sys
import traceback
import warnings
from datetime import timedelta
from functools import reduce
from typing import Any

import attrs
import torch
import torch.distributed as dist

from shardtensor.comm import process_group

_state = {"device_type": "cpu", "rank": 0}

# Warnings of torch about itself, which no test can help.
TORCH_OWN = (
    "Guards may run slower on Python 3.13.0",
    "`torch.jit.script_method` is deprecated",  # torch.compile imports what uses it
    "The .grad attribute of a Tensor that is not a leaf",  # torch.compile looks at it
    "<class 'torch.autograd.function.Function'> should not be instantiated",  # torch.compile does
)


@attrs.frozen
class Job:
    """A function to run, by name; `store` is the file by which a new world meets, None to keep the last one."""

    module: str
    qualname: str
    kwargs: dict[str, Any]
    size: int
    store: str | None
    path: list[str]


@attrs.frozen
class Reply:
    """How a job went on one rank.

    `collectives` counts those of the default group; `is_clean` says that the group can serve another job.
    """

    result: Any = None
    error: str = ""
    lost_a_peer: bool = False
    collectives: int = -1
    is_clean: bool = False


def device(rank: int | None = None) -> torch.device:
    """The device that a rank of the running job works on; of this process when no rank is given."""
    if _state["device_type"] == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", _state["rank"] if rank is None else rank)


def set_device(device_type: str, rank: int = 0) -> None:
    """Say what `device` returns in this process."""
    _state.update(device_type=device_type, rank=rank)


def serve(rank: int, device_type: str, pipe: Any, stack_file: str) -> None:
    """Run jobs until the pipe closes."""
    set_device(device_type, rank)
    gc.freeze()  # of what is loaded, which all ranks share, nothing is ever free
    torch.set_num_threads(1)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        while True:
            try:
                job = pickle.loads(pipe.recv_bytes())
            except EOFError:
                break
            if rank >= job.size:
                _leave()
                continue
            reply = _run(rank, job)
            if reply.error:
                _leave()  # peers that wait for this rank see the connection close
            pipe.send_bytes(_pickled(reply))
    _leave()


def _run(rank: int, job: Job) -> Reply:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for text in TORCH_OWN:
                warnings.filterwarnings("ignore", text)
            sys.path[:] = job.path
            body = reduce(getattr, job.qualname.split("."), importlib.import_module(job.module))
            if job.store is not None:
                _join(rank, job.size, job.store)
            world = dist.group.WORLD
            groups = len(dist.distributed_c10d._world.pg_map)
            torch.manual_seed(0)
            random.seed(0)
            result = body(**job.kwargs)
            is_clean = dist.group.WORLD is world and len(dist.distributed_c10d._world.pg_map) == groups
            return Reply(result, collectives=_collectives(), is_clean=is_clean)
    except BaseException as error:  # what ends a body must not end the pool
        text = "".join(traceback.format_exception(error))
        lost = any(sign in str(error) for sign in ("Connection closed by peer", "Connection reset by peer"))
        return Reply(error=text, lost_a_peer=lost)


def _join(rank: int, size: int, store: str) -> None:
    _leave()
    backend = "nccl" if _state["device_type"] == "cuda" else "gloo"
    # Longer than any job: it is the pool that says which ranks are stuck, and where.
    dist.init_process_group(
        backend, store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(minutes=10)
    )
    dist.all_reduce(torch.ones(1, device=device()))  # a rank that failed at once would cut short its peers' joining


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    process_group.forget_destroyed()
    gc.collect()  # a connection closes with the last reference to its group


def _collectives() -> int:
    return dist.group.WORLD._get_sequence_number_for_group() if dist.is_initialized() else -1


def _pickled(reply: Reply) -> bytes:
    try:
        return pickle.dumps(reply)
    except Exception as error:
        return pickle.dumps(Reply(error=f"the result cannot be pickled: {error}"))
