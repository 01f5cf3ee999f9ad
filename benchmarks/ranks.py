"""Start a benchmark's ranks, a process each: NCCL where there are GPUs, gloo on one thread each where not."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Body = Callable[[torch.device, argparse.Namespace], Any]


def spawn(body: Body, args: argparse.Namespace) -> None:
    """Run ``body(device, args)`` as each of ``args.world`` ranks of one host."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    mp.spawn(_rank, (body, args, port), nprocs=args.world)


def _rank(
    rank: int, body: Callable[[torch.device, argparse.Namespace], Any], args: argparse.Namespace, port: int
) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(args.world))
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=rank, world_size=args.world, device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=args.world)
    body(device, args)
    dist.barrier()
    dist.destroy_process_group()


def wait(device: torch.device) -> None:
    """Return when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
