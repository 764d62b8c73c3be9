"""What `activation_budget` buys: seconds and live peak of the exact step, from no graph kept to all of them.

    run with   python -m benchmarks.budget        (results/budget.csv, .png)

The sweep is over shares of what all graphs hold, which the attached model counts. Seconds come from interleaved passes
(timing.py), the peak of live storages (live.py) from one further pass, which is slower. The gradient is the same to
the bit at every budget. Bars: seconds fall as the budget grows; the peak is at most that of no budget, and the budget.
"""

import torch
from torch import Tensor

from longstraw_dist import LongStrawConfig
from longstraw_dist.attach import attachment_of

from . import models
from .conditions import RESULTS, conditions, show, verdict, write
from .flops import Shape, ours
from .live import LiveStorages
from .plots import curves
from .timing import interleaved, judged, options

MB = 1e6
SHARES = (0, 0.25, 0.5, 0.75, 1)


def main() -> None:
    parser = options(__doc__, prompt=4096, response=64, responses=8, layers=4, passes=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    group = models.prompt_group(args.prompt, args.response, args.responses)

    def case(budget: int) -> models.Case:
        config = LongStrawConfig(activation_budget=budget)
        model = models.prepare(models.step_packed, config, num_hidden_layers=args.layers)
        return models.Case(model, models.step_packed, group)

    everything = case(2**40)
    everything()
    whole = attachment_of(everything.model).meter.kept_bytes["graphs"]
    reference = models.gradients(everything.model)
    cases = {budget: case(budget) for budget in (int(share * whole) for share in SHARES)}

    def check(budget: int, number: int, loss: float, grads: dict[str, Tensor]) -> None:
        assert all(torch.equal(grads[name], g) for name, g in reference.items()), budget

    times = interleaved(cases, args.passes, check)
    rows, peaks = [], {}
    for budget, run in cases.items():
        model = run.model
        ignored = [*model.parameters(), *model.buffers(), group.prompt_ids, *group.response_ids, *run.w]
        with LiveStorages(ignored=ignored) as live:
            run()
        model.zero_grad()
        peaks[budget] = live.peak["device"]
        kept = attachment_of(model).meter.kept_bytes.get("graphs", 0)
        row = {
            "budget_mb": f"{budget / MB:.1f}",
            "kept_mb": f"{kept / MB:.1f}",
            "peak_mb": f"{peaks[budget] / MB:.1f}",
        }
        row |= {"seconds": f"{times[budget].wall:.3f}", "cpu_s": f"{times[budget].cpu:.3f}"}
        rows.append(row)
    shape = Shape.of(everything.model.config, args.prompt, args.response, args.responses)
    seconds = [t.judged for t in times.values()]
    limit = ours(shape) / ours(shape, kept=True)
    comments = [
        f"{models.about(args.layers)}; prompt {args.prompt}, "
        f"{args.responses} responses of {args.response}; exact; medians of {args.passes} interleaved passes; "
        "MB of 1e6 bytes, live storages without parameters",
        conditions(),
        f"none over all graphs kept: {seconds[0] / seconds[-1]:.3f} in {judged()}, {limit:.3f} in counted FLOPs",
    ]
    budgets = list(cases)
    for i, budget in enumerate(budgets[1:]):
        where = f"budget of {budget / MB:.0f} MB"
        comments.append(verdict(f"{where}, seconds over the budget before", seconds[i + 1] / seconds[i], 1, False))
        over = peaks[budget] / (peaks[0] + budget)
        comments.append(verdict(f"{where}, peak over (peak without + budget)", over, 1, False))
    show(rows, comments)
    write(RESULTS / "budget.csv", rows, comments)
    panels = {
        "seconds of a step": {"ours, exact": seconds},
        "live peak, MB": {
            "ours, exact": [peaks[b] / MB for b in budgets],
            "limit: peak without + budget": [(peaks[0] + b) / MB for b in budgets],
        },
    }
    curves(
        RESULTS / "budget", comments[:2], ("budget, MB", [round(b / MB) for b in budgets]), panels, logarithmic=False
    )


if __name__ == "__main__":
    main()
