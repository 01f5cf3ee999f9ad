"""The bytes that a plan names beside those that a rank comes to allocate: parameters, gradients, optimizer.

One rank of a world whose other ranks are only counted, so one GPU (or the CPU) is enough for a plan of any size; with
--real every rank is a process of its own, on a GPU each where there are GPUs. On a GPU the numbers are differences of
what was asked of the allocator; it rounds each tensor up to 512 bytes, and leaves up to 1 MiB of a large block unused.
On the CPU they are the bytes of storages.

    python benchmarks/plan_memory.py [--world 8] [--rank 3] [--layers 4] [--hidden 512] [--dtype bfloat16]
    python benchmarks/plan_memory.py --plan llama_2d --set tp=2
    python benchmarks/plan_memory.py --real [--world 2]
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from ranks import spawn
from report import write
from torch import nn
from torch.nn import functional as F

import shardtensor as st
from shardtensor.parallel.model_info import model_info
from shardtensor.plan.estimates.memory import rank_bytes
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.resolve import resolve

LINE = 512  # bytes; what CUDA's allocator rounds up to


class Attention(nn.Module):
    def __init__(self, hidden: int, head_dim: int, kv: int) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = head_dim, hidden // head_dim // kv
        self.q_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in "qo")
        self.k_proj, self.v_proj = (nn.Linear(hidden, kv * head_dim, bias=False) for _ in "kv")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, hidden: int, ffn: int, head_dim: int, kv: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.self_attn, self.mlp = Attention(hidden, head_dim, kv), MLP(hidden, ffn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        sizes = hidden, config["intermediate_size"], hidden // heads, config["num_key_value_heads"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        self.layers = nn.ModuleList(Layer(*sizes) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(hidden)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Llama(nn.Module):
    """A decoder with the names of Hugging Face's Llama."""

    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        self.model = Body(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(ids))


def config_of(args: argparse.Namespace) -> dict[str, int]:
    return {
        "vocab_size": args.vocab, "hidden_size": args.hidden, "intermediate_size": 7 * args.hidden // 2,
        "num_hidden_layers": args.layers, "num_attention_heads": args.hidden // 64,
        "num_key_value_heads": max(args.hidden // 256, 1),
    }  # fmt: skip


def storages(tensors: Iterable[Any]) -> int:
    """Bytes of distinct storages."""
    each = (t.untyped_storage() for t in tensors if t is not None)
    return sum({storage.data_ptr(): storage.nbytes() for storage in each}.values())


def allocated(device: torch.device, tensors: Callable[[], Iterable[Any]]) -> int:
    """Bytes in use: on a GPU by the allocator, on the CPU those of some tensors."""
    if device.type == "cpu":
        return storages(tensors())
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats(device)["requested_bytes.all.current"]


def measured(args: argparse.Namespace, device: torch.device, plan: Any) -> dict[str, int]:
    """What one rank allocates for each kind of tensor."""
    dtype = getattr(torch, args.dtype)
    on_gpu = device.type == "cuda"
    before = allocated(device, tuple)
    with torch.device(device):
        module = Llama(config_of(args)).to(dtype)
    st.shard_module(module, plan)

    def leaves() -> list[torch.Tensor]:
        return [getattr(param, "_local", param).detach() for param in module.parameters()]

    held = {"parameters": allocated(device, leaves) - before}
    optimizer = st.ShardedOptimizer(module, torch.optim.AdamW)
    ids = torch.zeros(2, 16, dtype=torch.long, device=device)
    out = module(ids)
    getattr(out, "_local", out).float().sum().backward()
    del out, ids

    def grads() -> list[Any]:
        return [getattr(param, "_local", param).grad for param in module.parameters()]

    def state() -> list[Any]:
        found = [value for values in optimizer.state.values() for value in values.values()]
        return [getattr(x, "_local", x) for x in found if torch.is_tensor(x) and x.dim()]

    start = allocated(device, tuple) if on_gpu else 0
    optimizer.step()
    held["optimizer"] = allocated(device, state) - start
    with_grads = allocated(device, grads)
    optimizer.zero_grad()
    held["gradients"] = with_grads - allocated(device, tuple)
    return held


def compared(name: str, params: dict[str, Any], device: torch.device, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One rank, one plan: a row for each kind of tensor."""
    plan = load_plan(name, config=config_of(args), world=args.world, **params)
    with torch.device("meta"):
        model = model_info(Llama(config_of(args)).to(getattr(torch, args.dtype)))
    resolved = resolve(plan, model)
    if resolved.errors:
        raise SystemExit("\n\n".join(map(str, resolved.errors)))
    if args.real:
        rank, found = dist.get_rank(), measured(args, device, plan)
    else:
        rank, mesh = args.rank, ", ".join(f"{axis}={size}" for axis, size in plan.axes.mesh.axes)
        counted = st.count_bytes(mesh, measured, args, device, plan, rank=rank, device_type=device.type)
        found = counted.result
    said = rank_bytes(resolved, rank)
    slack = said.tensors * LINE if device.type == "cuda" else 0
    return [
        {
            "plan": f"{name} {plan.axes.mesh}",
            "rank": rank,
            "of": kind,
            "by plan": getattr(said, kind),
            "allocated": found[kind],
            "difference": found[kind] - getattr(said, kind),
            "allowed": slack,
            "agrees": "yes" if 0 <= found[kind] - getattr(said, kind) <= slack else "NO",
        }
        for kind in ("parameters", "gradients", "optimizer")
    ]


def run(device: torch.device, args: argparse.Namespace) -> None:
    """One rank: compare for each plan, and on one of them print and write."""
    table = [row for name, params in plans(args) for row in compared(name, params, device, args)]
    if not args.real or dist.get_rank() == args.rank:
        write("plan_memory" + ("_gpu" if device.type == "cuda" else ""), table, world=args.world, real=args.real)


def plans(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Those asked for; else tensor parallel, that with fully sharded, and fully sharded alone."""
    if args.plan:
        return [(args.plan, dict(pair.split("=", 1) for pair in args.set))]
    half = args.world // 2 if args.world % 2 == 0 and args.world > 2 else args.world
    return [("llama", {"tp": args.world}), ("llama_2d", {"tp": half}), ("fsdp", {})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", help="one plan (default: llama, llama_2d and fsdp)")
    parser.add_argument("--set", action="append", default=[], help="a parameter of --plan, such as tp=2")
    parser.add_argument("--world", type=int, help="ranks (default 8; with --real as many as there are GPUs, or 2)")
    parser.add_argument("--rank", type=int, default=0, help="the one that is told of")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--real", action="store_true", help="a process, and a GPU, for each rank")
    args = parser.parse_args()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    args.world = args.world or ((min(gpus, 8) or 2) if args.real else 8)
    if args.real and 0 < gpus < args.world:
        raise SystemExit(f"--real takes a GPU for each of {args.world} ranks and here are {gpus}; give --world {gpus}")
    if args.real:
        spawn(run, args)
    else:
        run(torch.device("cuda" if gpus else "cpu"), args)


if __name__ == "__main__":
    main()
