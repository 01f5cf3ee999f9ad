"""``shardtensor ops``: the rule table as a page in Markdown. Imports no torch."""

from __future__ import annotations

from itertools import groupby

from shardtensor.rules.table import Row, rows

HEAD = """\
# Operations and their rules

Made by `shardtensor ops` from `shardtensor/rules/table.py`; do not edit.

Each word of a rule is a dim. Operands and the output that share a letter are sharded alike along it. If a sharded
letter is not in the output, the ranks' results are reduced as the third column states. An operation that is not listed
gathers its operands and warns once; under `strict()` it is an error. `register_op` adds a row.

| word | meaning |
|---|---|
| `k` | one dim |
| `...` | any number of dims, which broadcast; `i...` any number, alike wherever it stands |
| `[k]` | the dims that the call names, wherever they stand |
| `!k` | must be whole: an operand that is sharded along it is redistributed |
| `m?` | may be missing; `l/1` may be of size 1 |
| `k'` | a dim that only the output has |
| `+ n` | an operand that is added after the reduction |
| `*(...)` | a list of operands |
| `@name` | a function: of the layouts in the second column, of the ranks' results in the third |
"""


def page() -> str:
    """Return the coverage page in Markdown."""
    parts = [HEAD]
    for section, group in groupby(rows(), key=lambda row: row.section):
        title, _, note = section.partition(":")
        parts.append(f"## {title.capitalize()}\n")
        if note:
            parts.append(f"{note.strip().capitalize()}.\n")
        lines = ["| operations | rule | along a cut dim |", "|---|---|---|"]
        lines += [f"| {_names(row)} | {_code(rule_text(row))} | {_code(join_text(row))} |" for row in group]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def rule_text(row: Row) -> str:
    """Return a row's second column."""
    return str(row.pattern) if row.pattern is not None else f"@{row.function}" if row.function else "gathers"


def join_text(row: Row) -> str:
    """Return a row's third column, or why it gathers."""
    if row.pattern is None:
        return row.reason
    return ", ".join(f"{letter or '...'} {join}" for letter, join in row.pattern.combine)


def _names(row: Row) -> str:
    return ", ".join(f"`{name}`" for name in row.names)


def _code(text: str) -> str:
    return f"`{text}`" if text and ("->" in text or len(text.split()) < 5) else text
