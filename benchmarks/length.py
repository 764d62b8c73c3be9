"""Seconds of our exact step by the length of the prompt, beside its counted FLOPs.

    run with   python -m benchmarks.length [--stock 16384]        (results/length.csv, .png)

Ours runs at every length, interleaved (timing.py). Bar: measured over counted (flops.py), as a multiple of what it is
at the first length: the step stays as efficient as it is there. `--stock`: also one stock row, times G, up to there.
"""

import torch

from longstraw_dist import LongStrawConfig

from . import models
from .conditions import RESULTS, conditions, show, verdict, write
from .flops import Shape, ours, stock
from .plots import curves
from .timing import interleaved, judged, options

BAR = 1.15


def main() -> None:
    parser = options(__doc__, response=64, responses=8, layers=4, passes=3, stock=0)
    parser.add_argument("--prompts", type=int, nargs="+", default=[4096, 8192, 16_384, 32_768])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = models.prepare(models.step_packed, LongStrawConfig(), num_hidden_layers=args.layers)
    stock_model = models.prepare(models.step_rows, num_hidden_layers=args.layers)
    cases = {}
    for p in args.prompts:
        group, one = (models.prompt_group(p, args.response, n) for n in (args.responses, 1))
        cases["ours", p] = models.Case(model, models.step_packed, group)
        if p <= args.stock:
            cases["row", p] = models.Case(stock_model, models.step_rows, one)
    times = interleaved(cases, args.passes)
    rows, verdicts, base = [], [], None
    ratios: list[float | None] = []
    limits: list[float | None] = []
    for p in args.prompts:
        shape, mine = Shape.of(model.config, p, args.response, args.responses), times["ours", p]
        speed = ours(shape) / mine.judged
        base = base or speed
        row = {"prompt": p, "seconds": f"{mine.wall:.3f}", "cpu_s": f"{mine.cpu:.3f}"}
        row |= {"gflop": f"{ours(shape) / 1e9:.0f}", "measured_over_counted": f"{base / speed:.3f}"}
        ratio = args.responses * times["row", p].judged / mine.judged if ("row", p) in times else None
        ratios.append(ratio)
        limits.append(stock(shape) / ours(shape))
        rows.append(row | {"over_rows": f"{ratio:.2f}" if ratio else "", "limit_rows": f"{limits[-1]:.2f}"})
        if p != args.prompts[0]:
            verdicts.append(verdict(f"P={p}, measured over counted", base / speed, BAR, at_least=False))
    comments = [
        f"{models.about(args.layers)}; {args.responses} responses of "
        f"{args.response}; exact; medians of {args.passes} interleaved passes; stock: one row, times G",
        conditions(),
        f"measured_over_counted: {judged()} a counted FLOP, as a multiple of those at P={args.prompts[0]}",
        *verdicts,
    ]
    show(rows, comments)
    write(RESULTS / "length.csv", rows, comments)
    measured = [float(row["measured_over_counted"]) for row in rows]
    panels: dict[str, dict[str, list]] = {
        "measured over counted": {"ours, exact": measured, f"bar: {BAR}": [BAR] * len(rows)}
    }
    if any(ratios):
        panels["stock rows over ours"] = {"ours, exact": ratios, "arithmetic limit": limits}
    curves(RESULTS / "length", comments[:2], ("prompt tokens", args.prompts), panels)


if __name__ == "__main__":
    main()
