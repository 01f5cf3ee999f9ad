"""Every example in a docstring runs, in a world of one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import shardtensor

MODULES = sorted(module.name for module in pkgutil.walk_packages(shardtensor.__path__, "shardtensor."))


@pytest.mark.parametrize("folder", sorted({name.split(".")[1] for name in MODULES}))
def test_examples_run(folder):
    importlib.import_module("shardtensor.ops")  # gives ShardedTensor its operations
    for name in MODULES:
        if name.split(".")[1] == folder:
            module = importlib.import_module(name)
            torch.manual_seed(0)
            failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            assert not failed, name
