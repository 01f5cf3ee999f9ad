"""`ParamGroup`: parameters of one dtype that are gathered and reduced as one flat tensor.

A rank keeps one range of it, `shard`; the sharded parameters are ShardedTensors over views of that range. All-gathers
write to a fixed buffer, so the tensors that modules compute with are views that are made once. They are outputs of one
autograd node that is made once too: backward runs it when the gradients of all of them are computed; they are then
packed and reduced.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from shardtensor.comm.group import Group, Pending
from shardtensor.comm.untraced import untraced
from shardtensor.errors import RuleError
from shardtensor.fsdp.autograd import written_too_early
from shardtensor.fsdp.data_mesh import DataMesh
from shardtensor.fsdp.gradients import GroupGradients
from shardtensor.fsdp.outside import UNCOMPILED, join_group
from shardtensor.fsdp.param_info import ParamInfo, ranges_of
from shardtensor.fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardtensor.tensor.bucket import Bucket, FlatShard, Grads
from shardtensor.tensor.gradient import grad_dtype_of, keep_grad_dtype
from shardtensor.tensor.memory import become
from shardtensor.tensor.placing import bind_named, mesh_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

_LAST = 2**64 - 1  # autograd runs the ready node with the highest number first, as it does with leaves


class ParamGroup:
    """Parameters of one dtype that are gathered and reduced together.

    Attributes:
        shard: this rank's range, of the parameters' dtype: the authoritative values. On the CPU with offloading.
        sharded_params: the parameters as users see them.
        unsharded: the all-gather output, of `compute_dtype`; None until a buffer is assigned.
        parts: views of it for each parameter, with version counters of their own; see `autograd`.
        unsharded_params: the tensors that modules compute with: outputs of one autograd node over `parts`, or
            ShardedTensors or DTensors over them.
        node: that node; None if all parameters are frozen.
        trains: which parameters require a gradient.
        changes: how often a leaf was replaced, or its ``requires_grad`` set.
        state: a weak reference to the FSDPState.
        on_gradients: called by `node` with the gradients of unsharded parameters.
    """

    def __init__(
        self,
        params_info: Sequence[ParamInfo],
        data_mesh: DataMesh,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        self.params_info, self.data_mesh, self.device, self.policy = list(params_info), data_mesh, device, policy
        self.is_offloaded = isinstance(offload_policy, CPUOffloadPolicy) and device.type != "cpu"
        self._pins = isinstance(offload_policy, CPUOffloadPolicy) and self.is_offloaded and offload_policy.pin_memory
        params = [info.param for info in params_info]
        self.dtype, self.trains = params[0].dtype, tuple(param.requires_grad for param in params)
        self.shapes = [tuple(info.values.shape) for info in params_info]
        ranges = ranges_of(self.params_info, data_mesh.shard.size)
        self.bucket = Bucket([info.placement for info in params_info], self.shapes, ranges, data_mesh.shard.index)
        self.shard = self._first_shard()
        self.sharded_params: list[ShardedTensor] = []
        offload_to = _to_cpu(self._pins) if self.is_offloaded else None
        self.gradients = GroupGradients(self.bucket, data_mesh, self.sharded_params, offload_to)
        self._mark_shard(has_hooks=False)
        for i, shard in enumerate(self.bucket.flat_shards(self.shard)):
            self.sharded_params.append(self._sharded(i, shard))
        self.set_dtypes()
        self.state: Callable[[], Any] = type(None)
        self.changes = 0
        self._is_packed = True  # as far as recorded, the leaves are views of `shard`
        self._writes_before = 0  # into earlier shards
        self.unsharded: torch.Tensor | None = None
        self.node: Any = None
        self.forget()

    def set_dtypes(self) -> None:
        """Compute the dtypes of computation, of gradients and of reductions."""
        self.compute_dtype = (self.policy.param_dtype or self.dtype) if self.dtype.is_floating_point else self.dtype
        self.set_grad_dtypes()
        default = self.compute_dtype if self.gradients.dtype == self.dtype else self.gradients.dtype
        self.gradients.reduce_in(self.policy.reduce_dtype or default)

    def set_grad_dtypes(self) -> None:
        """Set the dtypes of gradients to those that users set; reductions use them from the next forward on."""
        dtypes = [grad_dtype_of(info.param) for info in self.params_info]
        dtype = self.gradients.dtype = reduce(torch.promote_types, dtypes)
        self.gradients.dtypes = None if all([own == dtype for own in dtypes]) else dtypes

    # -- sharded parameters -------------------------------------------------------------------------------------------

    def _first_shard(self) -> torch.Tensor:
        if self.params_info[0].param.is_meta:
            return torch.zeros(self.bucket.chunk, dtype=self.dtype, device="meta")
        device = None if self.is_offloaded else self.device
        shard = torch.zeros(self.bucket.chunk, dtype=self.dtype, device=device, pin_memory=self._pins)
        for i, (info, part) in enumerate(zip(self.params_info, self.bucket.flat_shards(shard), strict=True)):
            start, stop = self.bucket.ranges.piece(i, self.bucket.index)
            if start < stop:
                part.copy_(info.placement.stored(info.values)[start:stop])
        return shard

    def _sharded(self, i: int, shard: torch.Tensor) -> ShardedTensor:
        """Return the sharded parameter over a flat shard."""
        info = self.params_info[i]
        placement, tp_spec, sizes = info.placement, info.tp_spec, info.sizes(self.bucket.ranges, i)
        if tp_spec is None:
            group = self.data_mesh.whole
            spec = placement.spec(None, self.shapes[i], self.data_mesh.axis, sizes)
        else:
            group = tp_spec.joint
            spec = placement.spec(tp_spec.joint_spec, self.shapes[i], tp_spec.axis, sizes)
        layout = bind_named(spec, tuple(info.param.shape), mesh_of(group))
        if not layout.packed:
            shape = layout.local_shape(group.rank)
            self.bucket.reshape(i, shape)
            shard = placement.as_param(shard, shape)
        leaf = shard.detach().requires_grad_(self.trains[i])
        self._number(leaf, i)
        return wrap(leaf, layout, spec, group)

    def _mark_shard(self, has_hooks: bool) -> None:
        """Make a `FlatShard` over `shard` for the leaves made from now on; optimizers step it as one tensor."""
        self.gradients.flat_shard = self._flat_shard = FlatShard(self.shard, self.bucket.starts)
        self._flat_shard.has_hooks = has_hooks

    def _number(self, leaf: torch.Tensor, i: int) -> None:
        if leaf.is_contiguous():  # with other strides it is not one range of memory
            leaf._flat_shard = self._flat_shard, i  # type: ignore[attr-defined]

    def take_over(self) -> None:
        """Turn the parameter objects into the sharded parameters, wherever they are held; they keep their gradients."""
        for i, info in enumerate(self.params_info):
            grad = info.param.grad
            become(info.param, self.sharded_params[i])
            sharded: Any = info.param
            sharded.grad, self.sharded_params[i] = grad, sharded
            join_group(sharded, self, i)

    def is_aliased(self) -> bool:
        """Whether the local tensors of all parameters are views of `shard` that this group made."""
        return self._is_packed and all(
            sharded._param_group is self
            and sharded._local.data_ptr() == part.data_ptr()
            and sharded.dtype == self.dtype
            for sharded, part in zip(self.sharded_params, self.bucket.shards(self.shard), strict=True)
        )

    @torch.inference_mode(False)
    def repack(self) -> None:
        """Copy the parameters from their present leaves into a new shard, and make new leaves that are views of it.

        The new leaves have the gradients and hooks of the old ones.
        """
        leaves = [sharded._local for sharded in self.sharded_params]
        self.dtype, self.trains = leaves[0].dtype, tuple(leaf.requires_grad for leaf in leaves)
        self._writes_before += self.shard._version + 1
        self.shard = torch.zeros(self.bucket.chunk, dtype=self.dtype, device=leaves[0].device)
        self.set_dtypes()
        self._mark_shard(self._flat_shard.has_hooks)
        for i, (sharded, shard) in enumerate(zip(self.sharded_params, self.bucket.shards(self.shard), strict=True)):
            leaf = sharded._local
            shard.copy_(leaf.detach())
            fresh: Any = shard.detach().requires_grad_(leaf.requires_grad)
            self._number(fresh, i)
            keep_grad_dtype(leaf, fresh)
            fresh.grad = None if leaf.grad is None else leaf.grad.clone()  # not a view of a flat gradient
            fresh._backward_hooks = leaf._backward_hooks
            fresh._post_accumulate_grad_hooks = leaf._post_accumulate_grad_hooks
            join_group(sharded, self, i)
            sharded._replace_local(fresh)
        self._is_packed = True

    def show_sharded(self) -> None:
        """Put the sharded parameters into the modules."""
        for info, sharded in zip(self.params_info, self.sharded_params, strict=True):
            for owner, name in info.locations:
                owner._parameters[name] = sharded  # type: ignore[assignment]

    @property
    def writes(self) -> int:
        """The number of writes to the parameters."""
        return self.shard._version + self._writes_before

    def leaf_changed(self, is_replaced: bool) -> None:
        """Record that a parameter has a new leaf, or another ``requires_grad`` or ``grad_dtype``."""
        self.changes += 1
        if is_replaced:
            self._is_packed = False
            self._writes_before += 1

    # -- unsharded parameters -----------------------------------------------------------------------------------------

    @property
    def unsharded_bytes(self) -> int:
        """The bytes of the all-gather output."""
        return self.bucket.total * self.compute_dtype.itemsize

    def use_buffer(self, memory: torch.Tensor) -> None:
        """Use `memory`, a tensor of bytes, as the all-gather output from now on; call `make_views` next."""
        self.unsharded = memory[: self.unsharded_bytes].view(self.compute_dtype)
        self._own = self.bucket.own(self.unsharded)
        self.parts = [part.data for part in self.bucket.views(self.unsharded)[0]]  # each with a version of its own

    def forget(self) -> None:
        """Drop the buffer and the views of it."""
        self.unsharded = self.node = None
        self.on_gradients: Callable[[ParamGroup, Grads], None] | None = None
        self.gathers_by = self.data_mesh.shard
        self._own, self.parts = self.shard, list[torch.Tensor]()
        self.unsharded_params: tuple[torch.Tensor, ...] = ()
        self._gathered_writes = -1

    @torch.inference_mode(False)
    @torch.enable_grad()  # the first forward may run without gradients
    def make_views(self) -> None:
        """Make the tensors that modules compute with, in the caller's stream: autograd runs their node in it."""
        self.node, made = None, iter(())
        if any(self.trains):
            made = iter(_Unsharded.apply(torch.empty(0, device=self.device, requires_grad=True), self))
        found = []
        for info, part, is_trained in zip(self.params_info, self.parts, self.trains, strict=True):
            view: Any = _filled(next(made), part) if is_trained else part
            view._is_param = True
            self.node = self.node or view.grad_fn
            found.append(view if info.tp_spec is None else info.tp_spec.around(view))
        self.unsharded_params = tuple(found)
        # A DTensor has another node between the view and the module.
        for node in {self.node, *(param.grad_fn for param in found)} - {None}:
            node._set_sequence_nr(_LAST)

    def node_outputs(self) -> list[torch.Tensor]:
        """Return the outputs of the autograd node for trained parameters: the dtype of each is that of its gradient.

        If ranks other than the data ranks sum gradients of replicas, they sum them in the dtype of reductions.
        """
        trained = [
            (info, part) for info, part, trains in zip(self.params_info, self.parts, self.trains, strict=True) if trains
        ]
        parts = [part.detach() for _, part in trained]
        if self.gradients.reduce_dtype.itemsize <= self.compute_dtype.itemsize:
            return parts
        has_neighbours = any(info.tp_spec is not None for info in self.params_info)
        wide = torch.empty((), dtype=self.gradients.reduce_dtype, device=self.device)
        for (info, _), part in zip(trained, parts, strict=True):
            if info.may_be_summed(has_neighbours):
                part.data = wide.expand(part.shape)  # without memory; `_filled` replaces it
        return parts

    def gather(self) -> Pending:
        """Start the all-gather, in the current stream."""
        assert self.unsharded is not None, "a buffer is assigned before anything is gathered"
        self._gathered_writes = self.writes
        source = self.shard
        if self.is_offloaded:
            source = self._own.copy_(source, non_blocking=self._pins)
        elif self.unsharded.is_cuda or self.compute_dtype != self.dtype:  # NCCL gathers best in place
            source = self._own.copy_(source)
        return self.gathers_by.all_gather_into(self.unsharded, source)

    @property
    def is_unwritten(self) -> bool:
        """Whether the parameters were gathered and not written since."""
        return self._gathered_writes == self.writes

    def check_unwritten(self) -> None:
        """Raise RuleError if parameters were written since the forward: a backward must not gather them again."""
        if self._gathered_writes not in (-1, self.writes):
            raise written_too_early(self.params_info)


