"""Seconds of our exact step by the length of the prompt, beside the time that its counted FLOPs (flops.py) take.

    run with   python -m benchmarks.length        (results/length.csv, .png)

Ours and one stock row (times G) run at every length, interleaved (timing.py). What a counted FLOP takes depends on the
length, for stock too: the longer the prompt, the larger the share of attention, and the smaller that of norms and
activations, whose FLOPs are not counted. So counted time is told twice: at the speed that a stock row has at this
length (`by_stock`), and at the speed of our own step at the first length (`by_first`). Bar: measured over counted time
stays within 15 % of what it is at the first length.
"""

import torch

from longstraw_dist import LongStrawConfig

from . import models
from .conditions import RESULTS, conditions, show, verdict, write
from .flops import Shape, ours, stock
from .plots import curves
from .timing import interleaved, judged, options

BAR = 0.15


def main() -> None:
    parser = options(__doc__, response=64, responses=8, layers=4, passes=5)
    parser.add_argument("--prompts", type=int, nargs="+", default=[4096, 8192, 16_384, 32_768])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = models.prepare(models.step_packed, LongStrawConfig(), num_hidden_layers=args.layers)
    stock_model = models.prepare(models.step_rows, num_hidden_layers=args.layers)
    cases = {}
    for p in args.prompts:
        group, one = (models.prompt_group(p, args.response, n) for n in (args.responses, 1))
        cases["ours", p] = models.Case(model, models.step_packed, group)
        cases["row", p] = models.Case(stock_model, models.step_rows, one)
    times = interleaved(cases, args.passes)
    rows, verdicts = [], []
    ratios, limits = [], []
    speeds: list[float] = []  # FLOPs a second of ours
    for p in args.prompts:
        shape, mine = Shape.of(model.config, p, args.response, args.responses), times["ours", p]
        theirs = args.responses * times["row", p].judged
        ratios.append(theirs / mine.judged)
        limits.append(stock(shape) / ours(shape))
        speeds.append(ours(shape) / mine.judged)
        drift = {"by_stock": ratios[0] / limits[0] * limits[-1] / ratios[-1], "by_first": speeds[0] / speeds[-1]}
        row = {"prompt": p, "seconds": f"{mine.wall:.3f}", "cpu_s": f"{mine.cpu:.3f}", "rows_s": f"{theirs:.3f}"}
        row |= {"gflop": f"{ours(shape) / 1e9:.0f}"} | {name: f"{value:.3f}" for name, value in drift.items()}
        rows.append(row | {"over_rows": f"{ratios[-1]:.2f}", "limit_rows": f"{limits[-1]:.2f}"})
        if p != args.prompts[0]:
            for name, value in drift.items():
                what = f"P={p}, measured over counted time {name}, of that at P={args.prompts[0]}: {value:.3f}; off by"
                verdicts.append(verdict(what, abs(value - 1), BAR, at_least=False))
    comments = [
        f"{models.about(args.layers)}; {args.responses} responses of "
        f"{args.response}; exact; medians of {args.passes} interleaved passes; stock: one row, times G",
        conditions(),
        f"by_stock, by_first: measured over counted time as a multiple of that at P={args.prompts[0]}, counted at the "
        f"speed of a stock row at this P, or of ours at P={args.prompts[0]}; rows_s: of {judged()}, as the ratios are",
        *verdicts,
    ]
    show(rows, comments)
    write(RESULTS / "length.csv", rows, comments)
    measured = {
        "ours, counted at a stock row's speed": [float(row["by_stock"]) for row in rows],
        "ours, counted at its first speed": [float(row["by_first"]) for row in rows],
    }
    bar = {"bar": [1 + BAR] * len(rows), "_bar": [1 - BAR] * len(rows)}  # the second one is not in the legend
    panels: dict[str, dict[str, list]] = {
        "measured over counted time": measured | bar,
        "stock rows over ours": {"ours, exact": ratios, "arithmetic limit": limits},
    }
    curves(RESULTS / "length", comments[:2], ("prompt tokens", args.prompts), panels)


if __name__ == "__main__":
    main()
