"""A GPU check that takes a few minutes: is one bfloat16 step right on CUDA, how fast is it, and what does it hold?

    run with   python -m benchmarks.gpu_smoke
    try it     python -m benchmarks.gpu_smoke --device cpu --tiny

Parity: the gradient of a bfloat16 step against stock rows in float32 from the same (bfloat16) weights; its error may
be at most 1.1 times that of stock bfloat16 rows. Speed: seconds of stock rows over ours, medians of interleaved
passes, with the peak of allocated memory above what is there before a step. Writes results/gpu_smoke.csv.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from longstraw_dist import LongStrawConfig, PromptGroup, attach, kernels

from . import models
from .conditions import RESULTS, conditions, show, write
from .flops import Shape, ours, stock

SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
CASES = ("stock rows", "checkpointed rows", "exact", "detached")
VOCABULARY = models.SETTINGS["vocab_size"]
COLUMNS = ("what", "case", "loss", "error", "cosine", "bar", "seconds", "ratio", "limit", "peak_mb")
BAR = 1.1  # error of ours over error of stock bfloat16


def build(case: str, device: str, overrides: dict, dtype: torch.dtype = torch.bfloat16):
    """A model with the same bfloat16 weights whatever the case, and its step."""
    model = models.qwen3(dtype=torch.bfloat16, device=device, **overrides)
    if dtype == torch.float32:
        model.float()
    if case == "checkpointed rows":
        model.activation_checkpointing_enable({"use_reentrant": False})
    if case not in ("exact", "detached"):
        return model, models.step_rows
    attach(model, LongStrawConfig(prompt_grad=case))
    return model, models.step_packed


def group_on(device: str, prompt: int, response: int, responses: int, vocabulary: int) -> PromptGroup:
    group = models.prompt_group(prompt, response, responses, vocabulary=vocabulary)
    return PromptGroup(group.prompt_ids.to(device), [r.to(device) for r in group.response_ids])


def parity(device: str, overrides: dict, prompt: int, response: int, responses: int) -> list[dict]:
    group = group_on(device, prompt, response, responses, overrides.get("vocab_size", VOCABULARY))
    w = models.weights(group)
    taken = {}
    for name, case, dtype in (
        ("float32 stock rows", "stock rows", torch.float32),
        ("bfloat16 stock rows", "stock rows", torch.bfloat16),
        ("bfloat16 exact", "exact", torch.bfloat16),
    ):
        model, step = build(case, device, overrides, dtype)
        loss = step(model, group, w)
        taken[name] = (loss, models.gradients(model))
    reference = taken["float32 stock rows"][1]
    rows = []
    for name, (loss, grads) in taken.items():
        error, cosine = models.compare(grads, reference)
        row = {"what": "parity", "case": name, "loss": f"{loss:.4f}", "error": f"{error:.3g}"}
        rows.append(dict.fromkeys(COLUMNS) | row | {"cosine": f"{cosine:.5f}"})
    errors = [float(row["error"] or 0) for row in rows]
    rows[-1]["bar"] = f"{BAR * errors[1]:.3g}"
    rows[-1]["what"] = "parity: met" if errors[2] <= BAR * errors[1] else "parity: MISSED"
    return rows


def speed(device: str, overrides: dict, prompt: int, response: int, responses: int, passes: int) -> list[dict]:
    cuda = torch.device(device).type == "cuda"
    group = group_on(device, prompt, response, responses, overrides.get("vocab_size", VOCABULARY))
    w = models.weights(group)
    built = {case: build(case, device, overrides) for case in CASES}
    shape = Shape.of(built["exact"][0].config, prompt, response, responses)
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    peak, losses = {}, {}
    for _ in range(passes + 1):  # the first one warms up
        for case, (model, step) in built.items():
            before = 0
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            losses[case] = step(model, group, w)
            if cuda:
                torch.cuda.synchronize()
                peak[case] = (torch.cuda.max_memory_allocated() - before) / 1e6
            seconds[case].append(time.perf_counter() - start)
            model.zero_grad()
    median = {case: statistics.median(s[1:]) for case, s in seconds.items()}
    rows = []
    for case in CASES:
        flops = ours(shape, case) if case in ("exact", "detached") else stock(shape, case == "checkpointed rows")
        row = {"what": f"step, P={prompt}, {responses}x{response}", "case": case, "loss": f"{losses[case]:.4f}"}
        row |= {"seconds": f"{median[case]:.3f}", "peak_mb": f"{peak[case]:.0f}" if cuda else ""}
        row |= {"ratio": f"{median['stock rows'] / median[case]:.2f}", "limit": f"{stock(shape) / flops:.2f}"}
        rows.append(dict.fromkeys(COLUMNS) | row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU; leaves the CSV as it is")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_smoke.csv")
    args = parser.parse_args()
    overrides = {"num_hidden_layers": 2, "vocab_size": 512} if args.tiny else SMALL
    small, large = ((65, 8, 2), (257, 8, 2)) if args.tiny else ((2048, 64, 4), (16_384, 128, 8))
    if args.device == "cuda":
        print(torch.cuda.get_device_name())
    rows = parity(args.device, overrides, *small)
    show(rows)
    rows += speed(args.device, overrides, *large, args.passes)
    comments = [
        f"Qwen3 with {overrides}, bfloat16; parity at P={small[0]}, {small[2]} responses of {small[1]}; medians of "
        f"{args.passes} interleaved passes; peak_mb: allocated above what was there before the step",
        f"in use: {kernels.in_use()}",
        conditions(args.device),
    ]
    show(rows, comments)
    if not args.tiny:
        write(args.out, rows, comments)


if __name__ == "__main__":
    main()
