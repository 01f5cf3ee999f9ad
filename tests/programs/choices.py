"""What a random program may do next: each function picks operands and arguments of one family of operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from programs.generate import CHOICES, Writer, is_integral, volume
from programs.program import Var

Choice = tuple[str, tuple[Any, ...], dict[str, Any]] | None


def choice(weight: int) -> Callable[[Callable[[Writer], Choice]], Callable[[Writer], Choice]]:
    """Add a family, `weight` times."""

    def add(f: Callable[[Writer], Choice]) -> Callable[[Writer], Choice]:
        CHOICES.extend([f] * weight)
        return f

    return add


@choice(3)
def unary(w: Writer) -> Choice:
    exact = ["neg", "abs", "square", "clone", "relu", "positive", "detach"]
    smooth = ["tanh", "sigmoid", "sin", "exp", "erf", "atan", "expm1"]
    name = w.rng.choice(exact + smooth)
    return f"torch.{name}", (w.floats(),), {}


@choice(1)
def activation(w: Writer) -> Choice:
    name = w.rng.choice(["gelu", "silu", "elu", "softplus", "leaky_relu", "hardtanh", "relu6", "mish", "logsigmoid"])
    return f"F.{name}", (w.floats(),), {}


@choice(1)
def jumping(w: Writer) -> Choice:
    name = w.rng.choice(["sign", "floor", "ceil", "round", "trunc", "logical_not", "isnan", "isfinite", "signbit"])
    return f"torch.{name}", (w.exact(),), {}


@choice(5)
def binary(w: Writer) -> Choice:
    x = w.floats()
    name = w.rng.choice(["add", "sub", "mul", "add", "sub", "mul", "maximum", "minimum", "hypot", "atan2", "rsub"])
    pair = [x, w.broadcastable(x)]
    w.rng.shuffle(pair)
    if name in ("add", "sub") and w.rng.random() < 0.3:
        return f"torch.{name}", tuple(pair), {"alpha": w.rng.choice([2, -1, 0.5])}
    return f"torch.{name}", tuple(pair), {}


@choice(1)
def division(w: Writer) -> Choice:
    x = w.floats()
    return "torch.div", (x, w.broadcastable(x, "positive")), {}


@choice(1)
def jumping_division(w: Writer) -> Choice:
    x = w.exact()
    if not w.value(x).is_floating_point():
        return None
    y = w.broadcastable(x, "positive")
    return w.rng.choice(
        [
            ("torch.div", (x, y), {"rounding_mode": w.rng.choice(["floor", "trunc"])}),
            ("torch.remainder", (x, y), {}),
            ("torch.fmod", (x, y), {}),
            ("torch.floor_divide", (x, y), {}),
        ]
    )


@choice(2)
def scalars(w: Writer) -> Choice:
    x, scalar = w.floats(), w.rng.choice([2, -1, 0.5, 3.0, 0, True])
    name = w.rng.choice(["add", "sub", "mul", "truediv", "pow"])
    if name == "pow":
        return "torch.pow", (x, w.rng.choice([2, 3, 1, 0])), {}
    if name == "truediv":
        return "operator.truediv", (x, scalar or 2), {}
    pair = (x, scalar) if w.flag() else (scalar, x)
    return f"operator.{name}", pair, {}


@choice(2)
def compare(w: Writer) -> Choice:
    x = w.exact()
    if w.value(x).dtype == torch.bool:
        return None
    y: Any = w.rng.choice([0, 1, 1.5]) if w.rng.random() < 0.3 else w.broadcastable(x)
    if isinstance(y, Var) and not is_integral(w.value(y)):
        return None
    return f"torch.{w.rng.choice(['eq', 'ne', 'lt', 'le', 'gt', 'ge'])}", (x, y), {}


@choice(2)
def ternary(w: Writer) -> Choice:
    x = w.floats()
    name = w.rng.choice(
        ["where", "where scalar", "addcmul", "lerp", "clamp", "clamp tensors", "masked_fill", "lerp scalar"]
    )
    if name == "where":
        return "torch.where", (w.broadcastable(x, "bool"), x, w.broadcastable(x)), {}
    if name == "where scalar":
        return "torch.where", (w.broadcastable(x, "bool"), x, 0.0), {}
    if name == "addcmul":
        return "torch.addcmul", (x, w.broadcastable(x), w.broadcastable(x)), {"value": 2}
    if name == "lerp":
        return "torch.lerp", (x, w.broadcastable(x), w.broadcastable(x)), {}
    if name == "lerp scalar":
        return "torch.lerp", (x, w.broadcastable(x), 0.5), {}
    if name == "clamp":
        return "torch.clamp", (x, -1, 2), {}
    if name == "clamp tensors":
        return "torch.clamp", (x,), {"min": w.broadcastable(x, inside=True)}
    return "torch.masked_fill", (x, w.broadcastable(x, "bool"), 3.0), {}


@choice(4)
def in_place(w: Writer) -> Choice:
    x = w.writable()
    if x is None:
        return None
    name = w.rng.choice(
        [
            "add_",
            "sub_",
            "mul_",
            "copy_",
            "clamp_",
            "zero_",
            "fill_",
            "neg_",
            "masked_fill_",
            "relu_",
            "iadd",
            "sqrt",
            "addcmul_",
        ]
    )
    y = w.broadcastable(x, inside=True)
    if name in ("add_", "sub_", "mul_", "copy_"):
        return f"Tensor.{name}", (x, y), {}
    if name == "iadd":
        return w.rng.choice(["operator.iadd", "operator.imul", "operator.isub"]), (x, w.rng.choice([y, 2.0])), {}
    if name == "addcmul_":
        return "Tensor.addcmul_", (x, y, w.broadcastable(x, inside=True)), {}
    if name == "clamp_":
        return "Tensor.clamp_", (x, -2, 2), {}
    if name == "fill_":
        return "Tensor.fill_", (x, 2.0), {}
    if name == "masked_fill_":
        return "Tensor.masked_fill_", (x, w.broadcastable(x, "bool", inside=True), -1.0), {}
    return (f"Tensor.{name}" if name != "sqrt" else "Tensor.abs_"), (x,), {}


@choice(1)
def out(w: Writer) -> Choice:
    x = w.like(w.shape(), dtype=w.float)
    y = w.like(tuple(w.value(x).shape), dtype=w.float)
    name = w.rng.choice(["add", "mul", "maximum", "neg", "sum", "matmul"])
    if name == "neg":
        return "torch.neg", (x,), {"out": w.input(tuple(w.value(x).shape), grad=False)}
    if name == "sum":
        if not w.value(x).dim():
            return None
        dim = w.dim(x)
        shape = tuple(w.value(x).sum(dim).shape)
        return "torch.sum", (x, dim), {"out": w.input(shape, grad=False)}
    if name == "matmul":
        x, y = w.input((3, 4)), w.input((4, 2))
        return "torch.matmul", (x, y), {"out": w.input((3, 2), grad=False)}
    return f"torch.{name}", (x, y), {"out": w.input(tuple(w.value(x).shape), grad=False)}


@choice(5)
def views(w: Writer) -> Choice:
    x = w.any(high=4)
    t = w.value(x)
    n = t.dim()
    name = w.rng.choice(
        [
            "transpose",
            "permute",
            "unsqueeze",
            "squeeze",
            "squeeze dim",
            "narrow",
            "select",
            "view",
            "reshape",
            "flatten",
            "expand",
            "movedim",
            "unflatten",
            "t",
            "diagonal",
            "broadcast_to",
            "mT",
            "unbind",
            "view_as",
            "ravel",
            "swapaxes",
        ]
    )
    if name == "unsqueeze":
        return "torch.unsqueeze", (x, w.rng.randrange(-n - 1, n + 1)), {}
    if name == "squeeze":
        return "torch.squeeze", (x,), {}
    if name in ("flatten", "ravel"):
        if name == "flatten" and n > 1 and w.flag():
            start = w.rng.randrange(n - 1)
            return "torch.flatten", (x, start, w.rng.randrange(start, n)), {}
        return f"torch.{name}", (x,), {}
    if name in ("expand", "broadcast_to"):
        shape = tuple(w.rng.choice([2, 3]) if size == 1 and w.flag() else size for size in t.shape)
        shape = (2, *shape) if w.rng.random() < 0.3 else shape
        return ("Tensor.expand" if name == "expand" else "torch.broadcast_to"), (x, shape), {}
    if name in ("view", "reshape", "view_as"):
        shape = _refactor(w, tuple(t.shape))
        if name == "view_as":
            return "Tensor.view_as", (x, w.input(shape)), {}
        return f"Tensor.{name}", (x, _with_hole(w, shape)), {}
    if not n:
        return None
    if name in ("transpose", "swapaxes"):
        return f"torch.{name}", (x, w.dim(x), w.dim(x)), {}
    if name == "permute":
        dims = list(range(n))
        w.rng.shuffle(dims)
        return "torch.permute", (x, tuple(dims)), {}
    if name == "squeeze dim":
        return "torch.squeeze", (x, w.dim(x)), {}
    if name == "narrow":
        dim = w.dim(x)
        start = w.rng.randint(0, t.shape[dim])
        return "torch.narrow", (x, dim, start, w.rng.randint(0, t.shape[dim] - start)), {}
    if name == "select":
        dim = w.dim(x)
        return "torch.select", (x, dim, w.rng.randrange(-max(1, t.shape[dim]), max(1, t.shape[dim]))), {}
    if name == "movedim":
        return "torch.movedim", (x, w.dim(x), w.dim(x)), {}
    if name == "unflatten":
        dim = w.dim(x)
        return "torch.unflatten", (x, dim, w.rng.choice([(-1, 2), (2, -1), (1, -1), (-1, 1)])), {}
    if name == "t" and n <= 2:
        return "torch.t", (x,), {}
    if name == "mT" and n >= 2:
        return "torch.adjoint" if w.rng.random() < 0.1 else "torch.transpose", (x, -1, -2), {}
    if name == "diagonal" and n >= 2:
        return "torch.diagonal", (x, w.rng.choice([0, 1, -1])), {}
    if name == "unbind" and t.shape[0] <= 5:
        return "torch.unbind", (x,), {}
    return None


def _refactor(w: Writer, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape of as many elements."""
    total = volume(shape)
    if w.rng.random() < 0.5 and len(shape) > 1:  # join two neighbours
        i = w.rng.randrange(len(shape) - 1)
        return (*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :])
    if w.rng.random() < 0.5 and shape:  # take one apart
        i = w.rng.randrange(len(shape))
        factors = [k for k in range(1, shape[i] + 1) if shape[i] % k == 0] or [1]
        k = w.rng.choice(factors)
        return (*shape[:i], shape[i] // k, k, *shape[i + 1 :]) if shape[i] else (*shape, 1)
    factors = [k for k in range(1, total + 1) if total % k == 0] if total else [0, 1, 3]
    k = w.rng.choice(factors)
    return (k, total // k) if total else (k, 0)


def _with_hole(w: Writer, shape: tuple[int, ...]) -> tuple[int, ...]:
    if shape and w.rng.random() < 0.4 and 0 not in shape:
        i = w.rng.randrange(len(shape))
        return (*shape[:i], -1, *shape[i + 1 :])
    return shape


def _index(w: Writer, shape: tuple[int, ...]) -> Any:
    entries: list[Any] = []
    for size in shape:
        kind = w.rng.random()
        if kind < 0.35:
            start = w.rng.choice([None, 0, 1, -1, w.rng.randint(0, max(size, 1))])
            stop = w.rng.choice([None, None, size, -1, w.rng.randint(0, max(size, 1))])
            entries.append(slice(start, stop, w.rng.choice([None, None, 1, 2])))
        elif kind < 0.55:
            entries.append(w.rng.randrange(-max(1, size), max(1, size)))
        elif kind < 0.65:
            entries += [None, slice(None)]
        elif kind < 0.75 and size:
            entries.append([w.rng.randrange(-size, size) for _ in range(w.rng.randint(0, 3))])
        elif kind < 0.82 and size:
            entries.append(w.input((w.rng.randint(0, 3),), f"ids:{size}"))
        elif kind < 0.88:
            entries.append(w.input((size,), "bool"))
        else:
            entries.append(slice(None))
    if entries and w.rng.random() < 0.3:
        entries[w.rng.randrange(len(entries))] = Ellipsis
        if entries.count(Ellipsis) > 1:
            return slice(None)
    entries = entries[: w.rng.randint(0, len(entries))] if w.rng.random() < 0.3 else entries
    if len(entries) == 1 and w.flag():
        return entries[0]
    return tuple(entries)


@choice(4)
def getitem(w: Writer) -> Choice:
    x = w.any(low=1)
    return "operator.getitem", (x, _index(w, tuple(w.value(x).shape))), {}


@choice(3)
def setitem(w: Writer) -> Choice:
    x = w.writable()
    if x is None or not w.value(x).dim():
        return None
    at = _index(w, tuple(w.value(x).shape))
    try:
        from programs.program import substitute

        shape = tuple(w.value(x).detach()[substitute(at, w.env)].shape)
    except Exception:
        return None
    value: Any = w.rng.choice([0.0, 5])
    if w.rng.random() < 0.6:
        value = w.like(tuple(1 if w.rng.random() < 0.2 else size for size in shape), dtype=w.float)
    return "put", (x, at, value), {}


@choice(5)
def reductions(w: Writer) -> Choice:
    x = w.floats()
    n = w.value(x).dim()
    name = w.rng.choice(
        ["sum", "sum", "mean", "amax", "amin", "prod", "logsumexp", "var", "std", "norm", "nansum", "var_mean"]
    )
    kwargs: dict[str, Any] = {}
    if n and w.rng.random() < 0.75:
        kwargs["dim"] = w.dim(x)
        if n > 1 and name != "prod" and w.rng.random() < 0.3:
            kwargs["dim"] = tuple(w.rng.sample(range(n), 2))
        kwargs["keepdim"] = w.flag()
    elif name == "logsumexp":
        kwargs["dim"] = 0
    if name in ("var", "std", "var_mean") and w.flag():
        kwargs["correction"] = w.rng.choice([0, 1])
    if name == "norm":
        return "torch.linalg.vector_norm", (x, w.rng.choice([2, 1, float("inf"), 3])), kwargs
    return f"torch.{name}", (x,), kwargs


@choice(2)
def extremes(w: Writer) -> Choice:
    x = w.exact()
    if w.value(x).dtype == torch.bool:
        return None
    name = w.rng.choice(
        ["max", "min", "argmax", "argmin", "any", "all", "count_nonzero", "max", "min", "median", "aminmax"]
    )
    if name == "median" or (w.value(x).dim() and w.rng.random() < 0.7):
        if name == "aminmax":
            return "torch.aminmax", (x,), {"dim": w.dim(x)}
        return f"torch.{name}", (x, w.dim(x)), {}
    return f"torch.{name}", (x,), {}


@choice(2)
def scans(w: Writer) -> Choice:
    x = w.floats()
    name = w.rng.choice(["cumsum", "cumsum", "cumprod", "logcumsumexp"])
    return f"torch.{name}", (x, w.dim(x)), {}


@choice(1)
def jumping_scans(w: Writer) -> Choice:
    x = w.exact()
    if w.value(x).dtype == torch.bool:
        return None
    return f"torch.{w.rng.choice(['cummax', 'cummin'])}", (x, w.dim(x)), {}


@choice(2)
def sorts(w: Writer) -> Choice:
    x = w.input(w.shape(1), "distinct")
    name = w.rng.choice(["sort", "topk", "argsort", "kthvalue", "msort"])
    dim = w.dim(x)
    size = w.value(x).shape[dim]
    if name == "topk":
        return "torch.topk", (x, w.rng.randint(0, size), dim), {"largest": w.flag()}
    if name == "kthvalue":
        return "torch.kthvalue", (x, w.rng.randint(1, max(1, size)), dim), {}
    if name == "msort":
        return "torch.msort", (x,), {}
    return f"torch.{name}", (x, dim, w.flag()), {}


@choice(5)
def products(w: Writer) -> Choice:
    name = w.rng.choice(
        [
            "matmul",
            "matmul",
            "mm",
            "bmm",
            "linear",
            "linear",
            "addmm",
            "baddbmm",
            "mv",
            "dot",
            "outer",
            "einsum",
            "einsum",
            "tensordot",
            "bilinear",
        ]
    )
    size = lambda: w.rng.choice([0, 1, 2, 3, 4, 5])  # noqa: E731
    n, m, k, b = size(), size(), size(), w.rng.choice([1, 2, 3])
    if name == "matmul":
        x = w.floats(1)
        last = w.value(x).shape[-1]
        lead = tuple(w.value(x).shape[:-2])
        return (
            "torch.matmul",
            (x, w.like(w.rng.choice([(last,), (last, m), (last, m), (*lead, last, m), (b, last, m)]))),
            {},
        )
    if name == "linear":
        x = w.floats(1)
        last = w.value(x).shape[-1]
        bias = w.rng.choice([None, w.input((m,))])
        return "F.linear", (x, w.like((m, last)), bias), {}
    if name == "mm":
        return "torch.mm", (w.like((n, k)), w.like((k, m))), {}
    if name == "bmm":
        return "torch.bmm", (w.like((b, n, k)), w.like((b, k, m))), {}
    if name == "addmm":
        c = w.like(w.rng.choice([(n, m), (m,), (1, m), (n, 1)]))
        return "torch.addmm", (c, w.like((n, k)), w.like((k, m))), {"beta": 2, "alpha": 3}
    if name == "baddbmm":
        return (
            "torch.baddbmm",
            (w.like(w.rng.choice([(b, n, m), (n, m), (b, 1, m)])), w.like((b, n, k)), w.like((b, k, m))),
            {},
        )
    if name == "mv":
        return "torch.mv", (w.like((n, k)), w.like((k,))), {}
    if name == "dot":
        return "torch.dot", (w.like((k,)), w.like((k,))), {}
    if name == "outer":
        return "torch.outer", (w.like((n,)), w.like((m,))), {}
    if name == "tensordot":
        return "torch.tensordot", (w.like((b, n, k)), w.like((k, n, m))), {"dims": ([2, 1], [0, 1])}
    if name == "bilinear":
        return None
    text, shapes = w.rng.choice(
        [
            ("ij,jk->ik", ((n, k), (k, m))),
            ("bij,bjk->bik", ((b, n, k), (b, k, m))),
            ("bij,jk->bki", ((b, n, k), (k, m))),
            ("ij,ij->i", ((n, k), (n, k))),
            ("ij->ji", ((n, k),)),
            ("ij->j", ((n, k),)),
            ("i,j->ij", ((n,), (m,))),
            ("ij,kj,kl->il", ((n, k), (m, k), (m, b))),
            ("ii->i", ((n, n),)),
            ("...ij,jk->...ik", ((b, n, k), (k, m))),
        ]
    )
    return "torch.einsum", (text, *(w.like(shape) for shape in shapes)), {}


@choice(3)
def normalizations(w: Writer) -> Choice:
    x = w.floats(1)
    shape = tuple(w.value(x).shape)
    name = w.rng.choice(
        ["softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm", "normalize", "softmin", "batch_norm"]
    )
    if name in ("softmax", "log_softmax", "softmin"):
        return f"F.{name}", (x,), {"dim": w.dim(x)}
    if name == "normalize":
        return "F.normalize", (x,), {"dim": w.dim(x)}
    if name == "batch_norm":
        y = w.like(w.rng.choice([(4, 3), (3, 2, 4), (5, 2)]))
        channels = (w.value(y).shape[1],)
        return "F.batch_norm", (y, None, None, w.input(channels), w.input(channels), True), {}
    if name == "group_norm":
        y = w.like(w.rng.choice([(2, 4, 3), (3, 4), (1, 6, 2)]))
        channels = (w.value(y).shape[1],)
        return "F.group_norm", (y, 2, w.input(channels), w.input(channels)), {}
    last = shape[-w.rng.randint(1, len(shape)) :]
    weight = w.rng.choice([None, w.like(last)])
    if name == "layer_norm":
        return "F.layer_norm", (x, last, weight, w.rng.choice([None, w.like(last)])), {}
    return "F.rms_norm", (x, last, weight), {}


@choice(3)
def joining(w: Writer) -> Choice:
    x = w.any(low=1)
    t = w.value(x)
    shape, dim = list(t.shape), w.dim(x)
    kind = "bool" if t.dtype == torch.bool else "int"
    name = w.rng.choice(["cat", "cat", "stack", "hstack", "vstack"])
    if name == "cat":
        other = shape.copy()
        other[dim] = w.rng.choice([0, 1, 2, 3])
        parts = [x, w.like(tuple(other), kind)] + ([x] if w.rng.random() < 0.2 else [])
        w.rng.shuffle(parts)
        return "torch.cat", (parts, dim), {}
    y = w.like(tuple(shape), kind)
    return (f"torch.{name}", ([x, y], dim), {}) if name == "stack" else (f"torch.{name}", ([x, y],), {})


@choice(3)
def pieces(w: Writer) -> Choice:
    x = w.any(low=1)
    t, dim = w.value(x), w.dim(x)
    size = t.shape[dim]
    name = w.rng.choice(
        [
            "split",
            "split sizes",
            "chunk",
            "tensor_split",
            "repeat",
            "tile",
            "repeat_interleave",
            "flip",
            "roll",
            "tril",
            "pad",
            "diff",
            "unfold",
        ]
    )
    if name == "split":
        return "torch.split", (x, w.rng.randint(1, 3), dim), {}
    if name == "split sizes":
        at = w.rng.randint(0, size)
        return "torch.split", (x, [at, size - at], dim), {}
    if name in ("chunk", "tensor_split"):
        return f"torch.{name}", (x, w.rng.randint(1, 4), dim), {}
    if name in ("repeat", "tile"):
        repeats = tuple(w.rng.choice([1, 1, 2, 0]) for _ in t.shape)
        return ("Tensor.repeat" if name == "repeat" else "torch.tile"), (x, repeats), {}
    if name == "repeat_interleave":
        return "torch.repeat_interleave", (x, 2, dim), {}
    if name == "flip":
        return "torch.flip", (x, [dim]), {}
    if name == "roll":
        return "torch.roll", (x, w.rng.choice([1, -1, 2]), dim), {}
    if name == "tril" and t.dim() >= 2:
        return w.rng.choice(["torch.tril", "torch.triu"]), (x, w.rng.choice([0, 1, -1])), {}
    if name == "pad":
        return "F.pad", (x, w.rng.choice([(1, 0), (0, 2), (1, 1)])), {}
    if name == "diff" and t.dtype != torch.bool:
        return "torch.diff", (x,), {"dim": dim}
    if name == "unfold" and size >= 2:
        return "Tensor.unfold", (x, dim, 2, w.rng.choice([1, 2])), {}
    return None


def _ids(w: Writer, shape: tuple[int, ...], size: int) -> Var | None:
    return w.input(shape, f"ids:{size}") if size else None


@choice(4)
def by_index(w: Writer) -> Choice:
    x = w.floats(1)
    t, dim = w.value(x), w.dim(x)
    size = t.shape[dim]
    name = w.rng.choice(
        [
            "gather",
            "scatter",
            "scatter value",
            "scatter_add",
            "index_select",
            "index_add",
            "index_fill",
            "take_along_dim",
            "take",
            "index_put",
            "index_copy",
            "scatter_reduce",
        ]
    )
    if name in ("gather", "scatter", "scatter value", "scatter_add", "scatter_reduce"):
        shape = tuple(
            w.rng.randint(0, n) if i != dim % t.dim() else w.rng.randint(0, size) for i, n in enumerate(t.shape)
        )
        if name in ("scatter", "scatter value"):  # no two alike, for the last of them is not defined
            shape = tuple(min(1, n) if i == dim % t.dim() else n for i, n in enumerate(shape))
        at = _ids(w, shape, size)
        if at is None:
            return None
        if name == "gather":
            return "torch.gather", (x, dim, at), {}
        if name == "scatter value":
            return "torch.scatter", (x, dim, at, 5.0), {}
        if name == "scatter_reduce":
            return (
                "torch.scatter_reduce",
                (x, dim, at, w.input(shape, dtype=t.dtype)),
                {"reduce": w.rng.choice(["sum", "amax"])},
            )
        return f"torch.{name}", (x, dim, at, w.input(shape, dtype=t.dtype)), {}
    if name == "take":
        at = _ids(w, w.shape(), t.numel())
        return ("torch.take", (x, at), {}) if at is not None else None
    count = w.rng.randint(0, 3)
    at = _ids(w, (count,), size)
    if at is None:
        return None
    if name == "index_select":
        return "torch.index_select", (x, dim, at), {}
    if name == "take_along_dim":
        shape = tuple(1 if i != dim % t.dim() else count for i in range(t.dim()))
        return "torch.take_along_dim", (x, w.input(shape, f"ids:{size}"), dim), {}
    if name == "index_fill":
        return "torch.index_fill", (x, dim, at, 2.0), {}
    shape = tuple(count if i == dim % t.dim() else n for i, n in enumerate(t.shape))
    if name == "index_copy":
        if count > 1:
            return None
        return "torch.index_copy", (x, dim, at, w.input(shape, dtype=t.dtype)), {}
    if name == "index_add":
        return "torch.index_add", (x, dim, at, w.input(shape, dtype=t.dtype)), {"alpha": w.rng.choice([1, 2])}
    if t.shape[0]:
        return (
            "torch.index_put",
            (x, (w.input((count,), f"ids:{t.shape[0]}"),), w.input((count, *t.shape[1:]), dtype=t.dtype), True),
            {},
        )
    return None


@choice(1)
def by_mask(w: Writer) -> Choice:
    x = w.floats(1)
    mask = w.input(tuple(w.value(x).shape), "bool")
    return w.rng.choice(
        [
            ("torch.masked_select", (x, mask), {}),
            ("operator.getitem", (x, mask), {}),
            ("torch.nonzero", (mask,), {}),
            ("torch.masked_scatter", (x, mask, w.input(tuple(w.value(x).shape), dtype=w.value(x).dtype)), {}),
        ]
    )


@choice(2)
def lookups(w: Writer) -> Choice:
    rows, width = w.rng.choice([1, 3, 5, 8]), w.rng.choice([0, 1, 2, 4])
    ids = w.input(w.shape(0, 2), f"ids:{rows}")
    if w.rng.random() < 0.3:
        return "F.one_hot", (ids, rows), {}
    kwargs = {"padding_idx": w.rng.randrange(rows)} if w.rng.random() < 0.4 else {}
    return "F.embedding", (ids, w.input((rows, width))), kwargs


@choice(3)
def losses(w: Writer) -> Choice:
    name = w.rng.choice(
        [
            "cross_entropy",
            "cross_entropy",
            "nll_loss",
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "binary_cross_entropy_with_logits",
            "kl_div",
        ]
    )
    reduction = w.rng.choice(["mean", "sum", "none"])
    if name in ("cross_entropy", "nll_loss"):
        batch, classes = w.rng.choice([0, 1, 3, 4, 5]), w.rng.choice([1, 2, 3, 5])
        tail = w.rng.choice([(), (), (2,)])
        x, y = w.input((batch, classes, *tail)), w.input((batch, *tail), f"ids:{classes}")
        kwargs: dict[str, Any] = {"reduction": reduction}
        if w.rng.random() < 0.3:
            kwargs["weight"] = w.input((classes,), "positive", grad=False)
        if w.rng.random() < 0.3:
            kwargs["ignore_index"] = w.rng.randrange(classes)
        if name == "cross_entropy" and w.rng.random() < 0.3:
            kwargs["label_smoothing"] = 0.25
        return f"F.{name}", (x, y), kwargs
    x = w.floats()
    y = w.input(tuple(w.value(x).shape), "unit", dtype=w.value(x).dtype, grad=False)
    return f"F.{name}", (x, y), {"reduction": reduction}


@choice(1)
def attention(w: Writer) -> Choice:
    b, h, s, t, d = (w.rng.choice(sizes) for sizes in ([1, 2], [1, 2, 4], [1, 3, 4], [1, 3, 4], [2, 4]))
    causal = w.rng.random() < 0.4
    t = s if causal else t
    q, k, v = w.input((b, h, s, d)), w.input((b, h, t, d)), w.input((b, h, t, d))
    kwargs: dict[str, Any] = {"is_causal": causal}
    if not causal and w.rng.random() < 0.4:
        kwargs["attn_mask"] = w.input(w.rng.choice([(s, t), (b, 1, s, t), (b, h, s, t)]), "int", grad=False)
    return "F.scaled_dot_product_attention", (q, k, v), kwargs


@choice(1)
def convolution(w: Writer) -> Choice:
    if w.flag():
        return (
            "F.conv1d",
            (w.input((w.rng.choice([1, 2, 3]), 2, 5)), w.input((4, 2, 2)), w.rng.choice([None, w.input((4,))])),
            {"padding": w.rng.choice([0, 1])},
        )
    return "F.conv2d", (w.input((2, 2, 4, 4)), w.input((3, 2, 2, 2))), {"stride": w.rng.choice([1, 2])}


@choice(2)
def casts(w: Writer) -> Choice:
    x = w.exact()
    dtype = w.rng.choice([torch.float32, torch.float64, torch.int64, torch.int32, torch.bool])
    return "Tensor.to", (x, dtype), {}


@choice(1)
def randomness(w: Writer) -> Choice:
    x = w.floats()
    name = w.rng.choice(["dropout", "rand_like", "bernoulli", "randn_like", "normal_", "uniform_"])
    if name == "dropout":
        return "F.dropout", (x, 0.5), {}
    if name == "bernoulli":
        return "torch.bernoulli", (w.input(w.shape(), "unit", grad=False),), {}
    if name in ("normal_", "uniform_"):
        y = w.writable()
        return (f"Tensor.{name}", (y,), {}) if y is not None else None
    return f"torch.{name}", (x,), {}


@choice(5)
def relayout(w: Writer) -> Choice:
    x = w.any()
    shape = tuple(w.value(x).shape)
    spec = w.spec(shape, partial=False)
    if w.rng.random() < 0.3 and x.name not in w.viewed and x.name not in w.frozen:
        return "reshard_", (x, spec), {}
    return "reshard", (x, spec), {}


@choice(1)
def answers(w: Writer) -> Choice:
    x = w.exact()
    name = w.rng.choice(["equal", "allclose", "item", "numel", "size", "tolist"])
    if name in ("equal", "allclose"):
        y = w.like(tuple(w.value(x).shape), dtype=w.value(x).dtype if w.value(x).dtype != torch.bool else None)
        return f"torch.{name}", (x, y), {}
    if name == "item" and w.value(x).numel() != 1:
        return None
    return f"Tensor.{name}", (x,), {}


assert math.pi
