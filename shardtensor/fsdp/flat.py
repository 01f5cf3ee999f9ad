"""`Flat`: parameters that are gathered and reduced as one tensor.

A rank keeps one range of it, `shard`, over which the parameters' leaves are views; what people see are ShardedTensors
over those. The gathered whole lies in memory that is lent to it, always the same, so the tensors that modules compute
with are views made once. They are outputs of one autograd node that is made once too: backward runs it when the
gradients of all of them are there, which is when they are packed and sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch

from shardtensor.comm.group import Pending
from shardtensor.errors import RuleError
from shardtensor.fsdp.domain import Domain
from shardtensor.fsdp.forms import ANYWHERE, Form
from shardtensor.fsdp.inner import Inner
from shardtensor.fsdp.policy import MixedPrecisionPolicy
from shardtensor.fsdp.ranges import Ranges, lay_out, lay_out_owned
from shardtensor.parallel.memory import Home, become
from shardtensor.tensor.binding import bind_named
from shardtensor.tensor.placing import mesh_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

_LAST = 2**64 - 1  # autograd runs the ready node with the highest number first, as it does with leaves


@attrs.define(eq=False)
class Entry:
    """One parameter: its name in the unit, the object, the modules that own it under some name, and how it is cut.

    `inner` says how it was sharded before, over other axes; what is gathered then is this rank's part.
    """

    name: str
    param: torch.Tensor
    homes: list[Home]
    form: Form = ANYWHERE
    inner: Inner | None = None

    @property
    def values(self) -> torch.Tensor:
        """What the data ranks hold copies of."""
        return (self.param._local if isinstance(self.param, ShardedTensor) else self.param).detach()

    @property
    def grain(self) -> int:
        """So many elements stay together."""
        return self.form.grain(tuple(self.values.shape))


class Flat:
    """Parameters of one dtype that are gathered and reduced together.

    Attributes:
        shard: this rank's range, of the parameters' dtype; the truth about their values.
        shells: the parameters as people see them.
        whole: the gathered range, of the dtype of computation; None until memory is lent.
        views: the parameters as they are gathered.
        shown: the parameters as modules compute with them: views, or ShardedTensors over those.
        node: the autograd node of `views`; None where all are frozen.
        trains: which parameters require a gradient.
        is_packed: whether, for all that is known, the leaves are views of `shard`.
        changes: how often a leaf was replaced, or let require a gradient or not; see `upkeep`.
    """

    def __init__(
        self, entries: Sequence[Entry], domain: Domain, device: torch.device, policy: MixedPrecisionPolicy
    ) -> None:
        self.entries, self.domain, self.device, self.policy = list(entries), domain, device, policy
        params = [entry.param for entry in entries]
        self.dtype = params[0].dtype
        self.trains = tuple(param.requires_grad for param in params)
        self._settle_dtypes()
        self.global_shapes = [tuple(param.shape) for param in params]
        self.shapes = [tuple(entry.values.shape) for entry in entries]
        self.ranges = _ranges(self.entries, domain.shard.size)
        self._cuts = self.ranges.cuts(self.index)
        self._all_cuts = self.ranges.all_cuts()
        self._gaps = [i for i, size in enumerate(self._all_cuts) if not i % 2 and size]
        self.shard = self._own_range()
        self._reshaped: list[tuple[int, Form, tuple[int, ...]]] = []
        self.shells = [self._shell(i, piece) for i, piece in enumerate(self._pieces(self.shard))]
        self.whole: torch.Tensor | None = None
        self.views: tuple[torch.Tensor, ...] = ()
        self.shown: tuple[torch.Tensor, ...] = ()
        self.node: Any = None
        self.position = 0  # among the flats that are reduced together
        self.version = -1
        self.gathers_by = domain.shard
        self.changes = 0
        self.is_packed = True
        self._writes_before = 0  # into earlier shards
        self.scale = 1 / domain.size  # of summed gradients
        self.on_gradients: Callable[[Flat, Sequence[torch.Tensor | None]], None] | None = None
        self.held: Sequence[torch.Tensor | None] | None = None  # gradients that wait to be reduced

    def _settle_dtypes(self) -> None:
        self.compute_dtype = (self.policy.param_dtype or self.dtype) if self.dtype.is_floating_point else self.dtype
        self.reduce_dtype = self.policy.reduce_dtype or self.compute_dtype

    # -- shards -----------------------------------------------------------------------------------------------------

    def _own_range(self) -> torch.Tensor:
        is_meta = self.entries[0].param.is_meta
        shard = torch.zeros(self.ranges.chunk, dtype=self.dtype, device="meta" if is_meta else self.device)
        if not is_meta:
            for i, (entry, piece) in enumerate(zip(self.entries, self._stretches(shard), strict=True)):
                start, stop = self.ranges.piece(i, self.index)
                if start < stop:
                    piece.copy_(entry.form.stored(entry.values)[start:stop])
        return shard

    @property
    def index(self) -> int:
        """This rank's place among those that hold one copy."""
        return self.domain.shard.index

    def _shell(self, i: int, piece: torch.Tensor) -> ShardedTensor:
        form, inner, sizes = self.entries[i].form, self.entries[i].inner, self.ranges.sizes(i)
        if inner is None:
            group = self.domain.whole
            spec = form.spec(None, self.shapes[i], self.domain.axis, sizes)
        else:
            group = inner.joint
            spec = form.spec(inner.joint_spec, self.shapes[i], inner.axis, sizes)
        layout = bind_named(spec, self.global_shapes[i], mesh_of(group))
        if not layout.packed:
            shape = layout.local_shape(group.rank)
            self._reshaped.append((i, form, shape))
            piece = form.shown(piece, shape)
        return wrap(piece.detach().requires_grad_(self.trains[i]), layout, spec, group)

    def take_over(self) -> None:
        """Turn the parameter objects into the shells, for everyone who holds them; a gradient comes along."""
        for i, entry in enumerate(self.entries):
            grad = entry.param.grad
            become(entry.param, self.shells[i])
            shell: Any = entry.param
            shell.grad, shell._flat, self.shells[i] = grad, self, shell

    def repack(self) -> None:
        """Take the parameters, wherever their leaves lie by now, into a new range, and make their leaves views of it.

        Gradients and hooks come along.
        """
        leaves = [shell._local for shell in self.shells]
        self.dtype = leaves[0].dtype
        self.trains = tuple(leaf.requires_grad for leaf in leaves)
        self._writes_before += self.shard._version + 1
        self.shard = torch.zeros(self.ranges.chunk, dtype=self.dtype, device=leaves[0].device)
        self._settle_dtypes()
        for shell, leaf, piece in zip(self.shells, leaves, self._pieces(self.shard), strict=True):
            piece.copy_(leaf.detach())
            fresh: Any = piece.detach().requires_grad_(leaf.requires_grad)
            fresh.grad = None if leaf.grad is None else leaf.grad.clone()  # no piece of a flat gradient any more
            fresh._backward_hooks = leaf._backward_hooks
            fresh._post_accumulate_grad_hooks = leaf._post_accumulate_grad_hooks
            shell._flat = self
            shell._replace_local(fresh)
        self.is_packed = True

    # -- the whole --------------------------------------------------------------------------------------------------

    @property
    def whole_bytes(self) -> int:
        """Bytes of the gathered range."""
        return self.ranges.total * self.compute_dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the packed gradients."""
        return self.ranges.total * self.reduce_dtype.itemsize

    def lie_in(self, memory: torch.Tensor) -> None:
        """Be gathered into `memory`, bytes, from now on."""
        whole = memory[: self.whole_bytes].view(self.compute_dtype)
        self.whole = whole
        self._own = whole.narrow(0, self.index * self.ranges.chunk, self.ranges.chunk)
        self.make_views()

    def make_views(self) -> None:
        """Make the tensors that modules compute with, in the caller's stream, where backward will meet them."""
        views = self._parts(self.whole)
        self.node = None
        if any(self.trains):
            with torch.inference_mode(False), torch.enable_grad():  # the first forward may be one without
                made = iter(_Gathered.apply(_anchor(self.device), weakref.ref(self)))
            views = [next(made) if trains else view for trains, view in zip(self.trains, views, strict=True)]
            self.node = views[self.trains.index(True)].grad_fn
            self.node._set_sequence_nr(_LAST)
        self.views = tuple(views)
        for view in self.views:
            view._is_param = True
        self.shown = tuple(
            view if entry.inner is None else entry.inner.around(view)
            for entry, view in zip(self.entries, self.views, strict=True)
        )

    def _parts(self, flat: Any) -> list[torch.Tensor]:
        """The parameters in `flat`: tensors with a version of their own, which gathers never count."""
        return [part.data for part in self._as_parameters(flat.split_with_sizes(self._all_cuts)[1::2])]

    def _as_parameters(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            entry.form.shown(part, shape) for entry, part, shape in zip(self.entries, parts, self.shapes, strict=True)
        ]

    def gather(self) -> Pending:
        """Start to gather; the caller chose the stream."""
        assert self.whole is not None, "memory is lent before anything is gathered"
        self.version = self.writes
        source = self.shard
        if self.whole.is_cuda or self.compute_dtype != self.dtype:  # NCCL gathers in place, best within one memory
            source = self._own
            source.copy_(self.shard)
        return self.gathers_by.all_gather_into(self.whole, source)

    @property
    def writes(self) -> int:
        """How often the parameters were written."""
        return self.shard._version + self._writes_before

    def leaf_changed(self, is_replaced: bool) -> None:
        """Take note that a parameter has another leaf, or one that requires a gradient or does so no longer."""
        self.changes += 1
        if is_replaced:
            self.is_packed = False
            self._writes_before += 1

    def check_unchanged(self) -> None:
        """Refuse to gather again, for a backward, what was written since the forward."""
        if self.version not in (-1, self.writes):
            raise written_too_early(entry.name for entry in self.entries)

    # -- gradients --------------------------------------------------------------------------------------------------

    def hold(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Keep gradients of whole parameters, added to those that are kept."""
        if self.held is None:
            self.held = grads
        else:
            self.held = [a if b is None else b if a is None else a + b for a, b in zip(self.held, grads, strict=True)]

    def pack(self, packing: Packing) -> list[bool]:
        """Lay the gradients that are held end to end, with zeros for parameters that have none; tell which have one."""
        grads, self.held = self.held or [None] * len(self.shells), None
        parts, zeros, used = packing.parts, packing.padding, [grad is not None for grad in grads]
        if not all(used):
            zeros = zeros + [part for part, is_used in zip(parts, used, strict=True) if not is_used]
            parts = [part for part, is_used in zip(parts, used, strict=True) if is_used]
            grads = [grad for grad in grads if grad is not None]
        if zeros:
            torch._foreach_zero_(zeros)
        if parts:
            torch._foreach_copy_(parts, grads)  # type: ignore[arg-type]
        return used

    def reduce(self, packing: Packing) -> Pending:
        """Start to sum packed gradients over the ranks of one copy: this rank's range of it."""
        return self.domain.reduce.reduce_scatter_into(packing.own, packing.flat)

    def packing_in(self, memory: torch.Tensor) -> Packing:
        """Where gradients can be packed in `memory`, bytes."""
        flat = memory[: self.gradient_bytes].view(self.reduce_dtype)
        own = flat.narrow(0, self.index * self.ranges.chunk, self.ranges.chunk)
        cuts = flat.split_with_sizes(self._all_cuts)
        return Packing(
            flat=flat,
            own=own if flat.is_cuda else torch.empty_like(own),  # NCCL alone can reduce in place
            parts=self._as_parameters(cuts[1::2]),
            padding=[cuts[i] for i in self._gaps],
        )

    def receive(self, summed: torch.Tensor) -> torch.Tensor:
        """Take this rank's range of the sum, averaged, into a new gradient or onto the one that is there; return it."""
        if self.domain.replicate is not None:
            self.domain.replicate.all_reduce(summed)
        grad = self._kept_gradient()
        if grad is not None:
            return grad.add_(summed, alpha=self.scale)
        grad = torch.empty_like(self.shard)
        return torch.mul(summed, self.scale, out=grad)

    def _kept_gradient(self) -> torch.Tensor | None:
        """The flat gradient that every parameter's gradient is a piece of, if it is there still.

        Nothing but those pieces keeps it: its memory goes when they do.
        """
        grads = [shell._local.grad for shell in self.shells]
        whole = grads[0]._base if grads[0] is not None else None
        if whole is None or whole.shape != self.shard.shape or any(g is None or g._base is not whole for g in grads):
            return None
        return whole

    def attach(self, grad: torch.Tensor, used: Sequence[bool]) -> None:
        """Make what was received the gradients of the parameters that were used."""
        pieces = None
        for i, (shell, is_used) in enumerate(zip(self.shells, used, strict=True)):
            leaf = shell._local
            own = leaf.grad
            if not is_used or (own is not None and own._base is grad):
                continue
            pieces = self._pieces(grad) if pieces is None else pieces
            if own is None:
                leaf.grad = pieces[i]
            else:
                own.add_(pieces[i])  # of the user's own, or from a time when others had none

    def _pieces(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        """This rank's pieces of the parameters, views of its range, in the shapes of the leaves."""
        pieces: Sequence[torch.Tensor] = shard.split_with_sizes(self._cuts)[1::2]
        if self._reshaped:
            shaped = list(pieces)
            for i, form, shape in self._reshaped:
                shaped[i] = form.shown(shaped[i], shape)
            return shaped
        return pieces

    def _stretches(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        return shard.split_with_sizes(self._cuts)[1::2]


@attrs.frozen(eq=False)
class Packing:
    """Where gradients are packed: all of it, this rank's range of the sum, the parameters' parts, what is between."""

    flat: torch.Tensor
    own: torch.Tensor
    parts: list[torch.Tensor]
    padding: list[torch.Tensor]


class _Gathered(torch.autograd.Function):
    """From nothing to the gathered parameters; backward hands their gradients to the flat."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, flat: weakref.ref[Flat]) -> tuple[torch.Tensor, ...]:
        ctx.flat = flat  # weakly: the collector does not see that the flat's views hold this node
        ctx.set_materialize_grads(False)
        owner = flat()
        assert owner is not None
        ctx.trains = owner.trains
        return tuple(part for part, trains in zip(owner._parts(owner.whole), owner.trains, strict=True) if trains)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None]:
        if torch.is_grad_enabled():
            raise RuleError(
                "the gradient of a fully sharded parameter has no gradient (create_graph=True)",
                fix="keep what needs second derivatives out of fully_shard",
            )
        flat = ctx.flat()
        if flat is not None:
            assert flat.on_gradients is not None, "a flat whose views are used belongs to a schedule"
            if len(grads) < len(ctx.trains):
                found = iter(grads)
                grads = tuple(next(found) if trains else None for trains in ctx.trains)
            flat.on_gradients(flat, grads)
        return None, None


def written_too_early(names: Iterable[str]) -> RuleError:
    """The refusal of a backward whose parameters are no longer those of the forward."""
    return RuleError(
        "parameters were written between a forward and its backward",
        {"parameters": ", ".join([*names][:4])},
        "call backward before the optimizer steps or values are loaded",
    )


def _ranges(entries: Sequence[Entry], ranks: int) -> Ranges:
    lengths = [entry.values.numel() for entry in entries]
    owners = [entry.form.owner for entry in entries if entry.form.owner is not None]
    if owners:
        assert len(owners) == len(entries), "parameters with owners have a flat of their own"
        return lay_out_owned(lengths, ranks, owners)
    return lay_out(lengths, ranks, [entry.grain for entry in entries])


def _anchor(device: torch.device) -> torch.Tensor:
    return torch.empty(0, device=device, requires_grad=True)
