"""Every benchmark, one after the other, each in a process of its own.

    run with   python -m benchmarks [--threads 1] [--only step length]      (hours: the rows of stock are slow)
    try it     python -m benchmarks --quick                                 (minutes: tiny sizes, results in /tmp)

Each script writes its CSV and PNG with the conditions. One that fails is named at the end, with exit status 1. What
needs something that is not there is left out by name: the real model, which `launch/prepare_quickstart.py` makes. On a
GPU: `python -m benchmarks.gpu`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "quickstart" / "SmolLM2-135M-Instruct"
BATCHED = [
    "--skip",
    "batched",
    "batched, checkpointed",
]  # its 14 GB of activations want a quiet machine, and its passes half of the time
ONE = ["--passes", "1", "--response", "4"]
# name, options, and the sizes of --quick after them (`None`: it has none)
SCRIPTS: list[tuple[str, list[str], list[str] | None]] = [
    ("step", [], ["--prompt", "256", "--layers", "2", *ONE]),
    ("step", ["--name", "step_16_layers", "--layers", "16", *BATCHED], ["--prompt", "64", *ONE]),
    (
        "step",
        ["--name", "step_16384", "--prompt", "16384", "--response", "128", *BATCHED],
        ["--prompt", "1024", "--responses", "2", "--layers", "2", *ONE],
    ),
    (
        "step",
        ["--name", "step_hybrid", "--model", "qwen3_5_text", "--layers", "8", *BATCHED],
        ["--prompt", "128", "--layers", "4", *ONE],
    ),
    ("group_size", [], ["--prompt", "256", "--layers", "2", *ONE]),
    ("length", [], ["--prompts", "128", "256", *ONE]),
    ("budget", [], ["--prompt", "256", "--layers", "2", *ONE]),
    ("memory", [], ["--prompt", "256", "--layers", "2", "--cases", "exact", "exact, offload"]),
    ("memory", ["--plot"], []),
    ("collectives", [], None),
    ("real_model", [], ["--prompt", "40", "--responses", "2", "--tokens", "4", "--settings", "exact"]),
    ("real_step", [], None),
    ("capture", [], None),
    ("trl_step", [], None),
    ("longest", [], None),
]
NEED_MODEL = ("real_model", "real_step", "capture", "trl_step")


def absent(name: str) -> str | None:
    """Why a script is left out, if it is."""
    if name in NEED_MODEL and not QUICKSTART.exists():
        return f"{QUICKSTART.relative_to(ROOT)} is not there: python launch/prepare_quickstart.py"
    return None


def main() -> None:
    names = list(dict.fromkeys(name for name, *_ in SCRIPTS))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes; the results of the repository stay as they are"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    args = parser.parse_args()
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    if args.quick:
        environment["BENCHMARK_RESULTS"] = tempfile.mkdtemp(prefix="benchmarks-")
        print(f"results in {environment['BENCHMARK_RESULTS']}")
    lines, failed = [], []
    for name, options, tiny in SCRIPTS:
        if name not in args.only:
            continue
        command = [f"benchmarks.{name}", *options, *(tiny or [] if args.quick else [])]
        reason = absent(name) or ("it has no small size" if args.quick and tiny is None else None)
        start, ended = time.monotonic(), 0
        if reason is None:
            print(f"\n== python -m {' '.join(command)}", flush=True)
            ended = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment).returncode
        if ended:
            failed.append(name)
        verdict = f"FAILED, exit status {ended}" if ended else "done"
        verdict = verdict if reason is None else f"left out, {reason}"
        lines.append(f"{time.monotonic() - start:7.0f} s  {' '.join(command)}: {verdict}")
        print(lines[-1], flush=True)
    print("\n", *lines, sep="\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
