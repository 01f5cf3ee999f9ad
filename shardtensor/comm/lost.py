"""What a backend says when it has waited in vain, told as which call of the user's waited for whom."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from shardtensor.comm.agree import name_ranks
from shardtensor.comm.call_site import call_site, user_call
from shardtensor.errors import AbsentRankError

# Of gloo and of NCCL; other errors are left as they are.
_SIGNS = (
    *("Timed out waiting", "timeout", "Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("Connection refused", "remote process exited", "communicator was aborted"),
)


def told(error: RuntimeError, operation: str, t: torch.Tensor, ranks: Sequence[int]) -> RuntimeError:
    """Return the error to raise for one that a backend raised in a collective: ours when ranks were missing in it.

    Args:
        t: what this rank brought.
        ranks: the global ranks of the group.
    """
    text = str(error)
    if isinstance(error, AbsentRankError) or not any(sign in text for sign in _SIGNS):
        return error
    frame = sys._getframe(1)
    asked = user_call(frame) or operation
    return AbsentRankError(
        f"{asked}: other ranks of the group did not come, or were lost",
        {
            "call": f"{operation} of {t.numel()} {str(t.dtype).removeprefix('torch.')}\n{call_site(frame)}",
            "ranks": name_ranks(ranks).removeprefix("ranks "),
            "backend": text,
        },
        "call it on every rank of the group; SHARDTENSOR_CHECK=collectives tells which ranks are where",
    )
