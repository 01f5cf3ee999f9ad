"""`ShardedTensor`: one tensor distributed over many ranks.

Users hold a *wrapper*: a tensor of the global shape without bytes. Autograd works on the *leaf*, the plain local tensor
``wrapper._local``. ``__torch_function__`` passes every operation on wrappers to a handler; there is no generic way to
unwrap one, so no function computes on a single shard by accident. ``__torch_dispatch__`` only raises for operations
that bypass the handlers. The wrapper refers to the leaf, and the leaf never to the wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from shardtensor.comm.group import Group
from shardtensor.comm.redistribute import as_nothing, common_group, part, redistribute, reduce_local, whole
from shardtensor.comm.untraced import untraced
from shardtensor.errors import RuleError, ShardCountError
from shardtensor.layout.layout import Layout, ListedLayout, replicated
from shardtensor.layout.picture import html_map, picture_of
from shardtensor.spec.devices import ShardMetadata
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.tensor import dispatch, placing
from shardtensor.tensor.copied import Copied, version_of
from shardtensor.tensor.metadata_methods import MetadataMethods
from shardtensor.tensor.shard import Shard, ShardedTensorMetadata, TensorProperties

_make_body = torch.Tensor._make_wrapper_subclass
_refuse_data_pointer = torch._C._set_throw_on_mutable_data_ptr  # to_dlpack would give null
_no_override = torch._C.DisableTorchFunctionSubclass


class ShardedTensor(MetadataMethods, torch.Tensor):  # type: ignore[override, misc]
    """A tensor of global `shape` whose elements a layout distributes over ranks.

    The factories (`zeros`, `rand`, ...), `distribute`, `init_from_local_shards`, `shard_parameter`, and operations on
    other sharded tensors make one; every rank of its group takes part. Every operation returns the values that it has
    for the dense tensor. A result that every rank holds whole is a plain tensor.

    Attributes:
        shape, dtype, requires_grad, grad: as in the dense tensor; ``grad`` is a `ShardedTensor` of the same layout.
        device: the device of this rank's local tensor.

    Example:
        >>> import torch, shardtensor as st
        >>> x = st.distribute(torch.arange(6.0).view(2, 3), "[tp, -]")
        >>> x
        ShardedTensor(shape=(2, 3), dtype=torch.float32, spec=[tp, -], rank 0 holds [0:2, 0:3] as (2, 3) on cpu)
        >>> (x * 2).sum()
        tensor(30.)
    """

    _local: torch.Tensor
    _layout: Layout
    _spec: ShardingSpec | None
    _group: Group
    _grad_wrapper: tuple[torch.Tensor | None, ShardedTensor] | None = None
    _placements: dict[int, Any] | None = None
    _remote: Any = None  # RRefs to the shards of other ranks, of a tensor made with init_rrefs=True
    _copied: Copied | None = None  # of a copy of what is a view in the dense program; replaces `_local`
    _param_group: Any = None  # of a parameter of a fully sharded module: its `fsdp.param_group.ParamGroup`
    _unit: Any = None  # of such a parameter, and of what was computed from one: see `fsdp.outside`

    if TYPE_CHECKING:  # set by other modules of the folder

        @property
        def grad(self) -> ShardedTensor | None: ...
        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None: ...

        gather: Callable[..., Any]
        reshard: Callable[..., ShardedTensor]
        to_dtensor: Callable[..., Any]
    else:  # hidden: a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if name == "_local" and self._copied is not None:
                return self._copied.current
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def local_tensor(self) -> torch.Tensor:
        """Return this rank's local tensor, on which autograd and optimizers work. Sends nothing.

        Raises:
            ShardCountError: (a NotImplementedError) this rank holds no shard, or several: `local_shards` lists them.
        """
        if len(boxes := self._layout.boxes(self._group.rank)) != 1:
            raise ShardCountError(
                "Only single local shard is supported.",
                {"spec": self.sharding_spec(), f"rank {self._group.rank}": f"holds {len(boxes) or 'no'} shards"},
                "local_shards() returns all of them, each with its tensor and its metadata",
            )
        return self._local if not self._layout.packed else self._shard_tensor(0)

    def local_shards(self) -> list[Shard]:
        """Return this rank's shards, perhaps none. Their ``tensor`` and ``metadata`` can be set."""
        rank = self._group.rank
        return [Shard.of(self, i, self._shard_metadata(rank, i)) for i in range(len(self._layout.boxes(rank)))]

    def _shard_tensor(self, index: int) -> torch.Tensor:
        boxes = self._layout.local_boxes(self._group.rank)
        if len(boxes) == 1 and not self._layout.packed:
            return self._local
        piece = self._local[boxes[index].slices]
        return piece.view(self._layout.boxes(self._group.rank)[index].sizes) if self._layout.packed else piece

    def _set_shard_tensor(self, index: int, value: torch.Tensor) -> None:
        """Set the shard's tensor: `value` becomes the leaf if the rank has one shard, else it is copied in place."""
        expected = self._layout.boxes(self._group.rank)[index].sizes
        if tuple(value.shape) != expected:
            raise ValueError(f"a shard of shape {tuple(expected)} cannot hold one of shape {tuple(value.shape)}")
        if value is self._local:
            return
        if len(self._layout.boxes(self._group.rank)) == 1 and not self._layout.packed:
            self._replace_local(value)
        else:
            with torch.no_grad():
                self._shard_tensor(index).copy_(value)

    def _replace_local(self, value: torch.Tensor) -> None:
        """Replace the wrapper's leaf by `value`, of any dtype and device, and update the wrapper's body."""
        self._local = value
        self._grad_wrapper = None
        self._sync_body()
        self._record_change()

    def _sync_body(self) -> None:
        """Give the wrapper's C-level body the dtype, device and requires_grad of the leaf, for C code that reads it."""
        local = self._local
        body = _make_body(
            ShardedTensor, self._layout.shape, dtype=local.dtype, device=local.device, requires_grad=False
        )
        _refuse_data_pointer(body)
        with _no_override():
            torch._C.TensorBase.data.__set__(self, body)  # type: ignore[attr-defined]
            if local.is_leaf or not local.requires_grad:
                torch._C.TensorBase.requires_grad.__set__(self, local.requires_grad)  # type: ignore[attr-defined]

    def _record_change(self, *, is_replaced: bool = True) -> None:
        """Make the leaf's parameter group, if it has one, reset its parameters before the next forward."""
        if self._param_group is not None:
            self._param_group.leaf_changed(is_replaced)

    def _shard_metadata(self, rank: int, index: int) -> ShardMetadata:
        box = self._layout.boxes(rank)[index]
        placement = (self._placements or {}).get(index) if rank == self._group.rank else None
        placement = placement or placing.placement_of(self.sharding_spec(), rank)
        device = "cuda" if self.device.type == "cuda" else self.device
        return ShardMetadata(list(box.offsets), list(box.sizes), placement or f"rank:{rank}/{device}")

    def _set_shard_metadata(self, index: int, value: ShardMetadata) -> None:
        box = self._layout.boxes(self._group.rank)[index]
        if (tuple(value.shard_offsets), tuple(value.shard_sizes)) != (box.offsets, box.sizes):
            raise ValueError(
                f"the shard is {box}; its offsets and sizes follow from the layout, only its placement can be set"
            )
        self._placements = {**(self._placements or {}), index: value.placement}

    def metadata(self) -> ShardedTensorMetadata:
        """Return every rank's shards, the size and the properties. Sends nothing; its cost grows with the ranks."""
        layout = self._layout
        if isinstance(layout, ListedLayout):
            places = [(rank, layout.boxes(rank).index(box)) for rank, box in layout.owned]
        else:
            places = [(rank, i) for rank in layout.ranks for i in range(len(layout.boxes(rank)))]
        shards = [self._shard_metadata(rank, i) for rank, i in places]
        properties = TensorProperties(dtype=self.dtype, requires_grad=self.requires_grad, pin_memory=self.is_pinned())
        return ShardedTensorMetadata(shards, torch.Size(layout.shape), properties)

    def sharding_spec(self) -> ShardingSpec:
        """Return the spec this tensor was made with; for a result, the spec of its layout."""
        if self._spec is None:
            self._spec = placing.spec_of(self._layout, self.device)
        return self._spec

    def full_tensor(self) -> torch.Tensor:
        """Return the whole tensor on every rank: one all-gather (one all-reduce where it is partial).
        Differentiable. All ranks of the group call it."""
        return whole(self._local, self._layout, self._group)

    @property
    def requires_grad(self) -> bool:
        return self._local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedTensor:
        """Set whether autograd records operations on this tensor, on every rank."""
        self._local.requires_grad_(requires_grad)
        with _no_override():
            torch._C.TensorBase.requires_grad.__set__(self, requires_grad)  # type: ignore[attr-defined]
        self._record_change(is_replaced=False)
        return self

    @property
    def data(self) -> ShardedTensor:
        """A new tensor on the same memory, whose operations autograd does not record."""
        is_own = self._param_group is None
        local = self._local.data if is_own else self._local.detach()  # shares the version counter that the group reads
        return view_of(self, local, self._layout, self._spec)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, ShardedTensor):
            raise RuleError(
                "a plain tensor cannot become the data of a ShardedTensor",
                {"shape": tuple(value.shape), "why": "they would share memory, as after nn.utils.vector_to_parameters"},
                "use copy_(tensor), under no_grad, to take its values, or distribute(tensor, spec) first",
            )
        if value._layout is not self._layout and value._layout != self._layout:
            raise RuleError(
                "the new data has another layout",
                {"this": str(self.sharding_spec()), "new": str(value.sharding_spec())},
                "use copy_(tensor) to take its values",
            )
        self._local.data = value._local
        self._grad_wrapper = None
        self._sync_body()
        self._record_change()

    @classmethod
    @untraced("a graph takes no ShardedTensor as an operand: compile the parts that work on plain values")
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        handler = dispatch.HANDLERS.get(func)
        try:
            if handler is not None:
                return handler(*args, **kwargs) if kwargs else handler(*args)
            return dispatch.HANDLERS[dispatch.ANY_OTHER](func, args, kwargs or {})
        except (RuntimeError, TypeError) as error:
            dispatch.explain_error(error, func, (args, kwargs))
            raise

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> NoReturn:
        raise dispatch.refusal_below(func)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        boxes = self._layout.boxes(self._group.rank)
        here = ", ".join(map(str, boxes[:3])) + (", ..." if len(boxes) > 3 else "") if boxes else "nothing"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"ShardedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, spec={self.sharding_spec()}, "
            f"rank {self._group.rank} holds {here} as {tuple(self._local.shape)} on {self.device}{grad})"
        )

    def _repr_html_(self) -> str:
        """Return its text and a map of its shards, for notebooks. This rank alone may call it."""
        return f"<p>{escape(repr(self))}</p>{html_map(picture_of(self._layout))}"

    @property
    def _process_group(self) -> Any:
        return self._group.process_group

    @property
    def _sharding_spec(self) -> ShardingSpec:
        return self.sharding_spec()


