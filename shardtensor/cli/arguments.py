"""Arguments that several commands share: the model, the number of ranks, the parameters."""

from __future__ import annotations

import argparse
import os

NO_NUMPY = "Failed to initialize NumPy"
"""The beginning of torch's warning at import if numpy is not installed; nothing here needs numpy."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the inputs of a plan: ``--model``, ``--safetensors``, ``--module``, ``--world``, ``--set``."""
    parser.add_argument("--model", metavar="CONFIG", help="the model's config.json, for a plan")
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument("--safetensors", metavar="INDEX", help="names and shapes from this index or file")
    shapes.add_argument("--module", metavar="PKG:FN", help="names, shapes and ties of the module that FN() returns")
    parser.add_argument("--world", type=positive, default=1, metavar="N", help="number of ranks (default 1)")
    parser.add_argument(
        "--set", action="append", default=[], type=setting, metavar="K=V", help="the value of a parameter of the plan"
    )


def quiet_processes() -> None:
    """Suppress torch's warning about numpy in the processes that this one starts."""
    given = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (given, f"ignore:{NO_NUMPY}")))


def positive(text: str) -> int:
    """Parse a whole number of at least one.

    Example:
        >>> positive("4")
        4
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def setting(text: str) -> tuple[str, str]:
    """Parse a parameter and its value.

    Example:
        >>> setting("tp=4")
        ('tp', '4')
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"{text} sets nothing; write such as tp=4")
    return name.strip(), value.strip()
