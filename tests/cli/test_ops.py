"""The coverage page says what the rule table says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shardtensor.cli.main import main
from shardtensor.cli.ops import page
from shardtensor.rules.table import rows

PAGE = Path(__file__).parents[2] / "specs" / "ops.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "make it anew: shardtensor ops > specs/ops.md"


def test_every_operation_is_on_the_page_once():
    text = page()
    for row in rows():
        for name in row.names:
            assert text.count(f"`{name}`") == 1, name


def test_the_command_prints_the_page(capsys):
    assert main(["ops"]) == 0
    assert capsys.readouterr().out == page()


def test_it_needs_no_torch():
    program = "import sys; sys.modules['torch'] = None; from shardtensor.cli.main import main; main(['ops'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
