"""What programs of half precision do: conversions to and fro, and what sends or sums in the dtype of its operands."""

from __future__ import annotations

import torch

from programs.choices import Choice
from programs.generate import OF_HALVES, Writer
from programs.program import Var

HALF = (torch.bfloat16, torch.float16)


def _half(w: Writer, low: int = 0) -> Var | None:
    return w.pick(lambda x: x.dtype in HALF and x.dim() >= low)


def _beside(w: Writer, x: Var) -> Var:
    """A variable that broadcasts with `x`, of its dtype or a wider one."""
    return w.broadcastable(x, dtype=w.rng.choice([w.value(x).dtype, w.value(x).dtype, w.float]))


def narrowed(w: Writer) -> Choice:
    x = w.floats(high=4)
    return "Tensor.to", (x, w.rng.choice(HALF)), {}


def widened(w: Writer) -> Choice:
    x = _half(w)
    return None if x is None else ("Tensor.to", (x, w.rng.choice([torch.float32, torch.float64])), {})


def summed(w: Writer) -> Choice:
    x = _half(w)
    if x is None:
        return None
    name = w.rng.choice(["sum", "mean", "nansum", "amax", "sum", "logsumexp", "linalg.vector_norm", "var"])
    if name == "var" or (name == "amax" and not w.value(x).numel()):
        name = "sum"
    if name == "logsumexp":
        return ("torch.logsumexp", (x, w.dim(x)), {}) if w.value(x).dim() else None
    if name == "linalg.vector_norm" or not w.value(x).dim() or w.flag():
        return f"torch.{name}", (x,), {}
    return f"torch.{name}", (x, w.dim(x)), {"keepdim": w.flag()}


def met(w: Writer) -> Choice:
    x = _half(w)
    if x is None:
        return None
    pair = [x, _beside(w, x)]
    w.rng.shuffle(pair)
    return f"torch.{w.rng.choice(['add', 'mul', 'sub', 'maximum'])}", tuple(pair), {}


def multiplied(w: Writer) -> Choice:
    x = _half(w, 2)
    if x is None:
        return None
    shape, dtype = tuple(w.value(x).shape), w.value(x).dtype
    if w.flag():
        return "F.linear", (x, w.input((3, shape[-1]), dtype=dtype), w.input((3,), dtype=dtype)), {}
    return "torch.matmul", (x, w.input((shape[-1], 2), dtype=dtype)), {}


def smoothed(w: Writer) -> Choice:
    x = _half(w, 1)
    if x is None:
        return None
    name = w.rng.choice(["softmax", "log_softmax", "cumsum", "gelu", "relu", "softplus", "normalize"])
    if name in ("gelu", "relu", "softplus"):
        return f"F.{name}", (x,), {}
    if name == "normalize":
        return "F.normalize", (x,), {"dim": w.dim(x)}
    return f"torch.{name}", (x, w.dim(x)), {}


for _family in (narrowed, narrowed, widened, summed, summed, met, met, multiplied, smoothed):
    OF_HALVES.append(_family)
