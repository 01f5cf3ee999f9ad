"""Every method of torch's FSDPModule is here, with torch's parameters, and is on the page that says what it does."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch.distributed.fsdp as theirs
from torch import nn

import shardtensor.fsdp as ours
from shardtensor.errors import RuleError

PAGE = (Path(ours.__file__).parent / "METHODS.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)\(.*?\)` \| ([\w ,]+?) \|", PAGE, re.MULTILINE))
METHODS = sorted(name for name in vars(theirs.FSDPModule) if not name.startswith("_"))


def test_the_page_lists_all():
    assert set(METHODS) <= set(ROWS)  # an older torch has fewer


@pytest.mark.parametrize("name", METHODS)
def test_it_is_called_as_in_torch(name):
    known, mine = (inspect.signature(getattr(c, name)).parameters for c in (theirs.FSDPModule, ours.FSDPModule))
    assert [(p.name, p.kind, p.default) for p in known.values()] == [(p.name, p.kind, p.default) for p in mine.values()]


REFUSED = {
    "set_custom_all_gather": object(),
    "set_custom_reduce_scatter": object(),
    "set_allocate_memory_from_process_group_for_comm": True,
    "set_symm_mem_for_comm": "NCCL",
}


def test_refusals_tell_the_way_out():
    module = ours.fully_shard(nn.Linear(2, 2))
    assert {name for name, does in ROWS.items() if does == "refused"} == set(REFUSED)
    for name, argument in REFUSED.items():
        with pytest.raises(RuleError, match=rf"{name}\(\) is not there[^$]*fix"):
            getattr(module, name)(argument)


@pytest.mark.parametrize("name", ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"])
def test_functions_take_torchs_parameters(name):
    known, mine = (inspect.signature(getattr(m, name)).parameters for m in (theirs, ours))
    assert [p for p in known if p not in mine and p not in ("dp_mesh_dims",)] == []
