"""Train steps of data-parallel ranks, compiled as one graph by `shardtensor.spmd`, beside DDP, FSDP2 and eager steps.

A decoder with fused AdamW. All ways have the same seed and batches and take turns in every round; told are the median
and the minimum of the slowest rank. Ratios are to the fastest way of DDP or FSDP2, and to this library, eager.

* first s: seconds of the first call, with empty caches: of tracing and compiling, if the way compiles.
* again: programs (ours) or graphs (torch.compile) compiled after the first call. Ours must be 0.
* new process s: seconds of the first call in a second process with the same ``cache_dir`` and torch's own caches empty;
  lowered: what it gave to the compiler again, and must be 0.
* GiB: memory at most allocated in steps behind the first, on GPUs.
* losses: of the first steps, mean of ranks, at most so far from those of the first way; on gloo the script fails above
  1e-4. The fake group sends nothing: no losses.

Without ``--keep`` FSDP2 and the eager library gather parameters again for backward, and a compiled step those that need
more than 64 MiB together: the defaults.

On GPUs all values are bfloat16, or ``--precision autocast``, or ``policy``: float32 parameters, bfloat16 compute and
reductions, by autocast for replicas and by a MixedPrecisionPolicy for shards. On the CPU they are float32.

    torchrun --nproc-per-node 2 benchmarks/spmd.py --small    # NCCL if there are GPUs, else gloo
    python benchmarks/spmd.py --fake 4                        # one device as one rank of four
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest import mock

import attrs
import torch
import torch.distributed as dist
from decoder import SMALL, Decoder, Size
from fully_shard import batch_of
from ranks import wait
from report import write
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import clear_caches
from torch.distributed import fsdp as upstream
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from zero import all_reduced

import shardtensor as st
from shardtensor.fsdp import MixedPrecisionPolicy
from shardtensor.fsdp.data_parallel import data_parallel
from shardtensor.spmd import DataParallel, compile

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]
Way = Callable[["Case"], tuple[Step, Any]]  # the compiled function is the second, if it is ours
ADAMW: dict[str, Any] = {"lr": 1e-3, "fused": True}


def train(device: str, autocasts: bool, model: nn.Module, optimizer: Any, batch: Batch) -> torch.Tensor:
    with torch.autocast(device, torch.bfloat16, enabled=autocasts):
        loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@attrs.frozen
class Case:
    """What the ways of a table's part have in common."""

    style: str
    size: Size
    batch: int
    device: torch.device
    precision: str
    keeps: bool
    cache: str

    def model(self) -> Decoder:
        torch.manual_seed(0)
        with torch.device(self.device):
            module = Decoder(self.size)
        return module.to(torch.bfloat16) if self.precision == "parameters" else module

    def sharded(self, fully_shard: Any, kind: Any, compiled: bool = False, **options: Any) -> Decoder:
        """The model with each layer as a unit, by either library; `kind` is its MixedPrecisionPolicy."""
        module, bf16 = self.model(), torch.bfloat16
        if self.precision == "policy":
            options["mp_policy"] = kind(param_dtype=bf16, reduce_dtype=bf16)
        options["reshard_after_forward"] = not self.keeps
        for layer in module.layers:
            if compiled:
                layer.compile(dynamic=False)
            fully_shard(layer, **options)
        return fully_shard(module, **options)

    def step(self) -> Callable[[nn.Module, Any, Batch], torch.Tensor]:
        return partial(train, self.device.type, self.precision in ("autocast", "policy" * (self.style == "replicate")))

    def batches(self) -> list[Batch]:
        return [batch_of(self.size, self.batch, self.device, number) for number in range(4)]


def ddp(case: Case, compiled: str = "") -> tuple[Step, Any]:
    module: Any = case.model()
    if compiled == "module":  # a backend of its own: it shares no graphs with the other compiled way
        module.compile(dynamic=False, backend=lambda graph, inputs: compile_fx(graph, inputs))
    module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    if dist.get_backend() == "fake":  # its handles have no results, which DDP needs
        module.register_comm_hook(None, all_reduced)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    return partial(case.step(), torch.compile(module, dynamic=False) if compiled == "DDP" else module, optimizer), None


def fsdp2(case: Case, compiled: bool = False) -> tuple[Step, Any]:
    mesh = init_device_mesh(case.device.type, (dist.get_world_size(),))
    module = case.sharded(upstream.fully_shard, upstream.MixedPrecisionPolicy, compiled, mesh=mesh)
    return partial(case.step(), module, torch.optim.AdamW(module.parameters(), **ADAMW)), None


