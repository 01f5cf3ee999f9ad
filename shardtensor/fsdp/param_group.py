"""`ParamGroup`: parameters that are gathered and reduced as one tensor.

A rank keeps one range of it, `shard`, over which the parameters' leaves are views; users see ShardedTensors over those.
It is gathered into a buffer that stays the same, so the tensors that modules compute with are views made once. They are
outputs of one autograd node that is made once too: backward runs it when the gradients of all of them are there, which
is when they are packed and sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch

from shardtensor.comm.group import Pending
from shardtensor.comm.untraced import untraced
from shardtensor.errors import RuleError
from shardtensor.fsdp.autograd import written_too_early
from shardtensor.fsdp.data_mesh import DataMesh
from shardtensor.fsdp.gradients import AccumulatedGradients, Grads, ParamGroupGradients
from shardtensor.fsdp.outside import UNCOMPILED, join
from shardtensor.fsdp.param_info import ParamInfo, ShardPlacement, ranges_of
from shardtensor.fsdp.policy import MixedPrecisionPolicy
from shardtensor.parallel.memory import become
from shardtensor.tensor.binding import bind_named
from shardtensor.tensor.gradient import grad_dtype_of, keep_grad_dtype
from shardtensor.tensor.pieces import Pieces
from shardtensor.tensor.placing import mesh_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

_LAST = 2**64 - 1  # autograd runs the ready node with the highest number first, as it does with leaves


class ParamGroup(ParamGroupGradients):
    """Parameters of one dtype that are gathered and reduced together.

    Attributes:
        shard: this rank's range, of the parameters' dtype; the truth about their values.
        pieces: what the parameters' leaves know of each other.
        sharded_params: the parameters as people see them.
        unit: a weak reference to the unit that it is of.
        whole: the gathered range, of the dtype of computation; None until memory is assigned.
        parts: the parameters in it, with version counters of their own, which those of `views` are: see `versions`.
        views: the parameters as they are gathered.
        unsharded_params: the parameters as modules compute with them: views, or ShardedTensors over those.
        node: the autograd node of `views`; None where all are frozen.
        trains: which parameters require a gradient.
        grad_dtype, grad_dtypes: of the gradients; of each parameter's where they differ, else None.
        is_packed: whether, for all that is known, the leaves are views of `shard`.
        coalesced: the collective of several units that gathers it, if there is one.
        changes: how often a leaf was replaced, or let require a gradient or not; see `upkeep`.
    """

    is_offloaded = False  # whether shards and gradients lie elsewhere than the whole

    def __init__(
        self, params_info: Sequence[ParamInfo], data_mesh: DataMesh, device: torch.device, policy: MixedPrecisionPolicy
    ) -> None:
        self.params_info, self.data_mesh, self.device, self.policy = list(params_info), data_mesh, device, policy
        params = [info.param for info in params_info]
        self.dtype = params[0].dtype
        self.trains = tuple(param.requires_grad for param in params)
        self.divisor = float(data_mesh.size)  # of summed gradients
        self.accumulated = AccumulatedGradients(data_mesh.replicate)
        self.settle_dtypes()
        self.global_shapes = [tuple(param.shape) for param in params]
        self.shapes = [tuple(info.values.shape) for info in params_info]
        self.ranges = ranges_of(self.params_info, data_mesh.shard.size)
        self._cuts = self.ranges.cuts(self.index)
        self._all_cuts = self.ranges.all_cuts()
        self._gaps = [i for i, size in enumerate(self._all_cuts) if not i % 2 and size]
        self._own_parting = _parting(self._cuts)
        self.shard = self._own_range()
        self._reshaped: list[tuple[int, ShardPlacement, tuple[int, ...]]] = []
        self.pieces = self._known_pieces()
        self.sharded_params = [self._shell(i, piece) for i, piece in enumerate(self._pieces(self.shard))]
        self.whole: torch.Tensor | None = None
        self.parts: list[torch.Tensor] = []
        self.views: tuple[torch.Tensor, ...] = ()
        self.unsharded_params: tuple[torch.Tensor, ...] = ()
        self.node: Any = None
        self.state: Callable[[], Any] = type(None)
        self.position = 0  # among the groups that are reduced together
        self.version = -1
        self.gathers_by = data_mesh.shard
        self.coalesced: Any = None
        self.changes = 0
        self.is_packed = True
        self._writes_before = 0  # into earlier shards
        self.syncs = True
        self.on_gradients: Callable[[Sequence[ParamGroup], Sequence[Grads]], None] | None = None
        self.held: Grads | None = None  # gradients that wait to be reduced

    def settle_dtypes(self) -> None:
        """Set the dtypes of computation, reductions and gradients."""
        self.compute_dtype = (self.policy.param_dtype or self.dtype) if self.dtype.is_floating_point else self.dtype
        self.settle_grad_dtypes()
        wanted = self.compute_dtype if self.grad_dtype == self.dtype else self.grad_dtype
        self.reduce_dtype = self.policy.reduce_dtype or wanted
        self.accumulated.dtype = self.reduce_dtype
        self.divide_by(self.divisor)

    def settle_grad_dtypes(self) -> None:
        """Make the gradients to come of the dtypes that users set; the next forward also has them summed in these."""
        asked = [grad_dtype_of(info.param) for info in self.params_info]
        self.grad_dtype = reduce(torch.promote_types, asked)
        self.grad_dtypes = None if all([dtype == self.grad_dtype for dtype in asked]) else asked

    # -- shards -----------------------------------------------------------------------------------------------------

    def _own_range(self) -> torch.Tensor:
        is_meta = self.params_info[0].param.is_meta
        shard = torch.zeros(self.ranges.chunk, dtype=self.dtype, device="meta") if is_meta else self._empty_shard()
        if not is_meta:
            for i, (info, piece) in enumerate(zip(self.params_info, self._stretches(shard), strict=True)):
                start, stop = self.ranges.piece(i, self.index)
                if start < stop:
                    piece.copy_(info.form.stored(info.values)[start:stop])
        return shard

    def _empty_shard(self) -> torch.Tensor:
        return torch.zeros(self.ranges.chunk, dtype=self.dtype, device=self.device)

    def _shell(self, i: int, piece: torch.Tensor) -> ShardedTensor:
        form, inner, sizes = (
            self.params_info[i].form,
            self.params_info[i].inner,
            self.params_info[i].sizes(self.ranges, i),
        )
        if inner is None:
            group = self.data_mesh.whole
            spec = form.spec(None, self.shapes[i], self.data_mesh.axis, sizes)
        else:
            group = inner.joint
            spec = form.spec(inner.joint_spec, self.shapes[i], inner.axis, sizes)
        layout = bind_named(spec, self.global_shapes[i], mesh_of(group))
        if not layout.packed:
            shape = layout.local_shape(group.rank)
            self._reshaped.append((i, form, shape))
            piece = form.as_param(piece, shape)
        leaf = piece.detach().requires_grad_(self.trains[i])
        self._number(leaf, i)
        return wrap(leaf, layout, spec, group)

    def _known_pieces(self) -> Pieces:
        """What the leaves know of each other, in the present range."""
        *starts, _ = accumulate(self._cuts)
        return Pieces(self.shard, tuple(starts[::2]))

    def _number(self, leaf: torch.Tensor, i: int) -> None:
        if leaf.is_contiguous():  # another order of elements is none of a piece of memory
            leaf._piece = self.pieces, i  # type: ignore[attr-defined]

    def take_over(self) -> None:
        """Make the parameter objects the sharded parameters, for everyone who holds them; a gradient comes along."""
        for i, info in enumerate(self.params_info):
            grad = info.param.grad
            become(info.param, self.sharded_params[i])
            sharded: Any = info.param
            sharded.grad, self.sharded_params[i] = grad, sharded
            join(sharded, self, i)

    @torch.inference_mode(False)
    def repack(self) -> None:
        """Take the parameters, wherever their leaves lie by now, into a new range, and make their leaves views of it.

        Gradients and hooks come along.
        """
        leaves = [sharded._local for sharded in self.sharded_params]
        self.dtype = leaves[0].dtype
        self.trains = tuple(leaf.requires_grad for leaf in leaves)
        self._writes_before += self.shard._version + 1
        self.shard = torch.zeros(self.ranges.chunk, dtype=self.dtype, device=leaves[0].device)
        self.settle_dtypes()
        had_hooks, self.pieces = self.pieces.has_hooks, self._known_pieces()
        self.pieces.has_hooks = had_hooks
        for i, (sharded, leaf, piece) in enumerate(
            zip(self.sharded_params, leaves, self._pieces(self.shard), strict=True)
        ):
            piece.copy_(leaf.detach())
            fresh: Any = piece.detach().requires_grad_(leaf.requires_grad)
            self._number(fresh, i)
            keep_grad_dtype(leaf, fresh)
            fresh.grad = None if leaf.grad is None else leaf.grad.clone()  # no piece of a flat gradient any more
            fresh._backward_hooks = leaf._backward_hooks
            fresh._post_accumulate_grad_hooks = leaf._post_accumulate_grad_hooks
            join(sharded, self, i)
            sharded._replace_local(fresh)
        self.is_packed = True

    def show_sharded(self) -> None:
        """Let modules show the sharded parameters, in their turn."""
        for info, sharded in zip(self.params_info, self.sharded_params, strict=True):
            for owner, name in info.homes:
                owner._parameters[name] = sharded  # type: ignore[assignment]

    # -- the whole --------------------------------------------------------------------------------------------------

    @property
    def whole_bytes(self) -> int:
        """Bytes of the gathered range."""
        return self.ranges.total * self.compute_dtype.itemsize

    def use_buffer(self, memory: torch.Tensor) -> None:
        """Be gathered into `memory`, bytes, from now on; views are to be made then."""
        whole = memory[: self.whole_bytes].view(self.compute_dtype)
        self.whole, self.parts = whole, self.parts_of(whole)
        self._own = whole.narrow(0, self.index * self.ranges.chunk, self.ranges.chunk)

    def forget(self) -> None:
        """Hold no memory to be gathered into."""
        self.whole = self.node = self.on_gradients = self.coalesced = None
        self._own = self.shard
        self.parts, self.views, self.unsharded_params, self.gathers_by = [], (), (), self.data_mesh.shard

    def make_views(self) -> None:
        """Make the tensors that modules compute with, in the caller's stream, where backward will meet them.

        Those of groups that are coalesced are made together, of one node: it runs when it has all their gradients.
        """
        _make_views([self] if self.coalesced is None else self.coalesced.param_groups)

    def _take_views(self, made: Iterator[torch.Tensor]) -> None:
        parts = zip(self.trains, self.parts, strict=True)
        self.views = tuple(_filled(next(made), part) if trains else part for trains, part in parts)
        self.node = self.views[self.trains.index(True)].grad_fn if any(self.trains) else None
        for view in self.views:
            view._is_param = True
        self.unsharded_params = tuple(
            view if info.inner is None else info.inner.around(view)
            for info, view in zip(self.params_info, self.views, strict=True)
        )
        for unsharded_params in self.unsharded_params:
            node: Any = unsharded_params.grad_fn
            if node is not None and node is not self.node:  # a DTensor's, between the view and the module
                node._set_sequence_nr(_LAST)

    def outputs(self) -> list[torch.Tensor]:
        """What the autograd node of the trained parameters returns: the dtype of each is that of its gradient.

        Where ranks besides the data ranks sum gradients of copies, they are to do so in `reduce_dtype`.
        """
        parts = [part.detach() for part, trains in zip(self.parts, self.trains, strict=True) if trains]
        if self.reduce_dtype.itemsize <= self.compute_dtype.itemsize:
            return parts
        trained = [info for info, trains in zip(self.params_info, self.trains, strict=True) if trains]
        has_neighbours = any(info.inner is not None for info in self.params_info)
        wide = torch.empty((), dtype=self.reduce_dtype, device=self.device)
        for info, part in zip(trained, parts, strict=True):
            if info.may_be_summed(has_neighbours):
                part.data = wide.expand(part.shape)  # `_filled` gives it its memory back; the version counter stays
        return parts

    def parts_of(self, group: torch.Tensor) -> list[torch.Tensor]:
        """The parameters in `flat`: tensors with a version of their own, which gathers never count."""
        return [part.data for part in self.cut_up(group)[0]]

    def gather(self) -> Pending:
        """Start to gather; the caller chose the stream."""
        assert self.whole is not None, "a buffer is assigned before anything is gathered"
        source = self.present_range()
        if self.whole.is_cuda or self.compute_dtype != self.dtype:  # NCCL gathers in place, best within one memory
            source = self._own.copy_(source)
        return self.gathers_by.all_gather_into(self.whole, source)

    def present_range(self) -> torch.Tensor:
        """This rank's range, of which a gather is to be made now."""
        self.version = self.writes
        return self.shard

    @property
    def writes(self) -> int:
        """How often the parameters were written."""
        return self.shard._version + self._writes_before

    def leaf_changed(self, is_replaced: bool) -> None:
        """Record that a parameter has another leaf, or one that requires a gradient or does so no longer."""
        self.changes += 1
        if is_replaced:
            self.is_packed = False
            self._writes_before += 1

    @property
    def is_unwritten(self) -> bool:
        """Whether it was gathered, and not written since."""
        return self.version == self.writes

    def check_unchanged(self) -> None:
        """Refuse to gather again, for a backward, what was written since the forward."""
        if self.version not in (-1, self.writes):
            raise written_too_early(self.params_info)


