"""The tensor-parallel plan of a model of transformers: its own where it has one, else one derived from its modules.

It is verified: `check_numeric` runs a small model of the same code under the plan. A part with which the loss or a
gradient is not the dense one stays whole.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.errors import PlanError, ShardTensorError, SpecError
from shardtensor.parallel.model_info import config_of, model_info
from shardtensor.plan.findings.checking import errors_of
from shardtensor.plan.interop.adapters import resolve_with_adapters
from shardtensor.plan.interop.derived import Part, Rules, derived_parts
from shardtensor.plan.interop.hugging_face import OF_VOCABULARY, plan_text_from_hf, value_of
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.patterns import starred
from shardtensor.plan.models.model import Model
from shardtensor.plan.plan import Plan
from shardtensor.plan.text.reading import read_plan
from shardtensor.trace.case import MOST, few_layers_of, small_module
from shardtensor.trace.check import check_numeric
from shardtensor.trace.example import example_step
from shardtensor.trace.small import small_configs

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


def imported_plan(model: nn.Module, world: int | None = None) -> ImportedPlan:
    """Return the plan of a model of transformers. Runs small models in this process; sends nothing.

    Args:
        model: its values are not read, so it may be on the meta device.
        world: a number of ranks for which the plan has no errors: parts that these cannot share stay whole. Without it
            the plan is for all numbers that its parts allow.

    Raises:
        PlanError: transformers has no plan for it, and none can be derived and verified.
    """
    return _imported(_Given(type(model), json.dumps(config_of(model), sort_keys=True, default=str), model), world)


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
        if not _error(plan, model_info(model)):
            return plan
    except SpecError:
        pass  # there is none, or none for this number of ranks
    return read_plan(imported_plan(model, world).text, config=config, world=world)


def _error(plan: Plan, model: Model) -> str:
    """Return the first error of a plan that is found without running it; empty if there is none."""
    return next((finding.fault for finding in errors_of(resolve_with_adapters(plan, model))), "")


@attrs.frozen
class _Given:
    """A model as a key of the cache: models of one class and configuration have one plan."""

    kind: type
    config: str
    model: Any = attrs.field(eq=False)


@lru_cache(maxsize=8)
def _imported(given: _Given, world: int | None) -> ImportedPlan:
    model, config, words = given.model, config_of(given.model), dict(getattr(given.model, "tp_plan", None) or {})
    write = partial(plan_text_from_hf, config=config, model=model_info(model))
    is_own = any(word not in OF_VOCABULARY for word in words.values())
    try:
        verifier = _Verifier.of(model, write, world)
    except Exception as error:  # code of transformers and of users that is run with other sizes may raise anything
        why = f"a small model of its kind does not run: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if not is_own:
            raise _refused(model, {"not verified": why}) from None
        return ImportedPlan(write(words), unverified=why)
    if is_own:
        right, whole = _right_words(words, verifier)
        return ImportedPlan(write(right), whole)
    rules, whole = _right_rules(derived_parts(model_info(model)), verifier)
    if not rules:
        raise _refused(model, whole or {"found": "no attention, feed-forward network or vocabulary that is known"})
    return ImportedPlan(write({}, more=rules), whole)


def _refused(model: nn.Module, facts: Mapping[str, str]) -> PlanError:
    return PlanError(
        f"transformers has no tensor-parallel plan for {type(model).__name__}, and its modules do not give one",
        facts,
        ["write a plan for it", 'shard it fully with the plan "fsdp"'],
    )


@attrs.frozen(eq=False)
class _Verifier:
    """Finds out whether rules are right, with a small model of the same code.

    Attributes:
        write: returns the text of rules of the model itself.
        world: the ranks that share the model itself, if they are known.
        model, config: the model itself, and the keys of the small one.
        make: returns the small model and its step, for `check_numeric`.
        small: names and shapes of the small model.
        used: patterns of the modules whose parameters its step uses.
    """

    write: Callable[..., str]
    world: int | None
    model: nn.Module
    config: Mapping[str, Any]
    make: Callable[[], Any]
    small: Model
    used: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, write: Callable[..., str], world: int | None) -> _Verifier:
        """Make the small model; raise what its code raises if it does not run."""
        fault: Exception | None = None
        build = partial(_built, type(model), model.config)
        for small, _ in small_configs(config_of(model), 16):
            try:
                for config, _ in few_layers_of(build(small), small):
                    make = partial(small_module, build, config)
                    with torch.random.fork_rng(devices=[]):
                        module = make().double().eval()
                        example_step(module, 0, 8).backward()
                    named = module.named_parameters(remove_duplicate=False)
                    used = frozenset(starred(name.rpartition(".")[0]) for name, each in named if each.grad is not None)
                    return cls(write, world, model, config, make, model_info(module), used)
            except Exception as error:  # as above
                fault = fault or error
        assert fault is not None
        raise fault

    def fault(self, words: Words, more: Rules, of_small: Rules) -> str:
        """Return what is wrong with the rules, those of the small model in `of_small`; empty if nothing is."""
        text = plan_text_from_hf(words, config=self.config, model=self.small, more=of_small)
        try:
            if self.world is not None:
                keys = config_of(self.model)
                plan = read_plan(self.write(words, more=more), config=keys, world=self.world)
                if fault := _error(plan, model_info(self.model)):
                    return fault
            for ranks in self._worlds("kvr" in text):
                findings = check_numeric(read_plan(text, config=self.config, world=ranks), self.make)
                if findings:
                    return findings[0].fault
        except ShardTensorError as error:
            return str(error).partition("\n")[0]
        return ""

    def _worlds(self, is_shared: bool) -> tuple[int, ...]:
        """Return the numbers of ranks to run on: two, and so many that some hold the same key head."""
        heads, kv = (value_of(self.config, f"num_{name}_heads") or 1 for name in ("attention", "key_value"))
        more = next((kv * n for n in range(2, heads // kv + 1) if (heads // kv) % n == 0), 0)
        return (2, more) if is_shared and 2 < more <= 16 else (2,)


def _built(kind: Any, given: Any, keys: Mapping[str, Any], device: str = "meta") -> nn.Module:
    """Return the model of a class with the given configuration, changed to these keys."""
    config = _with_keys(copy.deepcopy(given), keys)
    with torch.device(device):
        model = kind._from_config(config, attn_implementation="eager")
    if device != "meta" and (size := sum(parameter.numel() for parameter in model.parameters())) > MOST:
        raise ValueError(f"it has {size:,} parameters")
    return model


def _with_keys(config: Any, keys: Mapping[str, Any]) -> Any:
    """Write keys in a configuration and in the configurations of its parts; return it."""
    config._experts_implementation = "eager"  # the others do not compute in float64
    for key, value in keys.items():
        own = getattr(config, key, None)
        if hasattr(own, "to_dict"):
            _with_keys(own, value)
        elif own != value and not isinstance(own, torch.dtype):
            setattr(config, key, value)
    return config


def _right_words(words: Words, verifier: _Verifier) -> tuple[Words, dict[str, str]]:
    """Return the words that are right: all of them, or those of the parts that are; and what is wrong with others."""
    if not verifier.fault(words, {}, {}):
        return words, {}
    right: dict[str, str] = {}
    whole: dict[str, str] = {}
    for part, own in _parts(words, _part).items():
        fault = verifier.fault(right | own, {}, {})
        inner = _parts(own, partial(_inner, part=part, words=words)) if fault else {part: own}
        for name, few in inner.items():
            if fault and (len(inner) == 1 or verifier.fault(right | few, {}, {})):
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


def _right_rules(parts: Sequence[Part], verifier: _Verifier) -> tuple[Rules, dict[str, str]]:
    """Return the rules of a model that are right in the small one, by part; and what is wrong with the others."""
    twins = {part.key: part for part in derived_parts(verifier.small)}
    right: dict[str, Sequence[str]] = {}
    of_small: dict[str, Sequence[str]] = {}
    whole: dict[str, str] = {}
    for part in parts:
        twin = twins.get(part.key)
        choices = [name for name in part.choices if twin is not None and name in twin.choices]
        faults = ["in a small model of its kind it has other shapes"]
        layers = {
            pattern for pattern, texts in next(iter(part.choices.values())).items() if texts and "wise(" in texts[0]
        }
        if not layers <= verifier.used:
            choices, faults = [], ["the step of a small model does not call it"]
        for name in choices:
            assert twin is not None
            faults.append(verifier.fault({}, {**right, **part.choices[name]}, {**of_small, **twin.choices[name]}))
            if not faults[-1]:
                right |= part.choices[name]
                of_small |= twin.choices[name]
                break
        if faults[-1]:
            whole[part.name or "vocabulary"] = faults[1] if choices else faults[0]
    return right, whole
