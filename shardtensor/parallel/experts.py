"""Mixture of experts, with experts sharded over ranks: `MoE`, with `GatedExperts` or an `ExpertList`.

A router chooses `top_k` experts for every token; the ranks send tokens to the ranks of their experts and the results
back. Each rank passes its own tokens (the ranks that share the experts are data ranks, too), any number of them, and
gets the dense result for them.

    >>> import copy, torch, shardtensor as st
    >>> from torch import nn
    >>> moe = st.MoE(nn.Linear(16, 8, bias=False), st.GatedExperts(8, embed=16, hidden=32), top_k=2)
    >>> dense = copy.deepcopy(moe)
    >>> moe = st.shard_module(moe, {
    ...     "experts.gate_up_proj": "[ep balanced, -, -]",  # with tensor parallelism: [ep balanced, tp blocks(2), -]
    ...     "experts.down_proj": "[ep balanced, -, -]",     #                          [ep balanced, -, tp]
    ... })
    >>> x = torch.randn(2, 5, 16)
    >>> torch.testing.assert_close(moe(x), dense(x))

Gradients. Let the loss be the mean over the data ranks. The gradient of an expert's weights comes through the exchange
and is the sum over all ranks that share the experts: reduce it over the other data axes only. The router gets only this
rank's tokens: its gradient is summed over all data axes, like that of any replicated parameter. Along ``tp`` both need
no reduction. `GatedExperts` runs the collectives of its axes itself: tokens, weights and results are replicated along
``tp``.

`torch.compile` leaves the experts' forward out of its graph, because the sizes are data: the code around it compiles,
other counts do not recompile it, and ``fullgraph=True`` raises. The modules of an `ExpertList` may be compiled
separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from shardtensor.comm import collectives
from shardtensor.comm.group import Group, SingleRankGroup, group_along
from shardtensor.comm.process_group import as_group
from shardtensor.comm.redistribute import along
from shardtensor.errors import RuleError
from shardtensor.layout.layout import Layout, MeshLayout
from shardtensor.layout.pieces import Interval
from shardtensor.mesh import Ranks, coordinate
from shardtensor.parallel.tokens import DispatchedTokens, dispatch, experts_per_rank, find_fault
from shardtensor.tensor.sharded_tensor import ShardedTensor

Activation = Callable[[torch.Tensor], torch.Tensor]

UNCOMPILED = "how many rows an expert gets is data: a graph for each count would be compiled anew"


def chosen(scores: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token and their weights, from a router's scores (n, experts); both are (n, top_k)."""
    chances = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights, experts = chances.topk(top_k, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights


class MoE(nn.Module):
    """A router and its experts.

    Args:
        gate: a module that maps (n, d) to scores (n, number of experts); the same on every rank.
        experts: called with tokens (n, d), numbers of their experts (n, k) and their weights (n, k); returns (n, d).
            A `GatedExperts`, an `ExpertList`, or the user's own module around `dispatch_tokens`.
        top_k: experts of each token.
        normalize: scale the weights of each token so that their sum is one.

    Shapes: (..., d), this rank's own tokens; the result has the same shape.

    References:
        Shazeer et al., Outrageously Large Neural Networks (arXiv:1701.06538); experts over ranks: Lepikhin et al.,
        GShard (arXiv:2006.16668); nothing dropped, any counts: Gale et al., MegaBlocks (arXiv:2211.15841).
    """

    def __init__(self, gate: nn.Module, experts: nn.Module, top_k: int, normalize: bool = True) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.top_k = top_k
        self.normalize = normalize

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of each token and their weights, both (n, top_k); override it to choose differently."""
        return chosen(self.gate(tokens), self.top_k, self.normalize)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        experts, weights = self.route(tokens)
        return self.experts(tokens, experts, weights).view(x.shape)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}"


class GatedExperts(nn.Module):
    """Experts ``down(activation(gate(x)) * up(x))`` without biases, in one stacked tensor for each projection.

    They start dense; the specs decide which ranks hold the experts. Names, shapes and the call are those of newer
    Hugging Face checkpoints.

    Args:
        num_experts: the number on all ranks together.
        embed: width d of the tokens.
        hidden: width inside of an expert.
        activation: the elementwise function of the gate.

    Attributes:
        gate_up_proj: (num_experts, 2 * hidden, embed), gate first, then up. Shard it ``[ep, -, -]``, over one axis or
            several, or inside the experts too, ``[ep, tp blocks(2), -]``. Uneven shards need ``balanced`` or sizes.
        down_proj: (num_experts, embed, hidden). Shard it the same way: ``[ep, -, -]`` or ``[ep, -, tp]``.

    Example:
        >>> experts = GatedExperts(4, embed=3, hidden=5)
        >>> experts(torch.ones(2, 3), torch.tensor([[0, 3], [1, 3]]), torch.full((2, 2), 0.5)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        num_experts: int,
        embed: int,
        hidden: int,
        activation: Activation = F.silu,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * hidden, embed, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(num_experts, embed, hidden, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weights of each expert as `nn.Linear` does."""
        for weight in (self.gate_up_proj, self.down_proj):
            bound = weight.shape[2] ** -0.5 if weight.shape[2] else 0.0
            nn.init.uniform_(weight, -bound, bound)

    @torch.compiler.disable(reason=UNCOMPILED)
    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return for each token the weighted sum of its experts' results.

        All ranks over which the experts are sharded call it, each with its own tokens, which are equal along ``tp``.

        Args:
            tokens: (n, embed); n differs from rank to rank.
            experts: (n, k), integers below `num_experts`.
            weights: (n, k).

        Returns:
            (n, embed), in the dtype of the tokens; under autocast in its dtype.
        """
        stacks: tuple[Any, Any] = self._parameters["gate_up_proj"], self._parameters["down_proj"]
        subgroup, held, inner = place(*stacks)
        gate_up, down = (p._local if isinstance(p, ShardedTensor) else p for p in stacks)
        fault = find_fault(tokens, experts, weights)
        if fault is None:
            if inner is not None:
                tokens, weights = (collectives.sum_gradient(value, inner) for value in (tokens, weights))
            tokens, gate_up, down = _cast(tokens, gate_up, down)
        sent = dispatch(tokens, experts, held, subgroup, fault)
        out = sent.combine(stacked(sent, gate_up, down, self.activation), weights)
        return out if inner is None else collectives.all_reduce(out, inner)

    def extra_repr(self) -> str:
        num_experts, embed, hidden = self.down_proj.shape
        return f"num_experts={num_experts}, embed={embed}, hidden={hidden}"


def stacked(sent: DispatchedTokens, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the results of this rank's experts, stacked in two plain tensors, for the rows that they received."""

    def gated(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return activation(gate) * up

    if _takes_grouped(sent.tokens, gate_up, down):
        both = F.grouped_mm(sent.tokens, gate_up.transpose(1, 2), offs=sent.ends)
        return F.grouped_mm(gated(both), down.transpose(1, 2), offs=sent.ends)
    if not sent.counts:  # no expert, no rows: but in the graph of the parameters, so that they get gradients
        return sent.tokens + gate_up.sum() + down.sum()
    parts = zip(sent.tokens.split(sent.counts), gate_up.unbind(), down.unbind(), strict=True)
    return torch.cat([F.linear(gated(F.linear(x, a)), b) for x, a, b in parts])


def combined(sent: DispatchedTokens, experts: Iterable[tuple[int, nn.Module]], weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted results of this rank's experts, modules with their numbers, at the ranks of the tokens."""
    outputs = []
    for (number, expert), rows in zip(experts, sent.tokens.split(sent.counts), strict=True):
        outputs.append(expert(rows))
        if outputs[-1].shape != rows.shape:
            raise RuleError(
                f"expert {number} must keep the shape of its tokens",
                {"tokens": tuple(rows.shape), "result": tuple(outputs[-1].shape)},
            )
    return sent.combine(torch.cat(outputs) if outputs else sent.tokens, weights)


def _takes_grouped(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Return whether torch multiplies all experts at once: bfloat16 on cuda, not empty, rows of whole 16 bytes."""
    if not (x.is_cuda and len(x) and x.dtype == gate_up.dtype == down.dtype == torch.bfloat16):
        return False
    return gate_up.shape[0] > 1 and gate_up.shape[2] % 8 == 0 and down.shape[2] % 8 == 0 and down.shape[2] > 0


class ExpertList(nn.Module):
    """Experts that are modules, each whole on one rank.

    The experts of this rank are named by their global number, so that names are those of a dense ``ModuleList``:
    rank 1 of 4 with eight experts has ``experts.2`` and ``experts.3``. An expert may do anything inside, for example
    shard its work over ``tp``. Every expert is called, even with no rows, so that its parameters get zeros for
    gradients and its collectives, if any, match on all ranks.

    The parameters are plain tensors that other ranks do not have. A gradient norm that `clip_grad_norm_` computes does
    not include those of other ranks: clip experts separately, or use `GatedExperts`.

    Args:
        num_experts: the number on all ranks together; distributed in order, as evenly as possible.
        make: returns the module of the expert with this number; called for the experts of this rank only.
            ``dense.__getitem__`` of a ``ModuleList`` uses its modules. An expert maps (m, d) to (m, d).
        process_group: the ranks that hold the experts; with several axes of a DeviceMesh, those along `axis`. None is
            the default group.
        axis: name of an axis.

    Example:
        >>> experts = ExpertList(4, lambda number: nn.Linear(3, 3))
        >>> experts(torch.ones(2, 3), torch.tensor([[0], [3]]), torch.ones(2, 1)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self, num_experts: int, make: Callable[[int], nn.Module], process_group: Any = None, axis: str = "ep"
    ) -> None:
        super().__init__()
        group = group_along(as_group(process_group), (axis,))
        self._subgroup = _ExpertGroup(group, experts_per_rank(num_experts, group.size))
        start = sum(self._subgroup.held[: group.index])
        self.numbers = range(start, start + self._subgroup.held[group.index])
        for number in self.numbers:
            self.add_module(str(number), make(number))

    @torch.compiler.disable(reason=UNCOMPILED)
    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Do the same as `GatedExperts.forward`."""
        fault = find_fault(tokens, experts, weights)
        if fault is None:
            (tokens,) = _cast(tokens)
        sent = dispatch(tokens, experts, self._subgroup.held, self._subgroup.group, fault)
        return combined(sent, ((number, self.get_submodule(str(number))) for number in self.numbers), weights)

    def extra_repr(self) -> str:
        return f"experts {self.numbers.start} to {self.numbers.stop - 1} of {sum(self._subgroup.held)}" * bool(
            self.numbers
        )


@attrs.frozen(eq=False)
class _ExpertGroup:
    """The ranks that hold experts, and how many each; one object for all copies of a module."""

    group: Group
    held: tuple[int, ...]

    def __deepcopy__(self, memo: Any) -> _ExpertGroup:
        return self


def _cast(*tensors: Any) -> tuple[Any, ...]:
    """Cast as autocast does for a product, before rows are sent, to send fewer bytes."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t.dtype in (torch.float32, torch.float16, torch.bfloat16) else t for t in tensors)


_alone = SingleRankGroup()


def place(gate_up: Any, down: Any) -> tuple[Group, tuple[int, ...], Group | None]:
    """Return the ranks that share the experts, how many each holds, and the ranks over which each expert is sharded."""
    if not isinstance(gate_up, ShardedTensor) and not isinstance(down, ShardedTensor):
        return _alone, (len(gate_up),), None
    if not (isinstance(gate_up, ShardedTensor) and isinstance(down, ShardedTensor)):
        raise _refused("one of the two is sharded, the other is not", gate_up, down)
    fault, expert_axes, splitting = _read(gate_up._layout, down._layout)
    if fault:
        raise _refused(fault, gate_up, down)
    group, layout = gate_up._group, gate_up._layout
    subgroup = along(group, layout, expert_axes)
    inner = along(group, layout, splitting) if splitting else None
    assert isinstance(layout, MeshLayout)
    return subgroup, _held(layout, subgroup.ranks), inner if inner is not None and inner.size > 1 else None


def _refused(fault: str, gate_up: Any, down: Any) -> RuleError:
    specs = (str(p.sharding_spec()) if isinstance(p, ShardedTensor) else "not sharded" for p in (gate_up, down))
    return RuleError(
        f"GatedExperts: {fault}",
        dict(zip(("gate_up_proj", "down_proj"), specs, strict=True)),
        [
            "deal them whole: [ep, -, -] and [ep, -, -]",
            "split each of them, too: [ep, tp blocks(2), -] and [ep, -, tp]",
        ],
    )


@lru_cache(maxsize=256)
def _read(gate_up: Layout, down: Layout) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return the fault of two layouts, or the axes that shard the experts and those that shard each of them inside."""
    if not (isinstance(gate_up, MeshLayout) and isinstance(down, MeshLayout)) or gate_up.partial or down.partial:
        return "experts are cut along their dims", (), ()
    (expert_cut, inside, across), (expert_cut_down, across_down, inside_down) = gate_up.dims, down.dims
    if (gate_up.ranks, gate_up.grid, expert_cut) != (down.ranks, down.grid, expert_cut_down):
        return "both must deal the experts alike", (), ()
    if across is not None or across_down is not None:
        return "the dim of the tokens must be whole", (), ()
    expert_axes = expert_cut.axes if expert_cut is not None else ()
    if inside is None and inside_down is None:
        return "", expert_axes, ()
    if inside is None or inside_down is None or inside.axes != inside_down.axes:
        return "both must be cut over the same axis inside of the experts", (), ()
    hidden = inside_down.pieces.length
    for i in range(inside_down.pieces.count):
        columns = _places(inside_down.pieces.intervals(i))
        if _places(inside.pieces.intervals(i)) != columns | {hidden + column for column in columns}:
            return "a rank must hold the rows of gate and up that meet its columns of down", (), ()
    return "", expert_axes, inside.axes


def _places(intervals: Iterable[Interval]) -> set[int]:
    return {i for start, end in intervals for i in range(start, end)}


@lru_cache(maxsize=256)
def _held(layout: MeshLayout, ranks: Ranks) -> tuple[int, ...]:
    """Return how many experts each of the ranks holds."""
    cut = layout.dims[0]
    if cut is None:
        return (layout.shape[0],)
    places = (coordinate(layout.ranks, layout.grid, rank) for rank in ranks)
    held = [cut.pieces.intervals(layout.piece(cut, place))[0] for place in places if place is not None]
    some = [interval for interval in held if interval[0] < interval[1]]
    if some != sorted(some):
        raise RuleError(
            "experts must be dealt to ranks in order",
            {"layout": str(layout)},
            "name the axes that deal them in the order of the mesh",
        )
    return tuple(end - start for start, end in held)
