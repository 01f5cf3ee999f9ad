"""Convert to and from DTensor on the same memory. Nothing is copied or sent; gradients flow in both directions.

A DTensor has one placement for each axis of its DeviceMesh (`layout.nested`). Every such layout has a `ShardedTensor`,
also uneven and strided ones; the way back exists for layouts that DTensor can express.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from shardtensor.comm.collectives import dtype_of_gradient
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group, device_mesh_of
from shardtensor.comm.redistribute import means, refuse_gradient_of_extremes
from shardtensor.errors import LayoutError
from shardtensor.layout.bind import bind
from shardtensor.layout.layout import MeshLayout, same_boxes
from shardtensor.layout.nested import nested_axes, nested_layout
from shardtensor.mesh import Mesh
from shardtensor.plan.interop.dtensor import as_mesh, make_placements, no_placements_error, read_placements
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.tensor.placing import enumerated, mesh_of, spec_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

_axes_of: WeakKeyDictionary[Any, Mesh] = WeakKeyDictionary()
_meshes: WeakKeyDictionary[Group, Any] = WeakKeyDictionary()  # made here, for groups that came from no DeviceMesh


def from_dtensor(dtensor: Any) -> ShardedTensor:
    """Return the `ShardedTensor` over a DTensor's own memory. Sends nothing; gradients flow back to the DTensor.

    A write into either is visible in the other. Of a parameter the result is a view, like ``to_local()``: its
    gradient accumulates in the parameter's ``grad``. ``nn.Parameter(from_dtensor(parameter))`` is a separate
    parameter on the same memory.

    Args:
        dtensor: of any placements but those private to torch's operations (masked and norm partials). All ranks of
            its mesh, and those outside that hold it, call this.

    Returns:
        a tensor of the same global shape, on the group of the DeviceMesh; its axes are named as the mesh's.

    Raises:
        TypeError: it is not a DTensor.
        LayoutError: a placement is not supported here.

    Example:
        >>> import shardtensor, torch.distributed as dist
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> theirs = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0), Shard(1)], src_data_rank=None)
        >>> ours = shardtensor.from_dtensor(theirs)
        >>> ours.sharding_spec(), ours.local_tensor().shape
        (parse_spec('[dp, tp]'), torch.Size([4, 6]))
        >>> ours.to_dtensor().placements
        (Shard(dim=0), Shard(dim=1))
        >>> dist.destroy_process_group()
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(dtensor, DTensor):
        raise TypeError(f"from_dtensor takes a DTensor, this is a {type(dtensor).__name__}")
    device_mesh = dtensor.device_mesh
    mesh = _mesh(device_mesh)
    axes = read_placements(dtensor.placements, dtensor.shape)
    layout = nested_layout(axes, tuple(dtensor.shape), mesh, _order(dtensor))
    group = as_group(device_mesh)
    local = _FromDTensor.apply(dtensor, means(layout))  # DTensor does not divide the gradient of an average
    if group.index < 0:
        local = local.reshape(-1)[:0].view(layout.local_shape(group.rank)) if layout.shape else local.new_empty(())
    return wrap(local, layout, _odd_spec(layout, local.device, mesh), group)


def to_dtensor(tensor: ShardedTensor, device_mesh: Any = None) -> Any:
    """Return the DTensor over this tensor's own memory: a write into either is visible in the other.

    Gradients flow back; ``nn.Parameter(parameter.to_dtensor())`` is a DTensor parameter on the same memory.

    Args:
        device_mesh: over the ranks that hold this tensor, in their order; None means the mesh of its group, or one made
        from its existing process groups.

    Raises:
        LayoutError: DTensor cannot express this layout; the error names the nearest one that it can.
        RuleError: a partial max or min that requires a gradient.
    """
    if device_mesh is None:
        device_mesh = _mesh_for(tensor)
    mesh = _mesh(device_mesh)
    layout = tensor._layout
    axes = nested_axes(layout, mesh)
    if axes is None:
        raise _no_placements_error(tensor, mesh)
    local = tensor._local
    if not isinstance(layout, MeshLayout):  # its boxes are DTensor's, but its local tensor may be flat
        local = local.view(nested_layout(axes, layout.shape, mesh).local_shape(tensor._group.rank))
    refuse_gradient_of_extremes(local, layout)
    return _ToDTensor.apply(local, device_mesh, make_placements(axes), torch.Size(layout.shape), means(layout))


def as_dtensor(tensor: ShardedTensor, device_mesh: Any, placements: Any) -> Any:
    """Return the DTensor of a tensor that was made from one with these placements."""
    return _ToDTensor.apply(tensor._local, device_mesh, placements, torch.Size(tensor._layout.shape), 1.0)


def parameter_of(dtensor: Any) -> nn.Parameter:
    """Return a new parameter on the memory of a DTensor, with the attributes that users set on the DTensor."""
    made = nn.Parameter(from_dtensor(dtensor.detach()), dtensor.requires_grad)
    standard = {"_local_tensor", "_spec", "_is_param"}
    vars(made).update({key: value for key, value in vars(dtensor).items() if key not in standard})
    return made