def ours(case: Case) -> tuple[Step, Any]:
    if case.style == "replicate":
        module = data_parallel(case.model())
        return partial(case.step(), module, torch.optim.AdamW(module.parameters(), **ADAMW)), None
    module = case.sharded(st.fully_shard, MixedPrecisionPolicy)
    return partial(case.step(), module, st.ShardedOptimizer(module, torch.optim.AdamW, **ADAMW)), None


def ours_compiled(case: Case, graphed: bool = False) -> tuple[Step, Any]:
    is_sharded = case.style == "fully_shard" and case.precision == "policy"  # else the first call shards it
    module = case.sharded(st.fully_shard, MixedPrecisionPolicy) if is_sharded else case.model()
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    cache = None if graphed else case.cache
    mode = DataParallel(case.style)
    if case.keeps:
        mode = attrs.evolve(mode, keep_mib=math.inf)
    compiled = compile(parallel_mode=mode, graphed=graphed, cache_dir=cache)(case.step())
    return partial(compiled, module, optimizer), compiled


OURS: dict[str, Way] = {"ours, eager": ours, "ours, compiled": ours_compiled}
OURS["ours, graphed"] = partial(ours_compiled, graphed=True)  # on GPUs
DDP: dict[str, Way] = {"DDP": ddp, "DDP, compiled": partial(ddp, compiled="DDP")}
DDP["DDP of compiled"] = partial(ddp, compiled="module")
FSDP2: dict[str, Way] = {"FSDP2": fsdp2, "FSDP2, blocks compiled": partial(fsdp2, compiled=True)}
WAYS = {"replicate": {**DDP, **OURS}, "fully_shard": {**FSDP2, **OURS}}


def first_call(case: Case, way: Way) -> tuple[Step, Any, torch.Tensor, float]:
    """Build a way and call it; return the step, the compiled function, the loss and the seconds of the call."""
    step, compiled = way(case)
    batch = case.batches()[0]
    dist.barrier()
    begun = time.perf_counter()
    loss = step(batch).clone()
    wait(case.device)
    return step, compiled, loss, round(time.perf_counter() - begun, 2)


def prepared(case: Case, name: str, way: Way) -> tuple[Step, dict[str, Any], torch.Tensor]:
    """Build a way and run its first steps; return the step, the row so far and the losses."""
    on_gpu = case.device.type == "cuda"
    gc.collect()
    base = torch.cuda.memory_allocated() if on_gpu else 0
    clear_caches()
    with empty_caches(case, name):
        step, compiled, loss, seconds = first_call(case, way)
        count = compiled.compiles if compiled is not None else counters["stats"]["unique_graphs"]
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        losses = torch.stack([loss, *(step(batch).clone() for batch in case.batches())]).float()
    again = (compiled.compiles if compiled is not None else counters["stats"]["unique_graphs"]) - count
    peak = round((torch.cuda.max_memory_allocated() - base) / 2**30, 2) if on_gpu else ""
    dist.all_reduce(losses)
    return step, {"way": name, "first s": seconds, "again": again, "GiB": peak}, losses.cpu() / dist.get_world_size()


def empty_caches(case: Case, name: str) -> Any:
    """Inductor and Triton find nothing that was compiled before; the ranks share what they compile."""
    folder = f"{case.cache}/{name.replace(' ', '_')}"
    return mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=f"{folder}/triton")


def turns(steps: Sequence[Step], case: Case, rounds: int) -> torch.Tensor:
    """Return milliseconds a step of the slowest rank, ``[ways, rounds]``."""
    batches, spent = case.batches(), torch.zeros(len(steps), rounds, dtype=torch.float64)
    for number in range(rounds):
        for i, step in enumerate(steps):
            wait(case.device)
            dist.barrier()
            begun = time.perf_counter()
            for batch in 2 * batches:
                step(batch)
            wait(case.device)
            spent[i, number] = (time.perf_counter() - begun) / 8 * 1e3
    spent = spent.to(case.device)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return spent.cpu()


