"""Mixture of experts, the experts dealt over ranks: `MoE`, with `GatedExperts` or an `ExpertList`.

A router chooses `top_k` experts for every token; tokens travel to the ranks that hold them and come back. Each rank
brings tokens of its own (the ranks that share the experts are data ranks, too), as many as it has, and gets the dense
answer for them.

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

Gradients. Let the loss be the mean over the data ranks. What reaches an expert's weights has come through the exchange
and is the sum over all ranks that share the experts: reduce it over the other data axes only. The router sees this
rank's tokens alone: its gradient is summed over all data axes, like that of any replicated parameter. Along ``tp`` both
are right as they are. `GatedExperts` does what its axes need by itself: tokens and weights go in, and results come out,
as copies along ``tp``.

`torch.compile` leaves the experts' forward out of its graph, for the sizes are data: what stands around it compiles,
counts do not recompile it, and ``fullgraph=True`` is refused. The modules of an `ExpertList` may be compiled by
themselves.
"""

from __future__ import annotations

import torch
from torch import nn


def chosen(scores: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their weights by a router's scores (n, experts): (n, top_k) both."""
    chances = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights, experts = chances.topk(top_k, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights


class MoE(nn.Module):
    """A router and its experts.

    Args:
        gate: from (n, d) to scores of (n, number of experts); the same on every rank.
        experts: called with tokens (n, d), the numbers of their experts (n, k) and their weights (n, k); gives (n, d).
            A `GatedExperts`, an `ExpertList`, or a module of one's own around `dispatch_tokens`.
        top_k: experts of each token.
        normalize: let the weights of each token add up to one.

    Shapes: (..., d), this rank's own tokens, to the same.

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
        """The experts of each token and their weights, (n, top_k) both; override it for another way to choose."""
        return chosen(self.gate(tokens), self.top_k, self.normalize)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        experts, weights = self.route(tokens)
        return self.experts(tokens, experts, weights).view(x.shape)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}"
