"""Convert a Hugging Face model's tensor-parallel plan, ``{"layers.*.mlp.up_proj": "colwise", ...}``, to a plan."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from shardtensor.errors import PlanError
from shardtensor.plan.interop.hugging_face_words import EP_WORDS, TP_WORDS, HFWord
from shardtensor.plan.match.patterns import starred
from shardtensor.plan.models.model import Model
from shardtensor.plan.plan import Plan
from shardtensor.plan.text.formatting import format_plan
from shardtensor.plan.text.reading import read_plan
from shardtensor.spec.diagnostics import Source

CUTTING = ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "grouped_gemm")
"""Words that shard a tensor with a rule of its own."""

OWNERS = {"moe_tp_experts": 3, "ep_dispatch_experts": 3, "local_params": 1}
"""Words of modules whose tensors have rules of their own -> the number of dims of these tensors."""

_VOCABULARY_WORDS = {"embedding": "embedding_rowwise", "linear": "colwise_gather_output"}
OF_VOCABULARY = (*_VOCABULARY_WORDS.values(), "colwise_rep")
"""Words that shard a vocabulary, by the kind of the layer."""

_ODD_HEADS = ("v_head_dim", "qk_head_dim", "qk_rope_head_dim", "kv_lora_rank")
"""Keys of configurations in which some heads have a length other than `head_dim`."""

_KV = (".k_proj", ".v_proj")
"""The ends of patterns of projections that several query heads share."""

_SIDES = ("use ", "local ", "in ", "in: ")
"""The beginnings of entries that are written in the block of a module."""

_LATENT = ("q_a_proj", "q_a_layernorm", "kv_a_layernorm")
"""The modules beside the products of latent attention: not sharded, with full values."""


def plan_from_hf(
    tp_plan: Mapping[str, str],
    ep_plan: Mapping[str, str] | None = None,
    *,
    config: Any,
    world: int,
    model: Model | None = None,
    **params: Any,
) -> Plan:
    """Return the plan for a Hugging Face plan, a configuration and a number of ranks.

    Args:
        tp_plan: patterns and words, as in ``model.tp_plan``. Those of a configuration (``base_model_tp_plan``) lack
            the prefix of the base model, ``model.``.
        ep_plan: as ``model.ep_plan``; its modules have no rule in `tp_plan`.
        config: the keys of the model's config.json, or an object with ``to_dict()``.
        world: the number of ranks.
        model: names and shapes, if available: then tensors and modules are known, not guessed.
        params: ``tp``, the ranks that share one layer (default: all), and ``ep``, those that share experts.

    Raises:
        PlanError: some words have no translation; the error lists all of them with the reasons.
    """
    keys: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else config
    text = plan_text_from_hf(tp_plan, ep_plan, config=keys, model=model)
    return read_plan(text, config=keys, world=world, params=params)


def plan_text_from_hf(
    tp_plan: Mapping[str, str],
    ep_plan: Mapping[str, str] | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    model: Model | None = None,
    more: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return the text of that plan; see `plan_from_hf`. It is valid for any number of ranks.

    If `config` has the length of a head, projections of attention are sharded at whole heads only. The words do not
    require it, and a shard boundary inside a head shows late: in wrong results. `more` are rules beside those of the
    plan, by their patterns, as `derived_parts` returns them.

    Example:
        >>> print(plan_text_from_hf({"mlp.up_proj": "colwise", "mlp.gate_proj": "colwise", "mlp.down_proj": "rowwise"}))
        shard 1
        # made of a Hugging Face tensor-parallel plan of 3 rules
        include "std/hugging_face.shard"
        param tp = world
        mesh (dp = world / tp, tp)
        data dp
        <BLANKLINE>
        mlp.up_proj:   hf_colwise(tp)
        mlp.gate_proj: hf_colwise(tp)
        mlp.down_proj: hf_rowwise(tp)
        unmatched: replicate
        <BLANKLINE>
        >>> plan_text_from_hf({"mlp.up_proj": "columnwise"})
        Traceback (most recent call last):
        shardtensor.errors.PlanError: 1 of 1 rules has no translation
          mlp.up_proj  "columnwise": no word of this name is known; did you mean "colwise"?
    """
    ep_plan, keys = ep_plan or {}, config or {}
    is_expert = re.compile(rf"(?:{'|'.join(map(re.escape, ep_plan))})(?:\..+)?").fullmatch if ep_plan else None
    kept = {name: word for name, word in tp_plan.items() if is_expert is None or not is_expert(name)}
    if model is not None:  # some plans list layers twice, with and without the prefix of the base model
        kept = {name: word for name, word in kept.items() if not any(other.endswith(f".{name}") for other in kept)}
    count = len(kept) + len(ep_plan)
    kept |= {owner: "local_params" for owner in _local_owners(kept, model)}
    kept |= _other_names(kept, model) | _norms_of_heads(kept, model, keys)
    rules: dict[str, list[str]] = {}
    untranslated: dict[str, str] = {}
    heads = _whole_heads(kept, keys)
    shared = _shared_heads(heads, model)
    for plan, words in ((kept, TP_WORDS), (ep_plan, EP_WORDS)):
        for pattern, word in plan.items():
            rule, why = _rule(pattern, word, plan, words, model)
            if why:
                untranslated[pattern] = f'"{word}": {why}'
            rule = rule.replace("(tp)", "(tp, unit=hd)") if pattern in heads else rule
            if shared and pattern in heads and pattern.endswith(_KV):
                rule = "hf_colwise_shared(kvg, copies=kvr, unit=hd)"
            rule = re.sub(r"config\.(\w+)", lambda key: _key(keys, key[1]), rule)
            rules.setdefault(pattern, []).append(rule)
            if word == "mla_kv_a_proj":  # the plans do not list the modules beside it, but `check` needs their rules
                owner = pattern.rpartition(".")[0]
                beside = (name for name in _LATENT if f"{owner}.{name}" not in kept)
                rules |= {f"optional {owner}.{name}": ["hf_whole()"] for name in beside}
    for owner in shared:
        rules.setdefault(owner, []).append("local num_key_value_groups: [kvr]")
    for path in _activations(kept, heads, model):
        rules[path] = ["hf_elementwise(tp)"]
    if untranslated:
        verb = "has" if len(untranslated) == 1 else "have"
        raise PlanError(f"{len(untranslated)} of {count} rules {verb} no translation", untranslated)
    rules |= {pattern: list(texts) for pattern, texts in (more or {}).items()}
    shared = shared or [text for texts in rules.values() for text in texts if "kvg" in text]
    lines = [*_header(count, heads, shared, ep_plan, keys, more or {}), ""]
    if _needs_heads(kept, heads, model) and (number := value_of(keys, "num_attention_heads")):
        kv = value_of(keys, "num_key_value_heads") or number
        for name, default in {"num_attention_heads": number, "num_key_value_heads": kv}.items():
            lines.insert(-1, f'require ({_key(keys, name)} ?? {default}) % tp == 0 "every rank needs whole heads"')
    for pattern, texts in rules.items():
        lines += [pattern] if pattern.startswith("tie ") else []
        lines += [f"{pattern}: {text}" for text in texts if not text.startswith(_SIDES)]
        sides = [text for text in texts if text.startswith(_SIDES)]
        lines += [f"{pattern} {{", *sides, "}"] if sides else []
    return format_plan(Source("\n".join([*lines, "unmatched: replicate", ""])))


