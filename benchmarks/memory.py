"""Memory of one GRPO step, in live tensor storages by kind (live.py) and in resident memory, each in a fresh process.

    run with   python -m benchmarks.memory [--prompt 8192 --response 64 --responses 2 8]
    a plot     python -m benchmarks.memory --plot      (from the CSV)

The parameters are left out, their gradients count in every case. Kinds go by shape: `hidden` is what has the shape of
the packed (or stock) hidden states, gradients of them included; `state` the prompt's keys and values and their
gradients; `logits` what has the vocabulary's width; `gradients` what has a parameter's shape. Stock row by row runs
the smaller number of responses: its peak is that of one row, whatever their number.
Bars: growth with the number of responses, and peak against stock.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from longstraw_dist import LongStrawConfig, attach

from . import models
from .conditions import RESULTS, conditions, read, show, write
from .live import LiveStorages

OURS = {
    "exact": LongStrawConfig(),
    "exact, offload": LongStrawConfig(offload="hidden"),
    "exact, all offloaded": LongStrawConfig(offload="all"),
    "detached": LongStrawConfig(prompt_grad="detached"),
}
STOCK = {"stock row by row": models.step_rows, "stock together": models.step_together}
KINDS = ("gradients", "hidden", "state", "logits", "other")
MB = 1e6


def kinds(model, prompt: int, response: int, responses: int):
    """Names a tensor after its shape."""
    config = model.config
    shapes = {tuple(p.shape) for p in model.parameters()}
    rows = {prompt - 1, response * responses, prompt + response, prompt - 1 + response * responses}

    def kind(t: Tensor) -> str:
        if tuple(t.shape) in shapes or tuple(t.shape[::-1]) in shapes:
            return "gradients"
        if t.shape[-1:] == (config.vocab_size,):
            return "logits"
        if t.dim() == 3 and t.shape[2] == config.hidden_size and t.shape[1] in rows:
            return "hidden"
        if t.dim() == 4 and t.shape[1:3] == (config.num_key_value_heads, prompt - 1):
            return "state"
        return "other"

    return kind


def measure(case: str, prompt: int, response: int, responses: int, layers: int) -> dict[str, float]:
    """One step of one case in this process: live bytes by tier and kind, and the growth of resident memory."""
    model = models.qwen3(num_hidden_layers=layers)
    if case in OURS:
        attach(model, OURS[case])
    step = models.step_packed if case in OURS else STOCK[case]
    group, warm = models.prompt_group(prompt, response, responses), models.prompt_group(16, 2, 2)
    w = models.weights(group)
    step(model, warm, models.weights(warm))  # thread pools and workspaces are not the step's
    model.zero_grad()
    inputs = [group.prompt_ids, *group.response_ids, *w]
    kind = kinds(model, prompt, response, responses)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with LiveStorages(kind, [*model.parameters(), *model.buffers(), *inputs]) as live:
        step(model, group, w)
    out = {"device": live.peak["device"], "host": live.peak["host"]}
    out |= {k: live.peak_kinds.get(("device", k), 0) for k in KINDS}
    return out | {"resident": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024}


def fresh(*args) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", "--one", json.dumps(args)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def bars(peak: dict[tuple[str, int], dict], hidden_row: int, layers: int, response: int, few: int, many: int):
    """(what, measured, bar) for each bar that these cases tell about."""
    added = (many - few) * response * hidden_row
    for case, tensors in (("exact", layers + 3), ("exact, offload", 4)):
        growth = peak[case, many]["device"] - peak[case, few]["device"]
        yield f"{case}: growth from G={few} to {many}, rows of hidden states a token", growth / added, 1.1 * tensors
    for case, g, part in (("stock together", many, 10), ("stock row by row", few, 3)):
        for what, key in (("live storages", "device"), ("resident memory", "resident")):
            if (case, g) in peak:
                ratio = peak["exact", many][key] / peak[case, g][key]
                yield f"exact at G={many} over {case}, {what}", ratio, 1 / part


def plot(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read(path)
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1.2), layout="constrained")
    left = [0.0] * len(rows)
    names = [f"{row['case']}, G={row['G']}" for row in rows]
    for kind in (*KINDS, "host"):
        widths = [float(row[kind]) for row in rows]
        axes.barh(names, widths, left=left, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.plot([float(row["resident"]) for row in rows], names, "k|", markersize=14, label="resident")
    limit = 1.2 * max(float(row["resident"]) for row in rows if row["case"] != "stock together")
    axes.set_xlim(0, limit)
    for i, end in enumerate(left):
        if end > limit:
            axes.text(limit, i, f"{end:.0f} MB > ", ha="right", va="center", color="white")
    axes.set_xlabel("MB at the peak of a step, without parameters")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path.with_suffix(".png"), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--responses", type=int, nargs=2, default=[2, 8])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cases", nargs="+", default=[*STOCK, *OURS])
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    path = RESULTS / "memory.csv"
    if args.plot:
        plot(path)
        return

    few, many = args.responses
    peak = {}
    for case in args.cases:
        for g in {"stock row by row": (few,), "stock together": (many,)}.get(case, (few, many)):
            peak[case, g] = fresh(case, args.prompt, args.response, g, args.layers)
            print(case, g, {k: f"{v / MB:.1f}" for k, v in peak[case, g].items()}, flush=True)
    rows = [{"case": c, "G": g} | {k: f"{v / MB:.1f}" for k, v in p.items()} for (c, g), p in peak.items()]
    hidden_row = models.SETTINGS["hidden_size"] * torch.finfo(torch.float32).bits // 8
    comments = [
        f"MB of 1e6 bytes. Qwen3 of {args.layers} layers, hidden 256, vocabulary 32,768 (tied), float32; "
        f"prompt {args.prompt}, responses of {args.response}; {', '.join(KINDS)}: of the device tier, at its peak",
        conditions(),
    ]
    for what, measured, bar in bars(peak, hidden_row, args.layers, args.response, few, many):
        comments.append(f"{what}: {measured:.4g}, bar {bar:.4g}: {'met' if measured <= bar else 'MISSED'}")
    show(rows, comments)
    if not args.no_save:
        write(path, rows, comments)


if __name__ == "__main__":
    main()
