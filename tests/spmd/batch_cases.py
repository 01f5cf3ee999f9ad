"""One small program for each operation that a compiled step runs on a part of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

B = 4
"""The samples are in dim 0 of what a program gets."""


@attrs.frozen
class Case:
    """A program: ``run(h, w, y)`` of h [B, *sample], which depends on weights, a weight w, and labels y of each sample.

    Attributes:
        is_refused: whether the operation mixes samples; `why`: what the text of the error has.
        any_dim: whether the program does not care which dim has the samples.
    """

    run: Callable[..., Tensor]
    sample: tuple[int, ...] = (6,)
    w: tuple[int, ...] = (6,)
    y: tuple[int, ...] = ()
    classes: int = 5
    is_refused: bool = False
    why: str = ""
    tolerance: float = 1e-10
    any_dim: bool = False


def _norm(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A statistic of the batch that is then used by each sample."""
    return lambda h, w, y: h * w * function(h * h + 0.1) + h


CASES: dict[str, Case] = {}


def case(name: str, run: Callable[..., Tensor], *sample: int, **kwargs: Any) -> None:
    """Add a case."""
    assert name not in CASES, name
    CASES[name] = Case(run, sample or (6,), **kwargs)


def refused(name: str, why: str, run: Callable[..., Tensor], *sample: int, **kwargs: Any) -> None:
    """Add a case that is refused."""
    case(name, run, *sample, is_refused=True, why=why, **kwargs)


# elementwise
for (
    _name
) in "exp tanh sigmoid relu gelu silu sin abs square neg rsqrt log1p softplus elu leaky_relu mish hardtanh".split():
    _f: Any = getattr(torch, _name, None) or getattr(F, _name)
    case(_name, lambda h, w, y, f=_f: f(h * h + 0.5) * w, any_dim=True, w=())
