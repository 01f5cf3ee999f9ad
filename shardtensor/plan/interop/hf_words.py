"""The words of Hugging Face's tensor- and expert-parallel plans, and what each says of a module and of a tensor."""

from __future__ import annotations

from collections.abc import Callable

import attrs


@attrs.frozen
class HFWord:
    """One word.

    Attributes:
        module: the rule for a module, written after its pattern and a colon; empty where it says nothing of modules.
        tensor: the layout of a tensor of so many dims that stands in the plan by itself; None where it says nothing.
        refused: why it has no translation, and what to write instead.
    """

    module: str = ""
    tensor: Callable[[int], str] | None = None
    refused: tuple[str, str] | None = None


def _last_but_one(cut: str) -> Callable[[int], str]:
    """As ``Shard(ndim - 2)``, which is the only dim of a tensor that has one."""
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
    "ep_router": HFWord(refused=(
        "the router of transformers 4.x masks what goes to other ranks, which no layout says",
        'take the rule out, and write "ep_dispatch_experts" for the experts and "grouped_gemm" for their tensors '
        "in the ep_plan",
    )),
    "local_colwise": HFWord(refused=(
        "a word of transformers 4.x, with which the layers around it do the sums", 'write "colwise"')),
    "local_rowwise": HFWord(refused=(
        "a word of transformers 4.x, with which the layers around it do the sums", 'write "rowwise"')),
    "local_packed_rowwise": HFWord(refused=(
        "a word of transformers 4.x, with which the layers around it do the sums", 'write "packed_rowwise"')),
    "local": HFWord(refused=(
        "a word of transformers 4.x that cuts nothing and changes the gradient",
        'write "moe_tp_experts" for the experts as a whole',
    )),
    "gather": HFWord(refused=(
        "a word of transformers 4.x that sums a result of `local` words", 'write "all_reduce" or "moe_tp_experts"')),
}  # fmt: skip
"""What each word says, over the axis `tp`."""

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
        word: HFWord(refused=_SEES_OTHERS)
        for word in ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "all_reduce")
    },
}
"""What each word of an ep_plan says, over the axis `ep`."""

CUTTING = ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "grouped_gemm")
"""Words that cut a tensor which a plan names by itself."""

OWNERS = {"moe_tp_experts": 3, "ep_dispatch_experts": 3, "local_params": 1}
"""Words of modules below which tensors stand in the plan by themselves -> how many dims those have."""
