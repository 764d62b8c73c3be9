"""The longest prompt that trains a step when the address space is limited to some GiB above the loaded program.

    run with   python -m benchmarks.longest [--gib 4 --response 64 --responses 8]
    stock      python -m benchmarks.longest --cases "stock together" "stock row by row" --no-save

Each try is a process of its own, on one thread: it builds the model (models.py), takes a short step so that thread
pools exist, sets RLIMIT_AS to its size of that moment plus the limit, and takes one step. A try fails when that is out
of memory (or when the process dies of it). The first guess is what the growth of the address space at two short
prompts predicts; from there it goes up or down by 5 % until one prompt has trained and the next has not. Stock row by
row runs two rows: the second one has the gradients of the first beside it, as every later row would.

Ours takes hours to search, since the time grows with the square of the prompt. It is tried once, at the prompt that
the bars ask for (20 times stock together, 5 times stock row by row): what it says is `at least`.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from longstraw_dist import LongStrawConfig, attach

from . import models
from .conditions import RESULTS, conditions, show, verdict, write
from .flops import Shape, ours, stock

OURS = {"exact": LongStrawConfig(), "detached": LongStrawConfig(prompt_grad="detached")}
STOCK = ("stock together", "stock row by row", "checkpointed row by row")
BARS = {"stock together": 20, "stock row by row": 5}  # exact over these, in prompt tokens
STEP = 1.05
SPEED = 80e9  # FLOPs a second of one thread, for the estimates of time


def build(case: str, prompt: int, layers: int):
    model = models.qwen3(num_hidden_layers=layers, max_position_embeddings=2 * prompt + 65_536)
    if case == "checkpointed row by row":
        model.activation_checkpointing_enable({"use_reentrant": False})
    if case in OURS:
        attach(model, OURS[case])
        return model, models.step_packed
    return model, models.step_together if case == "stock together" else models.step_rows


def address_space(name: str = "VmSize") -> int:
    """Bytes of this process's address space: now, or (`VmPeak`) at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def attempt(case: str, prompt: int, response: int, responses: int, layers: int, limit: float) -> dict:
    """One step in this process. A `limit` of 0 is none."""
    torch.set_num_threads(1)
    model, step = build(case, prompt, layers)
    responses = 2 if "row by row" in case else responses
    group, warm = models.prompt_group(prompt, response, responses), models.prompt_group(16, 2, 2)
    w = models.weights(group)
    step(model, warm, models.weights(warm))
    model.zero_grad()
    before = address_space()
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (before + int(limit), resource.RLIM_INFINITY))
    start = time.perf_counter()
    try:
        step(model, group, w)
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        return {"trained": False, "seconds": time.perf_counter() - start}
    return {"trained": True, "seconds": time.perf_counter() - start, "grown": address_space("VmPeak") - before}


def fresh(*args) -> dict:
    """`attempt` in a process of its own; one that dies without a word has failed, one that raises ends this one."""
    command = [sys.executable, "-m", "benchmarks.longest", "--one", json.dumps(args)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        out = json.loads(done.stdout.splitlines()[-1])
    elif done.returncode < 0 or "MemoryError" in done.stderr or "std::bad_alloc" in done.stderr:
        out = {"trained": False, "seconds": None}
    else:
        raise RuntimeError(done.stderr[-3000:])
    print(f"{args[0]}, P={args[1]}: {out}", flush=True)
    return out


def guess(case: str, args, limit: float) -> int:
    """The prompt at which the address space would have grown by the limit."""
    lengths = args.probe
    grown = [fresh(case, n, args.response, args.responses, args.layers, 0)["grown"] for n in lengths]
    slope = (grown[1] - grown[0]) / (lengths[1] - lengths[0])
    return int(lengths[1] + (limit - grown[1]) / slope)


def search(first: int, trains: Callable[[int], bool]) -> tuple[int, int]:
    """The longest prompt that trained and the next that did not, from `first` on in steps of 5 %."""
    prompt, factor = first, STEP if trains(first) else 1 / STEP
    while True:
        following = int(prompt * factor)
        if trains(following) != (factor > 1):
            return (prompt, following) if factor > 1 else (following, prompt)
        prompt = following


def minutes(case: str, prompt: int, args) -> float:
    """Of one thread, as counted FLOPs have it."""
    shape = Shape.of(models.qwen3(num_hidden_layers=args.layers).config, prompt, args.response, args.responses)
    flops = ours(shape, case) if case in OURS else stock(shape, case.startswith("checkpointed"))
    return flops * (2 / args.responses if "row by row" in case else 1) / SPEED / 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=4.0)
    for name, default in {"response": 64, "responses": 8, "layers": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cases", nargs="+", default=["stock together", "stock row by row", "exact"])
    parser.add_argument("--probe", type=int, nargs=2, default=[1024, 2048], help="the short prompts of the guess")
    parser.add_argument("--prompt", type=int, help="of ours, in place of what the bars ask for")
    parser.add_argument("--search-ours", action="store_true", help="look for its longest prompt too: hours")
    parser.add_argument("--no-save", action="store_true", help=f"leave {RESULTS.name}/longest.csv as it is")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(attempt(*args.one)))
        return

    limit, rows = args.gib * 2**30, []
    longest: dict[str, int] = {}
    asked = args.prompt or 0
    for case in args.cases:
        tries: dict[int, dict] = {}

        def trains(prompt: int, case: str = case, tries: dict = tries) -> bool:
            print(f"{case}, P={prompt}: about {minutes(case, prompt, args):.0f} min if it trains", flush=True)
            tries[prompt] = fresh(case, prompt, args.response, args.responses, args.layers, limit)
            return tries[prompt]["trained"]

        failed: int | None = None
        if case in STOCK or args.search_ours:
            longest[case], failed = search(guess(case, args, limit), trains)
            asked = asked if args.prompt else max(asked, BARS.get(case, 0) * longest[case])
        elif trains(asked):
            longest[case] = asked
        else:
            longest[case], failed = 0, asked
        seconds = tries[longest[case]]["seconds"] if longest[case] else None
        rows.append(
            {
                "case": case,
                "trained_prompt": longest[case] or None,
                "failed_prompt": failed,
                "searched": case in STOCK or args.search_ours,
                "seconds": seconds and f"{seconds:.0f}",
            }
        )
    comments = [
        f"longest prompt that trains a step with the address space limited to {args.gib:g} GiB above the loaded "
        f"program; Qwen3 of {args.layers} layers, hidden 256, vocabulary 32,768, float32; {args.responses} responses "
        f"of {args.response}; where it was not searched, at least; seconds of that step (two rows of row by row)",
        conditions(),
    ]
    for case, times in BARS.items():
        if case in longest and longest.get("exact"):
            ratio = longest["exact"] / longest[case]
            comments.append(verdict(f"exact, as far as it was tried, over {case}", ratio, times))
    show(rows, comments)
    if not args.no_save:
        write(RESULTS / "longest.csv", rows, comments)


if __name__ == "__main__":
    main()
