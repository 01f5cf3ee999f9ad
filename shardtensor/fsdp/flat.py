"""`Flat`: parameters that are gathered and reduced as one tensor.

A rank keeps one range of it, `shard`, over which the parameters' leaves are views; what people see are ShardedTensors
over those. The gathered whole lies in memory that is lent to it, always the same, so the tensors that modules compute
with are views made once. They are outputs of one autograd node that is made once too: backward runs it when the
gradients of all of them are there, which is when they are packed and sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from shardtensor.comm.group import Pending
from shardtensor.comm.untraced import untraced
from shardtensor.errors import RuleError
from shardtensor.fsdp.carry import Carry, Grads
from shardtensor.fsdp.domain import Domain
from shardtensor.fsdp.entry import Entry, ranges_of
from shardtensor.fsdp.flat_gradients import FlatGradients
from shardtensor.fsdp.forms import Form
from shardtensor.fsdp.outside import UNCOMPILED, join
from shardtensor.fsdp.policy import MixedPrecisionPolicy
from shardtensor.fsdp.versions import written_too_early
from shardtensor.parallel.memory import become
from shardtensor.tensor.binding import bind_named
from shardtensor.tensor.gradient import grad_dtype_of, keep_grad_dtype
from shardtensor.tensor.pieces import Pieces
from shardtensor.tensor.placing import mesh_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

if TYPE_CHECKING:
    from shardtensor.fsdp.convoy import Convoy

_LAST = 2**64 - 1  # autograd runs the ready node with the highest number first, as it does with leaves


class Flat(FlatGradients):
    """Parameters of one dtype that are gathered and reduced together.

    Attributes:
        shard: this rank's range, of the parameters' dtype; the truth about their values.
        pieces: what the parameters' leaves know of each other.
        shells: the parameters as people see them.
        unit: a weak reference to the unit that it is of.
        whole: the gathered range, of the dtype of computation; None until memory is lent.
        parts: the parameters in it, with version counters of their own, which those of `views` are: see `versions`.
        views: the parameters as they are gathered.
        shown: the parameters as modules compute with them: views, or ShardedTensors over those.
        node: the autograd node of `views`; None where all are frozen.
        trains: which parameters require a gradient.
        grad_dtype, grad_dtypes: of the gradients; of each parameter's where they differ, else None.
        is_packed: whether, for all that is known, the leaves are views of `shard`.
        convoy: what it travels with, if it does.
        changes: how often a leaf was replaced, or let require a gradient or not; see `upkeep`.
    """

    is_offloaded = False  # whether shards and gradients lie elsewhere than the whole

    def __init__(
        self, entries: Sequence[Entry], domain: Domain, device: torch.device, policy: MixedPrecisionPolicy
    ) -> None:
        self.entries, self.domain, self.device, self.policy = list(entries), domain, device, policy
        params = [entry.param for entry in entries]
        self.dtype = params[0].dtype
        self.trains = tuple(param.requires_grad for param in params)
        self.divisor = float(domain.size)  # of summed gradients
        self.carry = Carry(domain.replicate)
        self.settle_dtypes()
        self.global_shapes = [tuple(param.shape) for param in params]
        self.shapes = [tuple(entry.values.shape) for entry in entries]
        self.ranges = ranges_of(self.entries, domain.shard.size)
        self._cuts = self.ranges.cuts(self.index)
        self._all_cuts = self.ranges.all_cuts()
        self._gaps = [i for i, size in enumerate(self._all_cuts) if not i % 2 and size]
        self._own_parting = _parting(self._cuts)
        self.shard = self._own_range()
        self._reshaped: list[tuple[int, Form, tuple[int, ...]]] = []
        self.pieces = self._known_pieces()
        self.shells = [self._shell(i, piece) for i, piece in enumerate(self._pieces(self.shard))]
        self.whole: torch.Tensor | None = None
        self.parts: list[torch.Tensor] = []
        self.views: tuple[torch.Tensor, ...] = ()
        self.shown: tuple[torch.Tensor, ...] = ()
        self.node: Any = None
        self.unit: Callable[[], Any] = type(None)
        self.position = 0  # among the flats that are reduced together
        self.version = -1
        self.gathers_by = domain.shard
        self.convoy: Convoy | None = None
        self.changes = 0
        self.is_packed = True
        self._writes_before = 0  # into earlier shards
        self.syncs = True
        self.on_gradients: Callable[[Sequence[Flat], Sequence[Grads]], None] | None = None
        self.held: Grads | None = None  # gradients that wait to be reduced

    def settle_dtypes(self) -> None:
        """Take note of the dtypes of computation, reductions and gradients."""
        self.compute_dtype = (self.policy.param_dtype or self.dtype) if self.dtype.is_floating_point else self.dtype
        self.settle_grad_dtypes()
        wanted = self.compute_dtype if self.grad_dtype == self.dtype else self.grad_dtype
        self.reduce_dtype = self.policy.reduce_dtype or wanted
        self.carry.dtype = self.reduce_dtype
        self.divide_by(self.divisor)

    def settle_grad_dtypes(self) -> None:
        """Make the gradients to come of the dtypes that users set; the next forward also has them summed in these."""
        asked = [grad_dtype_of(entry.param) for entry in self.entries]
        self.grad_dtype = reduce(torch.promote_types, asked)
        self.grad_dtypes = None if all([dtype == self.grad_dtype for dtype in asked]) else asked

    # -- shards -----------------------------------------------------------------------------------------------------

    def _own_range(self) -> torch.Tensor:
        is_meta = self.entries[0].param.is_meta
        shard = torch.zeros(self.ranges.chunk, dtype=self.dtype, device="meta") if is_meta else self._empty_shard()
        if not is_meta:
            for i, (entry, piece) in enumerate(zip(self.entries, self._stretches(shard), strict=True)):
                start, stop = self.ranges.piece(i, self.index)
                if start < stop:
                    piece.copy_(entry.form.stored(entry.values)[start:stop])
        return shard

    def _empty_shard(self) -> torch.Tensor:
        return torch.zeros(self.ranges.chunk, dtype=self.dtype, device=self.device)

    def _shell(self, i: int, piece: torch.Tensor) -> ShardedTensor:
        form, inner, sizes = self.entries[i].form, self.entries[i].inner, self.entries[i].sizes(self.ranges, i)
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
        """Turn the parameter objects into the shells, for everyone who holds them; a gradient comes along."""
        for i, entry in enumerate(self.entries):
            grad = entry.param.grad
            become(entry.param, self.shells[i])
            shell: Any = entry.param
            shell.grad, self.shells[i] = grad, shell
            join(shell, self, i)

    @torch.inference_mode(False)
    def repack(self) -> None:
        """Take the parameters, wherever their leaves lie by now, into a new range, and make their leaves views of it.

        Gradients and hooks come along.
        """
        leaves = [shell._local for shell in self.shells]
        self.dtype = leaves[0].dtype
        self.trains = tuple(leaf.requires_grad for leaf in leaves)
        self._writes_before += self.shard._version + 1
        self.shard = torch.zeros(self.ranges.chunk, dtype=self.dtype, device=leaves[0].device)
        self.settle_dtypes()
        had_hooks, self.pieces = self.pieces.has_hooks, self._known_pieces()
        self.pieces.has_hooks = had_hooks
        for i, (shell, leaf, piece) in enumerate(zip(self.shells, leaves, self._pieces(self.shard), strict=True)):
            piece.copy_(leaf.detach())
            fresh: Any = piece.detach().requires_grad_(leaf.requires_grad)
            self._number(fresh, i)
            keep_grad_dtype(leaf, fresh)
            fresh.grad = None if leaf.grad is None else leaf.grad.clone()  # no piece of a flat gradient any more
            fresh._backward_hooks = leaf._backward_hooks
            fresh._post_accumulate_grad_hooks = leaf._post_accumulate_grad_hooks
            join(shell, self, i)
            shell._replace_local(fresh)
        self.is_packed = True

    def show_shells(self) -> None:
        """Let modules show the shells, in their turn."""
        for entry, shell in zip(self.entries, self.shells, strict=True):
            for owner, name in entry.homes:
                owner._parameters[name] = shell  # type: ignore[assignment]

    # -- the whole --------------------------------------------------------------------------------------------------

    @property
    def whole_bytes(self) -> int:
        """Bytes of the gathered range."""
        return self.ranges.total * self.compute_dtype.itemsize

    def lie_in(self, memory: torch.Tensor) -> None:
        """Be gathered into `memory`, bytes, from now on; views are to be made then."""
        whole = memory[: self.whole_bytes].view(self.compute_dtype)
        self.whole, self.parts = whole, self.parts_of(whole)
        self._own = whole.narrow(0, self.index * self.ranges.chunk, self.ranges.chunk)

    def forget(self) -> None:
        """Hold no memory to be gathered into."""
        self.whole = self.node = self.on_gradients = self.convoy = None
        self._own = self.shard
        self.parts, self.views, self.shown, self.gathers_by = [], (), (), self.domain.shard

    def make_views(self) -> None:
        """Make the tensors that modules compute with, in the caller's stream, where backward will meet them.

        Those of flats that travel together are made together, of one node: it runs when it has all their gradients.
        """
        _make_views([self] if self.convoy is None else self.convoy.flats)

    def _take_views(self, made: Iterator[torch.Tensor]) -> None:
        parts = zip(self.trains, self.parts, strict=True)
        self.views = tuple(_filled(next(made), part) if trains else part for trains, part in parts)
        self.node = self.views[self.trains.index(True)].grad_fn if any(self.trains) else None
        for view in self.views:
            view._is_param = True
        self.shown = tuple(
            view if entry.inner is None else entry.inner.around(view)
            for entry, view in zip(self.entries, self.views, strict=True)
        )
        for shown in self.shown:
            node: Any = shown.grad_fn
            if node is not None and node is not self.node:  # a DTensor's, between the view and the module
                node._set_sequence_nr(_LAST)

    def outputs(self) -> list[torch.Tensor]:
        """What the autograd node of the trained parameters returns: the dtype of each is that of its gradient.

        Where ranks besides the data ranks sum gradients of copies, they are to do so in `reduce_dtype`.
        """
        parts = [part.detach() for part, trains in zip(self.parts, self.trains, strict=True) if trains]
        if self.reduce_dtype.itemsize <= self.compute_dtype.itemsize:
            return parts
        trained = [entry for entry, trains in zip(self.entries, self.trains, strict=True) if trains]
        has_neighbours = any(entry.inner is not None for entry in self.entries)
        wide = torch.empty((), dtype=self.reduce_dtype, device=self.device)
        for entry, part in zip(trained, parts, strict=True):
            if entry.may_be_summed(has_neighbours):
                part.data = wide.expand(part.shape)  # `_filled` gives it its memory back; the version counter stays
        return parts

    def parts_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters in `flat`: tensors with a version of their own, which gathers never count."""
        return [part.data for part in self.cut_up(flat)[0]]

    def gather(self) -> Pending:
        """Start to gather; the caller chose the stream."""
        assert self.whole is not None, "memory is lent before anything is gathered"
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
        """Take note that a parameter has another leaf, or one that requires a gradient or does so no longer."""
        self.changes += 1
        if is_replaced:
            self.is_packed = False
            self._writes_before += 1

    def is_as_gathered(self) -> bool:
        """Whether this rank's range still has the values that were gathered. On cuda the host waits for the answer."""
        if self.compute_dtype != self.dtype:
            return torch.equal(self._own, self.shard.to(self.compute_dtype))
        return torch.equal(self._own, self.shard)

    @property
    def is_unwritten(self) -> bool:
        """Whether it was gathered, and not written since."""
        return self.version == self.writes

    def check_unchanged(self) -> None:
        """Refuse to gather again, for a backward, what was written since the forward."""
        if self.version not in (-1, self.writes):
            raise written_too_early(self.entries)