case("add", lambda h, w, y: h + w + 2, any_dim=True, w=())
case("sub", lambda h, w, y: w - h - 1, any_dim=True, w=())
case("rsub", lambda h, w, y: 1 - h * w, any_dim=True, w=())
case("div", lambda h, w, y: h / (w * w + 1) + w / (h * h + 1), any_dim=True, w=())
case("pow", lambda h, w, y: (h * h + 1) ** 1.5 + (h * h + 1) ** w.tanh(), any_dim=True, w=())
case("maximum", lambda h, w, y: torch.maximum(h, w) + torch.minimum(h * h, w), any_dim=True, w=())
case("clamp", lambda h, w, y: (h * w).clamp(-0.5, 0.5), any_dim=True, w=())
case("where", lambda h, w, y: torch.where(h > 0, h * w, w), any_dim=True, w=())
case("where numbers", lambda h, w, y: torch.where(h > 0, h * w, 0.0), any_dim=True, w=())
case("masked_fill", lambda h, w, y: (h * w).masked_fill(h > 0, 3.0), any_dim=True, w=())
case("masked_fill zero", lambda h, w, y: (h * w).masked_fill(h > 0, 0.0), any_dim=True, w=())
case("addcmul", lambda h, w, y: torch.addcmul(h, h, w, value=0.5), any_dim=True, w=())
case("addcdiv", lambda h, w, y: torch.addcdiv(h, w, h * h + 1), any_dim=True, w=())
case("lerp", lambda h, w, y: torch.lerp(h, w.expand_as(h), 0.3), any_dim=True, w=())
case("float", lambda h, w, y: (h * w).float().double(), any_dim=True, w=(), tolerance=1e-5)
case("detach", lambda h, w, y: h.detach() * h * w, any_dim=True, w=())
case("comparison", lambda h, w, y: (h > w).double() * h * w, any_dim=True, w=())
case("floor_divide", lambda h, w, y: h * w + (h.detach() * 10) // len(h))
case("mod", lambda h, w, y: h * w + (h.detach() * 10) % len(h))

# views
case("view", lambda h, w, y: h.view(len(h), 2, 3) * w, 6, w=(3,))
case("flatten", lambda h, w, y: h.flatten(0, 1) * w, 3, 2, w=(2,))
case("flatten all", lambda h, w, y: h.flatten() * w, 3, 2, w=())
case("flatten back", lambda h, w, y: (h.flatten(0, 1) * w).view(len(h), 3, 2).tanh(), 3, 2, w=(2,))
case("unflatten", lambda h, w, y: h.unflatten(1, (3, 2)) * w, 6, w=(2,))
case("squeeze", lambda h, w, y: h.squeeze(1).squeeze() * w, 1, 6)
case("unsqueeze", lambda h, w, y: h.unsqueeze(0).unsqueeze(-1) * w, w=(6, 1))
case("transpose", lambda h, w, y: h.transpose(0, 1).tanh().transpose(0, 2) @ w, 3, 2, w=(3, 2))
case("permute", lambda h, w, y: h.permute(2, 0, 1) @ w, 3, 2, w=(3, 2))
case("t", lambda h, w, y: w @ h.t(), w=(2, 6))
case("transpose flatten", lambda h, w, y: h.transpose(0, 1).flatten(0, 1) * w, 3, 2, w=(2,))
case("transpose view", lambda h, w, y: h.transpose(0, 1).reshape(3, -1).tanh() * w.sum(), 3, 2)
refused("view across samples", "", lambda h, w, y: h.t().reshape(-1, 6).sum(0) * w)
refused("view of pairs", "", lambda h, w, y: h.reshape(2, -1).sum(1) * w.sum())
case("expand", lambda h, w, y: h.unsqueeze(1).expand(-1, 3, -1) * w)
case("expand a weight", lambda h, w, y: h * w.expand(len(h), 6))
case("expand_as", lambda h, w, y: h * w.expand_as(h).tanh())
case("repeat", lambda h, w, y: h.repeat(1, 2) * w, w=(12,))
case("repeat a weight", lambda h, w, y: h * w.repeat(len(h), 1))
case("repeat_interleave", lambda h, w, y: h.repeat_interleave(2, 1) * w, w=(12,))
case("repeat_interleave samples", lambda h, w, y: h.repeat_interleave(2, 0) * w)
case("repeat samples", lambda h, w, y: h.repeat(2, 1) * w)
case("narrow", lambda h, w, y: h.narrow(1, 1, 3) * w, w=(3,))
case("slice", lambda h, w, y: h[:, 1:5:2] * w, w=(2,))
case("slice all", lambda h, w, y: h[: len(h)] * w)
case("select", lambda h, w, y: h[:, 1] * w, w=())
case("select last", lambda h, w, y: h[:, -1] * w, 3, 6)
case("unbind", lambda h, w, y: h.unbind(1)[1] * w, 3, 6)
case("split", lambda h, w, y: h.split(2, 1)[1] * w, w=(2,))
case("split sizes", lambda h, w, y: h.split([2, 4], 1)[1] * w, w=(4,))
case("chunk", lambda h, w, y: torch.cat(h.chunk(2, -1)[::-1], -1) * w)
case("diagonal", lambda h, w, y: torch.diagonal(h, dim1=1, dim2=2) * w, 3, 3, w=(3,))
case("unfold", lambda h, w, y: h.unfold(1, 2, 2) * w, w=(2,))
case("contiguous", lambda h, w, y: h.t().contiguous().t() * w)
case("movedim", lambda h, w, y: h.movedim(0, -1) * w.sum(), 3, 2)
refused("first sample", "", lambda h, w, y: h[0] * w)
refused("samples but the first", "", lambda h, w, y: h[1:] * w)
refused("half of the samples", "", lambda h, w, y: h[: len(h) // 2] * w)
refused("chunks of samples", "", lambda h, w, y: torch.cat(h.chunk(2)[::-1]) * w)
refused("unbound samples", "", lambda h, w, y: sum(h.unbind(0)) * w)
refused("flipped samples", "", lambda h, w, y: h.flip(0) * h * w)
refused("rolled samples", "", lambda h, w, y: h.roll(1, 0) * h * w)
case("flip", lambda h, w, y: h.flip(1) * w)
case("roll", lambda h, w, y: h.roll(2, 1) * w)
refused("weight rows of the batch", "depends on all samples", lambda h, w, y: h * w[: len(h)], w=(50, 6))
case("weight rows by arange", lambda h, w, y: h * w[torch.arange(len(h))], w=(50, 6))

# statistics of the batch, used by each sample
for _name in "sum mean amax amin var std logsumexp".split():
    _f = getattr(torch, _name)
    case(f"{_name} dim 0", _norm(lambda h, f=_f: f(h, 0)))
    case(f"{_name} dim 1", _norm(lambda h, f=_f: f(h, 1, keepdim=True)))
case("prod dim 1", _norm(lambda h: h.prod(1, keepdim=True)))
refused("prod of all", "", _norm(torch.prod))
for _name in "sum mean amax amin var std max min".split():
    case(f"{_name} of all", _norm(getattr(torch, _name)))
case("sum of dims", _norm(lambda h: h.sum((0, 2), keepdim=True)), 3, 6)
case("mean of dims", _norm(lambda h: h.mean((0, 1))), 3, 6)
case("var of dims", _norm(lambda h: h.var((0, 1), correction=0)), 3, 6)
case("norm", _norm(lambda h: h.norm()))
case("norm dim 0", _norm(lambda h: h.norm(dim=0)))
case("norm dim 1", _norm(lambda h: h.norm(dim=1, keepdim=True)))
case("norm 1", _norm(lambda h: h.norm(p=1)))
case("norm 3", _norm(lambda h: h.norm(p=3, dim=0)))
case("norm inf", _norm(lambda h: torch.linalg.vector_norm(h, float("inf"))))
case("norm 0", _norm(lambda h: torch.linalg.vector_norm(h, 0)))
case("normalize", lambda h, w, y: F.normalize(h, dim=1) * w)
case("normalize batch", lambda h, w, y: F.normalize(h, dim=0) * w)
case("max dim 1", lambda h, w, y: h.max(1).values * w, w=())
case("centered", lambda h, w, y: (h - h.mean(0)) * w)
case("standardized", lambda h, w, y: (h - h.mean()) / (h.std() + 0.1) * w)
case("any", lambda h, w, y: h * w * (h > 0).any(0) + h * (h > 0).all(1, keepdim=True))
case("count_nonzero", lambda h, w, y: h * w * torch.count_nonzero(h > 0))
case("mean of sums", lambda h, w, y: h.sum(1).mean() * w)
case("sum squared", lambda h, w, y: (h * w).sum().square())
case("sum of sums", lambda h, w, y: h.sum() * w + h.mean(0) * w)
case("product of sums", lambda h, w, y: h.sum(0) * h.mean(0) * w)
case("sum and mean", lambda h, w, y: (h * w).sum(0) + (h * w * w).mean(0))
case("sum and weight", lambda h, w, y: (h * w).sum(0) + w * w)
case("mean and weight", lambda h, w, y: (h * w).mean(0) - w * w)
case("sum times weight", lambda h, w, y: torch.cat([h.sum(0) * w, w, h.mean(0)]).tanh())
case("stacked sums", lambda h, w, y: torch.stack([h.sum(0), h.mean(0), w]).tanh())
case("divided by size", lambda h, w, y: (h * w).sum() / h.shape[0])
case("divided by numel", lambda h, w, y: (h * w).sum() / h.numel())
case("times size", lambda h, w, y: (h * w).mean() * len(h))
case("size over", lambda h, w, y: len(h) / ((h * w).square().sum() + 1))
case("plus size", lambda h, w, y: h * w + len(h))
case("size tensor", lambda h, w, y: (h * w).sum() / torch.tensor(float(len(h)), dtype=h.dtype))
case("unbiased by hand", lambda h, w, y: ((h - h.mean(0)) ** 2).sum(0) / (len(h) - 1) * w)
case("masked mean", lambda h, w, y: (h * w * (y > 1)[:, None]).sum() / (y > 1).sum().clamp(min=1))
case("masked mean of floats", lambda h, w, y: (h * w * (y > 1)[:, None]).sum() / ((y > 1).double().sum() + 1e-6))
refused("argmax of samples", "", lambda h, w, y: h * w + h.argmax(0))
case("argmax", lambda h, w, y: h * w + h.argmax(1, keepdim=True))
refused("max of samples with places", "", lambda h, w, y: h * w + h.max(0).values)
refused("median of samples", "", lambda h, w, y: h * w + h.median(0).values)
refused("sorted samples", "", lambda h, w, y: h.sort(0).values * w)
refused("top samples", "", lambda h, w, y: h.topk(2, 0).values * w)
refused("cumsum of samples", "", lambda h, w, y: h.cumsum(0) * w)
case("softmax of samples", lambda h, w, y: h.softmax(0) * w)
case("cumsum", lambda h, w, y: h.cumsum(1) * w)
case("cumprod", lambda h, w, y: h.cumprod(1) * w)
case("sort", lambda h, w, y: h.sort(1).values * w)
case("topk", lambda h, w, y: h.topk(2, 1).values * w, w=(2,))
case("topk gather", lambda h, w, y: h.gather(1, (h * w).topk(2, 1).indices).tanh())
case("median", lambda h, w, y: h.median(1).values * w, w=())
case("logcumsumexp", lambda h, w, y: h.logcumsumexp(1) * w)

case("mean plus", lambda h, w, y: (h * w / len(h) + 1).square())
case("mean where", lambda h, w, y: torch.where(h > 0, h * w / len(h), 2.0).square())
case("mean filled", lambda h, w, y: (h * w / len(h)).masked_fill(h > 0, 2.0).square())
case("mean padded", lambda h, w, y: F.pad(h * w / len(h), (1, 1), value=2.0).square())
case("mean as integers", lambda h, w, y: h * w + (10 * h / len(h)).detach().long())
case("means added", lambda h, w, y: (h * w / len(h) + h).square() + (h / len(h) - w).square())
case("means joined", lambda h, w, y: torch.cat([h * w / len(h), h], 1).square())
case("extreme product", lambda h, w, y: h.amax(0) @ w.outer(w) + h.amin(0) * w)
case("extremes joined", lambda h, w, y: torch.stack([h.amax(0), h.amin(0), h.sum(0)]) * w)
case("norms joined", lambda h, w, y: torch.stack([h.norm(), (h * w).norm(), w.norm()]).norm() * w)
case("integers times size", lambda h, w, y: h * w * (y.sum() * len(h)))
case("integers and weight", lambda h, w, y: h * w * (y.sum() + torch.arange(6)))
case("bool sums", lambda h, w, y: h * w * ((h > 0).sum(0) > len(h) / 2))
case("rounded sum", lambda h, w, y: h * w * h.detach().sum(0).round() + h * h.detach().sum().long())
case("floored mean", lambda h, w, y: h * w * torch.div(h.detach().sum(0), len(h), rounding_mode="floor"))
refused("rows after the batch", "the number", lambda h, w, y: h * w[len(h) : len(h) + 3].sum(0), w=(50, 6))
case("columns up to the size", lambda h, w, y: h[:, : 2 * len(h)].sum(1) * w, w=())
refused("rows of a weight", "", lambda h, w, y: h * w[: len(h)].sum(0), w=(50, 6))
refused("a view across samples", "", lambda h, w, y: h.transpose(0, 1).reshape(len(h), -1).sum(0) * w.sum(), B)
refused("product of samples", "", lambda h, w, y: h.prod(0) * w)

# normalization
case("softmax", lambda h, w, y: (h * w).softmax(-1))
case("log_softmax", lambda h, w, y: (h * w).log_softmax(1))
case("layer_norm", lambda h, w, y: F.layer_norm(h, (6,), w, w * 2))
case("layer_norm plain", lambda h, w, y: F.layer_norm(h, (6,)) * w)
case("layer_norm dims", lambda h, w, y: F.layer_norm(h, (2, 3), w), 2, 3, w=(2, 3))
case("rms_norm", lambda h, w, y: F.rms_norm(h, (6,), w))
case("group_norm", lambda h, w, y: F.group_norm(h, 2, w, w), 6, 5)
case("batch_norm", lambda h, w, y: F.batch_norm(h, None, None, w, w * 2, True))
case("batch_norm 2d", lambda h, w, y: F.batch_norm(h, None, None, w, w * 2, True), 6, 2, 3)
case("batch_norm buffers", lambda h, w, y: F.batch_norm(h, torch.zeros(6).double(), torch.ones(6).double(), w, w, True))
case("batch_norm eval", lambda h, w, y: F.batch_norm(h, torch.zeros(6).double(), torch.ones(6).double(), w, w, False))
case("instance_norm", lambda h, w, y: F.instance_norm(h, None, None, w, w), 6, 5)
case("weight norm", lambda h, w, y: F.linear(h, torch._weight_norm(w, w.norm(dim=1, keepdim=True), 0)), w=(3, 6))
refused("layer_norm over samples", "", lambda h, w, y: F.layer_norm(h.t(), (len(h),)) * w.sum())

# products
case("linear", lambda h, w, y: F.linear(h, w, w.sum(1)), w=(3, 6))
case("linear 3d", lambda h, w, y: F.linear(h, w, w.sum(1)), 3, 6, w=(3, 6))
case("linear from the left", lambda h, w, y: w @ h, 6, 2, w=(3, 6))
case("mm of transposed", lambda h, w, y: w.mm(h.t()), w=(3, 6))
case("mv", lambda h, w, y: h.mv(w))
case("bmm", lambda h, w, y: torch.bmm(h, h.transpose(1, 2)) * w.sum(), 3, 2)
case("matmul", lambda h, w, y: h @ w, 3, 2, w=(2, 4))
case("matmul heads", lambda h, w, y: (h @ h.transpose(-1, -2)) @ h * w, 2, 3, 4, w=(4,))
case("baddbmm", lambda h, w, y: torch.baddbmm(w, h, h.transpose(1, 2), beta=2, alpha=0.5), 3, 2, w=(3, 3))
case("baddbmm samples", lambda h, w, y: torch.baddbmm(h, h, h.transpose(1, 2)) * w, 3, 3, w=(3,))
case("addmm", lambda h, w, y: torch.addmm(w.sum(0), h, w, beta=0.5, alpha=2), w=(6, 3))
case("einsum", lambda h, w, y: torch.einsum("bij,jk->bik", h, w), 3, 2, w=(2, 4))
case("einsum heads", lambda h, w, y: torch.einsum("bqhd,bkhd->bhqk", h, h * w), 3, 2, 4, w=(4,))
case("einsum over samples", lambda h, w, y: torch.einsum("bi,bj->ij", h, h).tanh() * w)
case("gram", lambda h, w, y: (h.t() @ h).tanh() * w)
case("gram per sample", lambda h, w, y: h @ (h.t() @ h) * w)
case("dot", lambda h, w, y: h[:, 0].dot(h[:, 1]).tanh() * w)
case("bilinear", lambda h, w, y: F.bilinear(h, h, w), w=(2, 6, 6))
refused("similarity of samples", "", lambda h, w, y: (h * w) @ h.t())
refused("contrastive", "", lambda h, w, y: F.cross_entropy(h @ (h * w).t(), torch.arange(len(h))))
refused("pairwise distances", "", lambda h, w, y: (h[:, None] - h[None]).square().sum(-1) * w.sum())
refused("cdist", "", lambda h, w, y: torch.cdist(h, h * w))

# convolutions, pooling, padding
case("conv1d", lambda h, w, y: F.conv1d(h, w, w.sum((1, 2)), padding=1), 3, 6, w=(2, 3, 3))
case("conv2d", lambda h, w, y: F.conv2d(h, w, w.sum((1, 2, 3)), stride=2), 3, 6, 5, w=(2, 3, 3, 3))
case("conv3d", lambda h, w, y: F.conv3d(h, w), 2, 4, 3, 4, w=(2, 2, 2, 2, 2))
case("conv_transpose2d", lambda h, w, y: F.conv_transpose2d(h, w), 3, 4, 4, w=(3, 2, 2, 2))
case("depthwise", lambda h, w, y: F.conv1d(h, w, groups=3), 3, 6, w=(3, 1, 2))
for _d, _sizes in enumerate([(8,), (6, 6), (4, 4, 4)], 1):
    for _name in ("avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool"):
        _f = getattr(F, f"{_name}{_d}d")
        case(f"{_name}{_d}d", lambda h, w, y, f=_f: f(h * w.sum(), 2), 2, *_sizes)
case("pad", lambda h, w, y: F.pad(h, (1, 2)) * w, w=(9,))
case("pad value", lambda h, w, y: F.pad(h, (1, 2), value=2.0) * w, w=(9,))
case("pad reflect", lambda h, w, y: F.pad(h, (1, 2), "reflect") * w, 2, 6, w=(9,))
case("interpolate", lambda h, w, y: F.interpolate(h, scale_factor=2) * w.sum(), 2, 3, 3)
case("interpolate bilinear", lambda h, w, y: F.interpolate(h, size=5, mode="bilinear") * w.sum(), 2, 3, 3)
case("pixel_shuffle", lambda h, w, y: F.pixel_shuffle(h, 2) * w.sum(), 4, 3, 3)
case("im2col", lambda h, w, y: F.unfold(h, 2) * w.sum(), 2, 3, 3)
case("glu", lambda h, w, y: F.glu(h) * w, w=(3,))
case("dropout 0", lambda h, w, y: F.dropout(h, 0.0) * w)

# indexing
case("embedding", lambda h, w, y: F.embedding(y, w) + h, w=(5, 6))
case("embedding padding", lambda h, w, y: F.embedding(y, w, padding_idx=1) + h, w=(5, 6))
case("embedding of words", lambda h, w, y: F.embedding(y, w).mean(1) * h, w=(5, 6), y=(3,))
case("index a weight", lambda h, w, y: w[y] * h, w=(5, 6))
case("index_select a weight", lambda h, w, y: w.index_select(0, y) * h, w=(5, 6))
case("index arange", lambda h, w, y: h[torch.arange(len(h)), y] * w, w=())
case("index arange 3d", lambda h, w, y: h[torch.arange(len(h)), y] * w, 5, 6)
case("index arange kept", lambda h, w, y: h[torch.arange(len(h)).unsqueeze(1), y] * w, 5, y=(3,), w=())
case("last token", lambda h, w, y: h[torch.arange(len(h)), (y > 0).sum(1)] * w, 5, 6, y=(3,))
case("index columns", lambda h, w, y: h[:, torch.tensor([0, 2])] * w, w=(2,))
case("index_select columns", lambda h, w, y: h.index_select(1, torch.tensor([0, 2])) * w, w=(2,))
case("gather", lambda h, w, y: h.gather(1, y) * w, y=(2,), w=())
case("take_along_dim", lambda h, w, y: h.take_along_dim(y[:, None], 1) * w, w=())
case("gather log prob", lambda h, w, y: -(h * w).log_softmax(-1).gather(-1, y[:, None]).mean())
case("scatter", lambda h, w, y: h.scatter(1, y, 0.5) * w, y=(2,))
case("scatter source", lambda h, w, y: torch.zeros_like(h).scatter(1, y[:, :1], h[:, :1]) * w, y=(2,))
case("scatter_add", lambda h, w, y: torch.zeros_like(h).scatter_add(1, y, h[:, :3]) * w, y=(3,))
case("scatter_add to classes", lambda h, w, y: w.new_zeros(5, 6).index_add(0, y, h).tanh() * w)
case("one_hot", lambda h, w, y: (F.one_hot(y, 5).double() @ w) * h, w=(5, 6))
case("index_put", lambda h, w, y: (h * 1).index_put((torch.arange(len(h)), y), w), w=())
case("masked assignment", lambda h, w, y: torch.where(y[:, None] > 1, h, w))
refused("lookup of samples", "by number", lambda h, w, y: h[y % 2] * w)
refused("gather of samples", "by number", lambda h, w, y: h.gather(0, y[:, None] % 2) * w.sum())
refused("boolean mask", "", lambda h, w, y: h[y > 1].sum() * w)
refused("permuted samples", "", lambda h, w, y: h[torch.randperm(len(h))] * h * w)

# joins
case("cat columns", lambda h, w, y: torch.cat([h, h * w], 1).tanh())
case("cat a weight", lambda h, w, y: torch.cat([h, w.expand(len(h), 6)], 1).tanh())
case("class token", lambda h, w, y: torch.cat([w.expand(len(h), 1, 6), h], 1).tanh(), 3, 6)
case("stack", lambda h, w, y: torch.stack([h, h * w], 1).tanh())
case("stack in front", lambda h, w, y: torch.stack([h, h * w]).tanh())
case("meshgrid of sums", lambda h, w, y: torch.stack([h.sum(), h.mean()]).prod() * w)
case("cat samples", lambda h, w, y: torch.cat([h, h * w]).tanh())
refused("cat samples with a weight", "", lambda h, w, y: torch.cat([w, h]).tanh(), w=(1, 6))

# masks and factories
case("arange", lambda h, w, y: h * w + torch.arange(6))
case("arange samples", lambda h, w, y: h * w + torch.arange(len(h))[:, None])
case("arange scaled", lambda h, w, y: h * w + torch.arange(2, 2 + 3 * len(h), 3)[:, None] * 2)
case("tril", lambda h, w, y: (h @ h.transpose(1, 2)).tril() * w.sum(), 3, 2)
case("causal mask", lambda h, w, y: h.masked_fill(torch.ones(3, 3).triu(1).bool(), -1e9).softmax(-1) * w, 3, 3, w=(3,))
case("full", lambda h, w, y: h * w + torch.full((len(h), 6), 0.5))
case("ones", lambda h, w, y: h * w + torch.ones(len(h), 1) + h.new_ones(len(h), 1) + torch.ones_like(h))
case("zeros", lambda h, w, y: h * w + torch.zeros(len(h), 6) + h.new_zeros(h.shape) + torch.zeros_like(h))
case("new_full", lambda h, w, y: torch.maximum(h * w, h.new_full((len(h), 6), 0.2)))
case("initial state", lambda h, w, y: _recurrent(h, w), 3, 2, w=(2, 2))
case("padding mask", lambda h, w, y: (h * (torch.arange(5)[None] < y[:, None])[..., None] * w).sum(1), 5, 6)
case("positions", lambda h, w, y: h + w[torch.arange(h.shape[1])], 3, 6, w=(5, 6))
case("linspace", lambda h, w, y: h * w * torch.linspace(0, 1, 6))
refused("linspace samples", "", lambda h, w, y: h * w * torch.linspace(0, 1, len(h))[:, None])
refused("eye samples", "", lambda h, w, y: torch.eye(len(h), dtype=h.dtype) @ h * w)
refused("uneven count", "", lambda h, w, y: (h * w).sum() + torch.ones(len(h) + 1).sum() * w.sum())


def _recurrent(h: Tensor, w: Tensor) -> Tensor:
    state = h.new_zeros(len(h), 2)
    for x in h.unbind(1):
        state = torch.tanh(x + state @ w)
    return state


# attention
case("attention", lambda h, w, y: F.scaled_dot_product_attention(h, h * w, h), 2, 3, 4, w=(4,))
case("attention causal", lambda h, w, y: F.scaled_dot_product_attention(h, h * w, h, is_causal=True), 2, 3, 4, w=(4,))
case(
    "attention masked",
    lambda h, w, y: F.scaled_dot_product_attention(h, h * w, h, (y > 0)[:, None, None] | torch.eye(3).bool()),
    2, 3, 4, w=(4,), y=(3,),
)  # fmt: skip
case(
    "attention with a mask for all",
    lambda h, w, y: F.scaled_dot_product_attention(h, h * w, h, torch.ones(3, 3).tril().bool()),
    2, 3, 4, w=(4,),
)  # fmt: skip
case(
    "attention by hand",
    lambda h, w, y: (h @ (h * w).mT / 2).masked_fill(torch.ones(3, 3).triu(1).bool(), -1e9).softmax(-1) @ h,
    3, 4, w=(4,),
)  # fmt: skip

# losses
case("cross_entropy", lambda h, w, y: F.cross_entropy(h * w, y))
case("cross_entropy sum", lambda h, w, y: F.cross_entropy(h * w, y, reduction="sum"))
case("cross_entropy none", lambda h, w, y: F.cross_entropy(h * w, y, reduction="none"))
case("cross_entropy ignored", lambda h, w, y: F.cross_entropy(h * w, y, ignore_index=1))
case("cross_entropy ignored sum", lambda h, w, y: F.cross_entropy(h * w, y, ignore_index=1, reduction="sum"))
case("cross_entropy smoothed", lambda h, w, y: F.cross_entropy(h * w, y, label_smoothing=0.1))
case("cross_entropy smoothed, ignored", lambda h, w, y: F.cross_entropy(h * w, y, label_smoothing=0.1, ignore_index=1))
_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0, 1.5], dtype=torch.double)
case("cross_entropy weighted", lambda h, w, y: F.cross_entropy(h * w, y, _WEIGHTS))
case("cross_entropy weighted, smoothed", lambda h, w, y: F.cross_entropy(h * w, y, _WEIGHTS, label_smoothing=0.1))
case(
    "cross_entropy of words",
    lambda h, w, y: F.cross_entropy((h * w).flatten(0, 1), y.flatten(), ignore_index=1),
    3,
    6,
    y=(3,),
)
case("cross_entropy of images", lambda h, w, y: F.cross_entropy(h * w, y, ignore_index=1), 6, 2, 3, y=(2, 3), w=(2, 3))
case(
    "cross_entropy shifted",
    lambda h, w, y: F.cross_entropy((h * w)[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    3,
    6,
    y=(3,),
)
case("cross_entropy of probabilities", lambda h, w, y: F.cross_entropy(h * w, h.detach().softmax(1)))
case("nll_loss", lambda h, w, y: F.nll_loss((h * w).log_softmax(1), y))
case(
    "nll_loss times",
    lambda h, w, y: (
        F.nll_loss((h * w).log_softmax(1), y) * 3 + F.nll_loss(h.log_softmax(1), y, reduction="sum") / len(h)
    ),
)
for _reduction in ("mean", "sum", "none"):
    for _name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        _f = getattr(F, _name)
        case(
            f"{_name} {_reduction}",
            lambda h, w, y, f=_f, r=_reduction: f(h * w, y[:, None].double().expand_as(h), reduction=r),
        )
    case(
        f"bce {_reduction}",
        lambda h, w, y, r=_reduction: F.binary_cross_entropy((h * w).sigmoid(), (h > 0).double(), reduction=r),
    )
    case(
        f"bce_with_logits {_reduction}",
        lambda h, w, y, r=_reduction: F.binary_cross_entropy_with_logits(h * w, (h > 0).double(), reduction=r),
    )
    if _reduction != "mean":  # deprecated
        case(
            f"kl_div {_reduction}",
            lambda h, w, y, r=_reduction: F.kl_div((h * w).log_softmax(1), h.detach().softmax(1), reduction=r),
        )
case("kl_div batchmean", lambda h, w, y: F.kl_div((h * w).log_softmax(1), h.detach().softmax(1), reduction="batchmean"))
case("bce weighted", lambda h, w, y: F.binary_cross_entropy_with_logits(h * w, (h > 0).double(), pos_weight=_WEIGHTS))
case("triplet", lambda h, w, y: F.triplet_margin_loss(h, h * w, h.detach() * 2))
case("cosine", lambda h, w, y: F.cosine_similarity(h, h * w))
case("cosine loss", lambda h, w, y: F.cosine_embedding_loss(h, h * w, y.sign() * 2 - 1))
case("regularised", lambda h, w, y: F.cross_entropy(h * w, y) + 0.1 * w.square().sum())
case("sum regularised", lambda h, w, y: (h * w).square().sum() + 0.1 * w.square().sum())
case("sum and mean losses", lambda h, w, y: (h * w).square().sum() + (h * w).mean() + w.sum())
case("mean and ignored", lambda h, w, y: (h * w).mean() + F.cross_entropy(h * w, y, ignore_index=1))
