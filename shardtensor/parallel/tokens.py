"""`dispatch_tokens` sends every token to the ranks that hold its experts, and the results back.

The number of rows for each rank is data, so no layout can express it: the ranks first exchange counts, then rows. The
message of counts also has the facts that ranks compare before rows are sent, so that all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

import attrs
import torch
from torch.autograd import Function

from shardtensor.comm.agree import agree
from shardtensor.comm.collectives import all_to_all
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError, RuleError, ShardTensorError
from shardtensor.layout.pieces import balanced
from shardtensor.tensor.sharded_tensor import ShardedTensor

Order = tuple[torch.Tensor, torch.Tensor]
"""A permutation of rows: row i of the result is row ``indices[i]``; and its inverse."""


def _sorting(keys: torch.Tensor) -> Order:
    """Return the order by key; rows of one key keep their order."""
    indices = keys.argsort(stable=True)
    places = torch.arange(len(indices), device=indices.device)
    return indices, torch.empty_like(indices).scatter_(0, indices, places)


class Reorder(Function):
    """Permutes rows; backward applies the inverse."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, indices: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.back = inverse, indices
        return x.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return Reorder.apply(grad, *ctx.back), None, None


_FAULT, _NEEDS_GRADIENT = 1, 2  # bits of a rank's state
_HEAD = 3  # numbers before the counts: a digest of the facts, the state, the number of ids that no expert has


def dispatch_tokens(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int | Sequence[int],
    process_group: Any = None,
) -> DispatchedTokens:
    """Send each of this rank's tokens to the ranks that hold its experts.

    All ranks of the group call it, each with tokens of its own, any number of them. They first exchange counts, a few
    integers for each rank and expert, and wait for them on the host (on cuda the one point where the host waits for
    the device); then rows move. Nothing is dropped and nothing padded: an expert gets all rows that chose it.

    Differentiable. If gradients are enabled, all ranks take part in the backward of both exchanges, whether or not
    their own tensors require gradients.

    Args:
        tokens: (n, d), of any dtype; n differs from rank to rank and may be zero, d and dtype are equal on all.
        experts: (n, k), integers: the experts of each token, by their number among those of all ranks.
        num_experts: the number on all ranks together, distributed in order and as evenly as possible, with one more
            on the first ranks; or how many each rank holds.
        process_group: the ranks that hold the experts: a process group, a DeviceMesh, or None for the default group.

    Raises:
        LayoutError: (a ValueError) tokens or experts are invalid, or an expert's number is out of range.
        DisagreementError: (a ValueError) ranks pass tokens of different widths or dtypes, numbers of experts or
            gradient modes. All ranks raise the same error, and no row was sent.

    Example:
        >>> sent = dispatch_tokens(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1], [0], [1]]), num_experts=2)
        >>> sent.tokens.flatten().tolist(), sent.counts
        ([2.0, 1.0, 3.0], (1, 2))
        >>> sent.combine(10 * sent.tokens, weights=torch.ones(3, 1)).flatten().tolist()
        [10.0, 20.0, 30.0]
    """
    group = as_group(process_group)
    return dispatch(tokens, experts, experts_per_rank(num_experts, group.size), group)


def experts_per_rank(num_experts: int | Sequence[int], size: int) -> tuple[int, ...]:
    """Return how many experts each of `size` ranks holds."""
    if isinstance(num_experts, int):
        pieces = balanced(num_experts, size, 1)
        return tuple(pieces.size(i) for i in range(size))
    if len(num_experts) != size or any(count < 0 for count in num_experts):
        raise LayoutError(
            "num_experts must say for each rank how many experts it holds",
            {"num_experts": list(num_experts), "ranks": size},
            "give one count a rank, or the number of all experts",
        )
    return tuple(num_experts)


