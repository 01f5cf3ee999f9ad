"""layer_norm and rms_norm over cut dims, and normalize. Over whole dims the row of the table is all there is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.comm import collectives
from shardtensor.ops.by_rule import Cut, joins
from shardtensor.ops.engine import HALF
from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor


@joins("moments", blocks=True)
def moments(cut: Cut) -> torch.Tensor:
    """layer_norm: the mean, then the mean square of what is left, of all elements; each one all-reduce."""
    x = _wide(cut.locals[0])
    eps = cut.options.get("eps", 1e-5)
    away = x - _mean(x, cut)
    return _affine(away * (_mean(away.square(), cut) + eps).rsqrt(), cut)


@joins("mean_square", blocks=True)
def mean_square(cut: Cut) -> torch.Tensor:
    """rms_norm: one all-reduce."""
    x = _wide(cut.locals[0])
    eps = cut.options.get("eps")
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(x * (_mean(x.square(), cut) + eps).rsqrt(), cut)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in HALF else x


def _mean(x: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The mean over the dims worked on, in all ranks, for use by each rank's part of the work."""
    count = 1
    for d in cut.dims:
        count *= cut.layouts[0].shape[d]
    total = collectives.all_reduce(x.sum(cut.dims, keepdim=True), cut.team)
    return collectives.sum_gradient(total / count, cut.team)


def _affine(out: torch.Tensor, cut: Cut) -> torch.Tensor:
    given = dict(zip(cut.names, cut.locals, strict=True))
    out = out * given["weight"] if "weight" in given else out
    out = out + given["bias"] if "bias" in given else out
    return out.to(cut.locals[0].dtype)


@implements(F.normalize)
def normalize(input: torch.Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> torch.Tensor:
    """Divide by the p-norm over `dim`."""
    if out is not None or not isinstance(input, ShardedTensor):
        return fall_back(F.normalize, (input, p, dim, eps, out), {})
    length = torch.linalg.vector_norm(input, p, dim, True)
    return input / length.clamp_min(eps)
