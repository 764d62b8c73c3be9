"""Step, tokens a second, MFU and peak memory on one GPU at long prompts, in minutes: bfloat16, the shape of Qwen3-4B.

    run with   python -m benchmarks.gpu [--minutes 12 --prompts 32768 131072]
    try it     python -m benchmarks.gpu --device cpu --tiny

Random weights. Ours runs the whole group; of stock one row is timed, and its seconds are multiplied by the number of
responses. One pass each, behind a short step that warms up: minutes are few. Cases come in the order of their worth,
the shorter prompt first; what would not end within `--minutes` (at 30 % of the card's peak) is named in the CSV as
missing, what runs out of memory as that. FLOPs are counted (flops.py); those of the MFU are what the result needs,
each layer forward and backward once, without what is recomputed. `ratio` is over stock rows, or over checkpointed ones
where the former do not fit: `over` says which. Parity on a GPU is gpu_smoke.py's.
"""

import argparse
import gc
import time
from pathlib import Path

import torch
import transformers

from longstraw_dist import LongStrawConfig, PromptGroup, attach, kernels
from longstraw_dist.attach import attachment_of

from . import models
from .conditions import RESULTS, conditions, show, write
from .flops import Shape, ours, stock

QWEN3_4B = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
}
TINY = {"vocab_size": 512, "num_hidden_layers": 2}
OURS = {
    "exact": LongStrawConfig(),
    "detached": LongStrawConfig(prompt_grad="detached"),
    "exact, all offloaded": LongStrawConfig(offload="all"),
}
STOCK = {"stock rows, checkpointed": True, "stock rows": False}
ORDER = ("exact", "stock rows, checkpointed", "stock rows", "detached", "exact, all offloaded")
COLUMNS = (
    "prompt",
    "case",
    "outcome",
    "seconds",
    "measured_rows",
    "tokens_s",
    "mfu",
    "peak_gb",
    "over",
    "ratio",
    "limit",
)


class Bench:
    """One attached model: stock cases run its own forward, ours another setting of it each."""

    def __init__(self, args):
        self.args, self.cuda = args, args.device == "cuda"
        self.overrides = TINY if args.tiny else {**QWEN3_4B, "num_hidden_layers": args.layers}
        self.config = transformers.Qwen3Config(**{**models.SETTINGS, **self.overrides})
        with torch.device(args.device):
            self.model = transformers.AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16).train()
            for p in self.model.parameters():
                if p.dim() > 1:
                    torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        attach(self.model, LongStrawConfig())

    def group(self, prompt: int, response: int, responses: int) -> PromptGroup:
        group = models.prompt_group(prompt, response, responses, vocabulary=self.config.vocab_size)
        return PromptGroup(group.prompt_ids.to(self.args.device), [r.to(self.args.device) for r in group.response_ids])

    def choose(self, case: str) -> models.Step:
        if case in OURS:
            attachment_of(self.model).config = OURS[case]
            return models.step_packed
        if STOCK[case]:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.activation_checkpointing_disable()
        return models.step_rows

    def run(self, case: str, prompt: int) -> dict:
        """Seconds of the whole group and peak memory (parameters and gradients included)."""
        step, rows = self.choose(case), measured_rows(case, self.args.responses)
        warm = self.group(min(prompt, 1025), 8, 1)
        step(self.model, warm, models.weights(warm))  # and makes the gradients, which the step adds to
        group = self.group(prompt, self.args.response, rows)
        w = models.weights(group)
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step(self.model, group, w)
        if self.cuda:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) * self.args.responses / rows
        return {"seconds": seconds, "rows": rows, "peak": torch.cuda.max_memory_allocated() if self.cuda else None}

    def shape(self, prompt: int) -> Shape:
        return Shape.of(self.config, prompt, self.args.response, self.args.responses)

    def expected(self, case: str, prompt: int) -> float:
        """Seconds, at 30 % of the card's peak."""
        share = measured_rows(case, self.args.responses) / self.args.responses
        return done(self.shape(prompt), case) * share / (0.3 * self.args.tflops * 1e12)


