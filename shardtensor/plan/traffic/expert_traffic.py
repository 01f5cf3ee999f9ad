"""What tokens send on their way to experts and back, ``use dispatch(ep, top_k=2)``, if experts are chosen evenly."""

from __future__ import annotations

import attrs

from shardtensor.layout.pieces import balanced
from shardtensor.plan.flows.modules import Modules, Names
from shardtensor.plan.models.model import BYTES
from shardtensor.plan.traffic.collective import Collective, Phase

ROUTED = "the router says how many; here as many to each expert"
"""What is assumed of tokens, as reasons say it."""

HEAD = 3
"""Numbers that stand before the counts which ranks tell each other first."""


@attrs.frozen
class Dealing:
    """How the tokens of a module reach its experts.

    Attributes:
        axes: along which the experts are dealt.
        top_k: experts of each token.
        experts: how many there are.
        is_list: each is a module; else all are stacked in two tensors.
    """

    path: str
    axes: Names
    top_k: int
    experts: int
    is_list: bool

    def rows_of_one(self, tokens: int, ranks: int) -> int:
        """Rows that one expert gets."""
        return tokens * self.top_k * ranks // self.experts if self.is_list else tokens * self.top_k


def dealings(modules: Modules) -> dict[str, Dealing]:
    """The modules that send tokens to experts, by path."""
    found = {}
    for path, stated in modules.stated.items():
        for hook, _ in stated.passing.uses:
            if hook.name != "dispatch" or not hook.args:
                continue
            own = [placed.tensor for placed in modules.owned.get(path, {}).values()]
            top_k = hook.kwargs.get("top_k", hook.args[1] if len(hook.args) > 1 else 1)
            given = hook.args[0]
            names = (given,) if isinstance(given, str) else tuple(given)
            each = f"{path}.experts" if path else "experts"
            lists = {owner[len(each) + 1 :].split(".")[0] for owner in modules.below(each)}
            count = own[0].shape[0] if own and len(own[0].shape) > 2 else len(lists)
            axes = modules.leaves(name for said in names for name in said.split("*"))
            if axes and count:
                found[path] = Dealing(path, axes, int(top_k), count, not (own and len(own[0].shape) > 2))
    return found


class ExpertTraffic:
    """The collectives of one module that sends tokens to experts.

    Args:
        index: of this rank along the axes.
        tokens: of one data rank.
        width: of a token.
    """

    def __init__(
        self, dealing: Dealing, modules: Modules, size: int, index: int, tokens: int, width: int, dtype: str
    ) -> None:
        self._dealing, self._size, self._dtype = dealing, size, dtype
        self._axes = tuple(modules.named(dealing.axes).split("*"))
        pieces = balanced(dealing.experts, size, 1)
        held = [pieces.size(i) for i in range(size)]
        self._widest, self._held = max(held), held[index]
        self._sent = tokens * dealing.top_k * width  # elements, of all experts
        self._came = self._sent * size * self._held // dealing.experts

    def counts(self) -> Collective:
        """How many rows each rank has for each expert, before rows move."""
        each = (HEAD + self._widest) * BYTES["int64"]
        moved = each * (self._size - 1)
        return Collective(
            "all_to_all", "forward", self._axes, self._size, each * self._size, moved, moved, "int64",
            self._dealing.path, "how many tokens go where",
        )  # fmt: skip

    def rows(self, phase: Phase, is_back: bool) -> Collective:
        """The rows themselves, to the experts or back."""
        item = BYTES[self._dtype]
        stays = self._sent * self._held // self._dealing.experts
        out, came = (self._sent - stays) * item, (self._came - stays) * item
        sent, received = (came, out) if is_back else (out, came)
        why = "tokens come back from their experts" if is_back else "tokens go to their experts"
        why = why if phase == "forward" else f"gradients: {why}"
        return Collective(
            "all_to_all", phase, self._axes, self._size, (self._came if is_back else self._sent) * item, sent, received,
            self._dtype, self._dealing.path, f"{why} ({ROUTED})",
        )  # fmt: skip
