"""Gradient clipping of sharded and plain parameters, by the global norm or by value."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardtensor.ops.foreach import global_norm
from shardtensor.tensor.sharded_tensor import local_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their joint norm is at most `max_norm`; return the norm before scaling.

    Each element of the model counts once, also if several ranks hold it. It runs one all-reduce for each group of
    ranks, usually one in all; the number of kernels does not grow with the number of parameters. All ranks of the
    parameters' groups call it.

    Args:
        parameters: one or many, plain or sharded with any layouts over any groups; may be a generator.
        max_norm: the largest norm of all gradients as one vector.
        norm_type: the p of the norm; ``inf`` is the largest magnitude.
        error_if_nonfinite: if the norm is inf or nan, raise on every rank and do not change the gradients.
        foreach: False computes the norms one by one.

    Returns:
        a plain 0-d tensor, equal on every rank.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_(p, 1.0)
        tensor(5.)
    """
    grads = _gradients(parameters)
    if not grads:
        return torch.tensor(0.0)
    dtype = grads[0].dtype.to_real()
    for grad in grads:
        dtype = torch.promote_types(dtype, grad.dtype.to_real())
    total = global_norm(grads, norm_type, dtype, foreach=foreach is not False)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} for gradients from `parameters` is non-finite, so it cannot "
            "be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    scale = (total + 1e-6).reciprocal_()
    if isinstance(max_norm, torch.Tensor) or max_norm != 1:  # a max_norm of 1 needs no kernel
        scale = scale * max_norm
    scale.clamp_(max=1.0)
    for locals_ in _by_kind(grads):
        torch._foreach_mul_(locals_, scale.to(locals_[0].device))
    return total


@torch.no_grad()
def clip_grad_value_(
    parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    """Clamp every element of the gradients to [-clip_value, clip_value] in place. Sends nothing.

    Args:
        parameters: one or many, sharded and plain.
        clip_value: the largest magnitude after the call.
        foreach: ignored; torch's signature has it.
    """
    clip_value = float(clip_value)
    grads = _gradients(parameters)
    for locals_ in _by_kind(grads):
        torch._foreach_clamp_min_(locals_, -clip_value)
        torch._foreach_clamp_max_(locals_, clip_value)


def _gradients(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return each gradient once; that of a sharded parameter is sharded."""
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [grad for param in params if (grad := param.grad) is not None]
    return list({id(local_of(grad)): grad for grad in grads}.values())


def _by_kind(grads: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group local gradients by device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for local in map(local_of, grads):
        kinds.setdefault((local.device, local.dtype), []).append(local)
    return list(kinds.values())
