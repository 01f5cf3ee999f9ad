"""Convolutions, pooling, padding and resizing: batches and channels may be cut, places must be whole.

``n i !h !w, o i !k !l, o -> n o h' w'``: where the input channels are cut the products are summed, and the bias is
added after.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.ops.by_rule import by_rule, leaves_addends
from shardtensor.ops.empty_parts import at_least_one, takes_empty
from shardtensor.tensor.dispatch import HANDLERS, implements, spellings
from shardtensor.tensor.fallback import fall_back

# -- convolutions ------------------------------------------------------------------------------------------------------


def _convolves(name: str, groups_at: int) -> None:
    func = getattr(F, name)
    by_channels = by_rule(takes_empty(func, name), name)
    by_groups = by_rule(takes_empty(func, f"grouped_{name}"), f"grouped_{name}")

    def handler(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        groups = args[groups_at] if len(args) > groups_at else kwargs.get("groups", 1)
        if groups != 1:
            return by_groups(input, weight, bias, *args, **kwargs)
        if bias is not None and leaves_addends(name, (input, weight, bias)):
            product = by_channels(input, weight, None, *args, **kwargs)
            return product + bias.reshape(-1, *(1,) * (weight.dim() - 2))
        return by_channels(input, weight, bias, *args, **kwargs)

    for spelled in {func, getattr(torch, name)}:
        HANDLERS[spelled] = handler


for _n in (1, 2, 3):
    _convolves(f"conv{_n}d", 3)
    _convolves(f"conv_transpose{_n}d", 3)


# -- pooling and its kin -----------------------------------------------------------------------------------------------

for _name in """
max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices avg_pool1d
avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices
adaptive_max_pool3d_with_indices lp_pool1d lp_pool2d lp_pool3d interpolate pixel_shuffle pixel_unshuffle channel_shuffle
local_response_norm grid_sample
""".split():
    for _func in spellings(_name):
        HANDLERS[_func] = by_rule(takes_empty(_func, _name), _name)
for _func, _name in ((F.unfold, "im2col"), (F.fold, "col2im")):
    HANDLERS[_func] = by_rule(takes_empty(_func, _name), _name)


@implements(F.pad)
def pad(input: torch.Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> torch.Tensor:
    """Fill up, or cut off, the ends of the last dims; those must be whole."""
    pads = list(pad)
    count = len(pads) // 2
    dims = [input.dim() - 1 - i for i in range(count) if pads[2 * i] or pads[2 * i + 1]]
    if len(pads) % 2 or count > input.dim() or not dims or not input.numel():
        return fall_back(F.pad, (input, pads, mode, value), {})
    result = torch.empty(input.shape, device="meta")
    F.pad(result, pads, mode, value)  # torch's errors
    return _pad_by_rule(input, tuple(dims), pads, mode, value)


def _pad(input: torch.Tensor, dim: Any, pads: list[int], mode: str, value: Any) -> torch.Tensor:
    count = len(pads) // 2
    ahead = range(input.dim() - count)
    found = F.pad(at_least_one(input, ahead), pads, mode, value)
    for d in ahead:
        found = found.narrow(d, 0, input.shape[d])
    return found


_pad_by_rule = by_rule(_pad, "padded")