WRAPPER_CLASSES: set[type] = {ShardedTensor}
"""The class and its subclasses in the package, for tests of exact types, which are fast."""


def wrap(local: torch.Tensor, layout: Layout, spec: ShardingSpec | None, group: Group) -> ShardedTensor:
    """Return the wrapper over a rank's local tensor. Sends nothing and checks nothing; about 2 microseconds. An
    empty local tensor may have any shape. A `spec` of None is derived from the layout on demand."""
    if not local.numel():
        local = as_nothing(local, layout, group.rank)
    wrapper = _make_body(
        ShardedTensor, layout.shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
    )
    _refuse_data_pointer(wrapper)
    wrapper._local = local
    wrapper._layout = layout
    wrapper._spec = spec
    wrapper._group = group
    return wrapper


def view_of(x: ShardedTensor, local: torch.Tensor, layout: Layout, spec: ShardingSpec | None = None) -> ShardedTensor:
    """Return the wrapper over `local`, a view of the local tensor of `x`; it is a copy if `x` is one (see `Copied`)."""
    wrapper = wrap(local, layout, spec, x._group)
    return wrapper if x._copied is None else as_copy(wrapper, x._copied._replace(again=None))


def as_copy(wrapper: ShardedTensor, copied: Copied) -> ShardedTensor:
    """Mark `wrapper` as a copy and record its source; see `Copied`."""
    wrapper._copied = copied._replace(local=wrapper._local)
    vars(wrapper).pop("_local", None)
    return wrapper


