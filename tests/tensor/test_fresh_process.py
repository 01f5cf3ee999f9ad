"""A process that only reads: what ``torch.load`` takes after an import, and what it gives."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import shardtensor as st

READS = """
import io, sys, warnings
warnings.simplefilter("error")
{imports}
x = torch.load(sys.argv[1], weights_only={weights_only})["x"]
assert (x + 1).sum() == 21, x
assert type(x).__name__ == "ShardedTensor"
"""


@pytest.mark.parametrize(
    ("imports", "weights_only"),
    [
        ("import torch, shardtensor", True),
        ("from shardtensor import ShardedTensor\nimport torch", True),
        ("import shardtensor, torch", True),
        ("import torch", False),
    ],
)
def test_a_file_is_read_and_computed_with(tmp_path, imports, weights_only):
    """Operations find their rules (a warning of a gather would be an error), though nothing but the file was read."""
    file = str(tmp_path / "x.pt")
    torch.save({"x": st.distribute(torch.arange(6.0).view(2, 3), "[tp, -]")}, file)
    program = READS.format(imports=imports, weights_only=weights_only)
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
