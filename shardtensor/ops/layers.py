"""Attention, normalization, convolutions and padding.

``scaled_dot_product_attention``: batches and heads may be sharded, sequences and features may not. Grouped queries keep
sharded heads where a rank's query heads belong to its key heads. Dropout gathers, so that the mask is the dense one.

Norms: statistics cover the elements of all ranks. Over a sharded batch the ranks reduce the mean and the variance, as
synchronized batch norm does; the running statistics are those of a single process.

Convolutions, ``n i !h !w, o i !k !l, + o -> n o h' w'``: where the input channels are sharded the products are summed,
and the bias is added after. Grouped convolutions have rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.comm import collectives
from shardtensor.layout.layout import MeshLayout
from shardtensor.ops.by_rule import LetterCut, by_rule, combines, local_call_by_rule
from shardtensor.ops.engine import HALF, computed_alike, group_of
from shardtensor.ops.local_call import LocalCall, cached_call, wrapped
from shardtensor.rules.propagate import with_dims
from shardtensor.rules.table import ROWS
from shardtensor.rules.views import heads_fit
from shardtensor.tensor.dispatch import implements, implements_each, own_body
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor

implements_each((F.multi_head_attention_forward, F.normalize, F.group_norm, F.dropout), own_body)

# -- attention ---------------------------------------------------------------------------------------------------------

attend = F.scaled_dot_product_attention
_UNGROUPED, _GROUPED = (by_rule(attend, name) for name in ("scaled_dot_product_attention", "grouped_query_attention"))


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention of query ``(..., h, l, e)``, key ``(..., h, s, e)`` and value ``(..., h, s, f)``."""
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    operands = (query, key, value, attn_mask)
    if dropout_p or len({x.dim() for x in operands[:3]}) > 1 or query.dim() < 3:
        return fall_back(attend, operands, {"dropout_p": dropout_p, **options})
    groups = query.shape[-3] // max(key.shape[-3], 1) if enable_gqa else 1
    if groups == 1:
        return _UNGROUPED(*operands, **options)
    qkv = [x for x in operands[:3] if isinstance(x, ShardedTensor) and isinstance(x._layout, MeshLayout)]
    layouts: Any = [x._layout for x in qkv]
    if attn_mask is not None or len(qkv) < 3 or not heads_fit(layouts[0], layouts[1], layouts[2], groups):
        return _GROUPED(*operands, **options)
    group = group_of("scaled_dot_product_attention", qkv)
    shapes = tuple(tuple(x.shape) for x in qkv)
    rule = ROWS["grouped_query_attention"].rule((*shapes, None))
    local = computed_alike(lambda *xs: attend(*xs, **options), rule, layouts, [x._local for x in qkv])
    layout = with_dims(layouts[0], (*query.shape[:-1], value.shape[-1]), layouts[0].dims)
    return wrapped(local, None if layout.is_replicated else layout, group)


def _locally(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
    """Return the `LocalCall` for a call; None for grouped queries and dropout, which take the general path."""
    if len(args) != 3 or kwargs.get("dropout_p") or kwargs.get("enable_gqa"):
        return None
    if args[0].dim() < 3 or len({x.dim() for x in args}) > 1:
        return None
    return local_call_by_rule(attend, "scaled_dot_product_attention", args, kwargs)


implements(attend)(cached_call(attend, _locally, scaled_dot_product_attention, "scaled_dot_product_attention"))


# -- over the last dims ------------------------------------------------------------------------------------------------


@combines("moments", blocks=True)
def moments(cut: LetterCut, x: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
    """Compute layer_norm: the mean, then the mean square of the differences, of all elements; each one all-reduce."""
    wide = _wide(x)
    away = wide - _mean(wide, cut)
    return _scaled(away * (_mean(away.square(), cut) + cut.options.get("eps", 1e-5)).rsqrt(), cut, affine).to(x.dtype)


@combines("mean_square", blocks=True)
def mean_square(cut: LetterCut, x: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
    """Compute rms_norm: one all-reduce."""
    wide, eps = _wide(x), cut.options.get("eps")
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    return _scaled(wide * (_mean(wide.square(), cut) + eps).rsqrt(), cut, affine).to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in HALF else x


def _mean(x: torch.Tensor, cut: LetterCut) -> torch.Tensor:
    """Return the mean over the reduced dims of all ranks; backward sums its gradient over the ranks."""
    total = collectives.all_reduce(x.sum(cut.dims, keepdim=True), cut.subgroup)
    return collectives.sum_gradient(total / cut.count, cut.subgroup)


def _scaled(out: torch.Tensor, cut: LetterCut, affine: tuple[torch.Tensor, ...]) -> torch.Tensor:
    given = dict(zip(cut.names[1:], affine, strict=True))
    out = out * given["weight"] if "weight" in given else out
    return out + given["bias"] if "bias" in given else out


# -- over channels -----------------------------------------------------------------------------------------------------


@combines("statistics")  # so that the table can name it; the handler does not use the row
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
    """Normalize each channel of ``(n, c, ...)`` over all else, by the batch (`training`) or the running statistics."""
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
    """Return one value for each channel, in a shape that broadcasts with ``(n, c, ...)``."""
    return x[(slice(None), *(None,) * (like.dim() - 2))]


def _affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if weight is None else x * _column(weight, x)
    return x if bias is None else x + _column(bias, x)


# -- convolutions and padding ------------------------------------------------------------------------------------------


def _convolution(func: Any) -> Callable[..., torch.Tensor]:
    ungrouped, grouped = by_rule(func, func.__name__), by_rule(func, f"grouped_{func.__name__}")

    def handler(*args: Any, **kwargs: Any) -> torch.Tensor:
        groups = args[6] if len(args) > 6 else kwargs.get("groups", 1)
        return (ungrouped if groups == 1 else grouped)(*args, **kwargs)

    return handler


implements_each("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", _convolution)


@implements(F.pad)
def pad(input: torch.Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> torch.Tensor:
    """Pad, or crop, the ends of the last dims; those must be whole."""
    pads = list(pad)
    F.pad(torch.empty(input.shape, device="meta"), pads, mode, value)  # torch's errors
    dims = [input.dim() - 1 - i for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]]
    return _by_rule(input, tuple(dims), pads, mode, value) if dims else input.clone()


def _pad(input: torch.Tensor, dim: Any, pads: list[int], mode: str, value: float | None) -> torch.Tensor:
    return F.pad(input, pads, mode, value)


_by_rule = by_rule(_pad, "padded")
