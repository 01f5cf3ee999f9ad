"""Methods and properties of the global tensor that need no dispatch. Nothing here sends anything.

Through ``__torch_function__`` a getter costs some 6 microseconds; optimizers and modules call thousands of them a step.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

from shardtensor.errors import RuleError
from shardtensor.layout.layout import Layout
from shardtensor.rules.rule import one_dim


class MetadataMethods:
    """The part of `ShardedTensor` that reads its layout and its leaf; strides are those of a contiguous tensor."""

    __slots__ = ()

    _local: torch.Tensor
    _layout: Layout

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._layout.shape)

    def size(self, dim: int | None = None) -> Any:
        if dim is None:
            return torch.Size(self._layout.shape)
        shape = self._layout.shape
        if not shape:
            raise IndexError(f"Dimension specified as {dim} but tensor has no dimensions")
        return shape[one_dim(len(shape), dim)]

    def __len__(self) -> int:
        if not self._layout.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._layout.shape[0]

    def dim(self) -> int:
        return len(self._layout.shape)

    @property
    def ndim(self) -> int:
        return len(self._layout.shape)

    def numel(self) -> int:
        return math.prod(self._layout.shape)

    def stride(self, dim: int | None = None) -> Any:
        strides = [1]
        for size in reversed(self._layout.shape[1:]):
            strides.append(strides[-1] * max(size, 1))
        found = tuple(reversed(strides)) if self._layout.shape else ()
        return found if dim is None else found[dim]

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        return memory_format in (torch.contiguous_format, torch.preserve_format)

    @property
    def _base(self) -> None:
        """None: whether the leaf is a view differs between ranks, and no rank holds what the dense tensor views."""

    @property
    def names(self) -> tuple[None, ...]:
        return (None,) * len(self._layout.shape)

    @property
    def nbytes(self) -> int:
        return self.numel() * self._local.element_size()

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise RuleError(
            "numpy sees one process's memory, which holds only a part of a ShardedTensor",
            fix=["full_tensor().numpy() for the whole", "local_tensor().numpy() for this rank's part"],
        )

    @property
    def dtype(self) -> torch.dtype:
        return self._local.dtype

    @property
    def device(self) -> torch.device:
        return self._local.device

    @property
    def layout(self) -> torch.layout:
        return torch.strided

    nelement, ndimension = numel, dim


def _property(name: str) -> property:
    return property(lambda self: getattr(self._local, name), doc=f"As of the dense tensor: ``{name}``.")


def _method(name: str) -> Any:
    def method(self: MetadataMethods, *args: Any) -> Any:
        return getattr(self._local, name)(*args)

    method.__name__ = name
    return method


PROPERTIES = """
name itemsize is_leaf grad_fn output_nr _version retains_grad grad_dtype volatile
_backward_hooks _post_accumulate_grad_hooks
is_cpu is_cuda is_meta is_mps is_mtia is_xpu is_ipu is_maia is_vulkan is_xla
is_mkldnn is_quantized is_nested is_sparse is_sparse_csr
"""
METHODS = """
element_size is_floating_point is_complex is_signed is_conj is_neg is_inference is_pinned get_device
"""

for _name in PROPERTIES.split():
    if hasattr(torch.Tensor, _name):
        setattr(MetadataMethods, _name, _property(_name))
for _name in METHODS.split():
    setattr(MetadataMethods, _name, _method(_name))
