"""New values: random numbers, tensors like a sharded one, and torch.nn.init, with the numbers of the dense call.

Random numbers are bit for bit those of the dense call, and the generator ends in the same state. Each rank draws its
own part, in bounded scratch wherever torch's sampler can be split into pieces. If ranks have different generator
states, that of the group's first rank is used, for the default generator as for one passed as ``generator=``. Other
functions (``multinomial``, ``normal`` of a sharded mean, ``bernoulli`` of sharded probabilities, ``alpha_dropout``)
gather, with the same guarantee.

Of the functions in torch.nn.init, ``uniform_``, ``normal_``, ``constant_`` and ``kaiming_uniform_`` call a tensor's
override. The handler runs their own body (`own_body`), so that every rank computes torch's bound from the global shape.
The others (``xavier_*``, ``trunc_normal_``, ``orthogonal_``, ...) run their body on the ShardedTensor and need the
operations in it, for example `torch.eye` into a given tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import init

from shardtensor.tensor.copied import refuse_lost_write
from shardtensor.tensor.dispatch import implements, implements_each, own_body
from shardtensor.tensor.drawing import Sample, draw, memory_order
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor, reduced, wrap

_UNUSED = torch.Generator()


def draw_like(
    x: ShardedTensor,
    sample: Sample,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """Return this rank's part of what `sample` draws into an ``empty_like`` of the whole `x`. Collective."""
    layout = x._layout.reduced()
    keeps_order = memory_format == torch.preserve_format
    return draw(
        sample,
        layout,
        x._group,
        dtype=x.dtype if dtype is None else dtype,
        device=x.device if device is None else torch.device(device),
        generator=generator,
        order=memory_order(x._local, layout) if keeps_order else None,
    )


