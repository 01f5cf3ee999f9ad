"""Create sharded tensors: `empty`, `zeros`, `ones`, `full`, `rand`, `randn`, `distribute`.

Those without random numbers send nothing: each rank allocates its own bytes, in a time that does not depend on the
number of ranks. The random ones broadcast the first rank's generator state and return bit for bit the values of the
unsharded call with that state, in any layout; every rank's generator ends where that call leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import torch

from shardtensor.comm.group import Group
from shardtensor.comm.redistribute import redistribute
from shardtensor.comm.untraced import untraced
from shardtensor.errors import LayoutError
from shardtensor.layout.layout import Layout
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.tensor.dispatch import is_dtensor
from shardtensor.tensor.drawing import Sample, draw
from shardtensor.tensor.placing import bind_to, device_for, requested_device
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, wrap

SpecLike = ShardingSpec | str
_UNCOMPILED = "a graph makes no ShardedTensor: compile the parts that work on plain values"


class Options(TypedDict, total=False):
    """The options of every factory.

    Attributes:
        dtype: of the elements; None: torch's default dtype.
        device: of this rank's part, for a spec that names axes; when None, that of the ``torch.device`` context, else
        the group's. A spec that names devices determines it, and accepts only their type, or ``"meta"``, here.
        requires_grad: whether autograd records operations on the tensor.
        pin_memory: page-lock this rank's part (CPU placements).
        process_group: a process group, a DeviceMesh, or None for the default group (a world of one without any).
        layout, memory_format: for torch's signatures: strided and contiguous are the only ones.
    """

    dtype: torch.dtype | None
    device: torch.device | str | int | None
    requires_grad: bool
    pin_memory: bool
    process_group: Any
    layout: torch.layout
    memory_format: torch.memory_format


def empty(sharding_spec: SpecLike, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Return an uninitialized sharded tensor. Sends nothing; every rank of the group calls it.

    Args:
        sharding_spec: a spec or its text.
        size: the global shape, as numbers or one sequence.
        options: see `Options`.

    Raises:
        LayoutError: (a ValueError) the spec does not fit the shape or the ranks, or names other devices than `device`.

    Example:
        >>> empty("[tp, -]", 4, 6).shape
        torch.Size([4, 6])
        >>> empty("[tp, -]", 4, 6, device="meta").device
        device(type='meta')
    """
    return _make(sharding_spec, size, options, _empty)