def _rule(
    pattern: str, word: Any, plan: Mapping[str, str], words: Mapping[str, HFWord], model: Model | None
) -> tuple[str, str]:
    """Return the rule of a word for a pattern; or an empty one, and why it has no translation."""
    if word in words:
        entry = words[word]
        if entry.no_translation is not None:
            return "", "; ".join(entry.no_translation)
        ndim = _ndim(pattern, plan, model)
        if ndim is None and word == "moe_tp_experts" and model is not None and not _takes_weights(pattern, model):
            return "hf_moe_tp_experts_without_weights(tp)", ""
        rule = entry.module if ndim is None else entry.tensor(ndim) if entry.tensor is not None else ""
        return rule, "" if rule else f"it is no word for a {'module' if ndim is None else 'tensor'}"
    if word in TP_WORDS or word in EP_WORDS:
        return "", f"it is a word of the {'tp_plan' if word in TP_WORDS else 'ep_plan'}"
    near = get_close_matches(str(word), words, 1)
    return "", "no word of this name is known" + (f'; did you mean "{near[0]}"?' if near else "")


def _ndim(pattern: str, plan: Mapping[str, str], model: Model | None) -> int | None:
    """Return the number of dims of the tensor of this name; None for a module.

    Without a model, a tensor is recognized by its name and by the word of its module.
    """
    if model is not None:
        found = next((len(tensor.shape) for tensor in model.tensors if starred(tensor.name) == pattern), None)
        if found is not None or any(starred(path) == pattern for path in model.paths):
            return found  # a name that the model lacks is treated as without a model
    owner, _, name = pattern.rpartition(".")
    word = plan.get(owner, "")
    if word not in OWNERS or plan[pattern] not in CUTTING:
        return None
    if name.endswith("_bias"):
        return OWNERS[word] - 1 or 1
    return None if word == "local_params" and name.endswith("proj") else OWNERS[word]


