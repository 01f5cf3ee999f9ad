"""Texts for attacking the reader of plans: derived from the grammar, or plans that were changed; a seed each."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any

import attrs

from shardtensor.errors import SpecError
from shardtensor.plan.text.formatting import format_plan
from shardtensor.plan.text.reading import read_plan
from shardtensor.plan.text.sources import PACKAGED
from shardtensor.plan.text.syntax import _parser
from shardtensor.spec.diagnostics import Source

SECONDS = 1.0
CONFIG = {
    "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 768, "vocab_size": 50257, "n_head": 12,
    "n_embd": 768, "num_hidden_layers": 3, "intermediate_size": 3072, "num_local_experts": 8, "d_kv": 64,
    "num_heads": 12, "num_experts_per_tok": 2, "head_dim": None, "deep": {"er": 3}, "text": "words", "huge": 10**40,
}  # fmt: skip

_WORDS = (
    "tp dp ep kvg world config heads hd stream fits ax unit blocks pad sizes balanced flat partial only replicate "
    "chunk grid enum gcd min max row sum op placements dim splits colwise rowwise along vocab_head cross_entropy in x"
).split()
_SAMPLES: dict[str, list[str]] = {
    "NAME": _WORDS,
    "INT": ["0", "1", "2", "3", "4", "8", "64", "9223372036854775807", "99999999999999999999"],
    "BOOL": ["true", "false"],
    "STRING": [
        '"std/styles.shard"', '"llama.shard"', '"rank:0-3/cuda:0-3"', '"rank:0"', '"rank:0-99999999999"', '"cuda:1"',
        '"a reason"', '"a.b.*"', '"in"', '"\\\\"', '""', '"\\u0041{"',
    ],
    "GLOB": [
        "**", "*", "model.layers.*", "{q,k,v}_proj", "experts.<ep>", "layers.<L>.w", "weight", "bias", "a..b", "*a*b*",
    ],
    "COMPARE": ["==", "!=", "<", "<=", ">", ">="],
    "OVER": ["/", "//", "%"],
    "_NL": ["\n"],
}  # fmt: skip


@cache
def _rules() -> tuple[Mapping[str, list[list[str]]], Mapping[str, int], Mapping[str, str]]:
    """Expansions of each rule of the grammar, the depth of the shallowest one, and the text of terminals."""
    parser = _parser()
    rules: dict[str, list[list[str]]] = {}
    for rule in parser.rules:
        rules.setdefault(rule.origin.name, []).append([symbol.name for symbol in rule.expansion])
    terminals = {term.name: str(term.pattern.value) for term in parser.terminals}
    depth = dict.fromkeys(terminals, 0)
    while any(name not in depth for name in rules):
        for name, expansions in rules.items():
            known = [max((depth[s] for s in body), default=0) for body in expansions if all(s in depth for s in body)]
            if known and name not in depth:
                depth[name] = 1 + min(known)
    return rules, depth, terminals


def derived(random: Random, most: int = 400) -> str:
    """A text that the grammar makes."""
    rules, depth, terminals = _rules()
    words: list[str] = []
    stack = ["plan"]
    while stack:
        name = stack.pop()
        if name not in rules:
            words.append(random.choice(_SAMPLES.get(name, [terminals[name]])))
            continue
        bodies = rules[name]
        if len(words) + len(stack) > most:
            least = min(max((depth[s] for s in body), default=0) for body in bodies)
            bodies = [body for body in bodies if max((depth[s] for s in body), default=0) == least]
        stack += reversed(random.choice(bodies))
    text = " ".join(words)
    return text if random.random() < 0.05 else "shard 1" + text[text.index("\n") :]


_BYTES = b'[](){}<>-*:=,.@"#\n %/+?tp0192\xff\x00\\'


@cache
def _plans() -> tuple[str, ...]:
    return tuple(path.read_text() for path in sorted(PACKAGED.glob("**/*.shard")))


def mutated(random: Random) -> str:
    """A plan with bytes put in, taken out, changed, or lines of other plans between its own."""
    data = bytearray(random.choice(_plans()).encode())
    for _ in range(random.choice((1, 1, 2, 3, 8))):
        kind, at = random.randrange(6), random.randrange(len(data) + 1)
        if kind == 0:
            data[at:at] = bytes(
                random.choice(b'[](){}<>-*:=,.@"#\n %/+?tp0192\xff\x00\\') for _ in range(random.randint(1, 3))
            )
        elif kind == 1:
            del data[at : at + random.randint(1, 12)]
        elif kind == 2 and at < len(data):
            data[at] = random.randrange(256)
        elif kind == 3:
            other = random.choice(_plans()).encode().splitlines(keepends=True)
            data[at:at] = random.choice(other)
        elif kind == 4:
            lines = data.splitlines(keepends=True)
            random.shuffle(lines) if random.random() < 0.2 else lines.insert(random.randrange(len(lines)), lines[-1])
            data = bytearray(b"".join(lines))
        else:
            words = data.split(b" ")
            words[random.randrange(len(words))] = random.choice(_WORDS).encode()
            data = bytearray(b" ".join(words))
    return data.decode(errors="replace")


def text_of(seed: int) -> str:
    """The text of a seed: mutated, derived, or derived after a plan that defines what may be named."""
    random = Random(seed)
    if seed % 2 == 0:
        return mutated(random)
    text = derived(random, random.choice((20, 60, 200, 400)))
    return text if seed % 4 == 1 else random.choice(_plans()) + text.partition("\n")[2]


@attrs.frozen
class Verdict:
    """What became of a text.

    Attributes:
        outcome: ``plan``, or the code of the first error.
        problem: what should not be; empty when all is as promised.
        seconds: of the processor.
    """

    outcome: str
    problem: str
    seconds: float


def verdict(text: str, seed: int = 0) -> Verdict:
    """Read a text, and look at what comes of it."""
    random, source = Random(seed), Source(text, str(PACKAGED / "text.shard"))
    world = random.choice((1, 4, 8, 12))
    params: dict[str, Any] = random.choice(({}, {}, {}, {"tp": 4}, {"tp": "world"}))
    gc.disable()  # a collection walks all that other tests of this process have left
    began = time.process_time()
    problem, outcome = "", "plan"
    try:
        plan = read_plan(source, config=CONFIG, world=world, params=params)
        formatted = format_plan(source)
        again = read_plan(Source(formatted, source.file), config=CONFIG, world=world, params=params)
        if format_plan(Source(formatted)) != formatted:
            problem = "canonical text is not its own canonical text"
        if [(line.pattern, line.kind, str(line.value)) for line in plan.lines] != [
            (line.pattern, line.kind, str(line.value)) for line in again.lines
        ]:
            problem = "canonical text means something else"
    except SpecError as error:
        outcome = error.code
        problem = _wrong_error(error)
    except Exception as error:
        outcome, problem = "crash", f"{type(error).__name__}: {error}"
    seconds = time.process_time() - began
    gc.enable()
    if seconds > SECONDS:
        problem = problem or f"took {seconds:.1f} s"
    return Verdict(outcome, problem, seconds)


def _wrong_error(error: SpecError) -> str:
    errors = [finding for finding in error.findings if finding.severity == "error"]
    if not errors:
        return "an error without findings"
    for finding in errors:
        if finding.origin is None:
            if finding.code != "E101":
                return f"no place: {finding}"
            continue
        source, (start, end) = finding.origin.source, finding.origin.span
        if not 0 <= start < end or start > len(source.text):
            return f"not a place: {finding.origin.span} of {len(source.text)} in {finding}"
        if "\n" in finding.fault or not finding.fault or "^" not in str(finding).splitlines()[2]:
            return f"not a message: {finding}"
    return "" if error.code == errors[0].code else "another code"
