"""Mutated checkpoints: manifests and headers that a file may hold by accident or by intent, each from its seed.

Half of them get right checksums again, so that what lies behind the checksums is reached.
"""

from __future__ import annotations

import json
import random
import shutil
import time
import traceback
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import torch
from damages import MANIFEST, files_of, header_of, record_again, with_checksum, with_header
from small_run import Run
from torch import nn
from torch.overrides import TorchFunctionMode

import shardtensor as st
from shardtensor.checkpoint.random_states import rng_state, set_rng_state
from shardtensor.checkpoint.reads import BUFFER_BYTES

MOST_S = 1.0
MOST_BYTES = 4 << 20
"""What a load of a file of some kilobytes may allocate, apart from a multiple of the file's size."""
MOST_TIMES = 64  # an empty list takes two bytes of JSON, and 56 of memory

NUMBERS = (
    "0", "-1", "1", "2", "255", "4294967296", "9223372036854775807", "9223372036854775808", "1" + "0" * 40, "9" * 5000,
    "1.5", "-0.0", "1e400", "NaN", "-Infinity", "true", "null", '"7"', "[]", "{}",
)  # fmt: skip
TEXTS = (
    "", ".", "..", "../../x", "/etc/passwd", "a/../../x", "state/../../x", ".hidden", "state/", "//", "a\0b", "\ud800",
    "x" * 3000, "é" * 40, "rank-00000-of-00001.safetensors", MANIFEST, "model.safetensors", "$tensor", "$dict", "load",
    "float32", "float64", "complex128", "float8_e4m3fnuz", "int4", "uint8", "__class__", "cuda:99", "meta", "os.system",
    "__metadata__", "_dynamo", "replicate", "[tp, -]", "[tp]", "[-, tp balanced]", "[tp blocks(2), -] flat(dp)",
    'enum([0:5, 0:7] @ "rank:0/cpu")', 'chunk(dim=0, placements=["rank:0-99999/cpu"])', "[tp, -] partial(tp)",
    "[" * 40, "tp=999999999999", "tp=1, tp=1", "tp=0", ", ".join(f"a{i}=1" for i in range(2000)), "0-99999999999",
    "99999999999-100000000003", "3-1", "0,0", "-1", "0,", "1_0", "٣",
)  # fmt: skip
TAGS = "$tuple $set $deque $dict $counter $float $bytes $complex $scalar $dtype $device $numpy $tensor $odd".split()


@attrs.frozen
class Verdict:
    """How the load of a mutated checkpoint ended: ``refused``, ``loaded``, ``late`` (see `is_late`); and which law that
    breaks."""

    outcome: str
    law: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0


# -- mutations ---------------------------------------------------------------------------------------------------------


def of_bytes(data: bytes, draw: random.Random) -> bytes:
    """Return a text with bytes changed, left out, repeated or put in."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(changed) + 1)
        length = draw.choice([1, 1, 2, 8, 60])
        kind = draw.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[at : at + length]
        elif kind == 2:
            changed[at:at] = draw.randbytes(length)
        elif kind == 3:
            changed[at:at] = changed[at : at + length]
        elif kind == 4:
            changed[at:at] = draw.choice([b"{", b"[", b"[[[[[", b"]", b"}", b'"', b",", b"\\", b"\xff", b"9" * 400])
        else:
            changed = changed[:at]
    return bytes(changed)


def of_table(table: Any, draw: random.Random) -> Any:
    """Change one or two values of a JSON value in place, and return it."""
    for _ in range(draw.choice([1, 1, 2])):
        places = list(_places(table))
        if places:
            holder, key = draw.choice(places)
            _change(holder, key, places, draw)
    return table


def _places(value: Any) -> Any:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _change(holder: Any, key: Any, places: list[tuple[Any, Any]], draw: random.Random) -> None:
    kind = draw.randrange(9)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        holder[key] = Raw(draw.choice(NUMBERS))
    elif kind == 2:
        holder[key] = draw.choice(TEXTS)
    elif kind == 3 and isinstance(holder, dict):
        holder[draw.choice(TEXTS)] = holder.pop(key)
    elif kind == 4:
        other, place = draw.choice(places)
        try:
            holder[key] = json.loads(to_text(other[place]))
        except (KeyError, IndexError, ValueError):
            holder[key] = None
    elif kind == 5:
        contents = [holder[key], [holder[key]], [[1, [2]], [[], 3]], "inf", 10**30]
        holder[key] = {draw.choice(TAGS): draw.choice(contents)}
    elif kind == 6:
        opened = draw.choice(['{"a":', "[", '{"$tuple":[', '{"$scalar":["float32",'])
        holder[key] = Raw(opened * draw.choice([90, 9000]))
    elif kind == 7 and isinstance(holder[key], list):
        holder[key] = draw.choice([holder[key] * 3, [*holder[key], 1 << 62] * 40, [1] * 3000, [1 << 62] * 3000])
    elif isinstance(holder[key], int | float):
        holder[key] = draw.choice([-holder[key], holder[key] + 1, holder[key] * 1000, 1 << 40, 1 << 62])
    else:
        holder[key] = [holder[key]] * draw.choice([0, 2])


class Raw(str):
    """A piece of text that is not to be quoted."""


def to_text(value: Any) -> str:
    """Return JSON, with pieces of text as they are; brackets that they open are closed."""
    if isinstance(value, Raw):
        closing = {"[": "]", "{": "}"}
        return value + ("1" if value[-1:] in "[:," else "") + "".join(
            closing[sign] for sign in reversed(value) if sign in closing and value not in NUMBERS
        )  # fmt: skip
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {to_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_text, value)) + "]"
    return json.dumps(value)


def repeated_key(text: str, draw: random.Random) -> str:
    """Return the JSON of an object with one of its lines twice."""
    lines = text.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    return "".join([*lines[: at + 1], *lines[at:]])


# -- loads of them -----------------------------------------------------------------------------------------------------


class _Sizes(TorchFunctionMode):
    """Notes the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.most = max(self.most, result.numel() * result.element_size())
        return result


