"""Normalization: layer_norm and rms_norm over cut dims, batch_norm and group_norm.

Statistics are those of all elements, whichever rank has them. Over a cut batch the mean and the variance are reduced
over the ranks, as synchronized batch norm does; the running ones are what one process would have.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardtensor.comm import collectives
from shardtensor.ops.by_rule import Cut, joins
from shardtensor.ops.engine import HALF
from shardtensor.tensor.dispatch import implements

# -- over the last dims ------------------------------------------------------------------------------------------------


@joins("moments", blocks=True)
def moments(cut: Cut) -> torch.Tensor:
    """layer_norm: the mean, then the mean square of what is left, of all elements; each one all-reduce."""
    x = _wide(cut.locals[0])
    eps = cut.options.get("eps", 1e-5)
    away = x - _mean(x, cut)
    return _scaled(away * (_mean(away.square(), cut) + eps).rsqrt(), cut)


@joins("mean_square", blocks=True)
def mean_square(cut: Cut) -> torch.Tensor:
    """rms_norm: one all-reduce."""
    x = _wide(cut.locals[0])
    eps = cut.options.get("eps")
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _scaled(x * (_mean(x.square(), cut) + eps).rsqrt(), cut)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in HALF else x


def _mean(x: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The mean over the dims worked on, in all ranks, for use by each rank's part of the work."""
    count = 1
    for d in cut.dims:
        count *= cut.layouts[0].shape[d]
    total = collectives.all_reduce(x.sum(cut.dims, keepdim=True), cut.team)
    return collectives.sum_gradient(total / count, cut.team)


def _scaled(out: torch.Tensor, cut: Cut) -> torch.Tensor:
    given = dict(zip(cut.names, cut.locals, strict=True))
    out = out * given["weight"] if "weight" in given else out
    out = out + given["bias"] if "bias" in given else out
    return out.to(cut.locals[0].dtype)


# -- over channels -----------------------------------------------------------------------------------------------------


@joins("statistics")  # so that the table can name it; the handler does not go by the row
@implements(F.batch_norm, torch.batch_norm)
def batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = False,
) -> torch.Tensor:
    """Normalize every channel of ``(n, c, ...)`` over all else, by the batch (`training`) or the running statistics."""
    dims = (0, *range(2, input.dim()))
    channels = input.shape[1]
    count = input.numel() // max(channels, 1)
    if training and count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    x = input.float() if input.dtype in HALF else input
    if training:
        var, mean = torch.var_mean(x, dims, correction=0)
        with torch.no_grad():
            _follow(running_mean, mean, momentum)
            _follow(running_var, var * (count / max(count - 1, 1)), momentum)
    else:
        if running_mean is None or running_var is None:
            raise RuntimeError("Expected running_mean and running_var to be defined when training=False")
        mean, var = running_mean, running_var
    out = (x - _column(mean, x)) * (_column(var, x) + eps).rsqrt()
    return _affine(out, weight, bias).to(input.dtype)


def _follow(running: torch.Tensor | None, new: torch.Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_(running * (1 - momentum) + new.to(running.dtype) * momentum)


def _column(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One value for each channel, to meet ``(n, c, ...)``."""
    return x[(slice(None), *(None,) * (like.dim() - 2))]


def _affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if weight is None else x * _column(weight, x)
    return x if bias is None else x + _column(bias, x)


@implements(F.group_norm)
def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``F.group_norm``, which looks at the size of the whole batch first."""
    F.group_norm(torch.empty(input.shape, device="meta"), num_groups)  # torch's errors
    return torch.group_norm(input, num_groups, weight, bias, eps)
