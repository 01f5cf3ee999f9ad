"""Real text to train on: Python's own library, or what the user names."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

ENOUGH_BYTES = 2_000_000


class TextError(Exception):
    """There is no text to train on, and why."""


def read_text(path: Path | None) -> bytes:
    """Return up to two million bytes of a text file, a folder of text files, or Python's standard library.

    Raises:
        TextError: nothing there, or too little.
    """
    if path is None:
        path, pattern = Path(sysconfig.get_path("stdlib")), "*.py"
    else:
        pattern = "**/*"
    if not path.exists():
        raise TextError(f"{path} does not exist")
    files = sorted(path.glob(pattern)) if path.is_dir() else [path]
    parts, size = [], 0
    for file in files:
        if size >= ENOUGH_BYTES:
            break
        if file.is_file():
            parts.append(file.read_bytes())
            size += len(parts[-1])
    text = b"\n".join(parts)[:ENOUGH_BYTES]
    if len(text) < 1000:
        raise TextError(f"{path} holds {len(text)} bytes of text; the demo needs at least 1000")
    return text


class Corpus:
    """Text as numbers, one for each byte value that occurs in it."""

    def __init__(self, text: bytes) -> None:
        values = sorted(set(text))
        number = torch.zeros(256, dtype=torch.long)
        number[values] = torch.arange(len(values))
        self.vocabulary = len(values)
        self.numbers = number[torch.frombuffer(bytearray(text), dtype=torch.uint8).long()]

    def batch(self, step: int, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs and targets of a step, each ``(batch, length)`` int64; the same on every rank."""
        generator = torch.Generator().manual_seed(step)
        length = min(length, len(self.numbers) - 2)
        starts = torch.randint(len(self.numbers) - length - 1, (batch,), generator=generator)
        rows = torch.stack([self.numbers[start : start + length + 1] for start in starts.tolist()])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
