"""Every example in a docstring runs, in a world of one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import shardtensor

MODULES = sorted(module.name for module in pkgutil.walk_packages(shardtensor.__path__, "shardtensor."))


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    importlib.import_module("shardtensor.ops")  # gives ShardedTensor its operations
    module = importlib.import_module(name)
    torch.manual_seed(0)
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert not failed
