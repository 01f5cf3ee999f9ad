"""How fast checkpoints are: this library beside torch.distributed.checkpoint, safetensors by hand, and bare reads.

A decoder under ``fully_shard`` with AdamW's state, in float32. Each way saves and loads the same tensors; seconds are
those of the slowest rank, the best of the rounds. Rates are compared with bare writes and reads of as many bytes by as
many threads of each rank. Files are read from the memory of the operating system ("warm"), and once from the disk.

* save: whole tensors for the model (one exchange), or as is; both with fsync and checksums.
* async: the time until the call returns, and what three following steps take longer than without it; beside the bare
  copy of the tensors to host memory.
* load: into a new optimizer, as saved; and what three ranks have saved (resharded).

With GPUs each rank has one; else ranks are processes on the CPU.

    python benchmarks/checkpoint.py [--world 4] [--rounds 3] [--layers 8] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from decoder import Decoder, Size
from ranks import spawn, wait
from report import write
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardtensor as st
from shardtensor.checkpoint.storage import THREADS

SAVED_BY = 3
STEP_BYTES = 8 << 20


def sized(args: argparse.Namespace) -> Size:
    return Size(layers=args.layers, width=args.width, hidden=4 * args.width, vocabulary=8192, sequence=args.sequence)


# -- a model and its optimizer, by each way ----------------------------------------------------------------------------


def ours(device: torch.device, size: Size) -> tuple[nn.Module, torch.optim.Optimizer]:
    with device:
        model = Decoder(size)
    for block in model.layers:
        st.fully_shard(block)
    st.fully_shard(model)
    return model, st.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-4)


def theirs(device: torch.device, size: Size) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    with device:
        model = Decoder(size)
    for block in model.layers:
        torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, size: Size) -> None:
    ids = torch.randint(0, size.vocabulary, (1, size.sequence), device=device)
    model(ids, ids).backward()
    optimizer.step()
    optimizer.zero_grad()


def filled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer its state, without a forward: gradients of zeros."""
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()


# -- saves and loads ---------------------------------------------------------------------------------------------------


def dcp_save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=THREADS))


def dcp_load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def local_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """This rank's tensors of the peer's model, as a script by hand would list them."""
    found = {name: param.to_local() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            found[f"{name}.{key}"] = value.to_local() if hasattr(value, "to_local") else value
    return found


def by_hand_save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    path.mkdir(parents=True, exist_ok=True)
    file = path / f"{dist.get_rank()}.safetensors"
    safetensors.torch.save_file({k: v.detach().contiguous() for k, v in local_tensors(model, optimizer).items()}, file)
    with open(file, "rb+") as stream:
        os.fsync(stream.fileno())


def by_hand_load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    filled(model, optimizer)
    loaded = safetensors.torch.load_file(path / f"{dist.get_rank()}.safetensors")
    with torch.no_grad():
        for name, local in local_tensors(model, optimizer).items():
            local.copy_(loaded[name])


def raw_write(path: Path, size: int) -> None:
    """Write bytes from memory with several threads, and wait for the disk."""
    path.mkdir(parents=True, exist_ok=True)
    source = memoryview(_memory(size))
    handle = os.open(path / f"{dist.get_rank()}.raw", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda at: os.pwrite(handle, source[at : at + STEP_BYTES], at), range(0, size, STEP_BYTES)))
    os.fsync(handle)
    os.close(handle)


def raw_read(path: Path, size: int, device: torch.device, target: torch.Tensor | None = None) -> None:
    """Read the same bytes, into new memory or `target`, with several threads; on a GPU, through page-locked buffers."""
    handle = os.open(path / f"{dist.get_rank()}.raw", os.O_RDONLY)
    if target is None:
        target = torch.empty(size, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        view = memoryview(target.numpy())
        read = lambda at: os.preadv(handle, [view[at : at + STEP_BYTES]], at)  # noqa: E731
    else:
        pinned = [torch.empty(STEP_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(THREADS)]
        free = list(range(THREADS))

        def read(at: int) -> int:
            i = free.pop()
            count = min(STEP_BYTES, size - at)
            os.preadv(handle, [memoryview(pinned[i].numpy())[:count]], at)
            target[at : at + count].copy_(pinned[i][:count])
            free.append(i)
            return count

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, range(0, size, STEP_BYTES)))
    wait(device)
    os.close(handle)


_source: bytearray | None = None


def _memory(size: int) -> bytearray:
    global _source
    if _source is None or len(_source) != size:
        _source = bytearray(os.urandom(1 << 20)) * (size >> 20) + bytearray(size % (1 << 20))
    return _source


