"""The model of a config.json as transformers makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtensor.plan.models.dims import dtype_of


def transformers_model(config: Mapping[str, Any], device: str = "meta") -> Any:
    """Return the module that transformers makes of a model's configuration; on the meta device no tensor has memory.

    Args:
        config: the keys of its config.json. Its first architecture is the class, or its base model where none is named.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers knows no such model.
    """
    import torch
    import transformers

    try:
        known = transformers.AutoConfig.for_model(**config)
        name = next(iter(config.get("architectures") or ()), "")
        with torch.device(device):
            model_class = getattr(transformers, name, None)
            model = model_class(known) if model_class else transformers.AutoModel.from_config(known)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"transformers makes no model of this configuration: {error}") from None
    return model.to(getattr(torch, dtype_of(config)))
