"""layer_norm, rms_norm, group_norm, normalize.

Over whole dims the work is local (``b !d, !d, !d -> b !d``); over cut ones it is composed of mean and variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.layout.layout import CutLayout
from shardtensor.ops.engine import run
from shardtensor.ops.reducing import HALF
from shardtensor.rules.rule import Rule
from shardtensor.tensor.dispatch import fall_back, implements
from shardtensor.tensor.sharded_tensor import ShardedTensor


def _cuts(x: torch.Tensor, dims: Sequence[int]) -> bool:
    """Whether any of the dims is cut; also for boxes written out."""
    if not isinstance(x, ShardedTensor):
        return False
    return not isinstance(x._layout, CutLayout) or any(x._layout.dims[d] is not None for d in dims)


@implements(F.layer_norm, torch.layer_norm)
def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    """Normalize over the last dims, which have `normalized_shape`."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    dims = tuple(range(input.dim() - len(shape), input.dim()))
    if dims and dims[0] >= 0 and tuple(input.shape[dims[0] :]) == shape and _cuts(input, dims):
        x = input.float() if input.dtype in HALF else input
        away = x - x.mean(dims, keepdim=True)
        out = away * (away.square().mean(dims, keepdim=True) + eps).rsqrt()
        return _affine(out, weight, bias).to(input.dtype)

    def compute(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        found = iter(rest)
        return F.layer_norm(
            x, shape, None if weight is None else next(found), None if bias is None else next(found), eps
        )

    result = _whole("layer_norm", input, len(shape), [p for p in (weight, bias) if p is not None], compute)
    return fall_back(F.layer_norm, (input, shape, weight, bias, eps), {}) if result is None else result


@implements(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Divide by the root of the mean square over the last dims."""
    shape = tuple(normalized_shape)
    dims = tuple(range(input.dim() - len(shape), input.dim()))
    if dims and dims[0] >= 0 and tuple(input.shape[dims[0] :]) == shape and _cuts(input, dims):
        x = input.float() if input.dtype in HALF else input
        small = torch.finfo(x.dtype).eps if eps is None else eps
        out = x * (x.square().mean(dims, keepdim=True) + small).rsqrt()
        return _affine(out, weight, None).to(input.dtype)
    result = _whole(
        "rms_norm",
        input,
        len(shape),
        [] if weight is None else [weight],
        lambda x, *w: F.rms_norm(x, shape, w[0] if w else None, eps),
    )
    return fall_back(F.rms_norm, (input, shape, weight, eps), {}) if result is None else result


def _affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _whole(name: str, x: torch.Tensor, trailing: int, params: list[torch.Tensor], compute: Any) -> torch.Tensor | None:
    letters = tuple(f"d{i}" for i in range(x.dim()))
    last = letters[x.dim() - trailing :]
    if any(p.dim() != trailing for p in params) or trailing > x.dim():
        return None
    rule = Rule((letters, *(last,) * len(params)), letters, frozenset(last))
    return run(name, rule, [x, *params], compute)


@implements(F.group_norm)
def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Normalize groups of channels; batches may be cut: ``n !c !s, !c, !c -> n !c !s``."""
    params = [p for p in (weight, bias) if p is not None]
    if _cuts(input, range(1, input.dim())) or any(p.dim() != 1 for p in params):
        return fall_back(F.group_norm, (input, num_groups, weight, bias, eps), {})
    letters = tuple(f"d{i}" for i in range(input.dim()))

    def compute(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        found = iter(rest)
        return F.group_norm(
            x, num_groups, None if weight is None else next(found), None if bias is None else next(found), eps
        )

    rule = Rule((letters, *((letters[1],),) * len(params)), letters, frozenset(letters[1:]))
    out = run("group_norm", rule, [input, *params], compute)
    return fall_back(F.group_norm, (input, num_groups, weight, bias, eps), {}) if out is None else out


@implements(F.normalize)
def normalize(input: torch.Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> torch.Tensor:
    """Divide by the p-norm over `dim`."""
    if out is not None or not isinstance(input, ShardedTensor):
        return fall_back(F.normalize, (input, p, dim, eps, out), {})
    length = torch.linalg.vector_norm(input, p, dim, True)
    return input / length.clamp_min(eps)