def measured_rows(case: str, responses: int) -> int:
    return responses if case in OURS else 1


def needed(shape: Shape, case: str) -> float:
    """FLOPs without recomputation: of ours with every graph kept, of stock without checkpointing."""
    return ours(shape, OURS[case].prompt_grad, kept=True) if case in OURS else stock(shape)


def done(shape: Shape, case: str) -> float:
    return ours(shape, OURS[case].prompt_grad) if case in OURS else stock(shape, STOCK[case])


def row_of(case: str, prompt: int, found: dict, bench: Bench) -> dict:
    shape, seconds = bench.shape(prompt), found["seconds"]
    tokens = shape.responses * (prompt + shape.response)  # that stock would run: of the group's rows
    row = {"prompt": prompt, "case": case, "outcome": "ran", "seconds": f"{seconds:.2f}"}
    row |= {"measured_rows": found["rows"], "tokens_s": f"{tokens / seconds:.0f}"}
    row["mfu"] = f"{needed(shape, case) / seconds / (bench.args.tflops * 1e12):.3f}"
    row["peak_gb"] = f"{found['peak'] / 1e9:.1f}" if found["peak"] else None
    return dict.fromkeys(COLUMNS) | row


def compare(rows: list[dict], bench: Bench) -> None:
    """Writes into each row how many times faster it is than stock: plain rows where they ran, else checkpointed."""
    for row in rows:
        ran = {r["case"]: r for r in rows if r["prompt"] == row["prompt"] and r["outcome"] == "ran"}
        base = next((case for case in ("stock rows", "stock rows, checkpointed") if case in ran), None)
        if base is None or row["case"] not in ran:
            continue
        shape = bench.shape(row["prompt"])
        row["over"], row["ratio"] = base, f"{float(ran[base]['seconds']) / float(row['seconds']):.2f}"
        row["limit"] = f"{done(shape, base) / done(shape, row['case']):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU; leaves the CSV as it is")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--prompts", type=int, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--cases", nargs="+", default=list(ORDER))
    parser.add_argument("--tflops", type=float, default=989.0, help="the card's peak: H100, H200 bfloat16, dense")
    parser.add_argument("--minutes", type=float, default=12.0, help="of the cases together")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.csv")
    args = parser.parse_args()
    if args.tiny:
        args.prompts, args.response = [257, 1025], 8
    began = time.perf_counter()
    bench, rows = Bench(args), []
    for prompt in args.prompts:
        for case in args.cases:
            row = dict.fromkeys(COLUMNS) | {"prompt": prompt, "case": case}
            if time.perf_counter() - began + bench.expected(case, prompt) > 60 * args.minutes:
                rows.append(row | {"outcome": "missing: no time"})
                continue
            try:
                rows.append(row_of(case, prompt, bench.run(case, prompt), bench))
            except torch.OutOfMemoryError:
                rows.append(row | {"outcome": "out of memory"})
            gc.collect()  # what an exception held
            if bench.cuda:
                torch.cuda.empty_cache()
            print(rows[-1], f"{time.perf_counter() - began:.0f} s so far", flush=True)
            compare(rows, bench)
            save(rows, args, bench)  # after each: a run that is cut off has left what it had
    show(rows)


def save(rows: list[dict], args, bench: Bench) -> None:
    comments = [
        f"Qwen3 with {bench.overrides}, random weights, bfloat16; {args.responses} responses of {args.response}; one "
        "pass; stock: seconds of one row times the number of responses",
        "tokens_s: of the rows that stock would run; mfu: FLOPs without recomputation over "
        f"{args.tflops:g} TFLOP/s; peak_gb: 1e9 bytes, parameters and gradients included",
        f"in use: {kernels.in_use()}",
        conditions(args.device),
    ]
    if not args.tiny:
        write(args.out, rows, comments)


if __name__ == "__main__":
    main()
