"""Seconds of our exact step by the number of responses, and the ratio over stock rows beside its arithmetic limit.

    run with   python -m benchmarks.group_size        (results/group_size.csv, .png)

Ours runs at every size, interleaved (timing.py). Stock rows are one step a response, all alike, so one row is timed in
the same passes and multiplied by G. Bar: the seconds of the largest group over those of G=8 are as counted (flops.py).
"""

import torch

from longstraw_dist import LongStrawConfig

from . import models
from .conditions import RESULTS, conditions, show, verdict, write
from .flops import Shape, ours, stock
from .plots import curves
from .timing import interleaved, judged, options

BAR = 1.05  # measured over counted
BASE = 8
ROW = 0  # of the cases: one row of stock


def main() -> None:
    parser = options(__doc__, prompt=4096, response=64, layers=4, passes=5)
    parser.add_argument("--responses", type=int, nargs="+", default=[2, 4, BASE, 16, 32])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = models.prepare(models.step_packed, LongStrawConfig(), num_hidden_layers=args.layers)
    stock_model = models.prepare(models.step_rows, num_hidden_layers=args.layers)
    groups = {g: models.prompt_group(args.prompt, args.response, g) for g in args.responses}
    cases = {g: models.Case(model, models.step_packed, group) for g, group in groups.items()}
    cases[ROW] = models.Case(stock_model, models.step_rows, models.prompt_group(args.prompt, args.response, 1))
    times = interleaved(cases, args.passes)
    row = times[ROW]
    rows, seconds, counted = [], {}, {}
    for g in args.responses:
        shape = Shape.of(model.config, args.prompt, args.response, g)
        seconds[g], counted[g] = times[g].judged, ours(shape)
        limit, ratio = stock(shape) / counted[g], g * row.judged / seconds[g]
        result = {"G": g, "seconds": f"{times[g].wall:.3f}", "cpu_s": f"{times[g].cpu:.3f}"}
        result |= {"stock_s": f"{g * row.wall:.3f}", "stock_cpu_s": f"{g * row.cpu:.3f}"}
        rows.append(result | {"ratio": f"{ratio:.2f}", "limit": f"{limit:.2f}", "of_limit": f"{ratio / limit:.3f}"})
    comments = [
        f"{models.about(args.layers)}; prompt {args.prompt}, responses of "
        f"{args.response}; exact; medians of {args.passes} interleaved passes; stock: one row, times G",
        conditions(),
        f"ratio: stock over ours, in {judged()}; limit: in counted FLOPs",
    ]
    if BASE in args.responses:
        most = max(args.responses)
        measured, expected = seconds[most] / seconds[BASE], counted[most] / counted[BASE]
        what = f"G={most} over G={BASE}: {measured:.3f}, counted {expected:.3f}; measured over counted"
        comments.append(verdict(what, measured / expected, BAR, at_least=False))
    show(rows, comments)
    write(RESULTS / "group_size.csv", rows, comments)
    lines = {"ours, exact": [float(r["ratio"]) for r in rows], "arithmetic limit": [float(r["limit"]) for r in rows]}
    panels = {"stock rows over ours": lines, "seconds of a step of ours": {"ours, exact": list(seconds.values())}}
    curves(RESULTS / "group_size", comments[:2], ("responses a prompt", args.responses), panels)


if __name__ == "__main__":
    main()