@torch.inference_mode(False)
@torch.enable_grad()  # the first forward may be one without
def _make_views(param_groups: Sequence[ParamGroup]) -> None:
    trained = [group for group in param_groups if any(group.trains)]
    made = _Gathered.apply(_anchor(param_groups[0].device), trained) if trained else ()
    left = iter(made)
    for group in param_groups:
        group._take_views(left)
    if made:
        made[0].grad_fn._set_sequence_nr(_LAST)


class _Gathered(torch.autograd.Function):
    """From nothing to the gathered parameters; backward hands their gradients to the groups."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, param_groups: Sequence[ParamGroup]) -> tuple[torch.Tensor, ...]:
        ctx.param_groups = list(
            map(weakref.ref, param_groups)
        )  # the collector does not see that the groups' views hold this node
        ctx.trains = [group.trains for group in param_groups]
        ctx.names = [info.name for group in param_groups for info in group.params_info]
        ctx.set_materialize_grads(False)
        return tuple(part for group in param_groups for part in group.outputs())

    @staticmethod
    @untraced(UNCOMPILED)
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None]:
        if torch.is_grad_enabled():
            raise RuleError(
                "the gradient of a fully sharded parameter has no gradient (create_graph=True)",
                {"parameters": ", ".join(ctx.names[:4])},
                fix="keep what needs second derivatives out of fully_shard",
            )
        param_groups: list[ParamGroup] = [group() for group in ctx.param_groups]
        if None not in param_groups:
            found = iter(grads)
            each = [[next(found) if trains else None for trains in mask] for mask in ctx.trains]
            on_gradients = param_groups[0].on_gradients
            assert on_gradients is not None, "groups whose views are used belong to a runtime"
            on_gradients(param_groups, each)
        return None, None


def _filled(view: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """An output of the node over the gathered bytes; one without memory only says the dtype of the gradient."""
    if view.dtype != part.dtype:
        view.data = part
    return view


def _parting(cuts: list[int]) -> tuple[list[int], slice]:
    """Gaps and pieces in turn, as sizes to split by, and where the pieces are then; gaps of nothing are left out."""
    *gaps, last = cuts[::2]
    if any(gaps):
        return cuts, slice(1, None, 2)
    return cuts[1::2] + ([last] if last else []), slice(len(gaps))


def _anchor(device: torch.device) -> torch.Tensor:
    return torch.empty(0, device=device, requires_grad=True)
