"""``shardtensor import``: print plans of other libraries as plans of this one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtensor.errors import PlanError
from shardtensor.plan.loading import PACKAGED


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "import",
        help="print a plan of another library as a plan file",
        description="Read how another library shards a model and print it as a plan file. Exit status 0, 1 when "
        "something in it has no translation or no plan can be derived, 2 when it cannot be read.",
    )
    parser.add_argument("format", choices=("hf",), help="hf: a Hugging Face tensor-parallel plan")
    parser.add_argument(
        "path",
        type=Path,
        metavar="FILE",
        help='JSON: either a plan, {"layers.*.mlp.up_proj": "colwise", ...} or {"tp_plan": {...}, "ep_plan": {...}}, '
        "or the config.json of a model: the plan that transformers has for it, else one derived from its modules, both "
        "verified with a small model of the kind",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the model's config.json, for the length of its heads"
    )
    parser.add_argument("--experts", action="store_true", help="with the plan of experts: shards them over an axis ep")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        found = _json(options.path)
        text = _of_model(options, found) if "model_type" in found else _of_plan(options, found)
    except PlanError as error:
        print(f"{options.path}: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError, ImportError) as error:
        print(f"shardtensor import: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0


def _of_plan(options: argparse.Namespace, found: Mapping[str, Any]) -> str:
    """Return the text for a plan in a file."""
    from shardtensor.plan.interop.hugging_face import plan_text_from_hf

    nested = isinstance(found.get("tp_plan"), Mapping) or isinstance(found.get("ep_plan"), Mapping)
    plans = (found.get("tp_plan") or {}, found.get("ep_plan") or {}) if nested else (found, {})
    for plan in plans:
        odd = next((f"{pattern!r}: {word!r}" for pattern, word in plan.items() if not isinstance(word, str)), None)
        if odd is not None:
            raise ValueError(f"{options.path} is no plan: a rule is a pattern and a word, found {odd}")
    config = _json(options.config) if options.config else {}
    return plan_text_from_hf(plans[0], plans[1] if options.experts else None, config=config)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found


def _of_model(options: argparse.Namespace, config: dict[str, Any]) -> str:
    """Return the text for a model that transformers makes from its configuration, without weights."""
    from shardtensor.cli.model_source import transformers_model

    try:
        model = transformers_model(config)
    except ImportError:
        raise ImportError(
            f"{options.path} is a model's configuration, and its plan stands in transformers, which is not installed. "
            "Install it, or write the plan to a file where it is: json.dump(model.tp_plan, open(FILE, 'w'))"
        ) from None
    if options.experts and getattr(model, "ep_plan", None):
        from shardtensor.parallel.model_info import model_info
        from shardtensor.plan.interop.hugging_face import plan_text_from_hf

        return plan_text_from_hf(dict(model.tp_plan), dict(model.ep_plan), config=config, model=model_info(model))
    from shardtensor.trace.imported import imported_plan

    plan = imported_plan(model)
    for part, why in plan.whole.items():
        print(f"{options.path}: {part} is not sharded: {why}", file=sys.stderr)
    if plan.unverified:
        print(f"{options.path}: the plan was not run: {plan.unverified}", file=sys.stderr)
    if (packaged := PACKAGED.get(config["model_type"])) is not None:
        print(f"{options.path}: the package has a plan for such models, too: `{packaged}`", file=sys.stderr)
    return plan.text
