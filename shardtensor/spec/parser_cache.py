"""A parser by a grammar, its tables kept between processes: to make them takes longer than to read a whole plan.

They are kept in the user's own cache folder, as JSON, which runs no code when it is read; in no folder that others can
write to. Where there is none, or it cannot be written to, they are made anew, in about 0.15 s.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lark import Lark

_OPTIONS = {"parser": "lalr", "propagate_positions": True, "maybe_placeholders": False}


def parser_by(grammar: str, start: tuple[str, ...], postlex: Any = None) -> Lark:
    """Return the parser by a grammar, with rules to start at and what its tokens pass through.

    Example:
        >>> str(parser_by('word: NAME\\nNAME: /[a-z]+/', ("word",)).parse("tp").children[0])
        'tp'
    """
    from lark import Lark, __version__

    made_of = (__version__, sys.version, *start, repr(_OPTIONS), grammar)
    key = sha256("\0".join(made_of).encode()).hexdigest()
    path = _folder() / f"{start[0]}.json"
    with suppress(Exception):  # it is not there, or spoilt
        kept, tables = path.read_text(encoding="utf-8").split("\n", 1)
        if kept == key:
            found = json.loads(tables, object_hook=_with_numbers)
            found["data"]["options"]["postlex"] = postlex
            return Lark.load(found)
    parser = Lark(grammar, start=list(start), postlex=postlex, **_OPTIONS)
    with suppress(OSError):
        _keep(path, f"{key}\n{_tables(parser)}")
    return parser


def _folder() -> Path:
    """Of the user; who has none gets a place where nothing can be kept."""
    places = Path(os.environ.get("XDG_CACHE_HOME", "")), Path(os.path.expanduser("~/.cache"))
    return next((place for place in places if place.is_absolute()), Path(os.devnull)) / "shardtensor"


def _tables(parser: Lark) -> str:
    from lark.grammar import Rule
    from lark.lexer import TerminalDef

    data, memo = parser.memo_serialize([TerminalDef, Rule])
    data["options"] = {name: value for name, value in data["options"].items() if name != "postlex"}
    return json.dumps({"data": data, "memo": memo}, separators=(",", ":"))


def _with_numbers(values: Mapping[str, Any]) -> dict[Any, Any]:
    """Keys that were numbers, which in JSON are text, as numbers again."""
    return {int(key) if key.isdigit() else key: value for key, value in values.items()}


def _keep(path: Path, text: str) -> None:
    """Write a file so that who reads meanwhile sees all of it or nothing."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError:
        os.unlink(draft)
        raise
