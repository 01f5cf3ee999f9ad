"""`Flat`: parameters that are gathered and reduced as one tensor.

A rank keeps one range of it, `shard`, over which the parameters' leaves are views; what people see are ShardedTensors
over those. The gathered whole lies in memory that is lent to it, always the same, so the tensors that modules compute
with are views made once. They are outputs of one autograd node that is made once too: backward runs it when the
gradients of all of them are there, which is when they are packed and sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.comm.group import Pending
from shardtensor.errors import RuleError
from shardtensor.fsdp.domain import Domain
from shardtensor.fsdp.policy import MixedPrecisionPolicy
from shardtensor.fsdp.ranges import Ranges, lay_out
from shardtensor.parallel.memory import Home, become
from shardtensor.spec.nodes import Replicate
from shardtensor.tensor.binding import bind_named
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
        self.shard = self._own_range(params)
        self.shells = [self._shell(i, param) for i, param in enumerate(params)]
        self.whole: torch.Tensor | None = None
        self.views: tuple[torch.Tensor, ...] = ()
        self.node: Any = None
        self.position = 0  # in the order of reductions
        self.version = -1
        self.on_gradients: Callable[[Flat, Sequence[torch.Tensor | None]], None] | None = None
        self.held: Sequence[torch.Tensor | None] | None = None  # gradients that wait to be reduced
        self.grad: torch.Tensor | None = None
        self._attached: list[torch.Tensor | None] = [None] * len(params)

    # -- shards -----------------------------------------------------------------------------------------------------

    def _own_range(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        is_meta = params[0].is_meta
        shard = torch.zeros(self.ranges.chunk, dtype=self.dtype, device="meta" if is_meta else self.device)
        if not is_meta:
            for i, param in enumerate(params):
                start, stop = self.ranges.piece(i, self.index)
                if start < stop:
                    self._piece_of(shard, i).copy_(param.detach().reshape(-1)[start:stop])
        return shard

    @property
    def index(self) -> int:
        """This rank's place among those that hold one copy."""
        return self.domain.shard.index

    def _piece_of(self, shard: torch.Tensor, i: int) -> torch.Tensor:
        start, stop = self.ranges.piece(i, self.index)
        return shard.narrow(0, self.ranges.place(i, self.index), stop - start)

    def _shell(self, i: int, param: torch.Tensor) -> ShardedTensor:
        leaf = self._piece_of(self.shard, i).detach().requires_grad_(param.requires_grad)
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
            view._is_param = True  # type: ignore[attr-defined]

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

    def pack(self, grads: Sequence[torch.Tensor | None], memory: torch.Tensor) -> torch.Tensor:
        """Lay gradients of whole parameters end to end in `memory`, bytes; zeros where there is none."""
        flat, parts, padding = self._packed_in(memory)
        if None in grads:
            given = [(part, grad) for part, grad in zip(parts, grads, strict=True) if grad is not None]
            padding = padding + [part for part, grad in zip(parts, grads, strict=True) if grad is None]
            parts, grads = [part for part, _ in given], [grad for _, grad in given]
        if padding:
            torch._foreach_zero_(padding)
        if parts:
            torch._foreach_copy_(parts, list(grads))  # type: ignore[arg-type]
        return flat

    def _packed_in(self, memory: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        known = self.__dict__.setdefault("_packings", {})
        if memory.data_ptr() not in known:
            flat = memory[: self.gradient_bytes].view(self.reduce_dtype)
            padding = [flat[low:high] for low, high in self.ranges.padding()]
            known[memory.data_ptr()] = flat, self._parts(flat), padding
        return known[memory.data_ptr()]

    def hold(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Keep gradients of whole parameters, added to those that are kept."""
        if self.held is None:
            self.held = grads
        else:
            self.held = [a if b is None else b if a is None else a + b for a, b in zip(self.held, grads, strict=True)]

    def reduce(self, flat: torch.Tensor) -> Pending:
        """Start to sum packed gradients over the ranks of one copy; the result comes with `receive`."""
        own = flat.narrow(0, self.index * self.ranges.chunk, self.ranges.chunk)
        self._sum = own if flat.is_cuda else torch.empty_like(own)
        return self.domain.shard.reduce_scatter_into(self._sum, flat)

    def has_no_gradient(self) -> bool:
        """Whether no parameter has a gradient."""
        return all(shell._local.grad is None for shell in self.shells)

    def receive(self, scale: float) -> None:
        """Take this rank's range of the sum, times `scale`, into a new gradient or onto the one that is there."""
        if self.domain.replicate is not None:
            self.domain.replicate.all_reduce(self._sum)
        is_kept = self.grad is not None and all(
            shell._local.grad is known for shell, known in zip(self.shells, self._attached, strict=True)
        )
        if is_kept and not self.has_no_gradient():
            assert self.grad is not None
            self.grad.add_(self._sum, alpha=scale)
        else:
            self._attached = [None] * len(self.shells)
            self.grad = torch.empty_like(self.shard)
            torch.mul(self._sum, scale, out=self.grad)

    def attach(self, used: Sequence[bool]) -> None:
        """Make what was received the gradients of the parameters that were used."""
        grad = self.grad
        assert grad is not None
        for i, is_used in enumerate(used):
            leaf = self.shells[i]._local
            if not is_used or (leaf.grad is not None and leaf.grad is self._attached[i]):
                continue
            piece = self._piece_of(grad, i)
            if leaf.grad is None:
                leaf.grad = piece
                self._attached[i] = leaf.grad
            else:
                leaf.grad.add_(piece)  # a gradient of the user's own, or one whose flat has gone
        if self.has_no_gradient():
            self.grad = None


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
