"""Train steps of data-parallel ranks: compiled as one graph by `shardtensor.spmd`, beside DDP, FSDP2 and eager steps.

A decoder and fused AdamW. All ways of a style are built with the same seed, see the same batches and take turns in
every round; told are the median and the minimum over rounds, of the slowest rank. "to peer" is the ratio to the fastest
way of DDP or FSDP2 in the same rounds, "to eager" the one to this library without compilation.

* first s: seconds of the first call: tracing and compiling, with empty caches. It is the time of one step if nothing
  is compiled.
* again: programs (ours) or graphs (torch.compile) that were compiled after the first call. Ours must be 0.
* new process s: seconds of the first call in a second process with the same ``cache_dir``; "compiled" is what it
  compiled anew, and must be 0.
* GiB: memory at most allocated in steps behind the first, on GPUs.
* losses: how far those of the first steps, averaged over the ranks, are at most from those of DDP. With gloo in float32
  the script fails above 1e-4. On the fake group, whose collectives send nothing, they mean nothing.

Precision: float32 on the CPU. On GPUs ``parameters`` (all are bfloat16), ``autocast``, or ``policy``: float32
parameters, bfloat16 compute and reductions, by autocast for replicas and by a MixedPrecisionPolicy for shards.

    torchrun --nproc-per-node 2 benchmarks/spmd.py --small        # ranks: NCCL if each has a GPU, else gloo
    python benchmarks/spmd.py --fake 4                            # one device as one rank of four
        [--styles replicate fully_shard] [--batches 1 2 4 8] [--ways DDP ...] [--size layers=4 width=256 ...]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest import mock

import attrs
import torch
import torch.distributed as dist
from decoder import SMALL, Decoder, Size
from ranks import wait
from report import write
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import clear_caches
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtensor as st
from shardtensor.fsdp import MixedPrecisionPolicy
from shardtensor.fsdp.data_parallel import data_parallel
from shardtensor.spmd import DataParallel, compile

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]
ADAMW: dict[str, Any] = {"lr": 1e-3, "fused": True}
BATCHES = 4  # different ones, in turn


@attrs.frozen
class Case:
    """What the ways of a table's part have in common."""

    style: str
    size: Size
    batch: int
    device: torch.device
    precision: str
    cache: str

    def model(self) -> Decoder:
        torch.manual_seed(0)
        with torch.device(self.device):
            module = Decoder(self.size)
        return module.to(torch.bfloat16) if self.precision == "parameters" else module

    @property
    def autocasts(self) -> bool:
        return self.precision == "autocast" or (self.precision == "policy" and self.style == "replicate")

    def policy(self, kind: Any) -> dict[str, Any]:
        bf16 = torch.bfloat16
        return {"mp_policy": kind(param_dtype=bf16, reduce_dtype=bf16)} if self.precision == "policy" else {}

    def step(self) -> Callable[[nn.Module, Any, Batch], torch.Tensor]:
        def train(model: nn.Module, optimizer: Any, batch: Batch) -> torch.Tensor:
            ids, targets = batch
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocasts):
                loss = model(ids, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return train

    def batches(self) -> list[Batch]:
        found = []
        for number in range(BATCHES):
            generator = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
            shape = self.batch, self.size.sequence
            ids, targets = (torch.randint(self.size.vocabulary, shape, generator=generator) for _ in range(2))
            found.append((ids.to(self.device), targets.to(self.device)))
        return found


# -- ways: a step, and the compiled function if it is ours ------------------------------------------------------------


def all_reduced(state, bucket):  # without annotations: DDP refuses those that are text
    buffer = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(buffer)
    future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
    future.set_result(buffer)
    return future


def ddp(case: Case, compiled: str = "") -> tuple[Step, Any]:
    module: Any = case.model()
    if compiled == "module":
        module.compile(dynamic=False)
    ids = [case.device] if case.device.type == "cuda" else None
    module = DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)
    if dist.get_backend() == "fake":  # its handles have no results, which DDP needs
        module.register_comm_hook(None, all_reduced)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    return partial(case.step(), torch.compile(module, dynamic=False) if compiled == "DDP" else module, optimizer), None


