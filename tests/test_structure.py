"""The shape of the code base: who imports whom, how long files are, what is public, what runs without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from harness import house
from harness.house import FILES, PACKAGE, REEXPORTS, eager, imported, tree_of

import shardtensor

ORDER = """
errors imports mesh spec layout rules cost plan comm sim tensor ops fsdp optim parallel trace checkpoint
spmd compat cli
""".split()
PURE = ORDER[: ORDER.index("comm")]

LINES = 56_400
IN_CIRCLES: dict[str, int] = {}
DEFINED_TWICE = 23
LATE_IMPORTS = 16
OF_ONE_IMPORTER = 65
"""What there is today of each; a commit that takes some away lowers the number, and only a feature raises it."""

OWN_CODE = {"broadcast_object", "custom_ops", "ported", "rrefs"}
"""Modules of ``compat`` under no name of torch's: the code behind its names that nothing else needs."""


def _place(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def _imports(path: Path, *, top_level: bool) -> list[str]:
    """Modules a file imports; with `top_level` only those that run when it is imported."""
    nodes = eager(tree_of(path)) if top_level else ast.walk(tree_of(path))
    return [module for node in nodes for module in imported(node)]


def test_imports_point_left():
    wrong = []
    for path in FILES:
        place = _place(path)
        if place in ("__init__", "version"):
            continue
        assert place in ORDER, f"{place} has no place in the order of the package"
        for module in _imports(path, top_level=False):
            parts = module.split(".")
            if parts[0] != "shardtensor" or len(parts) < 2 or parts[1] not in ORDER:
                continue
            if ORDER.index(parts[1]) > ORDER.index(place):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {module}, which is to its right")
    assert wrong == []


def test_pure_folders_do_not_import_torch():
    for path in FILES:
        if _place(path) in PURE:
            assert not [m for m in _imports(path, top_level=True) if m.split(".")[0] == "torch"], path


def test_files_are_short():
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in FILES}
    assert [name for name, count in lines.items() if count >= 400] == [], "a concept wants a file of its own"


def test_the_package_shrinks():
    assert LINES - 200 < house.lines() <= LINES, "lower LINES with what was taken away; only a feature may add some"


def test_modules_of_a_folder_do_not_import_each_other_in_a_circle():
    found = house.circles()
    assert {folder: len(names) for folder, names in found.items()} == IN_CIRCLES, found


def test_a_public_name_is_defined_once():
    found = house.defined_twice()
    assert len(found) == DEFINED_TWICE, found


def test_imports_stand_at_the_top():
    """But for torch where the command line may not need it, and for packages that need not be there."""
    found = house.late_imports()
    assert len(found) == LATE_IMPORTS, found


def test_files_of_one_importer_are_counted():
    """Some are worth a file of their own; many are parts of the file that imports them."""
    found = house.of_one_importer()
    assert len(found) == OF_ONE_IMPORTER, found


def test_no_drawer_for_odds_and_ends():
    assert not {path.stem for path in FILES if REEXPORTS not in path.parents} & {
        "utils",
        "util",
        "common",
        "helpers",
        "types",
        "misc",
    }


def test_pure_folders_run_where_torch_cannot_be_imported():
    modules = [
        ".".join(("shardtensor", *path.relative_to(PACKAGE).with_suffix("").parts))
        for path in FILES
        if _place(path) in PURE and path.stem != "__init__"
    ]
    program = (
        "import sys; sys.modules['torch'] = None\n"
        f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
        "from shardtensor import Mesh, parse_spec\n"
        "from shardtensor.layout.bind import bind\n"
        "layout = bind(parse_spec('[tp, -]'), (8, 4), Mesh((('tp', 4),)))\n"
        "print(layout.boxes(1)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2:4, 0:4]\n"


def test_planning_does_not_pay_for_torch():
    program = "import sys, shardtensor; shardtensor.parse_spec('[tp, -]'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_torch_is_imported_without_a_warning_where_numpy_is_not_installed():
    program = "import sys; sys.modules['numpy'] = None; import shardtensor; shardtensor.rand('replicate', 2)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_collective_of_torch_sends_pickled_objects():
    pickled = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
    for path in FILES:
        called = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not pickled & called, path


def test_public_names_are_sorted_and_there():
    public = shardtensor.__all__
    assert public == ["__version__", *sorted(public[1:])]
    for name in public:
        assert getattr(shardtensor, name) is not None
    assert not hasattr(shardtensor, "no_such_name")


def test_no_public_function_shares_its_name_with_a_module():
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert not modules & set(shardtensor.__all__)


def test_upstream_modules_only_re_export():
    for path in REEXPORTS.rglob("*.py"):
        if path.stem in OWN_CODE:
            continue
        kinds = {type(node) for node in ast.parse(path.read_text()).body}
        assert kinds <= {ast.Expr, ast.Import, ast.ImportFrom, ast.Assign}, path


def test_every_file_of_tests_has_a_name_of_its_own():
    """They are imported by that name alone, and of two of one name only one is there."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_the_map_names_files_that_are_there():
    text = (PACKAGE / "README.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.\w+)?|[a-z_]+\.py)`", text))
    roots = (PACKAGE, PACKAGE.parent)
    folders = [path for path in PACKAGE.iterdir() if path.is_dir()]
    lost = [name for name in named if not any((root / name).exists() for root in (*roots, *folders))]
    assert named
    assert lost == []


def test_the_map_lists_every_folder_in_the_order_of_imports():
    rows = re.findall(r"^\| `([a-z]+)/` \|", (PACKAGE / "README.md").read_text(), re.MULTILINE)
    assert rows == [folder for folder in ORDER if (PACKAGE / folder).is_dir()]
