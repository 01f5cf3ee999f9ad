"""The tensor-parallel plan of a model of transformers: its own where it has one, else one derived from its modules.

It is verified: `check_numeric` runs a small model of the same code under the plan. A part with which the loss or a
gradient is not the dense one stays whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
from torch import nn

from shardtensor.errors import PlanError, ShardTensorError, SpecError
from shardtensor.plan.findings.checking import check_plan
from shardtensor.plan.interop.adapters import resolve_with_adapters
from shardtensor.plan.interop.derived import Part, Rules, derived_parts
from shardtensor.plan.interop.hugging_face import OF_VOCABULARY, plan_text_from_hf
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.patterns import starred
from shardtensor.plan.plan import Plan
from shardtensor.plan.text.reading import read_plan
from shardtensor.sharding.model_info import model_info
from shardtensor.sharding.numeric import check_numeric
from shardtensor.sharding.small_model import make_small, small_config, small_step

Words = Mapping[str, str]
"""A plan of transformers: from patterns to words."""


@attrs.frozen
class ImportedPlan:
    """The plan of a model, for any number of ranks.

    Attributes:
        text: of the plan.
        whole: the parts that are not sharded because no way that was tried is right, each with what went wrong.
        unverified: why the plan was not run; empty if it was.
    """

    text: str
    whole: Mapping[str, str] = attrs.field(factory=dict)
    unverified: str = ""


def imported_plan(model: nn.Module) -> ImportedPlan:
    """Return the plan of a model of transformers. Runs small models in this process; sends nothing.

    Args:
        model: its values are not read, so it may be on the meta device.

    Raises:
        PlanError: transformers has no plan for it, and none can be derived and verified.
    """
    return _imported(_Given(type(model), json.dumps(config_of(model), sort_keys=True, default=str), model))


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the keys of a model's configuration; none if it has no configuration."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    return dict(to_dict())


def automatic_plan(model: nn.Module, world: int) -> Plan:
    """Return the plan ``"auto"`` of a model: the package's for its type if it fits, else the imported one.

    Raises:
        PlanError: the model has no configuration, or no plan can be derived for it.
    """
    config = config_of(model)
    if not config.get("model_type"):
        raise PlanError(
            f'"auto" is for models of transformers, and {type(model).__name__} has no config with a model_type',
            fix=["write a plan, or rules", 'shard it fully with the plan "fsdp"'],
        )
    try:
        plan = load_plan("auto", config=config, world=world)
        if not any(finding.severity == "error" for finding in check_plan(resolve_with_adapters(plan, model_info(model)))):
            return plan
    except SpecError:
        pass  # there is none, or none for this number of ranks
    return read_plan(imported_plan(model).text, config=config, world=world)


@attrs.frozen
class _Given:
    """A model as a key of the cache: models of one class and configuration have one plan."""

    kind: type
    config: str
    model: Any = attrs.field(eq=False)


@lru_cache(maxsize=8)
def _imported(given: _Given) -> ImportedPlan:
    model, info = given.model, model_info(given.model)
    config, words = config_of(model), dict(getattr(model, "tp_plan", None) or {})
    is_own = any(word not in OF_VOCABULARY for word in words.values())
    try:
        small = _Small.of(model)
    except Exception as error:  # code of transformers and of users that is run with other sizes may raise anything
        why = f"a small model of its kind does not run: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if not is_own:
            raise _refused(model, {"not verified": why}) from None
        return ImportedPlan(plan_text_from_hf(words, config=config, model=info), unverified=why)
    if is_own:
        words, whole = _right_words(words, small)
        return ImportedPlan(plan_text_from_hf(words, config=config, model=info), whole)
    rules, whole = _right_rules(derived_parts(info), small)
    if not rules:
        raise _refused(model, whole or {"found": "no attention, feed-forward network or vocabulary that is known"})
    return ImportedPlan(plan_text_from_hf({}, config=config, model=info, more=rules), whole)


def _refused(model: nn.Module, facts: Mapping[str, str]) -> PlanError:
    return PlanError(
        f"transformers has no tensor-parallel plan for {type(model).__name__}, and none can be derived from its modules",
        facts,
        ["write a plan for it", 'shard it fully with the plan "fsdp"'],
    )


@attrs.frozen(eq=False)
class _Small:
    """A small model of the same code, with which plans are verified.

    Attributes:
        config: its keys.
        make: returns it and its step, for `check_numeric`.
        used: patterns of the modules whose parameters its step uses.
    """

    config: Any
    make: Callable[[], Any]
    info: Any
    used: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> _Small:
        """Return the small model; raise what its code raises if it does not run."""
        config = small_config(model)

        def make() -> Any:
            return make_small(type(model), config), small_step

        module, step = make()
        step(module.double().eval(), 0).backward()
        named = module.named_parameters(remove_duplicate=False)
        used = frozenset(starred(name.rpartition(".")[0]) for name, each in named if each.grad is not None)
        return cls(config.to_dict(), make, model_info(module), used)

    def fault(self, words: Words, more: Rules) -> str:
        """Return what is wrong with the rules; empty if nothing is."""
        text = plan_text_from_hf(words, config=self.config, model=self.info, more=more)
        for ranks in (2, 4) if "kvr" in text else (2,):
            try:
                findings = check_numeric(read_plan(text, config=self.config, world=ranks), self.make)
            except ShardTensorError as error:
                return str(error).partition("\n")[0]
            if findings:
                return findings[0].fault
        return ""


def _right_words(words: Words, small: _Small) -> tuple[Words, dict[str, str]]:
    """Return the words that are right: all of them, or those of the parts that are; and what is wrong with others."""
    if not small.fault(words, {}):
        return words, {}
    right: dict[str, str] = {}
    whole: dict[str, str] = {}
    for part, own in _parts(words, _part).items():
        fault = small.fault(right | own, {})
        inner = _parts(own, lambda pattern, part=part: _inner(pattern, part, words)) if fault else {part: own}
        for name, few in inner.items():
            if fault and (len(inner) == 1 or small.fault(right | few, {})):
                whole[name] = fault
            else:
                right |= few
    return right, whole


def _parts(words: Words, part_of: Callable[[str], str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for pattern, word in words.items():
        found.setdefault(part_of(pattern), {})[pattern] = word
    return found


def _part(pattern: str) -> str:
    """Return the part of a model that a pattern belongs to: a module of a layer, or the vocabulary.

    Example:
        >>> _part("model.layers.*.mlp.experts.down_proj"), _part("lm_head")
        ('model.layers.*.mlp', 'vocabulary')
    """
    before, star, after = pattern.partition("*.")
    return before + star + after.partition(".")[0] if star else "vocabulary"


def _inner(pattern: str, part: str, words: Words) -> str:
    """Return the module inside a part that a pattern belongs to: experts, for one; the part for a layer of its own."""
    child = f"{part}.{pattern.removeprefix(part).strip('.').partition('.')[0]}"
    return child if any(other.startswith(f"{child}.") for other in words) else part


def _right_rules(parts: Sequence[Part], small: _Small) -> tuple[Rules, dict[str, str]]:
    """Return the rules of a model that are right in the small one, by part; and what is wrong with the others."""
    twins = {part.key: part for part in derived_parts(small.info)}
    right: dict[str, Sequence[str]] = {}
    of_small: dict[str, Sequence[str]] = {}
    whole: dict[str, str] = {}
    for part in parts:
        twin = twins.get(part.key)
        ways = [name for name in part.ways if twin is not None and name in twin.ways]
        faults = ["in a small model of its kind it has other shapes"]
        layers = {pattern for pattern, texts in next(iter(part.ways.values())).items() if texts and "wise(" in texts[0]}
        if not layers <= small.used:
            ways, faults = [], ["the step of a small model does not call it"]
        for name in ways:
            assert twin is not None
            faults.append(small.fault({}, of_small | twin.ways[name]))
            if not faults[-1]:
                right |= part.ways[name]
                of_small |= twin.ways[name]
                break
        if faults[-1]:
            whole[part.name or "vocabulary"] = faults[1] if ways else faults[0]
    return right, whole