def fsdp2(case: Case, compiled: bool = False) -> tuple[Step, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = case.model()
    options = {
        "mesh": init_device_mesh(case.device.type, (dist.get_world_size(),)),
        **case.policy(MixedPrecisionPolicy),
    }
    for layer in module.layers:
        if compiled:
            layer.compile(dynamic=False)
        fully_shard(layer, **options)
    fully_shard(module, **options)
    return partial(case.step(), module, torch.optim.AdamW(module.parameters(), **ADAMW)), None


def sharded(case: Case, module: Decoder) -> Decoder:
    for layer in module.layers:
        st.fully_shard(layer, **case.policy(MixedPrecisionPolicy))
    st.fully_shard(module, **case.policy(MixedPrecisionPolicy))
    return module


def ours(case: Case) -> tuple[Step, Any]:
    module = case.model()
    if case.style == "replicate":
        data_parallel(module)
        return partial(case.step(), module, torch.optim.AdamW(module.parameters(), **ADAMW)), None
    optimizer = st.ShardedOptimizer(sharded(case, module), torch.optim.AdamW, **ADAMW)
    return partial(case.step(), module, optimizer), None


def ours_compiled(case: Case, graphed: bool = False) -> tuple[Step, Any]:
    module = case.model()
    if case.style == "fully_shard" and case.precision == "policy":
        sharded(case, module)  # else the first call does it
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    cache = None if graphed else case.cache
    compiled = compile(parallel_mode=DataParallel(case.style), graphed=graphed, cache_dir=cache)(case.step())
    return partial(compiled, module, optimizer), compiled


Way = Callable[[Case], tuple[Step, Any]]
OURS: dict[str, Way] = {"ours, eager": ours, "ours, compiled": ours_compiled}
GRAPHED: dict[str, Way] = {"ours, graphed": partial(ours_compiled, graphed=True)}
WAYS: dict[str, dict[str, Way]] = {
    "replicate": {
        "DDP": ddp,
        "DDP, compiled": partial(ddp, compiled="DDP"),
        "DDP of compiled": partial(ddp, compiled="module"),
        **OURS,
    },
    "fully_shard": {"FSDP2": fsdp2, "FSDP2, blocks compiled": partial(fsdp2, compiled=True), **OURS},
}


# -- measuring --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shared_folder(device: torch.device) -> Iterator[str]:
    """A new folder, the same for all ranks."""
    with tempfile.TemporaryDirectory() as own:
        found = [own]
        if dist.get_backend() != "fake":
            dist.broadcast_object_list(found, device=device)
        yield found[0]
        dist.barrier()


@contextlib.contextmanager
def empty_caches(device: torch.device) -> Iterator[None]:
    """Inductor and Triton find nothing that was compiled before; the ranks of a host share what they compile."""
    with shared_folder(device) as folder:
        clear_caches()
        with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=f"{folder}/triton"):
            yield
        clear_caches()


def prepared(case: Case, name: str, way: Way, warmup: int) -> tuple[Step, dict[str, Any], torch.Tensor]:
    """Build a way and run its first steps; return the step, the row so far and the losses."""
    on_gpu, batches = case.device.type == "cuda", case.batches()
    gc.collect()
    base = torch.cuda.memory_allocated() if on_gpu else 0
    with empty_caches(case.device):
        step, compiled = way(case)
        dist.barrier()
        begun = time.perf_counter()
        losses = [step(batches[0]).clone()]
        wait(case.device)
        row = {"way": name, "first s": round(time.perf_counter() - begun, 2)}
        count = [compiled.compiles if compiled is not None else counters["stats"]["unique_graphs"]]
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        losses += [step(batches[i % BATCHES]).clone() for i in range(1, warmup)]
        wait(case.device)
    count.append(compiled.compiles if compiled is not None else counters["stats"]["unique_graphs"])
    peak = round((torch.cuda.max_memory_allocated() - base) / 2**30, 2) if on_gpu else ""
    found = torch.stack(losses).float()
    dist.all_reduce(found)
    return step, {**row, "again": count[1] - count[0], "GiB": peak}, found.cpu() / dist.get_world_size()


def turns(steps: Sequence[Step], case: Case, rounds: int, repeats: int) -> torch.Tensor:
    """Return milliseconds a step of the slowest rank, ``[ways, rounds]``."""
    batches, spent = case.batches(), torch.zeros(len(steps), rounds, dtype=torch.float64)
    gc.collect()
    gc.disable()
    for number in range(rounds):
        for i, step in enumerate(steps):
            wait(case.device)
            dist.barrier()
            begun = time.perf_counter()
            for k in range(repeats):
                step(batches[k % BATCHES])
            wait(case.device)
            spent[i, number] = (time.perf_counter() - begun) / repeats * 1e3
    gc.enable()
    spent = spent.to(case.device)
    if dist.get_backend() != "fake":
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return spent.cpu()


