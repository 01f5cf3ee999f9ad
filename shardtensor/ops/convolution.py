"""Convolutions and padding: batches and channels may be cut, places must be whole.

``n i !h !w, o i !k !l, + o -> n o h' w'``: where the input channels are cut the products are summed, and the bias is
added after. Grouped convolutions have rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.ops.by_rule import by_rule
from shardtensor.tensor.dispatch import HANDLERS, implements


def _convolution(name: str) -> Callable[..., torch.Tensor]:
    func = getattr(F, name)
    alone, grouped = by_rule(func, name), by_rule(func, f"grouped_{name}")

    def handler(*args: Any, **kwargs: Any) -> torch.Tensor:
        groups = args[6] if len(args) > 6 else kwargs.get("groups", 1)
        return (alone if groups == 1 else grouped)(*args, **kwargs)

    return handler


for _name in (f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)):
    HANDLERS[getattr(F, _name)] = HANDLERS[getattr(torch, _name)] = _convolution(_name)


@implements(F.pad)
def pad(input: torch.Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> torch.Tensor:
    """Fill up, or cut off, the ends of the last dims; those must be whole."""
    pads = list(pad)
    F.pad(torch.empty(input.shape, device="meta"), pads, mode, value)  # torch's errors
    dims = [input.dim() - 1 - i for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]]
    return _by_rule(input, tuple(dims), pads, mode, value) if dims else input.clone()


def _pad(input: torch.Tensor, dim: Any, pads: list[int], mode: str, value: float | None) -> torch.Tensor:
    return F.pad(input, pads, mode, value)


_by_rule = by_rule(_pad, "padded")
