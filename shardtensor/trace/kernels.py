"""`FusedKernels`: meta tensors compute as with the fused kernels of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class FusedKernels(TorchFunctionMode):
    """A mode in which meta tensors compute as with fused kernels, so that FLOPs and saved bytes are those of a GPU.

    `scaled_dot_product_attention` calls the operation of a kernel: otherwise torch multiplies all pairs of tokens, and
    autograd saves these. `rms_norm` is one operation, not several that save their results. A product of groups of
    tokens with a weight for each is one product, whose FLOPs count.

    Example:
        >>> q = torch.empty(1, 2, 1024, 8, device="meta", requires_grad=True)
        >>> kept = []
        >>> hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()), lambda _: q)
        >>> with FusedKernels(), hooks:
        ...     y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> y.shape, max(kept) == q.numel()
        (torch.Size([1, 2, 1024, 8]), True)
    """

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and _has_kernel(
            *args[:3], shares_keys=bool(kwargs.get("enable_gqa"))
        ):
            return _fused(*args, **kwargs)
        if func is torch._grouped_mm and args[0].is_meta and args[0].dim() == 2 and args[1].dim() == 3:
            return args[0] @ args[1][0]  # kernels refuse some sizes and dtypes
        if func is F.rms_norm and args[0].is_meta:  # one kernel, which saves as much as that of the layer norm
            weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
            return F.layer_norm(args[0], args[1], weight)
        return func(*args, **kwargs)


def _has_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, shares_keys: bool) -> bool:
    """Whether a fused kernel computes this attention: in float32 none does if heads share keys."""
    is_plain = type(query) is torch.Tensor and query.is_meta and query.dim() == key.dim() == value.dim() == 4
    return is_plain and (query.element_size() == 2 or not shares_keys)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa:
        times = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(times, 1) for each in (key, value))
    if attn_mask is None and value.shape[-1] == query.shape[-1]:
        aten = torch.ops.aten._scaled_dot_product_flash_attention
        return aten(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(query.dtype)  # the kernel takes a bias instead
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
