"""The coverage page says what the rule table says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console

from shardtensor.cli.main import main
from shardtensor.cli.ops import page, print_table
from shardtensor.rules.table import rows

PAGE = Path(__file__).parents[2] / "specs" / "ops.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "make it anew: shardtensor ops --markdown > specs/ops.md"


def test_every_operation_is_on_the_page_once():
    text = page()
    for row in rows():
        for name in row.names:
            assert text.count(f"`{name}`") == 1, name


def test_the_command_prints_the_page(capsys):
    assert main(["ops", "--markdown"]) == 0
    assert capsys.readouterr().out == page()


def test_the_terminal_shows_every_rule():
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    print_table(console)
    shown = console.export_text()
    console.file.close()
    for row in rows():
        assert row.names[0] in shown
        if row.pattern is not None and len(str(row.pattern)) < 30:
            assert str(row.pattern) in shown


def test_it_needs_no_torch():
    program = "import sys; sys.modules['torch'] = None; from shardtensor.cli.main import main; main(['ops'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