def _local_owners(plan: Mapping[str, str], model: Model | None) -> list[str]:
    """Return the modules without a word whose tensors the plan shards: transformers before 5.23 has no word for them.

    It loads each rank's slice, and the module's forward computes with it. Without a model no tensor is known.
    """
    tensors = {starred(tensor.name) for tensor in model.tensors} if model is not None else set()
    owners = {p.rpartition(".")[0] for p, word in plan.items() if p in tensors and word in CUTTING}
    return sorted(owners - plan.keys() - {""})


def _other_names(plan: Mapping[str, str], model: Model | None) -> dict[str, str]:
    """Return words for embeddings and heads that the plan does not list and whose weight is one with a listed one."""
    words = {}
    for names in model.tied if model is not None else ():
        patterns = [starred(name).removesuffix(".weight") for name in names]
        if any(plan.get(pattern) in OF_VOCABULARY for pattern in patterns):
            for pattern, name in zip(patterns, names, strict=True):
                kind = model.kind(name.removesuffix(".weight")) if model is not None else None
                if pattern not in plan and kind is not None and kind.name in _VOCABULARY_WORDS:
                    words[pattern] = _VOCABULARY_WORDS[kind.name]
    return words


def _norms_of_heads(plan: Mapping[str, str], model: Model | None, config: Mapping[str, Any]) -> dict[str, str]:
    """Return words for norms over one head that the plan does not list: the values that they scale are sharded."""
    owners = {pattern.rpartition(".")[0] for pattern in _whole_heads(plan, config)}
    words = {}
    for tensor in model.tensors if model is not None else ():
        path = tensor.name.rpartition(".")[0]
        kind = model.kind(path) if model is not None else None
        if kind is not None and kind.name == "norm" and starred(path).rpartition(".")[0] in owners:
            words[starred(path)] = plan.get(starred(path), "replicated_with_grad_allreduce")
    return words


def _activations(plan: Mapping[str, str], heads: Iterable[str], model: Model | None) -> list[str]:
    """Return the activations with numbers that are trained, beside layers that are sharded by columns and by rows."""
    pairs = [{p.rpartition(".")[0] for p, word in plan.items() if word == each} for each in ("colwise", "rowwise")]
    owners = set.intersection(*pairs) - {pattern.rpartition(".")[0] for pattern in heads} - set(plan)
    sizes: dict[str, int] = {}
    for tensor in model.tensors if model is not None else ():
        path = starred(tensor.name.rpartition(".")[0])
        sizes[path] = max(tensor.numel, sizes.get(path, 0))
    return [
        path for path, size in sizes.items() if size == 1 and path.rpartition(".")[0] in owners and path not in plan
    ]


def _takes_weights(pattern: str, model: Model) -> bool:
    arguments = next((info.arguments for path, info in model.modules.items() if starred(path) == pattern), ())
    return not arguments or len(arguments) > 2


