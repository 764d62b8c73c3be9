"""Seconds of one GRPO step, stock against ours: a ratio measured in one run, beside its arithmetic limit (flops.py).

    run with   python -m benchmarks.step [--prompt 4096 --response 64 --responses 8 --passes 5]

All cases run the same prompt group through models of the same weights (models.py, float32), one after the other, pass
by pass; a figure is the median of the passes. The CPU seconds beside it tell a busy machine from a slow step. The loss
and the whole gradient of each case are compared with the stock rows' in the same run, so a wrong step has no speed.
"""

import argparse
import statistics
import time

import torch

from longstraw_dist import LongStrawConfig, attach

from . import models
from .conditions import RESULTS, conditions, show, write
from .flops import Shape, ours, stock

OURS = {
    "exact": LongStrawConfig(),
    "exact, graphs kept": LongStrawConfig(activation_budget=2**40),
    "last:2": LongStrawConfig(prompt_grad="last:2"),
    "detached": LongStrawConfig(prompt_grad="detached"),
}
BARS = {"exact": (3.6, 4.6), "detached": (7.5, None)}  # over stock rows, over checkpointed rows


def build(case: str, layers: int):
    model = models.qwen3(num_hidden_layers=layers)
    if case == "checkpointed rows":
        model.activation_checkpointing_enable({"use_reentrant": False})
    if case in OURS:
        attach(model, OURS[case])
    return model, models.step_packed if case in OURS else models.step_rows


def flops(case: str, shape: Shape) -> float:
    if case in OURS:
        return ours(shape, OURS[case].prompt_grad, kept=OURS[case].activation_budget > 0)
    return stock(shape, checkpointed=case == "checkpointed rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in {"prompt": 4096, "response": 64, "responses": 8, "layers": 4, "passes": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cases", nargs="+", default=["stock rows", "checkpointed rows", *OURS])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-save", action="store_true", help=f"leave {RESULTS.name}/step.csv as it is")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    group = models.prompt_group(args.prompt, args.response, args.responses)
    w = models.weights(group)
    built = {case: build(case, args.layers) for case in args.cases}
    shape = Shape.of(built["stock rows"][0].config, args.prompt, args.response, args.responses)
    wall: dict[str, list[float]] = {case: [] for case in built}
    cpu: dict[str, list[float]] = {case: [] for case in built}
    losses, agreement = {}, {}
    for number in range(args.passes + 1):  # the first one warms up
        for case, (model, step) in built.items():
            wall_0, cpu_0 = time.perf_counter(), time.process_time()
            losses[case] = step(model, group, w)
            wall_s, cpu_s = time.perf_counter() - wall_0, time.process_time() - cpu_0
            grads = models.gradients(model)
            if number:
                wall[case].append(wall_s)
                cpu[case].append(cpu_s)
                continue
            if case == "stock rows":
                reference = grads
            agreement[case] = models.compare(grads, reference)
            # detached and last:N have another gradient by definition; the loss is the same in every case
            assert case in ("last:2", "detached") or agreement[case][0] < 1e-5, (case, agreement[case])
            assert abs(losses[case] - losses["stock rows"]) < 1e-5 * abs(losses["stock rows"]), (case, losses)

    rows = []
    median = {case: statistics.median(seconds) for case, seconds in wall.items()}
    median_cpu = {case: statistics.median(seconds) for case, seconds in cpu.items()}
    for case in built:
        row = {"case": case, "seconds": f"{median[case]:.3f}", "min": f"{min(wall[case]):.3f}"}
        row |= {"cpu_s": f"{median_cpu[case]:.3f}", "gflop_s": f"{flops(case, shape) / median[case] / 1e9:.0f}"}
        for i, base in enumerate(("stock rows", "checkpointed rows")):
            name = base.split()[0]
            known = base in median
            bar = BARS.get(case, (None, None))[i]
            row[f"over_{name}"] = f"{median[base] / median[case]:.2f}" if known else None
            row[f"cpu_{name}"] = f"{median_cpu[base] / median_cpu[case]:.2f}" if known else None
            row[f"limit_{name}"] = f"{flops(base, shape) / flops(case, shape):.2f}"
            row[f"bar_{name}"] = bar
        row |= {"gradient_error": f"{agreement[case][0]:.1e}", "cosine": f"{agreement[case][1]:.4f}"}
        rows.append(row)
    comments = [
        f"Qwen3 of {args.layers} layers, hidden 256, vocabulary 32,768, float32; prompt {args.prompt}, "
        f"{args.responses} responses of {args.response}; medians of {args.passes} interleaved passes",
        conditions(),
        "over_X: seconds of X / seconds of the case; cpu_X: the same in CPU seconds; limit_X: in counted FLOPs",
    ]
    show(rows, comments)
    if not args.no_save:
        write(RESULTS / "step.csv", rows, comments)


if __name__ == "__main__":
    main()
