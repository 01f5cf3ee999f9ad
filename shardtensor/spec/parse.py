"""Text to spec: ``parse_spec("[tp, -]")``; and whatever a caller has to spec: ``as_spec``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import attrs

from shardtensor.errors import SpecError
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec
from shardtensor.spec.diagnostics import Source
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.syntax import MAX_LENGTH, parse_syntax

SHORT = 4096
"""Characters of a text that is worth remembering."""


def parse_spec(text: str, *, max_length: int = MAX_LENGTH) -> ShardingSpec:
    """Read a spec. ``parse_spec(str(spec)) == spec`` for every spec.

    Equal short texts are read once. A text longer than `max_length` is refused, so that no input costs seconds.

    Raises:
        SpecError: with the line, the column, a caret, what was expected and the nearest word.

    Example:
        >>> parse_spec("[ tp*dp , - ]  flat( fs )")
        Spec(('tp', 'dp'), None).flat('fs')
        >>> parse_spec("[tp unti(128), -]")
        Traceback (most recent call last):
        shardtensor.errors.SpecError: <spec>:1:5: error[E102]: no modifier is called `unti`
            1 | [tp unti(128), -]
              |     ^^^^
          why: there are pad, blocks, unit, sizes, balanced
          fix: did you mean `unit`?
    """
    if not isinstance(text, str):
        raise SpecError(f"a spec is text, found {type(text).__name__}", fix="as_spec takes objects too", code="E001")
    return _private(_parse_short(text) if len(text) <= SHORT else _parse(text, max_length))


def _parse(text: str, max_length: int = MAX_LENGTH) -> ShardingSpec:
    from shardtensor.spec.reader import read_spec  # lark is imported when the first text is read

    source = Source(text)
    return read_spec(source, parse_syntax(source, max_length))


_parse_short = lru_cache(maxsize=1024)(_parse)


def as_spec(spec: Any) -> ShardingSpec:
    """Return the spec that `spec` is, or that its text means; torch's own specs are taken too.

    What can be assigned to is copied.

    Example:
        >>> as_spec("replicate")
        Replicate()
    """
    if isinstance(spec, ShardingSpec):
        return _private(spec)
    if isinstance(spec, str):
        return parse_spec(spec)
    if type(spec).__module__.startswith("torch.distributed._shard"):
        if hasattr(spec, "placements"):
            return ChunkShardingSpec(spec.dim, spec.placements)
        if hasattr(spec, "shards"):
            return EnumerableShardingSpec(spec.shards)
    raise SpecError(
        f"not a spec: {spec!r}",
        {"found": f"an object of type {type(spec).__name__}"},
        'write text such as "[tp, -]", or make a Spec, ChunkShardingSpec, GridShardingSpec or EnumerableShardingSpec',
        code="E001",
    )


def _private(spec: ShardingSpec) -> ShardingSpec:
    """A spec that no one else can assign to."""
    return attrs.evolve(spec) if type(spec) is ChunkShardingSpec else spec
