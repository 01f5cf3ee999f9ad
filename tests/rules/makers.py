"""How to call every operation of the rule table, by name: what the property test of its row does."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from harness.law import Sample

S = (5, 4)
T = (2, 3, 4)


def _sample(call: Any, *shapes: tuple[int, ...], kinds: tuple[str, ...] = (), **options: Any) -> Sample:
    return Sample(call, shapes, kinds, **options)


def _exact(call: Any, *shapes: tuple[int, ...], kinds: tuple[str, ...] = (), **options: Any) -> Sample:
    return Sample(call, shapes, kinds, exact=True, **options)


def first(f: Any, *xs: torch.Tensor) -> Any:
    """Just the operands."""
    return f(*xs)


def _elementwise(name: str) -> list[Sample]:
    """Elementwise operations of one, two or three operands."""
    if name in _SPECIAL:
        return _SPECIAL[name]
    if name in _BITS:
        return [_exact(first, *((S,) * _BITS[name]), kinds=("long",) * _BITS[name])]
    if name in _BINARY:
        return [_sample(first, S, S, kinds=("unit", "unit")), _sample(first, T, (3, 1), kinds=("unit", "unit"))]
    return [_sample(first, S, kinds=("unit",)), _sample(first, (2,), kinds=("unit",))]


_BITS = {
    **dict.fromkeys("bitwise_not invert".split(), 1),
    **dict.fromkeys("bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm".split(), 2),
    **dict.fromkeys("and or xor lshift rshift __rand__ ror rxor rlshift rrshift".split(), 2),
}
_BINARY = set(
    """
    add arctan2 atan2 copysign div divide eq float_power floor_divide fmax fmin fmod ge greater greater_equal gt
    heaviside hypot igamma igammac isclose ldexp le less less_equal logaddexp logaddexp2 logical_and logical_or
    logical_xor lt maximum minimum mul multiply ne nextafter not_equal pow remainder rsub sub subtract true_divide
    xlog1py xlogy zeta truediv floordiv mod radd rdiv rtruediv rfloordiv rmod rmul rpow
    """.split()
)
_NO_GRAD = {"igamma", "igammac", "zeta", "heaviside", "nextafter", "floor_divide", "floordiv", "rfloordiv"}
_SPECIAL: dict[str, list[Sample]] = {
    "complex": [_sample(lambda f, x, y: f(x, y).abs(), S, S, kinds=("unit", "unit"))],
    "polar": [_sample(lambda f, x, y: f(x, y).abs(), S, (4,), kinds=("unit", "unit"))],
    "add": [
        _exact(first, S, S),
        _exact(first, T, (4,)),
        _exact(first, (3, 1), (2, 1, 4)),
        _exact(lambda f, x: f(x, 2.0), S),
        _exact(first, S, ()),
        _exact(first, (0, 3), (3,)),
    ],
    "mul": [_exact(first, S, S), _exact(first, S, (5, 1))],
    "abs": [_exact(first, S), _exact(first, (1,)), _exact(first, ())],
    **{name: [_sample(first, S, S, kinds=("unit", "unit"), grads=False)] for name in _NO_GRAD},
    "isclose": [_exact(first, S, S)],
    "bitwise_left_shift": [_exact(first, S, S, kinds=("long", "long"))],
    "mvlgamma": [_sample(lambda f, x: f(x + 2, 2), S, kinds=("unit",))],
    "multigammaln": [_sample(lambda f, x: f(x + 2, 2), S, kinds=("unit",))],
    "polygamma": [_sample(lambda f, x: torch.polygamma(1, x), S, kinds=("unit",))],
    "acosh": [_sample(lambda f, x: f(x + 1), S, kinds=("unit",))],
    "arccosh": [_sample(lambda f, x: f(x + 1), S, kinds=("unit",))],
    "threshold": [_exact(lambda f, x: f(x, 0.0, 1.0), S)],
    **{
        name: [_exact(first, S, S, S), _sample(lambda f, x, y, z: f(x, y, z, value=2), S, (4,), (5, 1), kinds=k)]
        for name, k in (("addcmul", ()), ("addcdiv", ("int", "positive", "positive")))
    },
    "addcdiv": [_sample(lambda f, x, y, z: f(x, y, z, value=2), S, (4,), (5, 1), kinds=("int", "int", "positive"))],
    **{
        key: [_exact(lambda f, x: f(x, -1.0, 2.0), S), _exact(lambda f, x, y: f(x, min=y.detach()), S, (4,))]
        for key in ("clamp", "clip")
    },
    "clamp_max": [_exact(lambda f, x: f(x, 1.0), S)],
    "clamp_min": [_exact(lambda f, x: f(x, 1.0), S)],
    "lerp": [_sample(first, S, S, (4,)), _exact(lambda f, x, y: f(x, y, 0.5), S, S)],
    "masked_fill": [_exact(lambda f, x, m: f(x, m, 7.0), S, (4,), kinds=("int", "bool"))],
    "where": [_exact(lambda f, x, y, m: torch.where(m, x, y), S, (4,), S, kinds=("int", "int", "bool"))],
}


def _dim(*rest: Any, exact: bool = True, kinds: tuple[str, ...] = (), **options: Any) -> list[Sample]:
    """Operations along a dim that takes further arguments, of either dim."""
    return [
        Sample(lambda f, x: f(x, *rest, 0), (S,), kinds, exact, **options),
        Sample(lambda f, x: f(x, *rest, dim=-1), (T,), kinds, exact, **options),
    ]


_NAMED: dict[str, list[Sample]] = {
    **{name: _dim(exact=False) for name in ("softmax", "log_softmax", "softmin")},
    "cumsum": _dim(),
    "cumprod": _dim(kinds=("positive",), exact=False),
    "logcumsumexp": _dim(exact=False),
    "cummax": _dim(kinds=("distinct",)),
    "cummin": _dim(kinds=("distinct",)),
    "sort": [*_dim(kinds=("distinct",)), _exact(lambda f, x: f(x, 1, True), S, kinds=("distinct",))],
    "argsort": _dim(kinds=("distinct",)),
    "topk": _dim(2, kinds=("distinct",)),
    "kthvalue": [
        *_dim(2, kinds=("distinct",)),
        _exact(lambda f, x: f(x, 1, 1, True), S, kinds=("distinct",)),
    ],
    "median": [*_dim(kinds=("distinct",)), _exact(first, S, kinds=("distinct",))],
    "nanmedian": _dim(kinds=("distinct",)),
    "nanmean": [*_dim(exact=False), _sample(first, S)],
    "mode": [_exact(lambda f, x: f(x, 1)[0], S, kinds=("distinct",), grads=False)],
    "roll": [
        _exact(lambda f, x: f(x, 2, 0), S),
        _exact(lambda f, x: f(x, 3), S),
        _exact(lambda f, x: f(x, (1, 2), (0, 2)), T),
    ],
    "flip": [_exact(lambda f, x: f(x, (0,)), S), _exact(lambda f, x: f(x, (1, -1)), T)],
    "glu": [_sample(lambda f, x: f(x, 1), (3, 4)), _sample(lambda f, x: f(x, 0), (4, 3))],
    "msort": [_exact(first, S, kinds=("distinct",))],
    "tril": [_exact(first, S), _exact(lambda f, x: f(x, 1), T)],
    "triu": [_exact(first, S), _exact(lambda f, x: f(x, -1), T)],
}


def _reduction(
    exact: bool = True, kinds: tuple[str, ...] = (), several: bool = True, keep: bool = True
) -> list[Sample]:
    found = [
        Sample(first, (S,), kinds, exact),
        Sample(lambda f, x: f(x, 0), (S,), kinds, exact),
        Sample(lambda f, x: f(x, dim=1, **({"keepdim": True} if keep else {})), (T,), kinds, exact),
    ]
    return found + ([Sample(lambda f, x: f(x, dim=(0, 2)), (T,), kinds, exact)] if several else [])


_REDUCTIONS: dict[str, list[Sample]] = {
    "sum": [*_reduction(), _exact(lambda f, x: f(x, 0), (0, 3))],
    "nansum": _reduction(),
    "mean": _reduction(exact=False),
    "prod": _reduction(exact=False, several=False),
    "any": _reduction(kinds=("bool",), several=False),
    "all": _reduction(kinds=("bool",), several=False),
    "amax": _reduction(exact=False),
    "amin": _reduction(exact=False),
    "count_nonzero": _reduction(keep=False),
    **{name: _reduction(exact=False) for name in ("var", "std", "var_mean", "std_mean")},
    "max": _reduction(several=False, exact=False),
    "min": _reduction(several=False, exact=False),
    "argmax": _reduction(several=False),
    "argmin": _reduction(several=False),
    "logsumexp": [_sample(lambda f, x: f(x, 0), S), _sample(lambda f, x: f(x, (0, 2), True), T)],
    "vector_norm": [
        _sample(first, S),
        _sample(lambda f, x: f(x, 1, 0), S),
        _sample(lambda f, x: f(x, float("inf"), (0, 1), True), T, kinds=("distinct",)),
        _sample(lambda f, x: f(x, 3, -1), T),
    ],
    "norm": [_sample(first, S), _sample(lambda f, x: f(x, dim=1), S)],
}

_INDEXED: dict[str, list[Sample]] = {
    "gather": [
        _exact(lambda f, x, i: f(x, 1, i), S, (5, 3), kinds=("int", "ids:4")),
        _exact(lambda f, x, i: f(x, 0, i), S, (3, 4), kinds=("int", "ids:5")),
    ],
    "index_select": [
        _exact(lambda f, x, i: f(x, 1, i), S, (3,), kinds=("int", "ids:4")),
        _exact(lambda f, x, i: f(x, 0, i), S, (6,), kinds=("int", "ids:5")),
    ],
    "scatter": [
        _exact(lambda f, x, i, s: f(x, 1, i, s), S, (5, 3), (5, 3), kinds=("int", "index:4", "int")),
        _exact(lambda f, x, i: f(x, -1, i, 9.0), S, (5, 2), kinds=("int", "index:4")),
    ],
    "scatter_add": [_exact(lambda f, x, i, s: f(x, 0, i, s), S, (3, 4), (3, 4), kinds=("int", "ids:5", "int"))],
    "scatter_reduce": [
        _exact(lambda f, x, i, s: f(x, 1, i, s, "sum"), S, (5, 6), (5, 6), kinds=("int", "ids:4", "int")),
        _exact(
            lambda f, x, i, s: f(x, 1, i, s, "amax"),
            S,
            (5, 3),
            (5, 3),
            kinds=("distinct", "index:4", "distinct"),
            grads=False,
        ),
    ],
    "index_add": [_exact(lambda f, x, i, s: f(x, 0, i, s), S, (6,), (6, 4), kinds=("int", "ids:5", "int"))],
    "index_copy": [_exact(lambda f, x, i, s: f(x, 1, i, s), S, (3,), (5, 3), kinds=("int", "index:4", "int"))],
    "index_reduce": [
        _sample(
            lambda f, x, i, s: f(x, 0, i, s, "prod"),
            S,
            (3,),
            (3, 4),
            kinds=("positive", "ids:5", "positive"),
            grads=False,
        )
    ],
    "index_fill": [_exact(lambda f, x, i: f(x, 0, i, 7.0), S, (3,), kinds=("int", "ids:5"))],
    "index_put": [
        _exact(lambda f, x, i, v: f(x, (i,), v), S, (3,), (3, 4), kinds=("int", "index:5", "int")),
        _exact(
            lambda f, x, i, j, v: f(x, (i, j), v, accumulate=True),
            S,
            (3,),
            (3,),
            (3,),
            kinds=("int", "ids:5", "ids:4", "int"),
        ),
    ],
    "masked_select": [_exact(first, S, S, kinds=("int", "bool"))],
    **{key: [_exact(first, S)] for key in ("nonzero",)},
    **{
        name: [
            _exact(lambda f, x, y: f([x, y]), S, (2, 4)),
            _exact(lambda f, x, y: f((x, y, x), dim=-1), S, (5, 2)),
        ]
        for name in ("cat", "concat", "concatenate")
    },
    "stack": [_exact(lambda f, x, y: f([x, y]), S, S), _exact(lambda f, x, y: f([x, y], dim=-1), S, S)],
}

_PRODUCTS: dict[str, list[Sample]] = {
    "matmul": [
        _exact(first, S, (4, 3)),
        _exact(first, T, (4, 3)),
        _exact(first, (2, 1, 3, 4), (2, 4, 3)),
        _exact(first, (4,), (4, 3)),
        _exact(first, T, (4,)),
        _exact(first, (4,), (4,)),
    ],
    "mm": [_exact(first, S, (4, 3))],
    "bmm": [_exact(first, T, (2, 4, 5))],
    "mv": [_exact(first, S, (4,))],
    "dot": [_exact(first, (5,), (5,))],
    **{key: [_exact(first, (5,), (3,))] for key in ("outer", "ger")},
    "linear": [_exact(first, S, (3, 4), (3,)), _exact(first, T, (5, 4)), _exact(first, (4,), (3, 4))],
    "addmm": [
        _exact(first, (5, 3), S, (4, 3)),
        _exact(lambda f, b, x, y: f(b, x, y, beta=2, alpha=3), (3,), S, (4, 3)),
    ],
    "baddbmm": [_exact(first, (2, 3, 5), T, (2, 4, 5)), _exact(first, (3, 1), T, (2, 4, 5))],
    "addbmm": [_exact(first, (3, 5), T, (2, 4, 5))],
    "addmv": [_exact(first, (5,), S, (4,))],
    "addr": [_exact(first, (5, 3), (5,), (3,))],
    "einsum": [
        _exact(lambda f, x, y: f("bik,kj->bij", x, y), T, (4, 3)),
        _exact(lambda f, x: f("...i->...", x), T),
        _exact(lambda f, x, y: f("ij,ij", x, y), S, S),
    ],
    "tensordot": [_exact(lambda f, x, y: f(x, y, dims=([0, 2], [1, 0])), T, (4, 2, 3))],
}

_LAYERS: dict[str, list[Sample]] = {
    "layer_norm": [
        _sample(lambda f, x, w, b: f(x, (4,), w, b), S, (4,), (4,)),
        _sample(lambda f, x: f(x, (3, 4)), T),
        _sample(lambda f, x, b: f(x, (4,), None, b, 0.1), T, (4,)),
    ],
    "rms_norm": [_sample(lambda f, x, w: f(x, (4,), w), S, (4,)), _sample(lambda f, x: f(x, [3, 4], eps=0.1), T)],
    "group_norm": [_sample(lambda f, x, w, b: f(x, 2, w, b), (3, 4, 2), (4,), (4,))],
    "embedding": [
        _exact(lambda f, i, w: f(i, w), (2, 3), (7, 4), kinds=("ids:7", "int")),
        _exact(lambda f, i, w: f(i, w, padding_idx=-2), (6,), (5, 2), kinds=("ids:5", "int")),
    ],
    "scaled_dot_product_attention": [
        _sample(first, (2, 3, 4, 2), (2, 3, 5, 2), (2, 3, 5, 3)),
        _sample(lambda f, q, k, v, m: f(q, k, v, m), (2, 2, 3, 2), (2, 2, 4, 2), (2, 2, 4, 2), (1, 4)),
        _sample(lambda f, q, k, v: f(q, k, v, is_causal=True), (3, 4, 2), (3, 4, 2), (3, 4, 2)),
    ],
    "grouped_query_attention": [
        _sample(
            lambda f, q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            *((2, 4, 3, 2), (2, 2, 3, 2), (2, 2, 3, 2)),
        )
    ],
    "cross_entropy": [
        _sample(first, S, (5,), kinds=("int", "ids:4")),
        _sample(
            lambda f, x, t, w: f(x, t, w.detach(), ignore_index=1, label_smoothing=0.2),
            *(S, (5,), (4,)),
            kinds=("int", "ids:4", "positive"),
        ),
        _sample(lambda f, x, t: f(x, t, reduction="none"), (2, 4, 3), (2, 3), kinds=("int", "ids:4")),
        _sample(first, (4,), (), kinds=("int", "ids:4")),
    ],
    "nll_loss": [
        _sample(first, S, (5,), kinds=("int", "ids:4")),
        _sample(
            lambda f, x, t, w: f(x, t, w.detach(), reduction="sum"), S, (5,), (4,), kinds=("int", "ids:4", "positive")
        ),
    ],
    **{
        name: [_sample(first, S, S), _sample(lambda f, x, y: f(x, y, reduction="sum"), S, S)]
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss")
    },
    "binary_cross_entropy": [
        _sample(lambda f, x, y: f(x, y.detach()), S, S, kinds=("unit", "unit")),
        _sample(lambda f, x, y, w: f(x, y.detach(), w.detach()), S, S, (4,), kinds=("unit", "unit", "positive")),
    ],
    "binary_cross_entropy_with_logits": [
        _sample(lambda f, x, y: f(x, y.detach()), S, S, kinds=("int", "unit")),
        _sample(
            lambda f, x, y, w: f(x, y.detach(), pos_weight=w.detach()), S, S, (4,), kinds=("int", "unit", "positive")
        ),
    ],
    "kl_div": [_sample(lambda f, x, y: f(x, y.detach(), reduction="batchmean"), S, S, kinds=("int", "unit"))],
    "soft_margin_loss": [_sample(lambda f, x, y: f(x, y.detach().sign()), S, S, kinds=("int", "positive"))],
    "hinge_embedding_loss": [_sample(lambda f, x, y: f(x, y.detach().sign()), S, S, kinds=("int", "distinct"))],
}

_VIEWS: dict[str, list[Sample]] = {
    "view": [
        _exact(lambda f, x: f(x, 2, 12), T),
        _exact(lambda f, x: f(x, 20), S),
        _exact(lambda f, x: f(x, 5, 2, 2), S),
    ],
    "reshape": [_exact(lambda f, x: f(x, (6, 4)), T), _exact(lambda f, x: f(x, (-1,)), S)],
    "flatten": [_exact(first, T), _exact(lambda f, x: f(x, 1), T)],
    "unflatten": [_exact(lambda f, x: f(x, 1, (2, 2)), S)],
    "ravel": [_exact(first, S)],
    "squeeze": [_exact(first, (5, 1, 4))],
    "unsqueeze": [_exact(lambda f, x: f(x, 1), S)],
    "view_as": [_exact(lambda f, x: f(x, torch.empty(6, 4)), T)],
    "reshape_as": [_exact(lambda f, x: f(x, torch.empty(4, 6)), T)],
    **{
        name: [_exact(lambda f, x: f(x, 0, -1), T)]
        for name in ("transpose", "swapaxes", "swapdims", "movedim", "moveaxis")
    },
    "permute": [_exact(lambda f, x: f(x, (2, 0, 1)), T)],
    **{key: [_exact(first, S)] for key in ("t", "T", "mT", "H", "mH")},
    "adjoint": [_exact(first, T)],
    **{
        key: [_exact(lambda f, x: f(x, (2, 5, 4)), (5, 1)), _exact(lambda f, x: f(x, (2, 5, 4)), S)]
        for key in ("expand", "broadcast_to")
    },
    "expand_as": [_exact(lambda f, x: f(x, torch.empty(2, 5, 4)), S)],
    **{
        key: [_exact(lambda f, x: f(x, (2, 1)), S), _exact(lambda f, x: f(x, (3, 1, 1)), S)]
        for key in ("repeat", "tile")
    },
    "__getitem__": [
        _exact(lambda f, x: f(x, (slice(1, 4), 2)), S),
        _exact(lambda f, x: f(x, (Ellipsis, None, slice(None, None, 2))), T),
        _exact(lambda f, x: f(x, -1), S),
    ],
    "narrow": [_exact(lambda f, x: f(x, 0, 1, 3), S)],
    "select": [_exact(lambda f, x: f(x, 1, 2), S)],
    "split": [_exact(lambda f, x: f(x, 2), S), _exact(lambda f, x: f(x, [1, 3], 1), S)],
    "split_with_sizes": [_exact(lambda f, x: f(x, [2, 3], 0), S)],
    "chunk": [_exact(lambda f, x: f(x, 3, 0), S)],
    "unbind": [_exact(lambda f, x: f(x, 1), S)],
}


def _drawn(f: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    torch.manual_seed(7)
    return f(x, *rest)


def _written(change: Any) -> Any:
    def call(f: Any, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        y = x * 1
        torch.manual_seed(7)
        change(f, y, *rest)
        return y

    return call


_COPIES: dict[str, list[Sample]] = {
    **{key: [_exact(first, S), _exact(first, ())] for key in ("clone", "contiguous")},
    "detach": [_exact(first, S)],
    **{key: [_exact(first, S)] for key in ("zeros_like", "ones_like")},
    "empty_like": [_exact(lambda f, x: f(x) * 0 == 0, (0, 3))],
    "full_like": [_exact(lambda f, x: f(x, 3.0), S)],
    **{key: [_exact(_drawn, S)] for key in ("rand_like", "randn_like")},
    "randint_like": [_exact(lambda f, x: _drawn(f, x, 9), S)],
    "fill_": [_exact(_written(lambda f, y: f(y, 3.0)), S)],
    "zero_": [_exact(_written(lambda f, y: f(y)), S)],
    **{key: [_exact(_written(lambda f, y: f(y)), S)] for key in ("uniform_", "normal_", "exponential_", "bernoulli_")},
    "dropout": [_exact(lambda f, x: _drawn(f, x, 0.5, True), S)],
    "copy_": [_exact(_written(lambda f, y, z: f(y, z)), S, (4,))],
    "equal": [_exact(first, S, S), _exact(lambda f, x: f(x, x * 1), S)],
    "allclose": [_exact(first, S, (4,)), _exact(lambda f, x: f(x, x * 1), S)],
}

_GATHERS: dict[str, list[Sample]] = {
    "tensor_split": [_exact(lambda f, x: f(x, 3), S), _exact(lambda f, x: f(x, (1, 3), dim=1), S)],
    **{name: [_exact(lambda f, x: f(x, 2), (4, 2, 2))] for name in ("hsplit", "vsplit", "dsplit")},
    "view_as_real": [_exact(lambda f, x, y: f(torch.complex(x, y)), S, S, gathers=True)],
    "view_as_complex": [_exact(lambda f, x: f(x).abs(), (3, 2), grads=False)],
    **{key: [_exact(lambda f, x, y: f(torch.complex(x, y)), S, S)] for key in ("real", "imag")},
    "qr": [_sample(first, S, kinds=("unit",), grads=False)],
    "svd": [_sample(lambda f, x: f(x, full_matrices=False)[1], S, kinds=("unit",), grads=False)],
    "eigh": [_sample(lambda f, x: f(x + x.mT)[0], (3, 3), kinds=("unit",), grads=False)],
    **{name: [_sample(lambda f, x: f(x + 3 * torch.eye(3)), (3, 3), kinds=("unit",))] for name in ("inv", "det")},
    "solve": [_sample(lambda f, x, y: f(x + 3 * torch.eye(3), y), (3, 3), (3, 2), kinds=("unit", "int"))],
    "cholesky": [_sample(lambda f, x: f(x @ x.mT + torch.eye(3)), (3, 3), kinds=("unit",), grads=False)],
}


def _places(*, n: int, channels: tuple[int, ...] = (3,)) -> tuple[int, ...]:
    """A batch of images of n dims."""
    return (5, *channels, *(4, 3, 3)[:n])


def _pools(name: str, n: int) -> list[Sample]:
    shape, kinds = _places(n=n), ("distinct",)
    if name.startswith("adaptive"):
        return [_sample(lambda f, x: f(x, 2), shape, kinds=kinds)]
    if name.startswith("lp"):
        return [_sample(lambda f, x: f(x, 2, 2), shape, kinds=("positive",))]
    return [_sample(lambda f, x: f(x, 2), shape, kinds=kinds), _sample(lambda f, x: f(x, 2, 1), shape[1:], kinds=kinds)]


_CONVOLUTIONS: dict[str, list[Sample]] = {
    **{
        f"conv{n}d": [
            _exact(first, _places(n=n), (4, 3, *(2, 2, 2)[:n]), (4,)),
            _exact(lambda f, x, w: f(x, w, padding=1), _places(n=n), (4, 3, *(3, 2, 1)[:n])),
            _exact(first, _places(n=n)[1:], (4, 3, *(2, 2, 2)[:n]), (4,)),
        ]
        for n in (1, 2, 3)
    },
    **{
        f"conv_transpose{n}d": [
            _exact(first, _places(n=n), (3, 4, *(2, 2, 2)[:n]), (4,)),
            _exact(lambda f, x, w: f(x, w, stride=2), _places(n=n), (3, 4, *(2, 2, 2)[:n])),
        ]
        for n in (1, 2, 3)
    },
    **{
        f"grouped_{kind}{n}d": [
            _exact(
                lambda _, x, w, b, name=f"{kind}{n}d": getattr(F, name)(x, w, b, groups=2),
                *(_places(n=n, channels=(4,)), (4, 2, *(2, 2, 2)[:n]), (4,)),
            )
        ]
        for kind in ("conv", "conv_transpose")
        for n in (1, 2, 3)
    },
    **{
        f"{kind}_pool{n}d{more}": _pools(kind, n)
        for kind in ("max", "avg", "lp", "adaptive_avg", "adaptive_max")
        for n in (1, 2, 3)
        for more in (("", "_with_indices") if "max" in kind else ("",))
    },
    "interpolate": [
        _exact(lambda f, x: f(x, scale_factor=2), _places(n=2)),
        _sample(lambda f, x: f(x, size=(3, 5), mode="bilinear"), _places(n=2)),
    ],
    "pixel_shuffle": [_exact(lambda f, x: f(x, 2), _places(n=2, channels=(8,)))],
    "pixel_unshuffle": [_exact(lambda f, x: f(x, 2), (3, 2, 4, 4))],
    "channel_shuffle": [_exact(lambda f, x: f(x, 2), _places(n=2, channels=(4,)))],
    "local_response_norm": [_sample(lambda f, x: f(x, 2), _places(n=2, channels=(4,)))],
    "grid_sample": [_sample(lambda f, x, g: f(x, g / 8, align_corners=False), _places(n=2), (5, 2, 2, 2))],
    "unfold": [_exact(lambda _, x: F.unfold(x, 2), _places(n=2))],
    "fold": [_exact(lambda _, x: F.fold(x, (4, 3), 2), (5, 12, 6))],
    "padded": [
        _exact(lambda _, x: F.pad(x, (1, 2)), S),
        _exact(lambda _, x: F.pad(x, (0, 0, 2, -1), value=3.0), S),
        _exact(lambda _, x: F.pad(x, (1, 1), "reflect"), S),
        _exact(lambda _, x: F.pad(x, (1, 0, 1, 0), "replicate"), _places(n=2)),
    ],
}


def _matrix(call: Any = first, **options: Any) -> list[Sample]:
    """A batch of matrices that can be inverted, and a single one."""
    kinds = ("unit",)
    return [
        _sample(lambda f, x: call(f, x + 3 * torch.eye(3)), (5, 3, 3), kinds=kinds, **options),
        _sample(lambda f, x: call(f, x + 3 * torch.eye(3)), (3, 3), kinds=kinds, gathers=True, **options),
    ]


def _positive(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mT + torch.eye(3)


_MATRICES: dict[str, list[Sample]] = {
    **{name: _matrix() for name in ("inv", "inverse", "pinv", "pinverse", "matrix_exp", "qr")},
    **{name: _matrix() for name in ("det", "logdet", "slogdet", "svdvals")},
    **{name: _matrix(lambda f, x: f(_positive(x))) for name in ("cholesky", "eigvalsh")},
    "matrix_power": _matrix(lambda f, x: f(x, 2)),
    "solve": [
        _sample(lambda f, x, y: f(x + 3 * torch.eye(3), y), (5, 3, 3), (5, 3, 2), kinds=("unit", "int")),
        _sample(lambda f, x, y: f(x + 3 * torch.eye(3), y), (3, 3), (3, 2), kinds=("unit", "int"), gathers=True),
    ],
    **{name: [_sample(first, (5, 3, 3), kinds=("unit",), grads=False)] for name in ("svd",)},
}


def _running(f: Any, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Any:
    """What a step of training makes of the running statistics, too."""
    mean, var = mean.detach() * 1, var.detach() * 1
    return f(x, mean, var, None, None, True, 0.3), mean, var


_MORE: dict[str, list[Sample]] = {
    "bilinear": [_exact(first, (5, 3), (5, 2), (4, 3, 2), (4,))],
    "cdist": [_sample(first, (2, 5, 3), (2, 4, 3), kinds=("unit", "unit"))],
    "cross": [_exact(first, (5, 3), (5, 3)), _exact(lambda f, x, y: f(x, y, dim=0), (3, 4), (3, 4))],
    "cosine_similarity": [_sample(first, S, S), _sample(lambda f, x, y: f(x, y, dim=0), S, S)],
    "bucketize": [_exact(lambda f, x: f(x, torch.arange(-2.0, 3.0)), S)],
    "searchsorted": [_exact(lambda f, b, x: f(b.sort()[0], x), (4,), S, grads=False)],
    "isin": [_exact(lambda f, x, t: f(x, t), S, (3,))],
    "batch_norm": [
        _sample(lambda f, x, w, b: f(x, None, None, w, b, True), (5, 4), (4,), (4,)),
        _sample(lambda f, x: f(x, None, None, training=True), _places(n=2)),
        _sample(
            lambda f, x, m, v: f(x, m.detach(), v.detach()), (5, 4, 3), (4,), (4,), kinds=("int", "int", "positive")
        ),
        _sample(_running, (5, 4), (4,), (4,), kinds=("int", "int", "positive")),
    ],
    "instance_norm": [
        _sample(lambda f, x, w, b: f(x, weight=w, bias=b), (5, 4, 3), (4,), (4,)),
        _sample(first, _places(n=2)),
    ],
    "prelu": [_exact(first, S, (4,)), _exact(first, S, (1,)), _exact(first, T, (3,))],
    "one_hot": [
        _exact(lambda f, x: f(x, 6), (5,), kinds=("ids:6",)),
        _exact(first, (2, 3), kinds=("ids:4",)),
    ],
}

MAKERS = {
    **_NAMED,
    **_REDUCTIONS,
    **_INDEXED,
    **_PRODUCTS,
    **_LAYERS,
    **_VIEWS,
    **_COPIES,
    **_GATHERS,
    **_CONVOLUTIONS,
    **_MATRICES,
    **_MORE,
}


def samples_of(name: str, section: str) -> list[Sample]:
    """The calls of one operation.

    Raises:
        KeyError: there is none yet: write one here.
    """
    return _elementwise(name) if section.startswith("elementwise:") else MAKERS[name]
