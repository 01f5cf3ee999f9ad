"""The usual parallel styles of a layer, as blocks of rules for its tensors and its flows.

Dims are named (out, in, vocab, embed), so that a style is right for `nn.Linear` and for GPT-2's `Conv1D`. Each is a
dict that users could write out; `shard_module` accepts them in place of a spec.
"""

from __future__ import annotations

from typing import Any

from shardtensor.spec.nodes import Cut
from shardtensor.spec.parse import as_spec

Axis = str | tuple[str, ...]
Block = dict[str, Any]


def colwise(axis: Axis = "tp", *, unit: int = 1, blocks: int = 1, balanced: bool = False) -> Block:
    """Return rules for a linear layer sharded along its outputs (column-parallel), computed with no communication.

    The gradient of the input is summed at the nearest `in` around the layer, or by the layer itself when there is none.

    Args:
        axis: mesh axis, or several, major to minor.
        unit: elements that stay together: the size of a head.
        blocks: how many matrices are concatenated along the outputs, such as 3 for q, k and v; each is sharded.
        balanced: pieces may differ by one unit.

    Example:
        >>> colwise("tp", unit=64)["weight"], colwise("tp")["out"]
        ('[out: tp unit(64)]', '[..., tp]')
    """
    cut = Cut(axis, unit=unit, blocks=blocks, balanced=balanced)
    return {"weight": f"[out: {cut}]", "optional bias": f"[out: {cut}]", "out": f"[..., {cut}]"}


def colwise_shared(axis: Axis, copies: Axis, *, unit: int = 1) -> Block:
    """Return rules for a column-parallel layer with fewer pieces than ranks: keys and values of grouped attention.

    Args:
        axis: the axes along which the pieces differ.
        copies: the axes along which ranks hold the same piece, each for other query heads.
        unit: elements that stay together: the size of a head.

    Example:
        >>> colwise_shared("kvg", "kvr", unit=64)["out"]
        '[..., kvg unit(64)] grad partial(kvr)'
    """
    cut = Cut(axis, unit=unit)
    return {
        "weight": f"[out: {cut}]",
        "optional bias": f"[out: {cut}]",
        "out": f"[..., {cut}] grad {_partials(Cut(copies))}",
    }


def rowwise(axis: Axis = "tp", *, unit: int = 1, to: str = "replicate", balanced: bool = False) -> Block:
    """Return rules for a linear layer sharded along its inputs (row-parallel): products are summed, bias added once.

    Args:
        axis: mesh axis, or several.
        unit: elements that stay together.
        to: the layout of the summed result: ``"replicate"`` is one all-reduce, ``"[-, tp, ...]"`` a reduce-scatter.
        balanced: pieces may differ by one unit.

    Example:
        >>> rowwise("tp", to="[-, tp, ...]")["out"]
        'partial(tp) -> [-, tp, ...]'
    """
    cut = Cut(axis, unit=unit, balanced=balanced)
    return {
        "weight": f"[in: {cut}]",
        "in": f"[..., {cut}]",
        "out": f"{_partials(cut)} -> {as_spec(to)}",
    }


def along(stream: str) -> Block:
    """Return rules for whole parameters and values that keep their layout: a norm between sequence-parallel layers.

    Args:
        stream: the layout of the values, such as ``"[-, tp, ...]"``; the parameters' gradients are summed over its
            axes.

    Example:
        >>> along("[-, tp, ...]")
        {'in': '[-, tp, ...]', 'out': '[-, tp, ...]'}
    """
    return {"in": stream, "out": stream}


def vocab_embedding(axis: Axis = "tp", *, pad: int | None = None, to: str = "replicate") -> Block:
    """Return rules for an embedding sharded along its vocabulary: each rank looks up its ids, and results are summed.

    Args:
        axis: mesh axis, or several.
        pad: the vocabulary is sharded as if it were a multiple of this, for even pieces; no rank stores the padding.
        to: the layout of the resulting rows.

    Example:
        >>> vocab_embedding("tp", pad=64)["weight"]
        '[vocab: tp pad(64)]'
    """
    cut = Cut(axis, pad=pad)
    return {"weight": f"[vocab: {cut}]", "out": f"{_partials(cut)} -> {as_spec(to)}"}


def vocab_head(axis: Axis = "tp", *, pad: int | None = None, came: str = "replicate") -> Block:
    """Return rules for the last linear layer, with vocabulary and logits sharded, for `ParallelCrossEntropy`.

    Args:
        axis: mesh axis, or several.
        pad: as in `vocab_embedding`, with which it may be tied.
        came: the layout of its input.

    Example:
        >>> vocab_head("tp", came="[-, tp, ...]")["in"]
        '[-, tp, ...] -> replicate'
    """
    cut = Cut(axis, pad=pad)
    came = str(as_spec(came))
    enters = came if came == "replicate" else f"{came} -> replicate"
    return {"weight": f"[out: {cut}]", "optional bias": f"[out: {cut}]", "in": enters, "out": f"[..., {cut}]"}


def _partials(cut: Cut) -> str:
    return f"partial({'*'.join(cut.axes)})"