# -- the measurement ---------------------------------------------------------------------------------------------------


@attrs.define
class Bench:
    """What all measurements need, and the rows of the table."""

    device: torch.device
    args: argparse.Namespace
    folder: Path
    bytes: int = 0
    rows: list[dict[str, Any]] = attrs.field(factory=list)

    def timed(self, action: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
        """The seconds of the slowest rank, the best of the rounds."""
        best = float("inf")
        for _ in range(self.args.rounds):
            gc.collect()
            given = before()
            wait(self.device)
            dist.barrier()
            start = time.perf_counter()
            action(*given) if given is not None else action()
            wait(self.device)
            took = torch.tensor(time.perf_counter() - start, device=self.device)
            del given
            dist.all_reduce(took, dist.ReduceOp.MAX)
            best = min(best, float(took))
        return best

    def row(self, what: str, way: str, seconds: float, raw: float) -> None:
        world = dist.get_world_size()
        rate = f"{self.bytes * world / seconds / 1e9:.2f}"
        row = {"what": what, "way": way, "s": f"{seconds:.3f}", "GB/s": rate, "times bare": f"{seconds / raw:.2f}"}
        self.rows.append(row)
        if dist.get_rank() == 0:
            print(self.rows[-1], flush=True)


def fresh(path: Path) -> Path:
    """Return a path at which nothing is, on every rank."""
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    return path


def drop_cache(path: Path) -> None:
    """Ask the operating system to forget the files below a path, so that the next read comes from the disk."""
    for file in path.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def run(device: torch.device, args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    size, folder = sized(args), Path(args.folder)
    mine, peer = ours(device, size), theirs(device, size)
    filled(*mine)
    filled(*peer)
    bench = Bench(device, args, folder)
    bench.bytes = sum(t.numel() * t.element_size() for t in local_tensors(*peer).values())
    if dist.get_rank() == 0:
        print(f"{bench.bytes / 1e9:.2f} GB on each of {dist.get_world_size()} ranks, {device}", flush=True)
    saves(bench, mine, peer)
    loads(bench)
    asynchronous(bench, mine, peer)
    if dist.get_rank() == 0:
        write("checkpoint", bench.rows, world=dist.get_world_size(), bytes_of_a_rank=bench.bytes)


Trained = tuple[nn.Module, torch.optim.Optimizer]


def saves(bench: Bench, mine: Trained, peer: Trained) -> None:
    folder = bench.folder

    def into(name: str, action: Callable[[Path], Any]) -> float:
        return bench.timed(lambda: action(folder / name), lambda: fresh(folder / name) and None)

    raw = into("raw", lambda path: raw_write(path, bench.bytes))
    bench.row("save", "bare writes", raw, raw)
    for layout in ("as is", "whole"):
        options = {"model": mine[0], "optimizer": mine[1], "rng": False, "layout": layout, "fingerprint": False}
        bench.row("save", f"shardtensor, {layout}", into(f"ours {layout}", partial(st.save, **options)), raw)
    bench.row("save", "torch.distributed.checkpoint", into("dcp", lambda path: dcp_save(path, *peer)), raw)
    bench.row("save", "safetensors by hand", into("hand", lambda path: by_hand_save(path, *peer)), raw)


def loads(bench: Bench) -> None:
    folder, device, size = bench.folder, bench.device, sized(bench.args)
    new_ours, new_theirs = (lambda: ours(device, size)), (lambda: theirs(device, size))

    def load_ours(name: str) -> Callable[..., Any]:
        return lambda model, optimizer: st.load(folder / name, model=model, optimizer=optimizer, rng=False)

    def load_theirs(name: str) -> Callable[..., Any]:
        return lambda model, optimizer: dcp_load(folder / name, model, optimizer)

    for temperature in ("warm", "disk"):

        def forgotten(make: Callable[[], Any], name: str, is_cold: bool = temperature == "disk") -> Any:
            made = make()
            if is_cold and dist.get_rank() == 0:
                drop_cache(folder / name)
            return made

        def best(name: str, make: Callable[[], Any], action: Callable[..., Any]) -> float:
            return bench.timed(action, lambda: forgotten(make, name))

        raw = best("raw", lambda: (), lambda: raw_read(folder / "raw", bench.bytes, device))
        bench.row(f"load, {temperature}", "bare reads into new memory", raw, raw)
        memory = torch.zeros(bench.bytes, dtype=torch.uint8, device=device)
        took = best("raw", lambda memory=memory: (memory,), partial(raw_read, folder / "raw", bench.bytes, device))
        bench.row(f"load, {temperature}", "bare reads into old memory", took, raw)
        del memory
        for layout in ("as is", "whole"):
            took = best(f"ours {layout}", new_ours, load_ours(f"ours {layout}"))
            bench.row(f"load, {temperature}", f"shardtensor, {layout}", took, raw)
        took = best("dcp", new_theirs, load_theirs("dcp"))
        bench.row(f"load, {temperature}", "torch.distributed.checkpoint", took, raw)
        took = best("hand", new_theirs, lambda m, o: by_hand_load(folder / "hand", m, o))
        bench.row(f"load, {temperature}", "safetensors by hand", took, raw)
        took = best("ours 3", new_ours, load_ours("ours 3"))
        bench.row(f"load of {SAVED_BY} ranks, {temperature}", "shardtensor, as is", took, raw)
        took = best("dcp 3", new_theirs, load_theirs("dcp 3"))
        bench.row(f"load of {SAVED_BY} ranks, {temperature}", "torch.distributed.checkpoint", took, raw)


def asynchronous(bench: Bench, mine: Trained, peer: Trained) -> None:
    """Time to return, and how much longer three steps take while the files are written."""
    folder, device, size = bench.folder, bench.device, sized(bench.args)

    def three_steps(trained: Trained) -> None:
        for _ in range(3):
            step(*trained, device, size)

    def to_host(trained: Trained, memory: list[torch.Tensor]) -> None:
        for copy, tensor in zip(memory, local_tensors(*trained).values(), strict=True):
            copy.copy_(tensor, non_blocking=True)

    tensors = local_tensors(*peer).values()
    memory = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in tensors]
    to_host(peer, memory)
    bare = bench.timed(lambda: to_host(peer, memory))
    bench.row("async", "bare copy to the host", bare, bare)
    writer = partial(dcp.FileSystemWriter, thread_count=THREADS)
    own_group = dist.new_group(backend="gloo")  # its thread and the steps may not share one
    on_gpu = device.type == "cuda"
    kind = AsyncCheckpointerType.PROCESS if on_gpu else AsyncCheckpointerType.THREAD
    stager = BlockingAsyncStager(cache_staged_state_dict=on_gpu)  # page-locked memory that is kept and shared

    def save_ours(path: Path) -> Any:
        return st.async_save(path, model=mine[0], optimizer=mine[1], rng=False, layout="as is", fingerprint=False)

    def save_theirs(path: Path) -> Any:
        state = dict(zip(("model", "optimizer"), get_state_dict(*peer), strict=True))
        return dcp.async_save(
            state,
            storage_writer=writer(path),
            process_group=own_group,
            async_checkpointer_type=kind,
            async_stager=stager,
        )

    for way, trained, save in (
        ("shardtensor", mine, save_ours),
        ("torch.distributed.checkpoint", peer, save_theirs),
    ):
        three_steps(trained)
        plain = bench.timed(lambda trained=trained: three_steps(trained))
        returned, lost = float("inf"), float("inf")
        for i in range(bench.args.rounds + 1):
            path = fresh(folder / "async")
            wait(device)
            dist.barrier()
            start = time.perf_counter()
            saving = save(path)
            back = time.perf_counter() - start
            three_steps(trained)
            wait(device)
            took = time.perf_counter() - start - plain
            (saving.wait if hasattr(saving, "wait") else saving.result)()
            worst = torch.tensor([back, took], device=device)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            if i:  # the first one allocates host memory
                returned, lost = min(returned, float(worst[0])), min(lost, float(worst[1]))
        bench.row("async, returns", way, returned, bare)
        bench.row("async, lost in 3 steps", way, max(lost, 1e-4), bare)


# -- what three ranks have saved ------------------------------------------------------------------------------------


def _prepare(rank: int, port: int, args: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=SAVED_BY)
    device, size, folder = torch.device("cpu"), sized(args), Path(args.folder)
    mine = ours(device, size)
    filled(*mine)
    st.save(folder / "ours 3", model=mine[0], optimizer=mine[1], rng=False, layout="as is", fingerprint=False)
    del mine
    peer = theirs(device, size)
    filled(*peer)
    dcp_save(folder / "dcp 3", *peer)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.device_count()
    parser.add_argument("--world", type=int, default=gpus or 4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048 if gpus else 768)
    parser.add_argument("--sequence", type=int, default=2048 if gpus else 32)
    parser.add_argument("--folder", default=None, help="on the disk to measure (default: a temporary one)")
    args = parser.parse_args()
    args.folder = tempfile.mkdtemp(dir=args.folder)
    try:
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        mp.spawn(_prepare, (port, args), nprocs=SAVED_BY)
        spawn(run, args)
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