@attrs.frozen(eq=False)
class DispatchedTokens:
    """Rows at the rank of their expert; `combine` sends the results back.

    Attributes:
        tokens: (received, d), sorted by this rank's experts; the rows of one expert by their source rank,
            and then in their order there.
        counts: rows of each of this rank's experts.
        ends: (experts here,), int32, on the device of the tokens: where the rows of each expert end.
    """

    tokens: torch.Tensor
    counts: tuple[int, ...]
    ends: torch.Tensor
    _group: Group
    _sent: Sequence[int]  # rows to each rank
    _received: Sequence[int]  # rows from each
    _shape: torch.Size  # of the ids
    _sorting: Order
    _regrouping: Order | None  # from the received order to that of `tokens`; None if they are the same

    def combine(self, outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Send the experts' outputs back and return the weighted sum of each token's outputs.

        All ranks call it, also those that received nothing.

        Args:
            outputs: (received, w), in the order of `tokens`; w is equal on all ranks, and may differ from d. They
                are sent in the dtype of the tokens.
            weights: (n, k), the factor of each expert of a token. Products are computed and summed in the wider dtype
                of the two.

        Returns:
            (n, w), of the dtype of the tokens, in the order in which they were given.
        """
        if outputs.dim() != 2 or len(outputs) != len(self.tokens) or weights.shape != self._shape:
            raise RuleError(
                "combine takes a row for each token received, and a weight for each expert of a token sent",
                {
                    "outputs": f"{tuple(outputs.shape)} for {len(self.tokens)} rows",
                    "weights": f"{tuple(weights.shape)} for {tuple(self._shape)}",
                },
            )
        outputs = _requiring_grad(outputs.to(self.tokens.dtype))
        width = outputs.shape[1]
        if self._regrouping is not None:
            outputs = Reorder.apply(outputs, *self._regrouping[::-1])
        rows = _moved(outputs, self._received, self._sent, self._group)
        rows = Reorder.apply(rows, *self._sorting[::-1]).view(*self._shape, width)
        return (rows * weights.unsqueeze(-1)).sum(1).to(self.tokens.dtype)


def dispatch(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    held: tuple[int, ...],
    group: Group,
    fault: ShardTensorError | None = None,
) -> DispatchedTokens:
    """Run `dispatch_tokens` with `held` experts on each rank; `fault` is an error found before."""
    fault = fault or find_fault(tokens, experts)
    facts = {}
    if fault is None:
        facts = {"number of experts": str(sum(held)), "width of tokens": str(tokens.shape[1])}
        facts |= {"dtype": str(tokens.dtype), "gradients": "enabled" if torch.is_grad_enabled() else "disabled"}
    slots, message = _counted(tokens, experts, held, fault, facts)
    messages = all_to_all(message, [message.shape[1]] * group.size, [message.shape[1]] * group.size, group)
    messages = messages.view(message.shape)
    if messages.is_meta:
        sending, receiving = _even(message, experts.numel(), held, group, tokens.requires_grad)
    else:
        sending, receiving = torch.stack([message, messages]).tolist()  # on cuda: here the host waits
    if any(head[:_HEAD] != [sending[0][0], head[1] & ~_FAULT, 0] for head in receiving):
        outside = sending[0][2]
        if outside:
            fault = LayoutError(
                "tokens ask for experts that do not exist",
                {"experts": f"0 to {sum(held) - 1}", "other numbers": f"{outside} of {experts.numel()}"},
                "give num_experts as the number of experts of all ranks together",
            )
        agree(group, "dispatch_tokens", facts, fault)
    assert fault is None, "a rank receives its own message"
    sent = [sum(row[_HEAD:]) for row in sending]
    received = [sum(row[_HEAD:]) for row in receiving]
    here = held[group.index]
    sorting = _sorting(slots)
    if any(row[1] & _NEEDS_GRADIENT for row in receiving):
        tokens = _requiring_grad(tokens)
    copies = tokens.unsqueeze(1).expand(-1, experts.shape[1], -1).flatten(0, 1)  # one for each expert of a token
    rows = _moved(Reorder.apply(copies, *sorting), sent, received, group)
    by_rank = messages[:, _HEAD : _HEAD + here]
    regrouping = None
    if group.size > 1 and here > 1:
        numbers = torch.arange(here, device=messages.device).repeat(group.size)
        numbers = numbers.repeat_interleave(by_rank.flatten(), output_size=sum(received))
        regrouping = _sorting(numbers)
        rows = Reorder.apply(rows, *regrouping)
    counts = tuple(sum(row[_HEAD + i] for row in receiving) for i in range(here))
    ends = by_rank.sum(0).cumsum(0).to(torch.int32)
    return DispatchedTokens(rows, counts, ends, group, sent, received, experts.shape, sorting, regrouping)


def _even(
    message: torch.Tensor, rows: int, held: tuple[int, ...], group: Group, needs_gradient: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Return counts for meta tensors, when a step is only counted: all experts get equally many rows."""
    each = rows // sum(held)
    head = [0, _NEEDS_GRADIENT if needs_gradient else 0, 0]
    padding = [0] * (message.shape[1] - _HEAD)

    def counts(rank: int) -> list[int]:
        return [*head, *([each] * held[rank] + padding)[: len(padding)]]

    sending = [counts(rank) for rank in range(group.size)]
    sending[0][_HEAD] += rows - each * sum(held)
    receiving = [counts(group.index) for _ in range(group.size)]
    return sending, receiving


# -- checks and counts, before rows ------------------------------------------------------------------------------------


def find_fault(tokens: Any, experts: Any, weights: Any = None) -> ShardTensorError | None:
    """Return the fault of this rank's arguments, if there is one."""
    if isinstance(tokens, ShardedTensor) or isinstance(experts, ShardedTensor):
        return RuleError(
            "experts take each rank's own tokens as plain tensors, and this is a ShardedTensor",
            fix="pass local_tensor() where its rows are cut over the ranks of the experts",
        )
    values = [tokens, experts, *(() if weights is None else (weights,))]
    if not all(isinstance(value, torch.Tensor) for value in values):
        found = ", ".join(type(value).__name__ for value in values)
        return LayoutError("tokens, experts and weights must be tensors", {"found": found})
    fits = tokens.dim() == 2 and experts.dim() == 2 and len(tokens) == len(experts) and tokens.device == experts.device
    if fits and experts.dtype != torch.bool and not experts.is_floating_point() and not experts.is_complex():
        if weights is None or weights.shape == experts.shape:
            return None
        shapes = {"experts": tuple(experts.shape), "weights": tuple(weights.shape)}
        return LayoutError("each expert of a token needs a weight", shapes, "give weights of (n, k), too")
    return LayoutError(
        "tokens must be rows, and experts whole numbers, as many for each row",
        {
            "tokens": f"{tuple(tokens.shape)} {tokens.dtype} on {tokens.device}",
            "experts": f"{tuple(experts.shape)} {experts.dtype} on {experts.device}",
        },
        "give tokens of (n, d) and experts of (n, k), on one device",
    )


def _counted(
    tokens: torch.Tensor, experts: torch.Tensor, held: tuple[int, ...], fault: Any, facts: dict[str, str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slot of each token's experts, and this rank's message to the others: one row each, of equal length.

    An expert's slot is its rank times the largest number of experts on any rank, plus its number there; numbers that
    no expert has come last. So slots sort like experts, and each rank needs the counts of its slots.
    """
    widest, total, last = max(held), sum(held), max(held) * len(held)
    if fault is not None:
        device = tokens.device if isinstance(tokens, torch.Tensor) else None
        message = torch.zeros(len(held), _HEAD + widest, dtype=torch.int64, device=device)
        message[:, 1] = _FAULT
        return message, message
    ids = experts.reshape(-1).long()
    slots = ids.where((ids >= 0) & (ids < total), total)
    if last != total:
        slots = _places(held, ids.device)[slots]
    counts = slots.new_zeros(last + 1).scatter_add_(0, slots, torch.ones_like(slots))
    message = counts.new_empty(len(held), _HEAD + widest)
    message[:, 0] = crc32(repr(facts).encode())
    message[:, 1] = _NEEDS_GRADIENT if tokens.requires_grad and torch.is_grad_enabled() else 0
    message[:, 2] = counts[-1]
    message[:, _HEAD:] = counts[:-1].view(len(held), widest)
    return slots, message


@lru_cache(maxsize=64)
def _places(held: tuple[int, ...], device: torch.device) -> torch.Tensor:
    widest = max(held)
    places = [rank * widest + i for rank, count in enumerate(held) for i in range(count)]
    with torch.inference_mode(False):
        return torch.tensor([*places, widest * len(held)], device=device)


# -- rows --------------------------------------------------------------------------------------------------------------


def _requiring_grad(x: torch.Tensor) -> torch.Tensor:
    """Return `x` requiring a gradient, so that this rank calls the collectives of backward as the others do."""
    is_ready = x.requires_grad or not torch.is_grad_enabled() or not (x.is_floating_point() or x.is_complex())
    return x if is_ready else x.detach().requires_grad_()


def _moved(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> torch.Tensor:
    width = rows.shape[1]
    flat = all_to_all(rows, [count * width for count in sent], [count * width for count in received], group)
    return flat.view(sum(received), width)
