"""Every module path of ``torch.distributed._shard`` is there under ``shardtensor``, and so are its names."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch.distributed import _shard

THEIRS = "torch.distributed._shard"
INSIDE = {
    "_utils": "helpers of torch.distributed.checkpoint",
    "checkpoint": "another name of torch.distributed.checkpoint",
    "common_op_utils": "how torch registers its operations",
    "op_registry_utils": "how torch registers its operations",
    "sharded_tensor._ops": "torch's operations",
    "sharded_tensor.logger": "torch's log",
    "sharded_tensor.logging_handlers": "torch's log",
    "sharded_tensor.reshard": "how torch reshards",
    "sharding_spec.chunk_sharding_spec_ops": "torch's operations",
}
"""Modules in which torch keeps its own workings, with nothing that its callers use."""
OWN = {
    "sharded_optim": {"ShardedTensor"},
    "sharded_tensor.metadata": {"MEM_FORMAT_ENCODING"},
    "sharded_tensor.utils": {
        "build_global_metadata",
        "build_metadata_from_local_shards",
        "recalc_global_sharded_tensor_metadata",
    },
}
"""Names that torch imports, or needs itself, and that have no underscore."""
PRIVATE = {
    "": "_shard_tensor",
    "api": "_shard_tensor _reshard_output _collect_local_shard",
    "sharded_tensor.api": "_sharded_tensor_map _create_tensor_from_params",
    "sharded_tensor.utils": "_parse_and_validate_remote_device",
    "sharding_spec": "_infer_sharding_spec_from_shards_metadata",
    "sharding_spec.api": "_infer_sharding_spec_from_shards_metadata",
}
"""Names with an underscore that torch's own code and tests import."""


def _is_inside(name: str) -> bool:
    return any(f"{name}.".startswith((f"{inside}.", f"{THEIRS}.{inside}.")) for inside in INSIDE)


def _paths() -> list[str]:
    folder = Path(_shard.__file__).parent
    parts = [path.relative_to(folder).with_suffix("").parts for path in sorted(folder.rglob("*.py"))]
    names = {".".join(part for part in each if part != "__init__") for each in parts}
    return sorted(name for name in names if not _is_inside(name))


def _promised(path: str) -> set[str]:
    module = importlib.import_module(f"{THEIRS}.{path}".rstrip("."))
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (isinstance(value, ModuleType) or inspect.isclass(value) or inspect.isfunction(value))
        and (value.__name__ if isinstance(value, ModuleType) else value.__module__).startswith(THEIRS)
        and not _is_inside(value.__name__ if isinstance(value, ModuleType) else value.__module__)
    }
    if path and not hasattr(module, "__path__"):  # what it imports from its neighbours is no promise
        public = {name for name in public if getattr(getattr(module, name), "__module__", None) == module.__name__}
    return (public - OWN.get(path, set())) | set(PRIVATE.get(path, "").split())


def test_there_are_seventeen():
    assert len(_paths()) >= 17


@pytest.mark.parametrize("path", _paths())
def test_each_path_has_the_names_of_torch(path):
    ours = importlib.import_module(f"shardtensor.{path}".rstrip("."))
    assert {name for name in _promised(path) if not hasattr(ours, name)} == set()


def test_a_name_is_one_object_wherever_it_is_imported_from():
    for path in _paths()[1:]:
        ours = importlib.import_module(f"shardtensor.{path}")
        for name in _promised(path):
            above = importlib.import_module(ours.__name__.rpartition(".")[0])
            there = inspect.unwrap(getattr(ours, name))  # factories take init_rrefs= beside what they wrap
            if not isinstance(there, ModuleType):
                assert inspect.unwrap(getattr(above, name, there)) is there, (path, name)


@pytest.mark.parametrize(
    "program",
    [
        "import shardtensor; print(shardtensor.sharded_tensor.api.ShardedTensor.__name__)",
        "import shardtensor.sharding_spec.api as api; print(api.EnumerableShardingSpec.__name__)",
        "import shardtensor; print(shardtensor.api.shard_parameter, shardtensor.metadata.ShardMetadata)",
        "from shardtensor.sharding_spec import chunk_sharding_spec as c; print(c.ChunkShardingSpec.build_metadata)",
        "from shardtensor.compat.sharded_optim.api import ShardedOptimizer",
    ],
)
def test_a_fresh_process_imports_any_of_them_first(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


MEMBERS = """
local_shards local_tensor remote_shards metadata sharding_spec size dim ndim dtype layout device requires_grad
requires_grad_ is_pinned is_contiguous gather reshard cpu cuda to clone detach __deepcopy__ _init_from_local_shards
_init_from_local_tensor _init_from_local_shards_and_global_metadata _process_group _sharding_spec _metadata
""".split()


def test_a_sharded_tensor_has_the_members_that_code_for_torchs_class_uses():
    from shardtensor.sharded_tensor import ShardedTensor

    assert [name for name in MEMBERS if not hasattr(ShardedTensor, name)] == []


def test_the_metadata_attribute_is_what_metadata_returns():
    import shardtensor.sharded_tensor

    import shardtensor as st

    def compare() -> bool:
        x = st.zeros("[tp, -]", 4, 2)
        return x._metadata == x.metadata()

    assert st.simulate("tp=2", compare) == [True, True]