def is_late(error: BaseException) -> bool:
    """Whether a checkpoint of right checksums has another fingerprint than the values that were loaded, as the error
    says: only a forged one gets so far."""
    return any(frame.name == "compare" for frame in traceback.extract_tb(error.__traceback__))


class Mutants:
    """Checkpoints that are mutated and loaded, one after the other.

    Args:
        root: a folder to write into.
        saved: folders of whole checkpoints, each with a function that loads it into new or unchanged objects.
    """

    def __init__(self, root: Path, saved: dict[str, Path], run: Run) -> None:
        self.run, self.saved, self.folder = run, saved, root / "mutants" / "step-1"
        self.random = rng_state()
        for folder in saved.values():  # what the first load of a kind imports and caches is not counted
            with suppress(st.CheckpointError):
                st.load(folder, **run.parts)
                st.load(folder, model=nn.Linear(1, 1))

    def verdict(self, seed: int, *, memory: bool = False) -> Verdict:
        """Mutate one of the checkpoints, load it, and say how that ended."""
        draw = random.Random(seed)
        whole = self.saved[draw.choice(sorted(self.saved))]
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(whole, self.folder, copy_function=shutil.copyfile)
        size = sum((self.folder / file).stat().st_size for file in files_of(self.folder))
        size += self._mutate(draw)
        parts = self.run.parts if (self.folder / MANIFEST).exists() else {"model": self.run.model}
        self.run.set_to(77)
        sizes, law, outcome = _Sizes(), "", "refused"
        if memory:
            tracemalloc.start()
        began = time.process_time()  # others may keep the machine busy
        try:
            with sizes:
                st.load(self.folder, **parts)
            outcome = "loaded"
        except st.CheckpointError as error:
            if is_late(error):
                outcome = "late"
            elif self.run.wrong(77):
                law = f"an error that came after values were loaded: {error}"
            elif len(str(error)) > 20_000:
                law = f"an error of {len(str(error))} characters"
        except BaseException as error:
            outcome = "late" if is_late(error) else outcome
            law = "" if is_late(error) else f"{type(error).__name__}: {str(error)[:300]}"
        seconds = time.process_time() - began
        if outcome != "refused" or law:
            self.run = Run.new()  # a forged state may be anything
            set_rng_state(self.random)
        peak = tracemalloc.get_traced_memory()[1] if memory else 0
        tracemalloc.stop()
        try:
            st.latest(self.folder.parent)
        except BaseException as error:
            law = law or f"latest: {type(error).__name__}: {str(error)[:300]}"
        most = MOST_BYTES + MOST_TIMES * size
        if 0 <= sizes.most - BUFFER_BYTES <= 64:  # what a load documents
            sizes.most = 0
        if seconds > MOST_S and not memory:
            law = law or f"took {seconds:.1f} s"
        if peak > most or sizes.most > most:
            law = law or f"allocated {max(peak, sizes.most)} bytes for files of {size}"
        return Verdict(outcome, law, seconds, max(peak, sizes.most))

    def _mutate(self, draw: random.Random) -> int:
        """Change a file, and return how many bytes longer it is."""
        path = self.folder / MANIFEST
        names = [name for name in files_of(self.folder) if name.endswith(".safetensors")]
        file = draw.choice([MANIFEST, MANIFEST, *names] if path.exists() else names)
        before = (self.folder / file).read_bytes()
        kind, is_forged = draw.randrange(3), draw.random() < 0.75
        if file == MANIFEST:
            text = before.decode()
            if kind == 0:
                changed = of_bytes(before, draw)
                if is_forged:
                    changed = with_checksum(changed.decode(errors="replace")).encode()
            elif kind == 1 and draw.random() < 0.2:
                changed = with_checksum(repeated_key(text, draw)).encode()
            else:
                table = json.loads(text)
                del table["checksum"]
                changed = with_checksum(to_text(of_table(table, draw))).encode("utf-8", "surrogatepass")
            path.write_bytes(changed)
            return len(changed) - len(before)
        table, begin = header_of(before)
        if kind == 0:
            header = of_bytes(before[8:begin], draw)
        elif kind == 1:
            header = to_text(of_table(table, draw)).encode("utf-8", "surrogatepass")
        else:  # the JSON in the metadata
            own = table.get("__metadata__", {})
            key = draw.choice(sorted(own)) if own else ""
            if key in ("shardtensor", "rank_values"):
                own[key] = to_text(of_table(json.loads(own[key]), draw))
            header = json.dumps(table).encode()
        (self.folder / file).write_bytes(with_header(before, header, begin))
        if is_forged and path.exists():
            record_again(self.folder, file)
        return len(header) - begin


def checkpoints(root: Path, simulate: Callable[..., Any]) -> dict[str, Path]:
    """Save the checkpoints to mutate: of one rank, of three whose parts are in many layouts, of another library."""
    Run.new().save(root / "one", 1)
    simulate(3, _save_by_ranks, str(root / "three"))
    foreign = root / "foreign"
    shutil.copytree(root / "one", foreign)
    (foreign / MANIFEST).unlink()
    shutil.rmtree(foreign / "state")
    return {name: root / name for name in ("one", "three", "foreign")}


def _save_by_ranks(folder: str) -> None:
    Run.new().save(folder, 1, layout="as is")