def _odd_spec(layout: MeshLayout, device: torch.device, mesh: Mesh) -> ShardingSpec | None:
    """Return a spec that lists the boxes if the spec language cannot express the layout, else None."""
    if not any(layout.is_blocked(dim) for dim in range(len(layout.shape))):
        return None
    try:
        is_same = same_boxes(bind(spec_of(layout, device), layout.shape, mesh), layout)
    except LayoutError:
        is_same = False
    return None if is_same else enumerated(layout, device)


def _mesh(device_mesh: Any) -> Mesh:
    """Return the axes and ranks of a DeviceMesh; unnamed axes are called ``dim_0``, ``dim_1``, ..."""
    cached = _axes_of.get(device_mesh)
    if cached is None:
        cached = _axes_of[device_mesh] = as_mesh(device_mesh)
    return cached


def _mesh_for(tensor: ShardedTensor) -> Any:
    """Return the DeviceMesh of a tensor's group, else a new one over its process groups; makes no process group."""
    group = tensor._group
    found = device_mesh_of(group) or _meshes.get(group)
    if found is None:
        mesh = mesh_of(group)
        if not isinstance(group.process_group, dist.ProcessGroup) or group.index < 0:  # simulated ranks have none
            raise LayoutError(
                "this tensor is on no process group that a DeviceMesh could be made of",
                {"tensor": str(tensor.sharding_spec()), "group": repr(group)},
                "call to_dtensor(mesh) with a DeviceMesh of the ranks that hold it",
            )
        if len(mesh.axes) == 1:
            found = dist.DeviceMesh.from_group(group.process_group, tensor.device.type)
        else:
            axes = [group.axis(name).process_group for name in mesh.names]
            ranks = torch.tensor(list(mesh.ranks)).view(mesh.sizes)
            found = dist.DeviceMesh.from_group(axes, tensor.device.type, ranks, mesh_dim_names=mesh.names)
        _meshes[group] = found
    return found


def _order(dtensor: Any) -> tuple[int, ...] | None:
    """Return the order in which the axes shard, if it is not left to right, else None."""
    entries = getattr(dtensor._spec, "shard_order", None)
    if not entries or any(type(p).__name__ == "_StridedShard" for p in dtensor.placements):
        return None
    return tuple(axis for entry in entries for axis in entry.mesh_dims)


class _FromDTensor(torch.autograd.Function):
    """DTensor -> local; backward: the gradient's local part -> DTensor, with nothing left to reduce."""

    @staticmethod
    def forward(ctx: Any, dtensor: Any, scale: int) -> torch.Tensor:
        ctx.mesh, ctx.placements, ctx.shape, ctx.scale = dtensor.device_mesh, dtensor.placements, dtensor.shape, scale
        local = dtensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:
        grad = grad * ctx.scale if ctx.scale != 1 else grad
        return _dtensor(grad, ctx.mesh, _reduced(ctx.placements), ctx.shape), None


class _ToDTensor(torch.autograd.Function):
    """Local -> DTensor; backward: DTensor in this tensor's layout -> the gradient's local part."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, device_mesh: Any, placements: tuple[Any, ...], shape: torch.Size, scale: int
    ) -> Any:
        ctx.mesh, ctx.placements, ctx.local_shape, ctx.scale = device_mesh, placements, local.shape, scale
        return _dtensor(local, device_mesh, placements, shape)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor, None, None, None, None]:
        target = _reduced(ctx.placements)
        if tuple(grad.placements) != target:
            grad = grad.to(dtype_of_gradient(ctx, grad.dtype)).redistribute(ctx.mesh, target)
        local = grad.to_local().view(ctx.local_shape)
        return local / ctx.scale if ctx.scale != 1 else local, None, None, None, None


def _dtensor(local: torch.Tensor, device_mesh: Any, placements: tuple[Any, ...], shape: torch.Size) -> Any:
    from torch.distributed.tensor import DTensor

    stride = _global_stride(local, shape)
    return DTensor.from_local(local, device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _global_stride(local: torch.Tensor, shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of the whole tensor with its dims in the memory order of the local tensor's."""
    stride, step = [0] * len(shape), 1
    order = range(len(shape))[::-1]
    if not local.is_contiguous() and local.dim() == len(shape):
        order = sorted(order, key=lambda dim: local.stride(dim))  # type: ignore[assignment]
    for dim in order:
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def _reduced(placements: tuple[Any, ...]) -> tuple[Any, ...]:
    from torch.distributed.tensor import Replicate

    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def _no_placements_error(tensor: ShardedTensor, mesh: Mesh) -> LayoutError:
    layout = tensor._layout
    facts = {"tensor": str(tensor.sharding_spec()), "shape": " x ".join(map(str, layout.shape)), "mesh": str(mesh)}
    if set(layout.ranks) != set(mesh.ranks):
        facts["held by"] = f"ranks {', '.join(map(str, layout.ranks))}"
        return LayoutError(
            "the mesh has other ranks than the tensor", facts, "pass the DeviceMesh of the ranks that hold the tensor"
        )
    return no_placements_error(layout, mesh, facts, 'tensor.reshard("{}").to_dtensor(mesh) is the nearest that it can')


ShardedTensor.to_dtensor = to_dtensor