def zeros(sharding_spec: SpecLike, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Return a sharded tensor of zeros; arguments as in `empty`."""
    return _make(sharding_spec, size, options, lambda *make: _empty(*make).zero_())


def ones(sharding_spec: SpecLike, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Return a sharded tensor of ones; arguments as in `empty`."""
    return _make(sharding_spec, size, options, lambda *make: _empty(*make).fill_(1))


def full(sharding_spec: SpecLike, size: Any, fill_value: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Return a sharded tensor of one value, of torch.full's dtype for it; arguments as in `empty`."""
    if options.get("dtype") is None:
        options["dtype"] = torch.full((), fill_value).dtype
    return _make(sharding_spec, (size,), options, lambda *make: _empty(*make).fill_(fill_value))


def rand(sharding_spec: SpecLike, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Return a sharded tensor of the same numbers as torch.rand, in any layout; arguments as in `empty`.

    All ranks of the group call it: the first rank's generator state is sent to the others.
    """
    return _make(sharding_spec, size, options, _drawn(lambda t, generator: t.uniform_(generator=generator)))


def randn(sharding_spec: SpecLike, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Return a sharded tensor of the same numbers as torch.randn, in any layout; arguments as in `rand`."""
    return _make(sharding_spec, size, options, _drawn(lambda t, generator: t.normal_(generator=generator)))


@untraced(_UNCOMPILED)
def distribute(
    tensor: torch.Tensor, sharding_spec: SpecLike, *, process_group: Any = None, requires_grad: bool | None = None
) -> ShardedTensor:
    """Shard a tensor that every rank holds whole; each rank copies its own part. Sends nothing.

    Differentiable: the gradient of `tensor` is the whole gradient on every rank.

    Args:
        tensor: of the global shape, equal on every rank; also a ShardedTensor, which is gathered first (collective).
        sharding_spec: a spec or its text.
        process_group: as in `empty`.
        requires_grad: makes the result a leaf that does or does not require a gradient; None keeps the graph.

    Raises:
        TypeError: it is a DTensor; use `from_dtensor`.

    Example:
        >>> distribute(torch.arange(4.0), "[tp]").full_tensor()
        tensor([0., 1., 2., 3.])
    """
    if is_dtensor(tensor):
        raise TypeError(
            "distribute takes a tensor that every rank holds whole, or a ShardedTensor, and this is a DTensor: "
            "pass from_dtensor(tensor)"
        )
    spec, group, layout = bind_to(sharding_spec, tuple(tensor.shape), process_group)
    device = device_for(spec, group, tensor.device)
    if requires_grad is not None:
        tensor = tensor.detach()
    local = redistribute(local_as(tensor, layout.reduced(), group), layout.reduced(), layout, group).to(device)
    source = tensor._local if isinstance(tensor, ShardedTensor) else tensor
    is_view = local.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    if is_view or local.untyped_storage().nbytes() != local.numel() * local.element_size():
        local = local.clone(memory_format=torch.contiguous_format)
    if requires_grad is not None:
        local.requires_grad_(requires_grad)
    return wrap(local, layout, spec, group)


Maker = Callable[[Layout, Group, torch.dtype, torch.device, bool], torch.Tensor]


def _empty(layout: Layout, group: Group, dtype: torch.dtype, device: torch.device, pin: bool) -> torch.Tensor:
    return torch.empty(layout.local_shape(group.rank), dtype=dtype, device=device, pin_memory=pin)


def _drawn(sample: Sample) -> Maker:
    def make(layout: Layout, group: Group, dtype: torch.dtype, device: torch.device, pin: bool) -> torch.Tensor:
        local = draw(sample, layout, group, dtype=dtype, device=device)
        return local.pin_memory() if pin else local

    return make


@untraced(_UNCOMPILED)
def _make(sharding_spec: SpecLike, size: Sequence[Any], options: Options, maker: Maker) -> ShardedTensor:
    if options:
        _refuse_what_is_not_plain(**options)
    spec, group, layout = bind_to(sharding_spec, as_shape(size), options.get("process_group"))
    if layout.partial:
        raise LayoutError(
            "a new tensor cannot be partial", {"spec": str(spec)}, "make it whole, or use init_from_local_tensor"
        )
    dtype = options.get("dtype") or torch.get_default_dtype()
    requested = options.get("device")
    device = device_for(spec, group) if requested is None else requested_device(spec, group, torch.device(requested))
    with torch.no_grad():
        local = maker(layout, group, dtype, device, options.get("pin_memory", False))
    if options.get("requires_grad"):
        local.requires_grad_()
    return wrap(local, layout, spec, group)


def as_shape(size: Sequence[Any]) -> tuple[int, ...]:
    """Return the global shape given as ``f(spec, 4, 6)``, ``f(spec, (4, 6))`` or ``f(spec, torch.Size(...))``."""
    if len(size) == 1 and not isinstance(size[0], int | str):
        size = tuple(size[0])
    for length in size:
        if not isinstance(length, int):
            raise TypeError(f"size has to be a sequence of ints, found: {list(size)}")
        if length < 0:
            raise LayoutError(f"a tensor cannot have {length} elements along a dim", {"size": tuple(size)})
    return tuple(size)


_OPTION_NAMES = frozenset(Options.__annotations__)


def _refuse_what_is_not_plain(
    layout: torch.layout = torch.strided,
    memory_format: torch.memory_format = torch.contiguous_format,
    **rest: Any,
) -> None:
    unknown = next((name for name in rest if name not in _OPTION_NAMES), None)
    if unknown is not None:
        raise TypeError(f"no argument is called {unknown!r}; there are {', '.join(sorted(_OPTION_NAMES))}")
    if layout != torch.strided:
        raise LayoutError(f"Only torch.strided layout is currently supported, found {layout}")
    if memory_format != torch.contiguous_format:
        raise LayoutError(f"Only torch.contiguous_format memory_format is currently supported, found {memory_format}")


def _new(cls: type[ShardedTensor], sharding_spec: SpecLike, *size: Any, **options: Any) -> ShardedTensor:
    """Implement ``ShardedTensor(spec, 4, 6, dtype=..., process_group=...)`` by `empty`."""
    return empty(sharding_spec, *size, **options)


ShardedTensor.__new__ = _new  # type: ignore[method-assign,assignment]