def rows_of(case: Case, args: argparse.Namespace, losses: dict[int, torch.Tensor]) -> list[dict[str, Any]]:
    """The rows of a style with a batch size."""
    steps, rows = [], []
    for name, way in {**WAYS[case.style], **(GRAPHED if case.device.type == "cuda" else {})}.items():
        if args.ways and name not in args.ways:
            continue
        try:
            step, row, own = prepared(case, name, way, args.warmup)
        except Exception as error:  # what this torch or this group does not support
            print(f"{case.style}, batch {case.batch}, {name}: {type(error).__name__}: {error}", flush=True)
            continue
        apart = (own - losses.setdefault(case.batch, own)).abs().max().item()
        steps.append(step)
        rows.append({**row, "losses": "" if dist.get_backend() == "fake" else f"{apart:.0e}"})
        del step
    times = turns(steps, case, args.rounds, args.repeats)
    steps.clear()
    median = {row["way"]: ms.median().item() for row, ms in zip(rows, times, strict=True)}
    peer = min((ms for name, ms in median.items() if name.startswith(("DDP", "FSDP2"))), default=float("nan"))
    found = []
    for row, ms in zip(rows, times, strict=True):
        way = row.pop("way")
        timed = {"ms": round(median[way], 2), "min": round(ms.min().item(), 2), "to peer": round(median[way] / peer, 3)}
        timed["to eager"] = round(median[way] / median.get("ours, eager", float("nan")), 3)
        new = ("", "")
        if way == "ours, compiled":
            gc.collect()
            with empty_caches(case.device), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                new = pool.submit(restarted, case, dist.get_backend(), dist.get_rank(), dist.get_world_size()).result()
        first = {"style": case.style, "batch": case.batch, "way": way}
        found.append({**first, **timed, **row, "new process s": new[0], "compiled": new[1]})
    return found


def restarted(case: Case, backend: str, rank: int, world: int) -> tuple[float, int]:
    """In a second process: return the seconds of the first step, and how many parts were compiled."""
    if case.device.type == "cuda":
        torch.cuda.set_device(case.device)
    torch.set_num_threads(1)
    store = FakeStore() if backend == "fake" else dist.FileStore(f"{case.cache}/store", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    step, compiled = ours_compiled(case)
    dist.barrier()
    begun = time.perf_counter()
    step(case.batches()[0])
    wait(case.device)
    spent = time.perf_counter() - begun
    dist.destroy_process_group()
    return round(spent, 2), compiled.lowered


def run(device: torch.device, args: argparse.Namespace) -> None:
    """One rank: every style with every batch; the first rank prints."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # newer names of collectives, which torch 2.11 lacks
    torch.set_flush_denormal(True)  # the fake group leaves results as the memory was: denormal numbers would be slow
    on_gpu = device.type == "cuda"
    size = attrs.evolve(Size() if on_gpu and not args.small else SMALL, **dict(args.size))
    precision = args.precision or ("parameters" if on_gpu else "float32")
    rows, losses = [], {}
    for batch in args.batches:
        for style in args.styles:
            torch._dynamo.reset()
            with shared_folder(device) as folder:
                rows += rows_of(Case(style, size, batch, device, precision, folder), args, losses)
    if dist.get_rank() == 0:
        facts = {"backend": dist.get_backend(), "precision": precision, "size": attrs.asdict(size)}
        print(facts)
        write("spmd", rows, world=dist.get_world_size(), **facts)
    for row in rows:
        own, at = row["way"] in OURS or row["way"] in GRAPHED, f"{row['style']}, batch {row['batch']}, {row['way']}"
        assert not own or not row["again"], f"{at}: a later call compiled again"
        assert not row["compiled"], f"{at}: a second process compiled again"
        is_exact = dist.get_backend() == "gloo" and precision == "float32"
        assert not is_exact or float(row["losses"]) <= 1e-4, f"{at}: other losses than those of DDP"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", type=int, metavar="N", help="one process, as one of N ranks of torch's fake group")
    parser.add_argument("--small", action="store_true", help="small sizes, as without a GPU")
    parser.add_argument("--size", nargs="*", default=[], type=lambda x: (x.split("=")[0], int(x.split("=")[1])))
    parser.add_argument("--styles", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--ways", nargs="+", choices=list({**WAYS["replicate"], **WAYS["fully_shard"], **GRAPHED}))
    parser.add_argument("--precision", choices=["float32", "parameters", "autocast", "policy"])
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=8, help="steps in a row, in each round")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    if args.fake:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.fake)
    else:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    run(device, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
