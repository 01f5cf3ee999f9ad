"""`Flat`: parameters that are gathered and reduced as one tensor.

A rank keeps one range of it, `shard`, over which the parameters' leaves are views; what people see are ShardedTensors
over those. The gathered whole lies in memory that is lent to it, always the same, so the tensors that modules compute
with are views made once. They are outputs of one autograd node that is made once too: backward runs it when the
gradients of all of them are there, which is when they are packed and sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch

from shardtensor.comm.group import Pending
from shardtensor.errors import RuleError
from shardtensor.fsdp.domain import Domain
from shardtensor.fsdp.policy import MixedPrecisionPolicy
from shardtensor.fsdp.ranges import Ranges, lay_out
from shardtensor.parallel.memory import Home, become
from shardtensor.spec.nodes import Replicate
from shardtensor.tensor.binding import bind_named
from shardtensor.tensor.pieces import Pieces
from shardtensor.tensor.placing import mesh_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

_LAST = 2**64 - 1  # autograd runs the ready node with the highest number first, as it does with leaves


@attrs.define(eq=False)
class Entry:
    """One parameter: its name in the unit, the object, and the modules that own it under some name."""

    name: str
    param: torch.Tensor
    homes: list[Home]


class Flat:
    """Parameters of one dtype that are gathered and reduced together.

    Attributes:
        shard: this rank's range, of the parameters' dtype; the truth about their values.
        pieces: what the parameters' leaves know of each other.
        shells: the parameters as people see them.
        whole: the gathered range, of the dtype of computation; None until memory is lent.
        views: the parameters as modules compute with them.
        node: the autograd node of `views`; None where they are frozen.
    """

    def __init__(
        self, entries: Sequence[Entry], domain: Domain, device: torch.device, policy: MixedPrecisionPolicy
    ) -> None:
        self.entries, self.domain, self.device, self.policy = list(entries), domain, device, policy
        params = [entry.param for entry in entries]
        self.dtype = params[0].dtype
        self.trains = params[0].requires_grad
        self.compute_dtype = (policy.param_dtype or self.dtype) if self.dtype.is_floating_point else self.dtype
        self.reduce_dtype = policy.reduce_dtype or self.compute_dtype
        self.shapes = [tuple(param.shape) for param in params]
        self.ranges: Ranges = lay_out([param.numel() for param in params], domain.shard.size)
        self._cuts = self.ranges.cuts(self.index)
        self._all_cuts = self.ranges.all_cuts()
        self._gaps = [i for i, size in enumerate(self._all_cuts) if not i % 2 and size]
        self.shard = self._own_range(params)
        *starts, _ = accumulate(self._cuts)
        self.pieces = Pieces(self.shard, tuple(starts[::2]))
        self.shells = [self._shell(i, piece) for i, piece in enumerate(self._pieces(self.shard))]
        self.whole: torch.Tensor | None = None
        self.views: tuple[torch.Tensor, ...] = ()
        self.node: Any = None
        self.position = 0  # in the order of reductions
        self.version = -1
        self.scale = 1 / domain.size  # of summed gradients
        self.on_gradients: Callable[[Flat, Sequence[torch.Tensor | None]], None] | None = None
        self.held: Sequence[torch.Tensor | None] | None = None  # gradients that wait to be reduced

    # -- shards -----------------------------------------------------------------------------------------------------

    def _own_range(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        is_meta = params[0].is_meta
        shard = torch.zeros(self.ranges.chunk, dtype=self.dtype, device="meta" if is_meta else self.device)
        if not is_meta:
            for i, (param, piece) in enumerate(zip(params, self._pieces(shard), strict=True)):
                start, stop = self.ranges.piece(i, self.index)
                if start < stop:
                    piece.copy_(param.detach().reshape(-1)[start:stop])
        return shard

    @property
    def index(self) -> int:
        """This rank's place among those that hold one copy."""
        return self.domain.shard.index

    def _shell(self, i: int, piece: torch.Tensor) -> ShardedTensor:
        leaf = piece.detach().requires_grad_(self.trains)
        leaf._piece = self.pieces, i  # type: ignore[attr-defined]
        spec = Replicate().flat(self.domain.axis, sizes=self.ranges.sizes(i))
        layout = bind_named(spec, self.shapes[i], mesh_of(self.domain.whole))
        return wrap(leaf, layout, spec, self.domain.whole)

    def take_over(self) -> None:
        """Turn the parameter objects into the shells, for everyone who holds them."""
        for i, entry in enumerate(self.entries):
            become(entry.param, self.shells[i])
            self.shells[i] = entry.param  # type: ignore[call-overload]

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
        if not self.trains:
            self.views, self.node = tuple(self._parts(self.whole)), None
        else:
            self.views = _Gathered.apply(_anchor(self.device), weakref.ref(self))
            self.node = self.views[0].grad_fn
            self.node._set_sequence_nr(_LAST)
        for view in self.views:
            view._is_param = True

    def _parts(self, flat: Any) -> list[torch.Tensor]:
        """The parameters in `flat`: tensors with a version of their own, which gathers never count."""
        starts, lengths = self.ranges.starts, self.ranges.lengths
        return [
            flat[start : start + length].view(shape).data
            for start, length, shape in zip(starts, lengths, self.shapes, strict=True)
        ]

    def gather(self) -> Pending:
        """Start to gather; the caller chose the stream."""
        assert self.whole is not None, "memory is lent before anything is gathered"
        self.version = self.shard._version
        source = self.shard
        if self.compute_dtype != self.dtype:
            source = self._own
            source.copy_(self.shard)
        return self.domain.shard.all_gather_into(self.whole, source)

    def check_unchanged(self) -> None:
        """Refuse to gather again, for a backward, what was written since the forward."""
        if self.version not in (-1, self.shard._version):
            raise RuleError(
                "parameters were written between a forward and its backward",
                {"parameters": ", ".join(entry.name for entry in self.entries[:4])},
                "call backward before the optimizer steps or values are loaded",
            )

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
            parts=[cut.view(shape) for cut, shape in zip(cuts[1::2], self.shapes, strict=True)],
            padding=[cuts[i] for i in self._gaps],
        )

    def receive(self, summed: torch.Tensor) -> torch.Tensor:
        """Take this rank's range of the sum, averaged, into a new gradient or onto the one that is there; return it."""
        if self.domain.replicate is not None:
            self.domain.replicate.all_reduce(summed)
        grad = None if self.pieces.has_hooks else self._kept_gradient()  # hooks see what is to be added by itself
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
            piece = self._hooked_gradient(leaf, pieces[i]) if self.pieces.has_hooks else pieces[i]
            if own is None:
                leaf.grad = piece
            else:
                own.add_(piece)  # of the user's own, or from a time when others had none

    @staticmethod
    def _hooked_gradient(leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """What hooks on the gradient of `leaf` make of it."""
        for hook in list((leaf._backward_hooks or {}).values()):
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad

    def run_hooks(self, used: Sequence[bool]) -> None:
        """Run the hooks of the parameters that were used, which have their gradients now."""
        for shell, is_used in zip(self.shells, used, strict=True):
            if is_used:
                hooks: Any = shell._local._post_accumulate_grad_hooks
                for hook in list((hooks or {}).values()):
                    hook(shell._local)

    def _pieces(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        """This rank's pieces of the parameters, views of its range."""
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
        return tuple(owner._parts(owner.whole))

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
            flat.on_gradients(flat, grads)
        return None, None


def _anchor(device: torch.device) -> torch.Tensor:
    return torch.empty(0, device=device, requires_grad=True)
