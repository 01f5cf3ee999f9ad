"""The comparison of programs on CPU ranks: each sends which one it runs, while it computes what needs no other rank.

Sums over samples that the batch alone determines, such as the number of labels that count, are sent with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from shardtensor.comm.group import Group, Pending

NO_PROGRAM = -1
SUMS = 7
"""How many sums can be sent with a comparison."""


class OtherProgram(Exception):
    """Other ranks run another program in this call, or none."""


def compares_programs(group: Group) -> bool:
    """Whether the ranks of a group compare their programs: on GPUs they would wait for the device."""
    return group.size > 1 and group.device_type == "cpu"


@attrs.frozen(eq=False)
class Comparison:
    """What the ranks of a group send in each call: 64 bytes from each, in one all-gather.

    Attributes:
        program: a digest, equal on all ranks that run one program; NO_PROGRAM if this rank has none.
    """

    group: Group
    program: int

    def start(self, numbers: Sequence[torch.Tensor] = ()) -> Pending:
        """Start to send the digest, and this rank's parts of at most SUMS sums: single numbers."""
        sent = torch.zeros(1 + SUMS, dtype=torch.int64)
        sent[0] = self.program
        for i, x in enumerate(numbers):
            sent[1 + i] = x.double().view(torch.int64) if x.is_floating_point() else x
        return self.group.all_gather_into(sent.new_empty(self.group.size * len(sent)), sent)

    def wait(self, pending: Pending, numbers: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Wait for what `start` has started; return the sums over the ranks.

        Raises:
            OtherProgram: another rank has sent another program, or this rank has none.
        """
        rows = pending.wait().view(self.group.size, 1 + SUMS)
        if self.program == NO_PROGRAM or any(other != self.program for other in rows[:, 0].tolist()):
            raise OtherProgram
        columns = [rows[:, 1 + i] for i in range(len(numbers))]
        return [
            (column.view(torch.float64) if x.is_floating_point() else column).sum().to(x.dtype)
            for x, column in zip(numbers, columns, strict=True)
        ]
