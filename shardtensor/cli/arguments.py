"""Arguments that several commands share: the model, the number of ranks, the parameters, the training step."""

from __future__ import annotations

import argparse
import os
import re

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}

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


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what determines the costs of a training step: the batch, the optimizer, the hardware and its memory."""
    parser.add_argument(
        "--batch", type=positive, default=1, metavar="N",
        help="samples of each data rank in a step (default 1); with --search, N for each rank of the world, dealt to "
        "the data ranks, so that every mesh does the same work",
    )  # fmt: skip
    parser.add_argument(
        "--seq", type=positive, metavar="N", help="tokens of a sample (default 4096, or as many as the model takes)"
    )
    dtypes = ("bfloat16", "float16", "float32", "float64")
    parser.add_argument("--dtype", choices=dtypes, help="of parameters and values (default the model's)")
    parser.add_argument("--optimizer", default="adamw", help="adamw, adam, momentum, sgd or none (default adamw)")
    state = parser.add_mutually_exclusive_group()
    state.add_argument(
        "--master-weights", action="store_true",
        help="the optimizer steps float32 copies of shorter parameters, and has its state in float32",
    )  # fmt: skip
    state.add_argument(
        "--zero", choices=("owners", "ranges", "gradients"),
        help="data ranks step parts, with ZeroRedundancyOptimizer: whole parameters, ranges, or ranges whose gradients "
        "alone they hold",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint-activations", nargs="?", const="", metavar="PATTERN",
        help="modules that run under torch.utils.checkpoint, as plans name them (default each layer of the model's "
        "lists): backward recomputes what their forward would save",
    )  # fmt: skip
    parser.add_argument("--hardware", default="h100", help="h100, h200, cpu, or a profile's file (default h100)")
    parser.add_argument("--no-step", action="store_true", help="bytes alone: no step is counted, torch not imported")
    parser.add_argument(
        "--memory", type=_bytes, metavar="SIZE",
        help="of a rank, as 80GiB (default: the hardware's); exit status 1 of `plan` where it does not fit into it",
    )  # fmt: skip


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


def _bytes(text: str) -> int:
    """Parse a size such as ``80GiB``.

    Example:
        >>> _bytes("80GiB"), _bytes("1.5 KB"), _bytes("12 B")
        (85899345920, 1500, 12)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in _UNITS:
        unit = found[1] if found is not None and not found[2] else "80"
        raise argparse.ArgumentTypeError(f"{text} is no size; give it a unit, as in {unit}GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])
