"""What operations refuse is one RuleError on every rank, word for word, and changes nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import device

import shardtensor as st


def ones(spec: str, *shape: int, **options: object) -> st.ShardedTensor:
    return st.distribute(torch.ones(shape, device=device()), spec, **options)


def rows() -> st.ShardedTensor:
    return ones("[tp balanced, -]", 5, 6)


def partials() -> st.ShardedTensor:
    return st.init_from_local_tensor(torch.ones(3, device=device()), "[-] partial(tp)", 3)


def strict(call):
    with st.strict():
        return call()


REFUSED = {
    "an operand that would move": (
        lambda: strict(lambda: rows() + ones("[-, tp balanced]", 5, 6)),
        'add: axis "tp" splits .0 in the input but .1 in the other\n'
        "  rule    .0 .1, .0 .1 -> .0 .1\n"
        "  input   [tp balanced, -]   5 x 6 float32\n"
        "  other   [-, tp balanced]   5 x 6 float32\n"
        '  either  reshard(other, "[tp balanced, -]")   all_to_all over tp=2, 24 B to 36 B received by each rank\n'
        '  or      reshard(input, "[-, tp]")            all_to_all over tp=2, 24 B to 36 B received by each rank',
    ),
    "a product whose ways cost differently": (
        lambda: strict(lambda: F.linear(ones("[-, tp]", 64, 8), ones("[tp, -]", 6, 8))),
        'linear: axis "tp" splits k in the input but n in the weight\n'
        "  rule    .0 k, n k -> .0 n\n"
        "  input   [-, tp]   64 x 8 float32\n"
        "  weight  [tp, -]   6 x 8 float32\n"
        '  either  reshard(input, "replicate")   all_gather over tp=2, 1.0 KiB received by each rank\n'
        '  or      reshard(weight, "[-, tp]")    all_to_all over tp=2, 48 B received by each rank\n'
        "          and of the result             all_reduce over tp=2, 1.5 KiB received by each rank",
    ),
    "a whole dim": (
        lambda: strict(lambda: ones("[-, tp]", 6, 4).sort(1)),
        'sort: axis "tp" splits d in the input, which must be whole\n'
        "  rule    .0 !d -> .0 !d\n"
        "  input   [-, tp]   6 x 4 float32\n"
        '  either  reshard(input, "[tp, -]")     all_to_all over tp=2, 24 B received by each rank\n'
        '  or      reshard(input, "replicate")   all_gather over tp=2, 48 B received by each rank',
    ),
    "an operation without a rule": (
        lambda: strict(lambda: torch.linalg.svd(rows())),
        "linalg_svd: no sharding rule\n"
        "  it would  gather 0.00 MiB on every rank\n"
        "  either    call full_tensor() on its operands where you mean to\n"
        "  or        leave strict() to let it gather",
    ),
    "two groups": (
        lambda: torch.add(rows(), ones("[tp balanced, -]", 5, 6, process_group=dist.new_group([0, 1]))),
        "add: All distributed tensors should use the same ProcessGroup if used together in an op.\n"
        "  one    ranks [0, 1]\n"
        "  other  ranks [0, 1]\n"
        "  fix    make them on one group, or call full_tensor() on one of them",
    ),
    "a write into partial sums": (
        lambda: partials().add_(1),
        "Tensor.add_: in place on a tensor that is still to be reduced\n"
        "  spec  [-] partial(tp)\n"
        "  fix   reduce it first: x = distribute(x, spec) with a spec that is not partial",
    ),
    "a write into partial sums of a list": (
        lambda: torch._foreach_add_([partials()], 1),
        "_foreach_add_: in place on a tensor that is still to be reduced\n"
        "  spec  [-] partial(tp)\n"
        "  fix   reduce it first: x = distribute(x, spec) with a spec that is not partial",
    ),
    "a write into a copy": (
        lambda: rows().view(6, 5).mul_(2),
        "Tensor.mul_: in place on a copy that the dense program would have as a view; the write would be lost\n"
        "  made by  reshape, which had to gather here\n"
        "  either   write into the source: source[...] = value\n"
        "  or       clone() first where the source shall stay as it is",
    ),
    "out of another shape": (
        lambda: torch.mul(rows(), 2, out=ones("[tp balanced, -]", 4, 6)),
        "mul: out has another shape than the result\n"
        "  out     (4, 6)\n"
        "  result  (5, 6)\n"
        "  fix     make out of the shape of the result",
    ),
    "another shape in place": (
        lambda: rows().unsqueeze_(0),
        "Tensor.unsqueeze_ would change the shape of a ShardedTensor in place\n"
        "  fix  use unsqueeze, which returns a new tensor",
    ),
    "memory": (
        lambda: rows().data_ptr(),
        "Tensor.data_ptr is not supported for ShardedTensor: no rank holds the whole of it in memory\n"
        "  either  local_tensor() or local_shards() for this rank's part\n"
        "  or      full_tensor() for the whole\n"
        "  or      shardtensor.full_state_dict(model), called by all ranks, to save a model whole",
    ),
    "sparse gradients": (
        lambda: F.embedding(torch.tensor([1], device=device()), rows(), sparse=True),
        "embedding: a sharded table has no sparse gradients\n  table  (5, 6)\n  fix    use sparse=False",
    ),
}


def refusal(name: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", st.GatherWarning)
        with pytest.raises(st.RuleError) as caught:
            REFUSED[name][0]()
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_so_on_every_rank(world, name):
    assert world(refusal, 2, name=name) == [REFUSED[name][1]] * 2