class PostForwardMesh:
    """This rank's part of a module's parameters from forward to backward, with ``reshard_after_forward=n``.

    Between forward and backward, each n consecutive ranks shard the module among them; backward gathers from these.

    Args:
        param_groups: of the module.
        shard: the shard group; all of its ranks make this.
        ranks: how many consecutive ranks shard the module.
    """

    def __init__(self, param_groups: Sequence[ParamGroup], shard: Group, ranks: int) -> None:
        self._param_groups, self._ranks = param_groups, ranks
        first = shard.index // ranks * ranks
        self.group = shard.subgroup(list(shard.ranks)[first : first + ranks])
        self.forget()

    def over(self, param_groups: Sequence[ParamGroup]) -> PostForwardMesh:
        """Return an object with the same group for a copy of the module."""
        copied = copy.copy(self)
        copied._param_groups = param_groups
        copied.forget()
        return copied

    def forget(self) -> None:
        """Drop the kept part."""
        self._kept: list[torch.Tensor] = []
        self._is_filled = False

    def gather(self, is_again: bool) -> list[Pending]:
        """Gather for a forward from all ranks and keep a part; for a backward, start to gather the parts of `group`."""
        wholes = [group.unsharded for group in self._param_groups if group.unsharded is not None]
        if is_again and self._is_filled:
            return [self.group.all_gather_into(*pair) for pair in zip(wholes, self._kept, strict=True)]
        for pending in [group.gather() for group in self._param_groups]:
            pending.wait()
        self._is_filled = torch.is_grad_enabled()
        if self._is_filled:
            if not self._kept:
                with torch.inference_mode(False):
                    self._kept = [whole.new_empty(whole.numel() // self._ranks) for whole in wholes]
            for whole, kept in zip(wholes, self._kept, strict=True):
                kept.copy_(whole.narrow(0, self.group.index * kept.numel(), kept.numel()))
        return []


class _Unsharded(torch.autograd.Function):
    """The autograd node that outputs the unsharded parameters; backward passes their gradients to the group."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, group: ParamGroup) -> tuple[torch.Tensor, ...]:
        ctx.group = weakref.ref(group)  # gc cannot see that the group's views refer to this node
        ctx.names = [info.name for info in group.params_info]
        ctx.trains = None if all(group.trains) else group.trains
        ctx.set_materialize_grads(False)
        return tuple(group.node_outputs())

    @staticmethod
    @untraced(UNCOMPILED)
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None]:
        if torch.is_grad_enabled():
            raise RuleError(
                "the gradient of a fully sharded parameter has no gradient (create_graph=True)",
                {"parameters": ", ".join(ctx.names[:4])},
                fix="keep what needs second derivatives out of fully_shard",
            )
        group: ParamGroup | None = ctx.group()
        if group is not None:
            assert group.on_gradients is not None, "a group whose views are used belongs to a runtime"
            found = iter(grads)
            group.on_gradients(
                group, grads if ctx.trains is None else [next(found) if trains else None for trains in ctx.trains]
            )
        return None, None


def _to_cpu(pins: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that starts to copy a tensor to the CPU."""

    def start(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=pins).copy_(x, non_blocking=pins)

    return start


def _filled(view: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return an output of the node over `part`; one of the gradient's wider dtype was made without memory."""
    if view.dtype != part.dtype:
        view.data = part
    return view