def _fills(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler of a method that overwrites a tensor with random numbers."""

    def handler(x: ShardedTensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        if any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
            return fall_back(method, (x, *args), {"generator": generator, **kwargs})
        refuse_lost_write(x, method.__name__)
        method(torch.empty(0, dtype=x.dtype, device="cpu"), *args, generator=_UNUSED, **kwargs)  # torch's own checks
        refuse_leaf(x)
        values = draw_like(x, lambda t, g: method(t, *args, generator=g, **kwargs), generator=generator)
        # Of partial sums one gets the values, the others zeros.
        x._local.copy_(values if x._layout.holds_full_value(x._group.rank) else torch.zeros_like(values))
        return x

    return handler


implements_each("uniform_ normal_ exponential_ bernoulli_ random_ cauchy_ log_normal_ geometric_", _fills)


def refuse_leaf(x: ShardedTensor) -> None:
    """Raise torch's error for writing to a leaf that requires grad, before anything is drawn."""
    if torch.is_grad_enabled() and x.requires_grad and x.is_leaf:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")


# -- new tensors -----------------------------------------------------------------------------------------------------


def _makes_like(sampler: Callable[..., Sample]) -> Callable[..., Any]:
    """Return the handler of a function like ``rand_like``; `sampler` takes its numbers and returns a `Sample`."""

    def handler(
        x: ShardedTensor,
        *numbers: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: Any = None,
        pin_memory: bool = False,
        requires_grad: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        generator: torch.Generator | None = None,
        **named: Any,
    ) -> Any:
        sample = sampler(*numbers, **named)
        with torch.no_grad():
            local = draw_like(x, sample, generator=generator, dtype=dtype, device=device, memory_format=memory_format)
        if pin_memory:
            local = local.pin_memory()
        spec = x._spec if local.device == x.device else None
        return wrap(local.requires_grad_(requires_grad), x._layout.reduced(), spec, x._group)

    return handler


def _integers(*bounds: Any, low: int = 0, high: int | None = None) -> Sample:
    bounds = (low, *bounds) if high is None else (low, *bounds, high)
    start, stop = map(int, bounds[-2:])
    return lambda t, g: t.random_(start, stop, generator=g)


implements(torch.rand_like)(_makes_like(lambda: lambda t, g: t.uniform_(generator=g)))
implements(torch.randn_like)(_makes_like(lambda: lambda t, g: t.normal_(generator=g)))
implements(torch.randint_like)(_makes_like(_integers))


# -- dropout ---------------------------------------------------------------------------------------------------------


@implements(torch.dropout)
def drop(input: ShardedTensor, p: float, train: bool) -> Any:
    """Run torch.dropout; its gradient is that of the dense mask."""
    torch.dropout(torch.empty(0), p, train)
    if not train or p == 0 or input.numel() == 0:
        return input
    x = reduced(input)
    if p == 1:
        out = x._local * torch.zeros((), dtype=x.dtype, device=x.device)
    elif x.is_cuda:  # on CUDA it is one kernel with another mask and rounding
        kept = draw_like(x, _fused_mask(p, x.dtype), dtype=torch.bool)
        out = _Masked.apply(x._local, kept, 1 / (1 - p))
    else:
        out = x._local * draw_like(x, _noise(p))
    return wrap(out, x._layout, x._spec, x._group)


@implements(torch.dropout_)
def drop_(input: ShardedTensor, p: float, train: bool) -> ShardedTensor:
    """Run torch.dropout_, in place."""
    torch.dropout(torch.empty(0), p, train)
    if not train or p == 0 or input.numel() == 0:
        return input
    refuse_lost_write(input, "dropout_")
    refuse_leaf(input)
    if p == 1:
        input._local.mul_(torch.zeros((), dtype=input.dtype, device=input.device))
    else:
        input._local.mul_(draw_like(input, _noise(p)))
    return input


class _Masked(torch.autograd.Function):
    """CUDA's fused ``x * kept * scale``; backward is the same kernel, which rounds once, like dense dropout."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return torch.ops.aten.native_dropout_backward(x, kept, scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Masked.apply(grad, *ctx.saved_tensors, ctx.scale), None, None


def _noise(p: float) -> Sample:
    return lambda t, g: t.bernoulli_(1 - p, generator=g).div_(1 - p)


def _fused_mask(p: float, dtype: torch.dtype) -> Sample:
    """Return the mask of CUDA's fused kernel, which depends on the dtype and the memory order of the input."""

    def sample(t: torch.Tensor, generator: torch.Generator | None) -> None:
        t.copy_(torch.native_dropout(torch.zeros_like(t, dtype=dtype), p, True)[1])

    return sample


# -- tensors like another ----------------------------------------------------------------------------------------------


def _filled(func: Callable[..., Any]) -> Callable[..., Any]:
    def handler(input: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
        return _wrapped_like(func(input._local, *args, **kwargs), input)

    return handler


def _wrapped_like(local: torch.Tensor, x: ShardedTensor) -> ShardedTensor:
    layout = x._layout.reduced()
    return wrap(local, layout, x._spec if layout is x._layout else None, x._group)


implements_each("zeros_like ones_like empty_like full_like", _filled)


def _new(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler of ``new_zeros`` etc.: a tensor of `input`'s shape gets its layout; others are plain."""

    def handler(input: ShardedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        size = kwargs.pop("size", None)
        if size is None:
            size, args = (args[0], args[1:]) if args and not isinstance(args[0], int) else (args, ())
        if tuple(size) != tuple(input.shape):
            return func(input._local, tuple(size), *args, **kwargs)
        return _wrapped_like(func(input._local, input._local.shape, *args, **kwargs), input)

    return handler


implements_each("new_zeros new_ones new_empty new_full", _new)


@implements(torch.Tensor.new_tensor)
def new_tensor(input: ShardedTensor, data: Any, **kwargs: Any) -> torch.Tensor:
    """Return a plain tensor of `data`, of the dtype and device of `input`."""
    data = data.full_tensor() if isinstance(data, ShardedTensor) else data
    return input._local.new_tensor(data, **kwargs)


# -- torch.nn.init -----------------------------------------------------------------------------------------------------


implements_each((init.uniform_, init.normal_, init.constant_, init.kaiming_uniform_), own_body)


@implements(torch.eye)
def eye(n: int, m: int | None = None, *, out: ShardedTensor, **options: Any) -> torch.Tensor:
    """Write the identity into a ShardedTensor of its shape. Sends nothing."""
    shape = (n, n if m is None else m)
    if tuple(out.shape) != shape:
        raise RuntimeError(f"out has shape {tuple(out.shape)}; it cannot be resized to {shape} as it is sharded")
    return out.copy_(torch.eye(*shape, dtype=out.dtype, device=out.device))
