"""Which tiny model has the tensor names of a real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import nn

from harness.tiny import bert, gpt2, llama, mixtral, mlp, t5, uneven, vit, vocab
from harness.tiny.names import ending, unnumbered
from harness.tiny.sizes import Sizes
from shardtensor.errors import SpecError
from shardtensor.plan.models.model import Model


@attrs.frozen(eq=False)
class Family:
    """A tiny model for the names of real ones.

    Attributes:
        name: as people call it.
        marks: ends of tensor names, all of which its models have.
        shrink: the keys of the configuration that a tiny model has other than the real one, whose keys these are.
        make: a tiny model of a configuration, with the tensors that a real one has.
    """

    name: str
    marks: tuple[str, ...]
    shrink: Callable[[Mapping[str, Any], Model, Sizes], dict[str, Any]]
    make: Callable[[Mapping[str, Any], Model], nn.Module]


_LLAMA = ("embed_tokens.weight", "self_attn.q_proj.weight")

FAMILIES = (
    Family("Mixtral", (*_LLAMA, "mlp.experts.gate_up_proj"), mixtral.shrink, mixtral.make),
    Family("Mixtral", (*_LLAMA, "block_sparse_moe.experts.0.w1.weight"), mixtral.shrink, mixtral.make),
    Family("Llama", (*_LLAMA, "mlp.gate_proj.weight"), llama.shrink, llama.make),
    Family("GPT-2", ("wte.weight", "attn.c_attn.weight"), gpt2.shrink, gpt2.make),
    Family("BERT", ("embeddings.word_embeddings.weight", "attention.self.query.weight"), bert.shrink, bert.make),
    Family("T5", ("shared.weight", "SelfAttention.q.weight"), t5.shrink, t5.make),
    Family("ViT", ("embeddings.cls_token", "layernorm_before.weight"), vit.shrink, vit.make),
    Family("uneven", ("embed.weight", "attn.q.weight", "gate.weight", "odd.weight"), uneven.shrink, uneven.make),
    Family("vocabulary", ("embed.weight", "head.weight"), vocab.shrink, vocab.make),
    Family("MLP", ("fc1.weight", "fc2.weight"), mlp.shrink, mlp.make),
)
"""In the order in which they are tried: the first whose marks a model has."""


def family_of(model: Model) -> Family:
    """The family of a model, by the names of its tensors.

    Raises:
        SpecError: E303, there is none.
    """
    found = next((family for family in FAMILIES if all(ending(model, mark) for mark in family.marks)), None)
    if found is None:
        kinds = list(dict.fromkeys(unnumbered(tensor.name) for tensor in model.tensors))
        raise _unknown("no tiny model has tensors of such names", {"the model has": ", ".join(kinds[:3]) + ", ..."})
    return found


def refuse_other_names(family: Family, made: Model, real: Model) -> None:
    """See that a tiny model has the tensors of the real one, but for the numbers of its layers.

    Names of one tied tensor may be missing in a file.

    Raises:
        SpecError: E303, it has others.
    """
    has, wants = ({unnumbered(tensor.name): tensor.name for tensor in model.tensors} for model in (made, real))
    again = {unnumbered(name) for names in made.tied for name in names}
    strange = [name for kind, name in wants.items() if kind not in has]
    missing = [name for kind, name in has.items() if kind not in wants and kind not in again]
    if strange or missing:
        facts = {"it has not": ", ".join(strange[:4]), "it has besides": ", ".join(missing[:4])}
        said = {key: names for key, names in facts.items() if names}
        raise _unknown(f"the tiny {family.name} has other tensors than this model", said)


def _unknown(fault: str, facts: Mapping[str, str]) -> SpecError:
    names = ", ".join(dict.fromkeys(family.name for family in FAMILIES))
    fix = "give --module PKG:FN; FN() makes a small one of the same names, or it and step(module, sample) -> loss"
    return SpecError(f"--numeric: {fault}", {**facts, "there are": names}, fix, code="E303")
