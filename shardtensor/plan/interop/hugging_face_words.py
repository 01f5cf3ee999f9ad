"""The words of Hugging Face's tensor- and expert-parallel plans: what each means for a module and for a tensor."""

from __future__ import annotations

from collections.abc import Callable

import attrs


@attrs.frozen
class HFWord:
    """One word.

    Attributes:
        module: the rule for a module, written after its pattern and a colon; empty if the word is not for modules.
        tensor: returns the layout of a tensor with a rule of its own, by its number of dims; None if not for tensors.
        no_translation: the reason if it has none, and what to write instead.
    """

    module: str = ""
    tensor: Callable[[int], str] | None = None
    no_translation: tuple[str, str] | None = None


def _last_but_one(cut: str) -> Callable[[int], str]:
    """Return the layout of ``Shard(ndim - 2)``; a tensor with one dim is sharded along that."""
    return lambda ndim: "[tp]" if ndim == 1 else f"[{'-, ' * (ndim - 2)}{cut}, -]"


def _last(cut: str) -> Callable[[int], str]:
    return lambda ndim: f"[{'-, ' * (ndim - 1)}{cut}]"


def _whole(ndim: int) -> str:
    return "replicate"


TP_WORDS = {
    "colwise": HFWord("hf_colwise(tp)", _last_but_one("tp")),
    "rowwise": HFWord("hf_rowwise(tp)", _last("tp")),
    "colwise_gather_output": HFWord("hf_colwise_gather_output(tp)"),
    "colwise_rep": HFWord("hf_colwise_gather_output(tp)"),
    "rowwise_split_input": HFWord("hf_rowwise_split_input(tp)"),
    "rowwise_rep": HFWord("hf_rowwise_split_input(tp)"),
    "packed_colwise": HFWord("hf_packed_colwise(tp)", _last_but_one("tp blocks(2)")),
    "packed_rowwise": HFWord("", lambda ndim: _whole(ndim) if ndim == 1 else _last("tp blocks(2)")(ndim)),
    "embedding_rowwise": HFWord("hf_embedding_rowwise(tp)"),
    "embedding_colwise": HFWord("hf_embedding_colwise(tp)"),
    "sequence_parallel": HFWord("hf_sequence_parallel(tp)"),
    "replicated_with_grad_allreduce": HFWord("hf_replicated_with_grad_allreduce(tp)"),
    "replicate": HFWord("replicate", _whole),
    "all_reduce": HFWord("hf_all_reduce(tp)"),
    "moe_tp_experts": HFWord("hf_moe_tp_experts(tp)"),
    "moe_identity_expert": HFWord("hf_moe_identity_expert(tp)"),
    "mla_kv_a_proj": HFWord("hf_mla_kv_a_proj(tp, rope=config.qk_rope_head_dim)"),
    "local_params": HFWord("hf_local_params()"),
    "ep_router": HFWord(no_translation=(
        "the router of transformers 4.x masks what goes to other ranks, which no layout says",
        'take the rule out, and write "ep_dispatch_experts" for the experts and "grouped_gemm" for their tensors '
        "in the ep_plan",
    )),
    **{f"local_{word}": HFWord(no_translation=(
        "a word of transformers 4.x, with which the layers around it do the sums", f'write "{word}"'))
       for word in ("colwise", "rowwise", "packed_rowwise")},
    "local": HFWord(no_translation=(
        "a word of transformers 4.x that cuts nothing and changes the gradient",
        'write "moe_tp_experts" for the experts as a whole',
    )),
    "gather": HFWord(no_translation=(
        "a word of transformers 4.x that sums a result of `local` words", 'write "all_reduce" or "moe_tp_experts"')),
}  # fmt: skip
"""The meaning of each word, over the axis `tp`."""

_SEES_OTHERS = (
    "ranks along `ep` see different samples, so a layer cannot be cut over them",
    "take the rule out of the ep_plan; the same rule may stand in the tp_plan",
)

EP_WORDS = {
    "grouped_gemm": HFWord("", lambda ndim: f"[ep{', -' * (ndim - 1)}]"),
    "ep_dispatch_experts": HFWord("use dispatch(ep, top_k=config.num_experts_per_tok)"),
    "replicate": HFWord("replicate", _whole),
    "replicated_with_grad_allreduce": HFWord("replicate", _whole),  # gradients are summed over data axes, as ep is one
    **{
        word: HFWord(no_translation=_SEES_OTHERS)
        for word in ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "all_reduce")
    },
}
"""The meaning of each word of an ep_plan, over the axis `ep`."""
