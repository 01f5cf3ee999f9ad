"""The letters of a matrix product: ``b m k, b k n -> b m n``, vectors and broadcast batches included."""

from __future__ import annotations

from functools import lru_cache

from shardtensor.layout.layout import Shape
from shardtensor.rules.rule import Letters, Rule


@lru_cache(maxsize=4096)
def matmul_rule(a: Shape, b: Shape) -> Rule | None:
    """The rule of ``a @ b`` for their shapes; None when they do not fit.

    Example:
        >>> str(matmul_rule((5, 2, 3), (3, 4)))
        'b0 m k, k n -> b0 m n'
        >>> str(matmul_rule((3,), (1, 3, 4)))
        'k, b0 k n -> b0 n'
    """
    if not a or not b or a[-1] != b[-2 if len(b) > 1 else -1]:
        return None
    batch = _broadcast(a[:-2], b[:-2])
    if batch is None:
        return None
    names = tuple(f"b{i}" for i in range(len(batch)))

    def leading(shape: Shape) -> Letters:
        skip = len(batch) - len(shape)
        return tuple(None if n == 1 and batch[skip + i] != 1 else names[skip + i] for i, n in enumerate(shape))

    left = (*leading(a[:-2]), "m", "k") if len(a) > 1 else ("k",)
    right = (*leading(b[:-2]), "k", "n") if len(b) > 1 else ("k",)
    result = names + (("m",) if len(a) > 1 else ()) + (("n",) if len(b) > 1 else ())
    return Rule((left, right), result)


def _broadcast(a: Shape, b: Shape) -> Shape | None:
    """The shape that both are broadcast to; None when there is none."""
    ndim = max(len(a), len(b))
    pairs = zip((1,) * (ndim - len(a)) + a, (1,) * (ndim - len(b)) + b, strict=True)
    shape = tuple(n if m == 1 else m if n in (1, m) else None for m, n in pairs)
    return None if None in shape else shape  # type: ignore[return-value]
