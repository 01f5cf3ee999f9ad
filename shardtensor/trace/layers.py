"""A few layers of a deep module, from which the counts of all of them follow, as copies on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator

import torch
from torch import nn

CHECKPOINTED = "_traced_checkpoint"
"""The attribute of a module that is to be checkpointed."""

KEPT = 4
"""The number of layers of each kind that run in a deep module: the two first and the two last, which may be gathered or
reduced beside no other one. With two, two buffers for gathered parameters would be enough for all."""

DEEP = 16
"""A list with more layers than this is deep; shorter ones run in full."""


def few_layers(module: nn.Module) -> tuple[nn.Module, list[tuple[nn.Module, int]]]:
    """Return a copy of a module with `KEPT` layers of each kind, and for each kind with more layers a copy with one
    more, and the number that is missing. Layers are the children of a ModuleList with more than `DEEP` that is in no
    other one. The copies are on the meta device.

    Example:
        >>> deep = nn.Sequential(nn.Embedding(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(32)))
        >>> base, [(more, missing)] = few_layers(deep)
        >>> len(base[1]), len(more[1]), missing
        (4, 5, 28)
    """
    lists = {path: layers for path, layers in lists_of_layers(module) if len(layers) > DEEP}
    kept: dict[tuple[str, Hashable], list[int]] = {}
    for path, layers in lists.items():
        for i, layer in enumerate(layers):
            kept.setdefault((path, kind_of_layer(layer)), []).append(i)
    chosen = {key: numbers[:KEPT] for key, numbers in kept.items()}
    others = []
    for key, numbers in kept.items():
        if len(numbers) > KEPT:
            more = {**chosen, key: numbers[: KEPT + 1]}
            others.append((_with(module, lists, more), len(numbers) - KEPT))
    return _with(module, lists, chosen), others


def lists_of_layers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        below = f"{path}.{name}".lstrip(".")
        if isinstance(child, nn.ModuleList):
            yield below, child
        else:
            yield from lists_of_layers(child, below)


def kind_of_layer(layer: nn.Module) -> Hashable:
    """Return a key that layers of one kind share: their classes, and their tensors' names, shapes and dtypes."""
    parts = layer.named_modules()
    classes = tuple((name, type(part).__qualname__, CHECKPOINTED in vars(part)) for name, part in parts)
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return classes, tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)


def _with(
    module: nn.Module, lists: dict[str, nn.ModuleList], chosen: dict[tuple[str, Hashable], list[int]]
) -> nn.Module:
    """Return a copy of a module with some of its layers, in their order."""
    before = {path: dict(layers._modules) for path, layers in lists.items()}
    try:
        for path, layers in lists.items():
            numbers = sorted(i for (of, _), some in chosen.items() if of == path for i in some)
            kept = [layers[i] for i in numbers]
            layers._modules.clear()
            layers._modules.update({str(i): layer for i, layer in enumerate(kept)})
        return copy.deepcopy(module, {id(tensor): on_meta for tensor, on_meta in _on_meta(module)})
    finally:
        for path, layers in lists.items():
            layers._modules.clear()
            layers._modules.update(before[path])


def _on_meta(module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor of a module with its replacement in a copy; tied tensors stay tied."""
    for owner in module.modules():
        for tensor in (*owner._parameters.values(), *owner._buffers.values(), *vars(owner).values()):
            if isinstance(tensor, torch.Tensor):
                on_meta = torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                yield tensor, nn.Parameter(on_meta, tensor.requires_grad) if is_parameter else on_meta
