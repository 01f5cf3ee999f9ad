"""``shardtensor ckpt``: what a checkpoint holds, whether its files are damaged, and other kinds of checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from shardtensor.errors import ShardTensorError

_KINDS = ("shardtensor", "dcp", "hf", "torch")


def add_parser(commands: Any) -> None:
    """Add ``ckpt`` and its commands to the command line."""
    parser = commands.add_parser("ckpt", help="inspect, verify and convert checkpoints")
    ways = parser.add_subparsers(dest="way", required=True)
    inspect = ways.add_parser(
        "inspect",
        help="list the tensors of a checkpoint",
        description="List the tensors of a checkpoint: names, shapes, dtypes, layouts and files. No tensor is read. "
        "Exit status 0, or 1 when there is no checkpoint.",
    )
    inspect.add_argument("path", help="a folder that save() has written, or a folder or file of safetensors")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)
    verify = ways.add_parser(
        "verify",
        help="compare all checksums of a checkpoint",
        description="Read every file of a checkpoint and compare its checksums. Exit status 0, or 1 when a file is "
        "missing or damaged.",
    )
    verify.add_argument("path", help="a folder that save() has written, or a folder or file of safetensors")
    verify.set_defaults(run=_verify)
    convert = ways.add_parser(
        "convert",
        help="write a checkpoint anew as one of another kind",
        description="Write a checkpoint anew as one of another kind. Models are always converted, optimizers to and "
        "from torch.distributed.checkpoint by the names of parameters. Exit status 0, or 1 when it cannot be done.",
    )
    convert.add_argument("source", help="a checkpoint of any of the kinds")
    convert.add_argument("target", help="where nothing is yet")
    convert.add_argument(
        "--to",
        choices=_KINDS,
        default="shardtensor",
        help="shardtensor: what load() reads (default); dcp: a folder of torch.distributed.checkpoint; hf: the model "
        "as a Hugging Face folder; torch: the model as one file of torch.save",
    )
    convert.add_argument(
        "--trust",
        action="store_true",
        help="read a folder of torch.distributed.checkpoint: its metadata is a pickle, which can run any program",
    )
    convert.add_argument(
        "--optimizer", default="", metavar="CLASS", help="the class of the optimizer, if its options do not tell it"
    )
    convert.set_defaults(run=_convert)


def _inspect(options: argparse.Namespace) -> int:
    from shardtensor.checkpoint.inspecting import inspect  # after parsing, so that --help does not import torch

    try:
        found = inspect(options.path)
    except ShardTensorError as error:
        return _failed(error)
    print(json.dumps(found.as_dict(), indent=1) if options.json else found)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from shardtensor.checkpoint.inspecting import inspect, verify_files
    from shardtensor.layout.explain import bytes_text

    try:
        count = verify_files(options.path)
        has_checksums = count > 0 or inspect(options.path).kind == "shardtensor"
    except ShardTensorError as error:
        return _failed(error)
    if has_checksums:
        print(f"{options.path}: {bytes_text(count)} are as they were saved")
    else:
        print(f"{options.path}: the files have no checksums; their headers fit their lengths")
    return 0


def _convert(options: argparse.Namespace) -> int:
    from shardtensor.checkpoint.converting import convert
    from shardtensor.layout.explain import bytes_text

    try:
        done = convert(options.source, options.target, options.to, trust=options.trust, optimizer=options.optimizer)
    except ShardTensorError as error:
        return _failed(error)
    what = f"{done.tensors} tensors, {bytes_text(done.bytes)}: {', '.join(done.parts)}"
    print(f"{options.target}: {what}; {done.source} to {done.target}")
    for text in done.left_out:
        print(f"  left out  {text}")
    return 0


def _failed(error: ShardTensorError) -> int:
    print(f"shardtensor ckpt: {error}", file=sys.stderr)
    return 1
