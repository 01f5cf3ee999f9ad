"""How long `shardtensor check` takes, from the start of the interpreter to its end, and whether torch was imported.

python benchmarks/check_speed.py [--times 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import write

ROOT = Path(__file__).parent.parent
RUN = """
import sys
from shardtensor.cli.main import main
status = main(sys.argv[1:])
print("torch" if "torch" in sys.modules else "no torch", file=sys.stderr)
sys.exit(status)
"""
LLAMA = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "dtype": "bfloat16",
}  # fmt: skip
LARGEST = LLAMA | {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
}  # fmt: skip
MIXTRAL = LLAMA | {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}

CASES = [
    ("Llama-3-8B", LLAMA, ["llama", "--world", "8"], 0.5),
    ("Llama-3-8B, FSDP", LLAMA, ["fsdp", "--world", "64"], 0.5),
    ("Mixtral-8x7B, a list of experts", MIXTRAL, ["mixtral", "--world", "64", "--set", "published=true"], 2),
    ("Llama-3.1-405B", LARGEST, ["llama_2d", "--world", "16384"], 2),
]


def seconds(command: list[str]) -> tuple[float, str]:
    """The seconds of one run, and what it said of torch."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return time.perf_counter() - began, done.stderr.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=7, help="of which the median and the least are shown")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, config, arguments, limit_s in CASES:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            command = [sys.executable, "-c", RUN, "check", *arguments, "--model", str(path)]
            found = [seconds(command) for _ in range(options.times)]
            times = [each for each, _ in found]
            rows.append({
                "model": name, "ranks": arguments[2], "median s": f"{statistics.median(times):.2f}",
                "least s": f"{min(times):.2f}", "limit s": limit_s, "imports": found[0][1],
            })  # fmt: skip
    write("check_speed", rows, times=options.times)


if __name__ == "__main__":
    main()
