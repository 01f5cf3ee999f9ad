"""Agreement of ranks in the words of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from shardtensor.comm.agree import agree
from shardtensor.comm.group import Group
from shardtensor.errors import CheckpointError, DisagreementError, ShardTensorError


def agree_or_raise(group: Group, call: str, facts: Mapping[str, str], fault: ShardTensorError | None = None) -> None:
    """Return if all ranks make this call with equal facts and without a fault. Every rank of the group calls it.

    Raises:
        CheckpointError: on every rank, with one text.
    """
    short = call.partition("(")[0]  # a path may differ: then it is a fact that differs, not another call
    try:
        agree(group, short if "path" in facts else call, facts, fault)
    except DisagreementError as error:
        raise CheckpointError(error.fault.replace("nothing was moved", "nothing was done"), dict(error.rows)) from None


def fault_of(error: Exception) -> CheckpointError:
    """Return an error as one that all ranks can raise."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, ShardTensorError):
        return CheckpointError(error.fault, dict(error.rows))
    return CheckpointError(f"{type(error).__name__}: {error}")
