"""Products of a layer that are one autograd Function with their collective, and for which inputs they pay."""

from __future__ import annotations

from typing import Protocol

import attrs
import torch

from shardtensor.comm.along_dim import DimSizes
from shardtensor.comm.function_call import caller
from shardtensor.comm.group import Group
from shardtensor.ops.fused_linear import ChunkedRowLinear, ColumnLinear, GatheredColumnLinear, is_large

_column_linear, _gathered_column_linear = caller(ColumnLinear), caller(GatheredColumnLinear)
_chunked_row_linear = caller(ChunkedRowLinear)


class Product(Protocol):
    """The whole work of a linear layer: what comes to what leaves."""

    def pays(self, x: torch.Tensor) -> bool:
        """Whether it is the one to take for this input: small ones are cheaper for the host step by step."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...


@attrs.frozen
class ColumnProduct:
    """The input's gradient is summed beside the weight's; `start` as of `LayerFlow`."""

    team: Group
    start: int | None

    def pays(self, x: torch.Tensor) -> bool:
        return x.requires_grad or self.start is not None  # else there is nothing to sum in backward

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _column_linear(x, weight, bias, self.team, self.start)


@attrs.frozen
class StreamProduct:
    """The stretches of the input are gathered, and the sums of its gradient scattered beside the weight's gradient."""

    team: Group
    stretches: DimSizes

    def pays(self, x: torch.Tensor) -> bool:
        return is_large(x)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _gathered_column_linear(x, weight, bias, self.team, self.stretches)


@attrs.frozen
class ChunkedProduct:
    """Inputs of `least` elements or more are multiplied and summed in so many chunks of rows."""

    team: Group
    chunks: int
    least: int

    def pays(self, x: torch.Tensor) -> bool:
        return x.numel() >= self.least and not torch.compiler.is_compiling()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = _chunked_row_linear(x, weight, self.team, self.chunks)
        return y if bias is None else y + bias