@torch.inference_mode(False)
@torch.enable_grad()  # the first forward may be one without
def _make_views(flats: Sequence[Flat]) -> None:
    trained = [flat for flat in flats if any(flat.trains)]
    made = _Gathered.apply(_anchor(flats[0].device), trained) if trained else ()
    left = iter(made)
    for flat in flats:
        flat._take_views(left)
    if made:
        made[0].grad_fn._set_sequence_nr(_LAST)


class _Gathered(torch.autograd.Function):
    """From nothing to the gathered parameters; backward hands their gradients to the flats."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, flats: Sequence[Flat]) -> tuple[torch.Tensor, ...]:
        ctx.flats = list(map(weakref.ref, flats))  # the collector does not see that the flats' views hold this node
        ctx.trains = [flat.trains for flat in flats]
        ctx.names = [entry.name for flat in flats for entry in flat.entries]
        ctx.set_materialize_grads(False)
        return tuple(part for flat in flats for part in flat.outputs())

    @staticmethod
    @untraced(UNCOMPILED)
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None]:
        if torch.is_grad_enabled():
            raise RuleError(
                "the gradient of a fully sharded parameter has no gradient (create_graph=True)",
                {"parameters": ", ".join(ctx.names[:4])},
                fix="keep what needs second derivatives out of fully_shard",
            )
        flats: list[Flat] = [flat() for flat in ctx.flats]
        if None not in flats:
            found = iter(grads)
            each = [[next(found) if trains else None for trains in mask] for mask in ctx.trains]
            on_gradients = flats[0].on_gradients
            assert on_gradients is not None, "flats whose views are used belong to a schedule"
            on_gradients(flats, each)
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
