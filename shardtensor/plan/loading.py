"""Load a plan from its file, for a model's configuration: ``load_plan("llama", config="config.json", world=8)``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtensor.errors import SpecError
from shardtensor.plan.plan import Plan
from shardtensor.plan.text.reading import read_plan

PACKAGED = {
    "bert": "bert", "bloom": "bloom", "deepseek_v3": "deepseek_v3", "falcon": "falcon", "gpt2": "gpt2",
    "gpt_oss": "gpt_oss", "llama": "llama", "mamba": "mamba", "mistral": "llama", "mixtral": "mixtral",
    "qwen2": "llama", "t5": "t5", "vit": "vit",
}  # fmt: skip
"""The plan of the package for each ``model_type`` of a configuration."""


def load_plan(path: str | Path, /, config: Any = None, world: int | None = None, **params: Any) -> Plan:
    """Return the plan of a file, for a configuration and a number of ranks. Nothing is sent, and torch is not imported.

    Args:
        path: of a plan file, or the name of one in the package, such as ``"llama"``; ``"auto"`` for that of the
            configuration's `model_type`.
        config: of the model: the path of its config.json, a mapping, or an object that has `to_dict`.
        world: the number of ranks; by default that of the process group, 1 without one.
        **params: values of the plan's parameters.

    Raises:
        SpecError: (a ValueError) the plan has errors; the text lists all of them, each with its place.

    Example:
        >>> plan = load_plan("shard 1\\nparam tp = world\\nmesh (tp)\\nhead.weight: [tp, -]\\n", world=4, tp=4)
        >>> str(plan.lines[0].value)
        '[tp, -]'
    """
    keys, source = read_config(config)
    path = packaged_for(keys) if path == "auto" else path
    return read_plan(path, config=keys, world=_ranks() if world is None else world, params=params, config_source=source)


def packaged_for(config: Mapping[str, Any]) -> str:
    """Return the name of the package's plan for a configuration.

    Raises:
        SpecError: E103, there is none.

    Example:
        >>> packaged_for({"model_type": "mistral"})
        'llama'
    """
    kind = str(config.get("model_type"))
    if kind not in PACKAGED:
        raise SpecError(
            f'the package has no plan for the model_type "{kind}"',
            {"it has plans for": ", ".join(sorted(PACKAGED))},
            ["give the path of a plan", 'let `shard_module(model, "auto")` derive one from the model'],
            code="E103",
        )
    return PACKAGED[kind]


def read_config(config: Any) -> tuple[Mapping[str, Any], str]:
    """Return the keys of a model's configuration, and its name in messages.

    Raises:
        SpecError: E104, it does not exist or has no keys.

    Example:
        >>> read_config({"hidden_size": 64})
        ({'hidden_size': 64}, 'config.json')
    """
    if config is None:
        return {}, "config.json"
    if isinstance(config, Mapping):
        return config, "config.json"
    if hasattr(config, "to_dict"):
        return config.to_dict(), type(config).__name__
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"{path} is not there", fix="give the path of the model's config.json", code="E104") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{path} cannot be read as JSON", {"why": str(error)[:200]}, code="E104") from None
    if not isinstance(keys, dict) or not keys:
        raise SpecError(f"{path} holds no keys", fix="give the path of the model's config.json", code="E104")
    return keys, str(path)


def _ranks() -> int:
    """Return the ranks of the process group or of a simulated world, without importing either of them or torch."""
    import sys

    groups, distributed = (sys.modules.get(name) for name in ("shardtensor.comm.process_group", "torch.distributed"))
    if groups is not None:
        place = groups.world_place()
        return 1 if place is None else place[1]
    return distributed.get_world_size() if distributed is not None and distributed.is_initialized() else 1
