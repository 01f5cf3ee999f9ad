"""Checkpoints: saved under any layout, loaded under any other.

``from shardtensor.checkpoint import save, load`` gives what ``shardtensor.save`` and ``shardtensor.load`` are.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = frozenset("async_save fingerprint inspect latest load reshard_module save CheckpointError".split())


def __getattr__(name: str) -> Any:
    if name in _NAMES:  # the pure modules of this folder do without torch
        return getattr(importlib.import_module("shardtensor"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
