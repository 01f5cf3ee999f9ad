"""Models of families for commands that run one, where transformers is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.tiny.family import family_of
from harness.tiny.sizes import RealSizes

from shardtensor.cli import traced
from shardtensor.errors import SpecError


@pytest.fixture
def families(monkeypatch: Any) -> None:
    """`plan` takes a family of the tests, in the real sizes, for what transformers would make of a config.json."""
    given = traced._made

    def made(options: Any, model: Any, config: Any) -> Any:
        if options.module is not None:
            return given(options, model, config)
        try:
            family = family_of(model)
        except SpecError:
            raise traced.NotTraced(f"no module of this model is known; {traced._GIVE}") from None
        keys = family.shrink(config, model, RealSizes.of(model))
        known = {key: value for key, value in config.items() if value is not None}
        with torch.device("meta"):
            module = family.make({**keys, **known}, model)
        return module.to(getattr(torch, model.dtype)), None

    monkeypatch.setattr(traced, "_made", made)
