"""What `explain_reshard` prints, without torch: the steps, and the bytes that a rank receives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardtensor.errors import LayoutError
from shardtensor.layout.bind import bind
from shardtensor.layout.explain import bytes_text, explain_reshard, item_bytes
from shardtensor.mesh import Mesh
from shardtensor.spec.nodes import Spec


@pytest.mark.parametrize(
    ("source", "target", "shape", "mesh", "dtype", "lines"),
    [
        ("[tp, -]", "replicate", (8, 8), "tp=4", "float32", ["all_gather over tp=4   192 B received by each rank"]),
        ("replicate", "[tp, -]", (8, 8), "tp=4", "float32", ["slice   nothing is sent"]),
        ("replicate", "replicate", (), "tp=2", "int8", ["nothing moves: both say the same"]),
        ("replicate partial(tp, op=max)", "replicate", (), "tp=2", "float64",
         ["all_reduce (max) over tp=2   8 B received by each rank"]),
        ("[tp balanced, -]", "replicate", (3, 1024), "tp=2", "bfloat16",
         ["all_to_all over tp=2   2.0 KiB to 4.0 KiB received by each rank"]),
        ("[tp, -]", "[-, dp]", (4, 4), "dp=2, tp=2", "torch.bool",
         ["all_to_all over dp=2 * tp=2   4 B received by each rank"]),
        ("[tp, -]", "replicate partial(tp)", (4, 4), "tp=2", "float16",
         ["all_gather over tp=2   16 B received by each rank", "split   nothing is sent"]),
    ],
)  # fmt: skip
def test_every_step_is_said_with_its_bytes(capsys, source, target, shape, mesh, dtype, lines):
    explain_reshard(source, target, shape=shape, mesh=mesh, dtype=dtype)
    head, *said = capsys.readouterr().out.splitlines()
    size = " x ".join(map(str, shape)) or "scalar"
    ranks = {"tp=4": 4, "tp=2": 2}.get(mesh, 4)
    assert head == f"{source} -> {target}   {size} {dtype.removeprefix('torch.')} on {ranks} ranks"
    assert said == [f"  {line}" for line in lines]


def test_what_is_missing_is_named():
    with pytest.raises(LayoutError) as caught:
        explain_reshard("[tp, -]", "replicate", mesh="tp=4")
    assert str(caught.value) == (
        "specs alone do not determine what is sent\n"
        "  missing  shape\n"
        '  fix      pass shape=(rows, columns) and mesh="tp=4", or a ShardedTensor'
    )
    with pytest.raises(LayoutError, match="missing  shape, mesh"):
        explain_reshard("[tp, -]", "replicate")


def test_bytes_are_read_by_people():
    said = [bytes_text(n) for n in (0, 1023, 1024, 1536, 1 << 20, 5 << 30, 3 << 40, 2048 << 40)]
    assert said == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "5.0 GiB", "3.0 TiB", "2048.0 TiB"]
    assert bytes_text(1536, digits=2) == "1.50 KiB"
    assert [item_bytes(name) for name in ("float64", "int8", "complex128", "bool")] == [8, 1, 16, 1]


def test_a_tensor_says_its_shape_dtype_and_ranks_also_if_its_group_has_no_mesh(capsys):
    mesh = Mesh((("tp", 2),))
    spec = Spec("tp", None)
    for known in (mesh, None):
        group = SimpleNamespace(mesh=known, size=2, ranks=range(2))
        x = SimpleNamespace(_layout=bind(spec, (4, 4), mesh), _group=group, shape=(4, 4), dtype="torch.float32")
        x.sharding_spec = lambda: spec
        explain_reshard(x, "replicate")
        assert capsys.readouterr().out.splitlines() == [
            "[tp, -] -> replicate   4 x 4 float32 on 2 ranks",
            "  all_gather over tp=2   32 B received by each rank",
        ]
