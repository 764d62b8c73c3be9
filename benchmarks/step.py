"""Seconds of one GRPO step, ours beside stock and other peers: ratios of one run, beside their arithmetic limits.

    run with   python -m benchmarks.step                                              (results/step.csv, .png)
               python -m benchmarks.step --name step_16_layers --layers 16
               python -m benchmarks.step --name step_16384 --prompt 16384 --response 128
               python -m benchmarks.step --name step_hybrid --model qwen3_5_text --layers 8

All cases (peers.py says what the peers do) run the same prompt group through models of the same weights (models.py,
float32), interleaved (timing.py). The loss and the whole gradient of each are compared with the stock rows' in the
same run, so a wrong step has no speed. The limit is the same ratio in counted FLOPs (flops.py); those of the delta
rule are not counted, so a hybrid model has none.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from longstraw_dist import LongStrawConfig, PromptGroup

from . import flops, models
from .conditions import RESULTS, conditions, show, verdict, write
from .peers import PEERS, missing
from .plots import bars
from .timing import Times, interleaved, judged, options

OURS = {
    "exact": LongStrawConfig(),
    "exact, graphs kept": LongStrawConfig(prompt_chunk_size=4096, head_chunk_size=512, activation_budget=2**40),
    "last:2": LongStrawConfig(prompt_grad="last:2"),
    "detached": LongStrawConfig(prompt_grad="detached"),
}
BASES = {"rows": "stock rows", "checkpointed": "stock rows, checkpointed"}
BARS: dict[tuple, dict[str, tuple[float | None, float | None]]] = {  # over rows, over checkpointed rows
    ("qwen3", 4, 4096, 64, 8): {"exact": (5.3, 6.6), "exact, graphs kept": (7.0, None), "detached": (11, None)},
    ("qwen3", 16, 4096, 64, 8): {"exact": (5.0, 6.2), "exact, graphs kept": (6.5, None), "detached": (11, None)},
    ("qwen3", 4, 16_384, 128, 8): {"exact": (6.7, None), "exact, graphs kept": (8.5, None)},
    ("qwen3_5_text", 8, 4096, 64, 8): {"exact": (4.0, None)},
}
OF_LIMIT = 0.94  # bar of ours, at the sizes that have bars
GRADIENT = {"qwen3": 1e-5, "qwen3_5_text": 1e-4}  # largest relative error; a recurrence in float32 adds more rounding


@dataclass
class Run:
    """What came out of a case: its FLOPs, its times, and of its first pass loss and gradient."""

    gflop: float | None
    times: Times = field(default_factory=Times)
    loss: float = 0.0
    error: float = 0.0
    cosine: float = 1.0


def prepare(case: str, kind: str, layers: int, group: PromptGroup) -> models.Case:
    config, peer = OURS.get(case), PEERS.get(case)
    step = models.step_packed if peer is None else peer.step
    checkpointed = peer is not None and peer.checkpointed
    return models.Case(models.prepare(step, config, checkpointed, kind, num_hidden_layers=layers), step, group)


def count(case: str, shape: flops.Shape) -> float:
    if case in OURS:
        return flops.ours(shape, OURS[case].prompt_grad, kept=OURS[case].activation_budget > 0)
    return PEERS[case].flops(shape, PEERS[case].checkpointed)


def measure(names: list[str], kind: str, layers: int, group: PromptGroup, passes: int) -> dict[str, Run]:
    """Every case, timed and checked against stock rows, which must be the first."""
    cases = {name: prepare(name, kind, layers, group) for name in names}
    sizes = len(group.prompt_ids), len(group.response_ids[0]), len(group.response_ids)
    runs, reference = {}, {}
    for name, case in cases.items():
        known = kind == "qwen3"
        runs[name] = Run(count(name, flops.Shape.of(case.model.config, *sizes)) / 1e9 if known else None)

    def check(name: str, number: int, loss: float, grads: dict[str, Tensor]) -> None:
        if number:
            return
        if name == "stock rows":
            reference.update(grads)
        run = runs[name]
        run.loss = loss
        run.error, run.cosine = models.compare(grads, reference)
        # detached and last:N have another gradient by definition; the loss is the same in every case
        assert name in ("last:2", "detached") or run.error < GRADIENT[kind], (name, run)
        assert abs(loss - runs["stock rows"].loss) < 1e-5 * abs(loss), (name, loss, runs["stock rows"].loss)

    for name, times in interleaved(cases, passes, check).items():
        runs[name].times = times
    return runs


def table(
    runs: dict[str, Run], bars_here: dict[str, tuple[float | None, float | None]]
) -> tuple[list[dict], list[str]]:
    """A row a case, and a line a bar."""
    rows, verdicts = [], []
    for case, run in runs.items():
        seconds = run.times
        row = {"case": case, "seconds": f"{seconds.wall:.3f}", "min": f"{min(seconds.wall_passes):.3f}"}
        row |= {"cpu_s": f"{seconds.cpu:.3f}", "gflop_s": f"{run.gflop / seconds.judged:.0f}" if run.gflop else ""}
        for name, bar in zip(BASES, bars_here.get(case, (None, None)), strict=True):
            columns = dict.fromkeys((f"over_{name}", f"cpu_{name}", f"limit_{name}", f"of_limit_{name}"), "")
            base = runs.get(BASES[name])
            if base is not None:
                ratio = base.times.judged / seconds.judged
                columns[f"over_{name}"] = f"{base.times.wall / seconds.wall:.2f}"
                columns[f"cpu_{name}"] = f"{base.times.cpu / seconds.cpu:.2f}"
                if base.gflop and run.gflop:
                    limit = base.gflop / run.gflop
                    columns[f"limit_{name}"], columns[f"of_limit_{name}"] = f"{limit:.2f}", f"{ratio / limit:.3f}"
                    if bars_here and case in OURS:
                        verdicts.append(verdict(f"{case}, of its limit over {BASES[name]}", ratio / limit, OF_LIMIT))
                if bar is not None:
                    verdicts.append(verdict(f"{case} over {BASES[name]}", ratio, bar))
            row |= columns
        rows.append(row | {"gradient_error": f"{run.error:.1e}", "cosine": f"{run.cosine:.4f}"})
    return rows, verdicts


def main() -> None:
    parser = options(__doc__, prompt=4096, response=64, responses=8, layers=4, passes=5)
    parser.add_argument("--model", choices=list(models.MODELS), default="qwen3")
    parser.add_argument("--cases", nargs="+", default=[*PEERS, *OURS])
    parser.add_argument("--skip", nargs="+", default=[], help="cases left out")
    parser.add_argument("--name", default="step", help="of the CSV and PNG file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases = ["stock rows"]  # every other one is held against it
    for case in args.cases:
        reason = "skipped" if case in args.skip else missing(case, args.model)
        if reason is not None:
            print(f"{case}: left out, {reason}")
        elif case not in cases:
            cases.append(case)

    group = models.prompt_group(args.prompt, args.response, args.responses)
    runs = measure(cases, args.model, args.layers, group, args.passes)
    sizes = (args.model, args.layers, args.prompt, args.response, args.responses)
    rows, verdicts = table(runs, BARS.get(sizes, {}))
    here = [
        f"{models.about(args.layers, args.model)}; prompt {args.prompt}, "
        f"{args.responses} responses of {args.response}; medians of {args.passes} interleaved passes",
        conditions(),
    ]
    comments = [
        *here,
        "over_X: seconds of X / seconds of the case; cpu_X: the same in CPU seconds; limit_X: in counted FLOPs; "
        f"of_limit_X: the share of it, in {judged()}, of which the bars are held, too",
        *verdicts,
    ]
    show(rows, comments)
    write(RESULTS / f"{args.name}.csv", rows, comments)
    seconds = {case: run.times.judged for case, run in runs.items()}
    speed = (runs["stock rows"].gflop or 0) / seconds["stock rows"]
    limit = {case: run.gflop / speed for case, run in runs.items() if run.gflop}
    bars(RESULTS / args.name, here, seconds, limit, "were each FLOP as fast as in stock rows")


if __name__ == "__main__":
    main()