def _whole_heads(plan: Mapping[str, str], config: Mapping[str, Any]) -> frozenset[str]:
    """Return the sharded projections of attention, if the configuration has the length of every head."""
    if not _head_dim(config) or any(value_of(config, key) is not None for key in _ODD_HEADS):
        return frozenset()
    found: list[str] = []
    for owner in {pattern.rpartition(".")[0] for pattern in plan if pattern.endswith(".q_proj")}:
        inputs = [f"{owner}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        outputs = [p for p, word in plan.items() if word == "rowwise" and p.rpartition(".")[0] == owner]
        if all(plan.get(pattern) == "colwise" for pattern in inputs) and len(outputs) == 1:
            found += [*inputs, *outputs]
    return frozenset(found)


def _needs_heads(plan: Mapping[str, str], heads: Container[str], model: Model | None) -> bool:
    """Whether some products of attention are sharded by columns, and not in units of heads."""
    infos = {starred(path): info for path, info in model.modules.items()} if model is not None else {}
    owners = (
        pattern.rpartition(".")[0] for pattern, word in plan.items() if word == "colwise" and pattern not in heads
    )
    return any(owner in infos and "attention" in infos[owner].class_name.lower() for owner in owners)


def _shared_heads(heads: Iterable[str], model: Model | None) -> list[str]:
    """Return the modules of sharded attention in which several query heads share a key head, and whose code says how
    many: with more ranks than key heads, several ranks hold the same one."""
    owners = dict.fromkeys(pattern.rpartition(".")[0] for pattern in sorted(heads))
    infos = {starred(path): info for path, info in model.modules.items()} if model is not None else {}
    found = [owner for owner in owners if owner in infos and infos[owner].counts.get("num_key_value_groups", 1) > 1]
    return found if len(found) == len(owners) else []


def _head_dim(config: Mapping[str, Any]) -> str:
    """Return the length of a head, in the language of plans; empty if the configuration does not have it."""
    names = ("head_dim", "hidden_size", "num_attention_heads")
    size, width, heads = (value_of(config, name) for name in names)
    own, wide, count = (_key(config, name) for name in names)
    if heads and width and width % heads == 0 and size in (None, width // heads):
        return f"{own} ?? {wide} / {count}"
    return f"{own} ?? {size}" if size else ""


def value_of(config: Mapping[str, Any], name: str) -> Any:
    """Return a key of the configuration; for a model of several parts, of the text part."""
    part: Any = next((each for each in config.values() if isinstance(each, Mapping) and name in each), {})
    return config[name] if name in config else part.get(name)


def _key(config: Mapping[str, Any], name: str) -> str:
    """Return a key of the configuration, in the language of plans; for a model of several parts, of the text part."""
    part = next((key for key, value in config.items() if isinstance(value, Mapping) and name in value), "")
    return f"config.{part}.{name}" if part and name not in config else f"config.{name}"


def _header(
    count: int,
    heads: Iterable[str],
    shared: Iterable[str],
    ep_plan: Mapping[str, str],
    config: Mapping[str, Any],
    more: Mapping[str, Sequence[str]],
) -> list[str]:
    kind = "tensor- and expert-parallel" if ep_plan else "tensor-parallel"
    sources = [f"a Hugging Face {kind} plan of {count} rules"] if count else []
    sources += ["the modules of the model"] if more else []
    lines = ["shard 1", f"# made of {' and '.join(sources)}", 'include "std/hugging_face.shard"']
    lines += ['include "std/styles.shard"'] if more else []
    lines += ["param tp = world"] if not ep_plan else ["param tp = 1", "param ep = world / tp"]
    if heads:
        lines.append(f"let hd = {_head_dim(config)}")
    axis = "tp"
    if shared:
        default = value_of(config, "num_key_value_heads")
        lines.append(f"let kv = {_key(config, 'num_key_value_heads')}" + (f" ?? {default}" if default else ""))
        axis = "tp (kvg = gcd(tp, kv), kvr = tp / kvg)"
    lines += (
        [f"mesh (dp = world / (ep * tp), ep, {axis})", "data dp*ep"]
        if ep_plan
        else [f"mesh (dp = world / tp, {axis})", "data dp"]
    )
    if shared:
        lines.append('require kv % tp == 0 or tp % kv == 0 "kv heads must divide tp, or tp must divide kv heads"')
    return lines
