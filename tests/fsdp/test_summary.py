"""The table of a fully sharded model, by its full text."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardtensor as st
from shardtensor.errors import LayoutError
from shardtensor.fsdp import MixedPrecisionPolicy, fsdp_summary, fully_shard


def model():
    parts = [nn.Linear(256, 256), nn.Linear(8, 8), nn.Linear(300, 299), nn.Linear(256, 256), nn.LayerNorm(8)]
    return nn.Sequential(*parts, nn.Linear(16, 16))


TEXT = """\
6 units, sharded over 2 ranks
unit    class       parameters  on a rank  unsharded  stays unsharded  parameter groups
(root)  Sequential          16       64 B      128 B  yes: outer       float32 x 2, 50% padding
0       Linear          65,792  128.5 KiB  257.0 KiB  no               float32 x 2
1       Linear              72      192 B      384 B  yes: small       float32 x 2, 25% padding
2       Linear          89,999  175.8 KiB  351.6 KiB  yes: as asked    float32 x 2
3       Linear          65,792  128.5 KiB  128.5 KiB  no               float32 as bfloat16 x 2, frozen
5       Linear             272      576 B    1.1 KiB  yes: small       float32 x 2, 5% padding"""


def body():
    module = model()
    module[3].requires_grad_(False)
    fully_shard(module[0])
    fully_shard(module[1])
    fully_shard(module[2], reshard_after_forward=False)
    fully_shard(module[3], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(module[5])
    return fsdp_summary(fully_shard(module))


def test_the_whole_text():
    for text in st.simulate(2, body):
        assert text == TEXT


def test_replicas_are_named():
    def body():
        return fsdp_summary(fully_shard(nn.Linear(2, 2), mesh="rep*dp")).splitlines()[0]

    assert st.simulate("rep=2, dp=2, tp=1", body) == ["1 unit, sharded over 2 ranks, 2 replicas"] * 4


def test_a_plain_module_has_none():
    with pytest.raises(LayoutError, match="nothing in this module"):
        fsdp_summary(nn.Linear(2, 2))
