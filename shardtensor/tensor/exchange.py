"""The exchange of pieces between ranks, each sent from where it lies to where it belongs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardtensor.comm.group import Group
from shardtensor.layout.steps import Step
from shardtensor.layout.transfer import transfer
from shardtensor.tensor.memory import copy, follow_one_another, pack, see, unpack
from shardtensor.tensor.staging import staging

ROUNDS = 4
ROUND_BYTES = 1 << 24
"""What a rank holds of a tensor, in bytes, from which on it is sent in rounds."""


def exchange(local: torch.Tensor, step: Step, team: Group, rank: int) -> torch.Tensor:
    """Send and receive pieces: straight from and to where they lie where the group can, else by way of staging.

    A group that takes tensors from anywhere is not given a rank's own pieces, which are copied meanwhile; and much is
    sent in rounds, so that the next is put end to end while one is on its way.
    """
    moves = transfer(step.source, step.target, rank, team.ranks)
    out = local.new_empty(step.target.local_shape(rank))
    sends = [[see(local, region) for region in regions] for regions in moves.sends]
    receives = [[see(out, region) for region in regions] for regions in moves.receives]
    own = [(see(local, here), see(out, there)) for here, there in moves.keeps]
    if not team.moves_lists and own:
        sends[team.index], receives[team.index] = [here for here, _ in own], [there for _, there in own]
        own = []
    rounds = 1
    if team.moves_lists and math.prod(step.source.shape) * local.element_size() > team.size * ROUND_BYTES:
        rounds = ROUNDS
    flights = [
        _Flight(team, [_share(p, k, rounds) for p in sends], [_share(p, k, rounds) for p in receives])
        for k in range(rounds)
    ]
    with staging(sum(flight.to_stage for flight in flights), local) as buffer:
        for flight in flights:
            flight.start(buffer[: flight.to_stage])
            buffer = buffer[flight.to_stage :]
        for here, there in own:
            copy(here, there)
        for flight in flights:
            flight.land()
    return out


class _Flight:
    """Pieces for each peer, and from each, on their way."""

    def __init__(self, team: Group, sends: list[list[torch.Tensor]], receives: list[list[torch.Tensor]]) -> None:
        self.team, self.sends, self.receives = team, sends, receives
        self.lent = _to_stage(sends, team), _to_stage(receives, team)
        self.to_stage = sum(map(sum, self.lent))

    def start(self, buffer: torch.Tensor) -> None:
        """Put end to end in `buffer` what does not lie so, and begin to send."""
        size = self.team.size
        chunks = buffer.split([*self.lent[0], *self.lent[1]])
        ins = [_end_to_end(pieces, chunk) for pieces, chunk in zip(self.sends, chunks[:size], strict=True)]
        outs = [_end_to_end(pieces, chunk) for pieces, chunk in zip(self.receives, chunks[size:], strict=True)]
        for pieces, count, flat in zip(self.sends, self.lent[0], ins, strict=True):
            if count:
                pack(pieces, flat)
        self.staged = [(flat, pieces) for flat, pieces, n in zip(outs, self.receives, self.lent[1], strict=True) if n]
        self.pending = self.team.all_to_all_into(outs, ins)

    def land(self) -> None:
        """Wait for what comes, and put it where it belongs."""
        self.pending.wait()
        for flat, pieces in self.staged:
            unpack(flat, pieces)


def _share(pieces: list[torch.Tensor], k: int, rounds: int) -> list[torch.Tensor]:
    """The k-th of so many shares of each piece, by its first dim; sender and receiver cut alike."""
    if rounds == 1:
        return pieces
    bounds = [(piece, piece.shape[0] * k // rounds, piece.shape[0] * (k + 1) // rounds) for piece in pieces]
    return [piece[a:b] for piece, a, b in bounds if b > a]


def _to_stage(pieces_by_peer: Sequence[Sequence[torch.Tensor]], team: Group) -> list[int]:
    """How many elements of each peer have to be put end to end elsewhere."""
    counts = [sum(piece.numel() for piece in pieces) for pieces in pieces_by_peer]
    if team.moves_lists:
        return [0 if follow_one_another(pieces) else n for pieces, n in zip(pieces_by_peer, counts, strict=True)]
    return [0] * len(counts) if follow_one_another([p for pieces in pieces_by_peer for p in pieces]) else counts


def _end_to_end(pieces: Sequence[torch.Tensor], chunk: torch.Tensor) -> torch.Tensor:
    """The flat memory that pieces are sent from or come to: the staging chunk, or their own."""
    if chunk.numel() or not pieces:
        return chunk
    return pieces[0].as_strided((sum(piece.numel() for piece in pieces),), (1,))
