"""Memory of one GRPO step, in live tensor storages by kind (live.py) and in resident memory, each in a fresh process.

    run with   python -m benchmarks.memory [--prompt 16384 --response 64 --responses 2 8]
    one case   python -m benchmarks.memory --cases "exact, all offloaded" --show --no-save
    a plot     python -m benchmarks.memory --plot      (from the CSV)

The parameters are left out, their gradients count in every case. Kinds go by shape: `hidden` is what has the shape of
the packed (or stock) hidden states, gradients of them included; `state` the prompt's keys and values and their
gradients; `logits` what has the vocabulary's width; `gradients` what has a parameter's shape. Stock row by row runs
the smaller number of responses: its peak is that of one row, whatever their number.

Bars, at the larger number of responses: with all offloaded, what the device tier holds beside gradients of parameters
is at most 1.15 times one layer's working set, whatever the number of layers; it grows by at most 4 rows of hidden
states for each token that more responses add; and without offload the peak is at most 1/20 of stock rows together and
1/4 of one stock row, in live storages and in resident memory.

One layer's working set: its input, the gradients of its output and of its input; the prompt's K and V, their summed
gradients and those that a chunk's attention returns; and what the stock layer, by itself, holds at most in a forward
and backward of `prompt_chunk_size` tokens (measured). On CUDA one layer's input, K and V, fetched ahead, are to be
added; on a CPU nothing is fetched ahead, and nothing is added here.
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
from .conditions import RESULTS, conditions, read, show, verdict, write
from .live import LiveStorages

OFFLOADED = "exact, all offloaded"
OURS = {
    "exact": LongStrawConfig(),
    "exact, offload": LongStrawConfig(offload="hidden"),
    OFFLOADED: LongStrawConfig(offload="all"),
    "detached": LongStrawConfig(prompt_grad="detached"),
}
STOCK = {"stock row by row": models.step_rows, "stock together": models.step_together}
KINDS = ("gradients", "hidden", "state", "logits", "other")
WIDTH, CHUNK = models.SETTINGS["hidden_size"], int(LongStrawConfig.prompt_chunk_size)
ITEM = torch.finfo(torch.float32).bits // 8
MB = 1e6
Peaks = dict[tuple[str, int, int], dict]  # of (case, responses, layers)


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
        if t.dim() == 4 and t.shape[1] == config.num_key_value_heads and CHUNK < t.shape[2] < prompt:
            return "state"
        return "other"

    return kind


def measure(case: str, prompt: int, response: int, responses: int, layers: int) -> dict:
    """One step of one case in this process: live bytes by tier and kind, the growth of resident memory, and the
    largest storages of the peak."""
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
    out: dict = {"device": live.peak["device"], "host": live.peak["host"]}
    out |= {k: live.peak_kinds.get(("device", k), 0) for k in KINDS}
    out["resident"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    largest = sorted(live.peak_shapes.items(), key=lambda item: -item[0][2] * item[1])[:12]
    out["largest"] = [f"{n} x {kind} {list(shape)}, {n * size / MB:.1f} MB" for (kind, shape, size), n in largest]
    return out


def fresh(*args) -> dict:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", "--one", json.dumps(args)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def segment_bytes() -> int:
    """Most that a stock layer holds in a forward and backward of `CHUNK` tokens, gradients of parameters left out."""
    model = models.qwen3(num_hidden_layers=1)
    layer = model.model.layers[0]
    x = torch.randn(1, CHUNK, WIDTH).requires_grad_()
    rotary = model.model.rotary_emb(x, torch.arange(CHUNK)[None])
    parameters = list(layer.parameters())
    with LiveStorages(kinds(model, 2, 1, 1), [*parameters, x, *rotary]) as live:
        y = layer(x, position_embeddings=rotary)
        torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))
    return live.peak["device"] - live.peak_kinds.get(("device", "gradients"), 0)


def working_set(prompt: int, response: int, responses: int) -> int:
    """Of one layer, in bytes, as the docstring of the module has it; gradients of parameters left out."""
    hidden = ITEM * WIDTH * (prompt - 1 + response * responses)
    state = ITEM * 2 * models.SETTINGS["num_key_value_heads"] * models.SETTINGS["head_dim"] * (prompt - 1)
    return 3 * hidden + 3 * state + segment_bytes()


def bars(peak: Peaks, args, few: int, many: int):
    """(what, measured, bar, whether it is to be reached) for what these cases tell about; without a bar `None`."""
    base = args.layers[0]
    for layers in args.layers:
        if found := peak.get((OFFLOADED, many, layers)):
            rest = (found["device"] - found["gradients"]) / working_set(args.prompt, args.response, many)
            yield (
                f"{OFFLOADED}, L={layers}: device tier without gradients over a layer's working set",
                rest,
                1.15,
                False,
            )
    added = (many - few) * args.response * WIDTH * ITEM
    for case in OURS:
        if (case, few, base) in peak and (case, many, base) in peak:
            growth = (peak[case, many, base]["device"] - peak[case, few, base]["device"]) / added
            bar = 4 if case == OFFLOADED else None
            yield f"{case}: growth from G={few} to {many}, rows of hidden states an added token", growth, bar, False
    for case, g, part in (("stock together", many, 20), ("stock row by row", few, 4)):
        for what, key in (("live storages", "device"), ("resident memory", "resident")):
            if (case, g, base) in peak and ("exact", many, base) in peak:
                ratio = peak[case, g, base][key] / peak["exact", many, base][key]
                yield f"{case} over exact at G={many}, {what}", ratio, part, True


def plot(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read(path)
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1.2), layout="constrained")
    left = [0.0] * len(rows)
    names = [f"{row['case']}, G={row['G']}, L={row['layers']}" for row in rows]
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
    parser.add_argument("--prompt", type=int, default=16_384)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--responses", type=int, nargs=2, default=[2, 8])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16], help="all with offload, else the first")
    parser.add_argument("--cases", nargs="+", default=[*STOCK, *OURS])
    parser.add_argument("--show", action="store_true", help="the largest storages of each peak")
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
    chosen = {"stock row by row": (few,), "stock together": (many,)}
    runs = [(case, g, args.layers[0]) for case in args.cases for g in chosen.get(case, (few, many))]
    runs += [(OFFLOADED, many, layers) for layers in args.layers[1:] if OFFLOADED in args.cases]
    peak: Peaks = {}
    for case, g, layers in runs:
        found = peak[case, g, layers] = fresh(case, args.prompt, args.response, g, layers)
        largest = found.pop("largest")
        print(case, g, layers, {k: f"{v / MB:.1f}" for k, v in found.items()}, flush=True)
        if args.show:
            print(*largest, sep="\n")
    rows = [
        {"case": case, "G": g, "layers": layers} | {k: f"{v / MB:.1f}" for k, v in found.items()}
        for (case, g, layers), found in peak.items()
    ]
    comments = [
        f"MB of 1e6 bytes. Qwen3 of hidden 256, vocabulary 32,768 (tied), float32; prompt {args.prompt}, responses of "
        f"{args.response}; {', '.join(KINDS)}: of the device tier, at its peak",
        conditions(),
        f"one layer's working set at G={many}: {working_set(args.prompt, args.response, many) / MB:.1f} MB, of which "
        f"{segment_bytes() / MB:.1f} are a chunk's graph; nothing fetched ahead is added",
    ]
    for what, measured, bar, at_least in bars(peak, args, few, many):
        comments.append(f"{what}: {measured:.4g}" if bar is None else verdict(what, measured, bar, at_least))
    show(rows, comments)
    if not args.no_save:
        write(path, rows, comments)


if __name__ == "__main__":
    main()
