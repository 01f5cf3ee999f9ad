"""Errors of losses, layers, experts and averaged gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardtensor as st
from fixes.case import Case, grid, linear, mlp, rank, weight


def loss(targets: torch.Tensor, logits: Any = None, spec: Any = "[..., tp]", **options: Any) -> torch.Tensor:
    logits = torch.ones(2, 3) if logits is None else logits
    return st.ParallelCrossEntropy(6, spec, **options)(logits, targets)


def sharded_loss(targets: torch.Tensor, logits: torch.Tensor | None = None) -> torch.Tensor:
    logits = torch.ones(2, 6) if logits is None else logits
    return F.cross_entropy(st.distribute(logits, "[-, tp]"), targets)


def derived_twice(of: Any, columns: int) -> None:
    logits = torch.ones(2, columns, requires_grad=True)
    (grad,) = torch.autograd.grad(of(torch.arange(2), logits), logits, create_graph=True)
    (grad.square().sum() + logits.sum()).backward()


def averaged(module: nn.Module, axis: str = "dp", mesh: Any = None, x: torch.Tensor | None = None) -> nn.Module:
    """The gradients of a step are averaged."""
    module = st.data_parallel(module, axis, mesh, bucket_mib=1e-6)
    module(torch.ones(2, 4) if x is None else x).sum().backward()
    return module


def holder(spec: str) -> nn.Module:
    """A module whose one parameter is laid out by a spec."""
    mesh = grid(("dp", 3), ("tp", 1))
    module = nn.Module()
    module.part = nn.Parameter(st.distribute(torch.ones(4), spec, process_group=mesh))
    return st.data_parallel(module, "dp", mesh)


def experts(gate_up: str, down: str, *axes: tuple[str, int]) -> torch.Tensor:
    group = grid(*(axes or (("ep", 2), ("tp", 2))))
    plan = {"gate_up_proj": gate_up, "down_proj": down}
    module = st.shard_module(st.GatedExperts(4, 6, 4), plan, process_group=group)
    return module(torch.ones(2, 6), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))


def sent(tokens: Any = None, ids: Any = None, num_experts: Any = 4) -> Any:
    tokens = torch.ones(2, 3) if tokens is None else tokens
    return st.dispatch_tokens(tokens, torch.tensor([[0], [3]]) if ids is None else ids, num_experts)


def listed(columns: int) -> torch.Tensor:
    module = st.ExpertList(2, lambda _: nn.Identity())
    return module(torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, columns))


def looked_up(kind: type[nn.Embedding], spec: str = "[tp pad(1), -]") -> torch.Tensor:
    plan: dict[str, Any] = {"weight": spec, "out": "partial(tp) -> replicate"} if spec != "replicate" else {}
    model = nn.Sequential(kind(10, 4), nn.Linear(4, 3))
    return st.shard_module(model, {"0": plan} if plan else {"1.weight": "[-, tp]"})(torch.arange(3))


class ByHand(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight) * 2


class BySuper(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 2


class Twice(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = nn.Linear(4, 4), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return x


def turned(contiguous: bool) -> None:
    model = linear(None)
    values = torch.ones(6, 4).t()
    model[0].weight = nn.Parameter(values.contiguous() if contiguous else values)
    st.shard_parameter(model, "0.weight", "[tp, -]")


TARGETS = torch.arange(2)
ROWS = torch.ones(1, 4, requires_grad=True)

CASES: dict[str, Case] = {
    "class probabilities": Case(
        lambda: loss(torch.ones(2, 6) / 6),
        {
            "give class indices": lambda: loss(TARGETS),
            "call torch.nn.functional.cross_entropy with ShardedTensors": lambda: sharded_loss(torch.ones(2, 6) / 6),
        },
    ),
    "logits of other classes": Case(
        lambda: loss(TARGETS, torch.ones(2, [4, 3][rank()])),
        {
            "give num_classes and the spec in which the head leaves its logits": lambda: [
                st.ParallelCrossEntropy(8, "[..., tp]")(torch.ones(2, 4), TARGETS),
                loss(TARGETS, torch.ones(2, [4, 2][rank()]), "[..., tp sizes(4, 2)]"),
            ]
        },
    ),
    "targets that differ along the axis of the classes": Case(
        lambda: loss(TARGETS, data_axes="tp"),
        {"name the other axes of the mesh as data_axes": lambda: loss(TARGETS, data_axes="dp")},
        mesh="dp=2, tp=2",
    ),
    "classes on devices": Case(
        lambda: loss(TARGETS, spec=st.ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"])),
        {'write the spec as "[..., tp]"': lambda: loss(TARGETS, spec="[..., tp]")},
    ),
    "rows that are cut, too": Case(
        lambda: loss(TARGETS, spec="[dp, tp]"),
        {
            'write it as "[..., tp]", and name the axes along which targets differ as data_axes': lambda: loss(
                TARGETS, data_axes="dp"
            )
        },
        mesh="dp=2, tp=2",
    ),
    "flat logits": Case(
        lambda: loss(TARGETS, spec="[..., tp] flat(dp)"),
        {'write it as "[..., tp]"': lambda: loss(TARGETS)},
        mesh="dp=2, tp=2",
    ),
    "no class is cut": Case(
        lambda: loss(TARGETS, spec="[..., -]"),
        {"use torch's cross_entropy: it is local": lambda: F.cross_entropy(torch.ones(2, 6), TARGETS)},
    ),
    "several ranges of classes": Case(
        lambda: st.ParallelCrossEntropy(8, "[..., tp blocks(2)]")(torch.ones(2, 4), TARGETS),
        {
            "reshard the head, so that each rank has one range": lambda: st.ParallelCrossEntropy(8, "[..., tp]")(
                torch.ones(2, 4), TARGETS
            )
        },
    ),
    "sharded logits": Case(
        lambda: loss(TARGETS, st.distribute(torch.ones(2, 6), "[-, tp]")),
        {"call torch.nn.functional.cross_entropy, which takes ShardedTensors": lambda: sharded_loss(TARGETS)},
    ),
    "targets of other rows": Case(
        lambda: loss(torch.arange(3)),
        {
            "flatten or permute them to (..., classes) and (...)": lambda: [
                loss(TARGETS),
                loss(torch.zeros(4, dtype=torch.long), torch.ones(2, 2, 3).flatten(0, 1)),
            ]
        },
    ),
    "weights of some classes": Case(
        lambda: loss(TARGETS, weight=torch.ones(3)),
        {"give the whole vector, detached, on every rank": lambda: loss(TARGETS, weight=torch.ones(6))},
    ),
    "a loss differentiated twice": Case(
        lambda: derived_twice(loss, 3),
        {
            "for derivatives of the gradient call torch.nn.functional.cross_entropy with ShardedTensors": lambda: (
                derived_twice(sharded_loss, 6)
            )
        },
    ),
    "several axes of a group without names": Case(
        lambda: averaged(mlp(), "dp*tp"),
        {
            "pass the DeviceMesh that has these axes as process_group": lambda: averaged(
                mlp(), "dp*tp", grid(("dp", 1), ("tp", 2))
            )
        },
        mesh=2,
    ),
    "neither whole nor cut along a data axis": Case(
        lambda: holder('chunk(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])'),
        {"give it a spec that does not name the axis, on the mesh that has it": lambda: holder("[tp]")},
        mesh=3,
    ),
    "experts that are cut in one of two": Case(
        lambda: experts("[ep, tp blocks(2), -]", "[ep, -, -]"),
        {
            "deal them whole: [ep, -, -] and [ep, -, -]": lambda: experts("[ep, -, -]", "[ep, -, -]"),
            "split each of them, too: [ep, tp blocks(2), -] and [ep, -, tp]": lambda: experts(
                "[ep, tp blocks(2), -]", "[ep, -, tp]"
            ),
        },
        mesh=4,
    ),
    "experts dealt out of order": Case(
        lambda: experts("[b*a, -, -]", "[b*a, -, -]", ("a", 2), ("b", 2)),
        {
            "name the axes that deal them in the order of the mesh": lambda: experts(
                "[a*b, -, -]", "[a*b, -, -]", ("a", 2), ("b", 2)
            )
        },
        mesh=4,
    ),
    "a weight cut along a data axis": Case(
        lambda: averaged(linear("[dp, -]"), x=torch.ones(2, 6)),
        {
            "shard it along other axes": lambda: averaged(linear("[tp, -]"), x=torch.ones(2, 6)),
        },
        mesh="dp=2, tp=2",
    ),
    "sparse gradients": Case(
        lambda: averaged(nn.Embedding(4, 2, sparse=True), x=TARGETS),
        {"make the embedding with sparse=False": lambda: averaged(nn.Embedding(4, 2, sparse=False), x=TARGETS)},
        mesh="dp=2",
    ),
    "averaged twice": Case(
        lambda: [st.data_parallel(layer, "dp") for layer in (lambda model: (model, model[0]))(mlp())],
        {"call data_parallel once, on the whole model": lambda: averaged(mlp())},
        mesh="dp=2",
    ),
    "reentrant checkpoints of one parameter": Case(
        lambda: averaged(Twice(True), x=ROWS),
        {"checkpoint(..., use_reentrant=False)": lambda: averaged(Twice(False), x=ROWS)},
        mesh="dp=2",
    ),
    "an embedding that looks up by itself": Case(
        lambda: looked_up(ByHand),
        {
            "let it call super().forward(input); or keep this embedding whole in the plan": lambda: [
                looked_up(BySuper),
                looked_up(ByHand, "replicate"),
            ]
        },
    ),
    "a parameter that is not contiguous": Case(
        lambda: turned(contiguous=False), {"call contiguous() on it first": lambda: turned(contiguous=True)}
    ),
    "counts of other ranks": Case(
        lambda: sent(num_experts=[1, 2, 1]),
        {
            "give one count a rank, or the number of all experts": lambda: [
                sent(num_experts=[1, 3]),
                sent(num_experts=4),
            ]
        },
    ),
    "experts that are not there": Case(
        lambda: sent(ids=torch.tensor([[0], [7]])),
        {
            "give num_experts as the number of experts of all ranks together": lambda: sent(
                ids=torch.tensor([[0], [7]]), num_experts=8
            )
        },
    ),
    "sharded tokens": Case(
        lambda: sent(weight()),
        {
            "pass local_tensor() where its rows are cut over the ranks of the experts": lambda: sent(
                weight().local_tensor()
            )
        },
    ),
    "weights of other experts": Case(lambda: listed(2), {"give weights of (n, k), too": lambda: listed(1)}),
    "experts that are no whole numbers": Case(
        lambda: sent(ids=torch.ones(2, 1)),
        {"give tokens of (n, d) and experts of (n, k), on one device": lambda: sent(ids=torch.ones(2, 1).long())},
    ),
    "a sharded gradient for a plain tensor": Case(
        lambda: (torch.ones(4, 6, requires_grad=True) * 2).backward(weight()),
        {
            "call full_tensor() first": lambda: (torch.ones(4, 6, requires_grad=True) * 2).backward(
                weight().full_tensor()
            ),
            "unshard_module(module) makes its parameters plain": lambda: st.unshard_module(linear())(torch.ones(2, 6)),
        },
    ),
}