def copy_of(
    value: torch.Tensor,
    x: ShardedTensor,
    name: str,
    again: tuple[Callable[[], Any], Callable[[Any], Any]] | None = None,
) -> ShardedTensor:
    """Return `value`, plain or sharded and read from `x`, marked as a copy of a view in the dense program. Errors show
    `name`, the view function's; the functions of `again` read `x` again and write such a value into it."""
    local = x._local
    if not isinstance(value, ShardedTensor):
        value = wrap(value, replicated(tuple(value.shape), x._group.ranks), None, x._group)
    origin = x._copied
    source, version = (local, version_of(local)) if origin is None else (origin.source, origin.version)
    return as_copy(value, Copied(name, local, source, version, again))


def local_as(tensor: torch.Tensor, layout: Layout, group: Group) -> torch.Tensor:
    """Return this rank's local tensor of a plain or sharded tensor under `layout`. Differentiable. A plain tensor is
    replicated. A sharded one of another layout is redistributed (collective)."""
    if isinstance(tensor, ShardedTensor):
        if tensor._layout is layout:
            return tensor._local
        return redistribute(tensor._local, tensor._layout, layout, common_group(group, tensor._group))
    return part(tensor, layout, group)


def local_of(x: Any) -> Any:
    """Return the local tensor of a sharded tensor; return anything else unchanged."""
    return x._local if isinstance(x, ShardedTensor) else x


def reduced(tensor: ShardedTensor) -> ShardedTensor:
    """Return `tensor` reduced if it is partial, else `tensor` itself."""
    if not tensor._layout.partial:
        return tensor
    local = reduce_local(tensor._local, tensor._layout, tensor._group)
    return wrap(local, tensor._layout.reduced(), None, tensor._group)
