"""Derive rules from the modules of a model: attention by heads, feed-forward networks by columns and rows, vocabulary.

Names, shapes and classes of modules do not determine what a model's code computes. So each part comes with several
choices to shard it, and whoever asks for them runs a small model of the same code to learn which one is right, if any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

import attrs

from shardtensor.plan.match.patterns import starred
from shardtensor.plan.models.model import Model

Rules = Mapping[str, Sequence[str]]
"""From a pattern to the texts of its rules; from a statement, such as ``tie a = b``, to nothing."""


@attrs.frozen
class Part:
    """One part of a model, whose rules are right together or not at all.

    Attributes:
        name: the pattern of the module that holds it.
        choices: by a short name, the rules of each way to shard it, the most usual first.
    """

    name: str
    choices: Mapping[str, Rules]

    @property
    def key(self) -> tuple[str, frozenset[str]]:
        """What it has in common with the same part of a model of other sizes."""
        return self.name, frozenset(pattern for rules in self.choices.values() for pattern in rules)


@attrs.frozen
class _Linear:
    """A linear layer, under the pattern of its path."""

    path: str
    pattern: str
    width_in: int
    width_out: int


def derived_parts(model: Model, covered: Collection[str] = ()) -> tuple[Part, ...]:
    """Return the parts of a model that may be sharded over an axis ``tp``, and how.

    Args:
        model: of a real module.
        covered: patterns that have rules already; parts with one of these layers are left out.

    Example:
        >>> from shardtensor.plan.models.model import ModuleInfo, TensorInfo
        >>> shapes = {"layers.0.up": (32, 8), "layers.0.down": (8, 32)}
        >>> tensors = tuple(TensorInfo(f"{path}.weight", shape, ("out", "in")) for path, shape in shapes.items())
        >>> (part,) = derived_parts(Model(tensors, modules={path: ModuleInfo("Linear") for path in shapes}))
        >>> part.choices["columns and rows"]
        {'layers.*.up': ['colwise(tp)'], 'layers.*.down': ['rowwise(tp)']}
    """
    layers = [layer for layer in _linears(model) if layer.pattern not in covered]
    attentions = _attentions(model)
    inside = {layer.pattern: path for path in attentions for layer in layers if layer.path.startswith(f"{path}.")}
    parts = []
    for path in attentions:
        choices = _attention(model, path, [layer for layer in layers if inside.get(layer.pattern) == path])
        parts.append(Part(starred(path), choices))
    parts += _feed_forwards([layer for layer in layers if layer.pattern not in inside])
    parts = [_with_norms(model, part) for part in parts if part.choices]
    return (*parts, *_vocabulary(model, covered))


def _with_norms(model: Model, part: Part) -> Part:
    """Return a part with rules for the norms beside its column products: they take whole values."""
    norms = list(dict.fromkeys(starred(path) for path in model.paths if _kind(model, path) == "norm"))

    def completed(rules: Rules) -> Rules:
        owners = {
            p.rpartition(".")[0] for p, texts in rules.items() if any(text.startswith("colwise") for text in texts)
        }
        beside = (norm for norm in norms if norm.rpartition(".")[0] in owners and norm not in rules)
        return {**rules, **{norm: ["along(replicate)"] for norm in beside}}

    return attrs.evolve(part, choices={name: completed(rules) for name, rules in part.choices.items()})


def _linears(model: Model) -> list[_Linear]:
    """Return the first linear layer of each pattern, if all of the pattern are alike."""
    found: dict[str, _Linear | None] = {}
    for path in model.paths:
        kind, weight = model.kind(path), model.by_name.get(f"{path}.weight")
        if kind is None or kind.name != "linear" or weight is None or not weight.dims:
            continue
        sizes = dict(zip(weight.dims, weight.shape, strict=True))
        layer, pattern = _Linear(path, starred(path), sizes["in"], sizes["out"]), starred(path)
        other = found.setdefault(pattern, layer)
        if other is not None and (other.width_in, other.width_out) != (layer.width_in, layer.width_out):
            found[pattern] = None
    return [layer for layer in found.values() if layer is not None]


# -- attention --------------------------------------------------------------------------------------------------------


def _attentions(model: Model) -> list[str]:
    """Return the paths of modules of attention that are not inside another."""
    found: list[str] = []
    for path, info in model.modules.items():
        name = info.class_name.lower()
        is_inside = bool(found) and path.startswith(f"{found[-1]}.")  # modules come parents first, depth first
        if ("attention" in name or name.endswith("attn")) and not is_inside:
            found.append(path)
    return found


def _attention(model: Model, path: str, layers: Sequence[_Linear]) -> dict[str, Rules]:
    """Return ways to shard an attention by whole heads; none if its layers do not have the shapes of one."""
    if len(layers) < 2:
        return {}
    *inputs, output = layers
    counts = model.modules[inputs[0].path.rpartition(".")[0]].counts
    width = output.width_in
    heads, kv = _heads(counts, width)
    if not heads or width % heads or len({layer.width_in for layer in inputs}) != 1:
        return {}
    size = width // heads
    owner = inputs[0].pattern.rpartition(".")[0]
    products = _separate(inputs, width, kv * size, size) if len(inputs) > 1 else _fused(inputs[0], heads, kv, size)
    rest: dict[str, list[str]] = {output.pattern: [f"rowwise(tp, unit={size})"]}
    rest |= {norm: ["hf_replicated_with_grad_allreduce(tp)"] for norm in _norms_of_heads(model, path, size)}
    rest |= _biases(model, path, owner, heads)
    return {
        f"{product}, {count}": {**rules, **rest, owner: [*rest.get(owner, ()), *lines]}
        for product, rules in products.items()
        for count, lines in _counts(counts, heads, kv, size, "kvg" if product == "shared heads" else "tp").items()
    }


def _heads(counts: Mapping[str, int], width: int) -> tuple[int, int]:
    """Return the numbers of heads of queries and of keys in the attributes of a module; 0 if it has none."""
    numbers = {name: n for name, n in counts.items() if _is_number_of_heads(name) and n > 0}
    shared = [n for name, n in numbers.items() if _is_shared(name)]
    own = [n for name, n in numbers.items() if not _is_shared(name)]
    if not own:
        size = next((n for name, n in counts.items() if name in ("head_dim", "attention_head_size") and n), 0)
        own = [width // size] if size else [0]
    return own[0], shared[0] if shared else own[0]


def _is_number_of_heads(name: str) -> bool:
    return "head" in name and not any(word in name for word in ("dim", "size", "group", "idx"))


def _is_shared(name: str) -> bool:
    return "kv" in name or "key_value" in name


def _separate(inputs: Sequence[_Linear], width: int, kv_width: int, size: int) -> dict[str, Rules]:
    if any(layer.width_out not in (width, kv_width) for layer in inputs):
        return {}
    if kv_width == width:
        return {"heads": {layer.pattern: [f"colwise(tp, unit={size})"] for layer in inputs}}
    texts = {width: f"colwise(tp, unit={size})", kv_width: f"colwise_shared(kvg, copies=kvr, unit={size})"}
    return {"shared heads": {layer.pattern: [texts[layer.width_out]] for layer in inputs}}


def _fused(layer: _Linear, heads: int, kv: int, size: int) -> dict[str, Rules]:
    """Return ways to shard one product of q, k and v: three blocks, or those of each head side by side."""
    if layer.width_out != (heads + 2 * kv) * size:
        return {}
    choices: dict[str, Rules] = {}
    if heads == kv:
        choices["blocks"] = {layer.pattern: [f"colwise(tp, unit={size}, blocks=3)"]}
    return choices | {"side by side": {layer.pattern: [f"colwise(tp, unit={layer.width_out // kv})"]}}


def _counts(counts: Mapping[str, int], heads: int, kv: int, size: int, axis: str) -> dict[str, list[str]]:
    """Return ways to share out attributes: those that count heads, and some of those that are all heads wide."""
    lines = []
    for name, number in counts.items():
        if _is_number_of_heads(name) and number in (heads, kv):
            lines.append(f"local {name}: [{axis if _is_shared(name) else 'tp'}]")
        elif "group" in name and number == heads // kv and axis == "kvg":
            lines.append(f"local {name}: [kvr]")
    wide = [name for name, number in counts.items() if number == heads * size and not _is_number_of_heads(name)]
    sets = [names for n in range(len(wide) + 1) for names in combinations(wide, n)]
    return {
        ", ".join(["numbers", *names]): [*lines, *(f"local {name}: [tp unit({size})]" for name in names)]
        for names in sorted(sets[:16], key=lambda names: (len(names) not in (0, len(wide)), len(names)))
    }


def _biases(model: Model, path: str, owner: str, heads: int) -> dict[str, list[str]]:
    """Return rules for biases of scores: a table with a column for each head, as T5 has it, and an argument."""
    arguments = next(info.arguments for name, info in model.modules.items() if starred(name) == owner)
    tables = [
        each for each in model.paths
        if _kind(model, each) == "embedding" and model.by_name[f"{each}.weight"].shape[-1] == heads
    ]  # fmt: skip
    rules = {starred(each): ["hf_table_of_heads(tp)"] for each in tables if each.startswith(f"{path}.")}
    if not rules and "position_bias" not in arguments:
        return {}
    entries = ["in: replicate", *("in key_value_states: replicate",) * ("key_value_states" in arguments)]
    if (
        "position_bias" in arguments
    ):  # from a table in the first layer, (batch, heads, ...); or made whole, (heads, ...)
        entries.append(f"in position_bias: {'[-, tp, ...]' if tables else 'replicate -> [tp, ...]'}")
    return {**rules, owner: entries}


def _norms_of_heads(model: Model, path: str, size: int) -> list[str]:
    found: dict[str, None] = {}
    for name, tensor in model.by_name.items():
        norm = name.rpartition(".")[0]
        kind = model.kind(norm)
        if name.startswith(f"{path}.") and kind is not None and kind.name == "norm" and tensor.shape == (size,):
            found[starred(norm)] = None
    return list(found)


# -- feed-forward networks and vocabulary -----------------------------------------------------------------------------


def _feed_forwards(layers: Sequence[_Linear]) -> Iterator[Part]:
    """Yield linear layers of which the last undoes the change of width of the first, or of two, or of two in one."""
    left = [layer for layer in layers if "*" in layer.pattern.split(".")]
    while left:
        for count in (3, 2):
            group = left[:count]
            if len(group) == count and len({_block(layer.pattern) for layer in group}) == 1:
                choices = _columns_and_rows(group)
                if choices:
                    yield Part(_block(group[0].pattern), choices)
                    del left[:count]
                    break
        else:
            del left[0]


def _block(pattern: str) -> str:
    """Return the pattern of the innermost numbered module around a layer."""
    return pattern[: pattern.rindex("*") + 1]


def _columns_and_rows(group: Sequence[_Linear]) -> dict[str, Rules]:
    first = group[0]
    rows = [layer for layer in group[1:] if layer.width_out == first.width_in]
    last = rows[-1] if rows else None
    columns = [layer for layer in group if layer is not last]
    if last is None or any((c.width_in, c.width_out) != (first.width_in, first.width_out) for c in columns):
        return {}
    down: dict[str, Sequence[str]] = {last.pattern: ["rowwise(tp)"]}
    if last.width_in == first.width_out:
        return {"columns and rows": {**{layer.pattern: ["colwise(tp)"] for layer in columns}, **down}}
    if 2 * last.width_in == first.width_out and len(columns) == 1:
        choices = {"two blocks and rows": "colwise(tp, blocks=2)", "pairs and rows": "colwise(tp, unit=2)"}
        return {name: {first.pattern: [text], **down} for name, text in choices.items()}
    return {}


def _vocabulary(model: Model, covered: Collection[str]) -> Iterator[Part]:
    """Yield the embedding of the vocabulary and the head, with what is one tensor with their parameters."""
    rows = {path: model.by_name[f"{path}.weight"] for path in model.paths if _kind(model, path) == "embedding"}
    sizes = [tensor.shape[0] for path, tensor in rows.items() if not starred(path).count("*")]
    size = model.config.get("vocab_size") or max(sizes, default=0)
    embeddings = {path: ["vocab_embedding(tp, pad=1)"] for path, tensor in rows.items() if tensor.shape[0] == size}
    heads = {
        path: ["hf_colwise_gather_output(tp)"]
        for path in model.paths
        if _kind(model, path) == "linear" and "*" not in starred(path)
        and dict(zip(model.by_name[f"{path}.weight"].dims or (), model.by_name[f"{path}.weight"].shape, strict=True))
        .get("out") == size
    }  # fmt: skip
    if any(starred(path) in covered for path in (*embeddings, *heads)) or not embeddings:
        return
    choices = {"embedding and head": {**embeddings, **heads}, "embedding": embeddings}
    yield Part("", {name: {**rules, **_ties(model, rules)} for name, rules in choices.items()})


def _kind(model: Model, path: str) -> str:
    kind = model.kind(path)
    return kind.name if kind is not None and f"{path}.weight" in model.by_name else ""


def _ties(model: Model, rules: Rules) -> dict[str, Sequence[str]]:
    """Return statements for the names that are one tensor with a sharded one."""
    found: dict[str, Sequence[str]] = {}
    for names in model.tied:
        ruled = [name for name in names if name.rpartition(".")[0] in rules]
        if ruled:
            found |= {f"tie {name} = {ruled[0]}": () for name in names if name != ruled[0]}
    return found
