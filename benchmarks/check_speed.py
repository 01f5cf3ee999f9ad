"""How long the commands that only plan take, from the start of the interpreter to its end, and whether torch came in.

The least of several runs, in a shell's seconds (wall) and in a core's (user and system); compiled files are there, as
they are from a package's second run on.

python benchmarks/check_speed.py [--times 7]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
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
    ("Llama-3-8B", LLAMA, "check llama --world 8", 0.5),
    ("Llama-3-8B", LLAMA, "check fsdp --world 64", 0.5),
    ("Mixtral-8x7B, a list of experts", MIXTRAL, "check mixtral --world 64 --set published=true", 2),
    ("Llama-3.1-405B", LARGEST, "check llama_2d --world 16384", 2),
    ("Llama-3.1-405B", LARGEST, "plan llama_2d --no-step --world 16384 --rank 777", 2),
    ("Llama-3.1-405B", LARGEST, "show llama_2d --world 16384", 2),
    ("Llama-3-8B", LLAMA, "plan llama --no-step --world 64 --search", 5),
    ("Llama-3-8B", LLAMA, "plan llama_2d --no-step --world 64 --search", 5),
]


def seconds(command: list[str], environment: dict[str, str]) -> tuple[float, float, str]:
    """The seconds of one run, of a clock and of a core, and what it said of torch."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, env=environment)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    core = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, core, done.stderr.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=7, help="of which the least is shown (default 7)")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "XDG_CACHE_HOME": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        path = Path(folder) / "config.json"
        for name, config, arguments, limit_s in CASES:
            path.write_text(json.dumps(config))
            command = [sys.executable, "-c", RUN, *arguments.split(), "--model", str(path)]
            seconds(command, environment)  # which compiles
            walls, cores, imports = zip(*(seconds(command, environment) for _ in range(options.times)), strict=True)
            rows.append({
                "model": name, "command": arguments, "wall s": f"{min(walls):.2f}", "core s": f"{min(cores):.2f}",
                "limit s": limit_s, "imports": imports[0],
            })  # fmt: skip
    write("check_speed", rows, times=options.times)


if __name__ == "__main__":
    main()
