"""The sharding rule of an operation, in einsum's notation: ``b k, n k -> b n``.

Each dim of an operand has a letter. If several operands have a letter, it must be sharded in the same way in all of
them, and the output is sharded so too. A letter that the output lacks is contracted: if it is sharded, the result is
partial. An operand without the letter that an axis shards is replicated along that axis, and its gradient is partial.
There are two marks beside einsum's notation (which einops and Shardy's sharding rules use too):

* ``!k``: dim k must not be sharded (softmax over it, a sort along it);
* ``1``: a dim of size 1 that is broadcast; it is not sharded and has no letter.

A `Rule` is for operands of fixed numbers of dims; `shardtensor.rules.pattern` makes one from a row of the table.
"""

from __future__ import annotations

import attrs

Letters = tuple[str | None, ...]


@attrs.frozen(cache_hash=True)
class Rule:
    """The letters of every operand and of the output.

    Attributes:
        whole: letters that must not be sharded.
        made: letters that only the output has, with their sizes (the dim of `cat`, a reduced dim under ``keepdim``).
        joins: for letters that the output lacks, the reduction of the ranks' results if it is not a sum; "none" if each
            rank has the full result.
    """

    inputs: tuple[Letters, ...]
    output: Letters
    whole: frozenset[str] = frozenset()
    made: tuple[tuple[str, int], ...] = ()
    joins: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        def side(letters: Letters) -> str:
            return " ".join("1" if x is None else f"!{x}" if x in self.whole else x for x in letters) or "()"

        return f"{', '.join(map(side, self.inputs))} -> {side(self.output)}"