def rows_of(case: Case, args: argparse.Namespace, losses: dict[int, torch.Tensor]) -> list[dict[str, Any]]:
    """The rows of a style with a batch size."""
    steps, rows = [], []
    for name, way in WAYS[case.style].items():
        if (args.ways and name not in args.ways) or (name == "ours, graphed" and case.device.type == "cpu"):
            continue
        try:
            step, row, own = prepared(case, name, way)
        except Exception as error:
            if name != "ours, graphed":
                raise
            print(f"{name}, {case.style}, batch {case.batch}: {type(error).__name__}: {error}", flush=True)
            continue
        apart = (own - losses.setdefault(case.batch, own)).abs().max().item()
        steps.append(step)
        rows.append({**row, "losses": "" if dist.get_backend() == "fake" else f"{apart:.0e}"})
        del step
    times = turns(steps, case, args.rounds)
    steps.clear()
    median = {row["way"]: ms.median().item() for row, ms in zip(rows, times, strict=True)}
    peer = min((ms for name, ms in median.items() if name.startswith(("DDP", "FSDP2"))), default=float("nan"))
    eager, found = median.get("ours, eager", float("nan")), []
    for row, least in zip(rows, times.amin(1).tolist(), strict=True):
        way, new = row.pop("way"), ("", "")
        if way == "ours, compiled":
            gc.collect()
            with empty_caches(case, "new"), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                new = pool.submit(restarted, case, dist.get_backend(), dist.get_rank(), dist.get_world_size()).result()
        ms = median[way]
        first = {"style": case.style, "batch": case.batch, "way": way, "ms": round(ms, 2), "min": round(least, 2)}
        first |= {"to peer": round(ms / peer, 3), "to eager": round(ms / eager, 3), **row}
        found.append({**first, "new process s": new[0], "lowered": new[1]})
    return found


def start(device: torch.device, backend: str, **options: Any) -> None:
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, **options)


def restarted(case: Case, backend: str, rank: int, world: int) -> tuple[float, int]:
    """In a second process: return the seconds of the first step, and how many parts were compiled."""
    store: Any = FakeStore() if backend == "fake" else dist.FileStore(f"{case.cache}/store", world)
    start(case.device, backend, store=store, rank=rank, world_size=world)
    _, compiled, _, seconds = first_call(case, ours_compiled)
    dist.destroy_process_group()
    return seconds, compiled.lowered


def run(device: torch.device, args: argparse.Namespace) -> None:
    """One rank: every style with every batch; the first rank prints."""
    torch._dynamo.config.recompile_limit = 64  # all ways share the code of the decoder
    warnings.filterwarnings("ignore", category=FutureWarning)  # newer names of collectives, which torch 2.11 lacks
    torch.set_flush_denormal(True)  # the fake group leaves results as the memory was: denormal numbers would be slow
    size = attrs.evolve(Size() if device.type == "cuda" and not args.small else SMALL, **dict(args.size))
    precision = args.precision or ("parameters" if device.type == "cuda" else "float32")
    backend, rows, losses = dist.get_backend(), [], {}
    for batch in args.batches:
        for style in args.styles:
            torch._dynamo.reset()
            with tempfile.TemporaryDirectory() as own:
                folder = [own]  # of the first rank
                if backend != "fake":
                    dist.broadcast_object_list(folder, device=device)
                rows += rows_of(Case(style, size, batch, device, precision, args.keep, folder[0]), args, losses)
                dist.barrier()
    if dist.get_rank() == 0:
        print(size, precision, backend)
        write("spmd", rows, world=dist.get_world_size(), backend=backend, precision=precision, size=attrs.asdict(size))
    for row in rows:
        assert row["way"] not in OURS or not row["again"], f"a later call compiled again: {row}"
        assert not row["lowered"], f"a second process compiled again: {row}"
        assert backend != "gloo" or float(row["losses"]) <= 1e-4, f"other losses than those of the first way: {row}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", type=int, metavar="N", help="one process, as one of N ranks of torch's fake group")
    parser.add_argument("--small", action="store_true", help="small sizes, as without a GPU")
    parser.add_argument("--size", nargs="*", default=[], type=lambda x: (x.split("=")[0], int(x.split("=")[1])))
    parser.add_argument("--styles", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--ways", nargs="+", choices=list({**WAYS["replicate"], **WAYS["fully_shard"]}))
    parser.add_argument("--precision", choices=["float32", "parameters", "autocast", "policy"])
    parser.add_argument("--keep", action="store_true", help="unsharded parameters from forward to backward, all ways")
    parser.add_argument("--rounds", type=int, default=9, help="of eight steps in a row")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    fake = {"store": FakeStore(), "rank": 0, "world_size": args.fake}
    start(device, "fake" if args.fake else "nccl" if on_gpu else "gloo", **(fake if args.fake else {}))
    run(device, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
