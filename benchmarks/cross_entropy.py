"""What the loss behind a head with a cut vocabulary costs the host, forward and backward.

One process on torch's fake process group of four ranks, whose collectives return at once; sizes are so small that the
host's work is all there is. Beside `ParallelCrossEntropy`: torch's cross_entropy of the local logits with no
communication (the floor), an autograd function written by hand as Megatron-LM does it, the ShardedTensor way, and
DTensor's loss_parallel. All ways take turns in every round; told are medians.

    python benchmarks/cross_entropy.py [--rounds 60]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pretended import WORLD, medians_us, start
from report import write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

import shardtensor as st
from shardtensor.parallel.cross_entropy import ParallelCrossEntropy

TOKENS, CLASSES = 8, 64


class ByHand(torch.autograd.Function):
    """Losses of rows; three all-reduces, and the softmax kept for the backward."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, start: int) -> torch.Tensor:
        top = logits.max(-1)[0]
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        shifted = logits - top.unsqueeze(-1)
        away = (target < start) | (target >= start + logits.shape[-1])
        at = (target - start).masked_fill(away, 0)
        picked = shifted.gather(-1, at.unsqueeze(-1)).squeeze(-1).masked_fill(away, 0.0)
        dist.all_reduce(picked)
        powers = shifted.exp_()
        total = powers.sum(-1)
        dist.all_reduce(total)
        ctx.save_for_backward(powers.div_(total.unsqueeze(-1)), away, at)
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, away, at = ctx.saved_tensors
        softmax.scatter_add_(-1, at.unsqueeze(-1), (away.to(softmax.dtype) - 1).unsqueeze(-1))
        return softmax.mul_(grad.unsqueeze(-1)), None, None


def main() -> None:
    args = start(__doc__)
    mesh = init_device_mesh("cpu", (WORLD,))
    local = torch.randn(TOKENS, CLASSES // WORLD, requires_grad=True)
    target = torch.randint(0, CLASSES // WORLD, (TOKENS,))
    d_logits = DTensor.from_local(local.detach(), mesh, [Shard(1)], run_check=False).requires_grad_()
    sharded = st.init_from_local_tensor(local.detach().clone(), "[-, tp]", (TOKENS, CLASSES)).requires_grad_()
    loss = ParallelCrossEntropy(CLASSES)

    def with_dtensor() -> None:
        with loss_parallel():
            F.cross_entropy(d_logits, target).backward()

    ways: dict[str, Callable[[], Any]] = {
        "no communication": lambda: F.cross_entropy(local, target).backward(),
        "by hand": lambda: ByHand.apply(local, target, 0).mean().backward(),
        "ParallelCrossEntropy": lambda: loss(local, target).backward(),
        "ShardedTensor": lambda: F.cross_entropy(sharded, target).backward(),
        "DTensor": with_dtensor,
    }

    def forget() -> None:
        local.grad = d_logits.grad = sharded.grad = None

    medians = medians_us(ways, args, forget)
    hand = medians["by hand"]
    write(
        "cross_entropy",
        [{"way": name, "us a step": round(us, 1), "to hand": round(us / hand, 2)} for name, us in medians.items()],
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
