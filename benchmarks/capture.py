"""Forward and backward of a group whose prompt an earlier call has captured, as TRL's rollout does, against without.

    run with   python -m benchmarks.capture [--model quickstart/SmolLM2-135M-Instruct --passes 5]

The same group as in real_step.py; exact, and detached, where a prompt that does not run in forward costs nothing at
all. Making the capture is the rollout's, and is not timed. Gradients must be the same to the bit. CPU seconds of one
thread. Bar: exact, at least 1.2 times faster. Its limit in counted FLOPs is below.
"""

import dataclasses
from pathlib import Path

import torch

from longstraw_dist import LongStrawConfig, PromptGroup, attach

from . import models
from .conditions import RESULTS, conditions, show, verdict, write
from .flops import Shape, ours
from .real_model import load
from .real_step import text_group
from .timing import interleaved, judged, options

BAR = 1.2


def main() -> None:
    parser = options(__doc__, prompt=1000, responses=8, tokens=32, passes=5)
    parser.add_argument("--model", type=Path, default=Path("quickstart/SmolLM2-135M-Instruct"))
    parser.set_defaults(threads=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    group = text_group(args.model, args.prompt, args.responses, args.tokens, 0)
    rows, comments = [], []
    for setting in ("exact", "detached"):
        model = attach(load(args.model), LongStrawConfig(prompt_grad=setting))
        with torch.no_grad():
            (capture,) = model(prompt_groups=[PromptGroup(group.prompt_ids, [])], capture=True).captures
        groups = {"without": group, "captured": dataclasses.replace(group, capture=capture)}
        cases = {name: models.Case(model, models.step_packed, each) for name, each in groups.items()}
        interleaved(cases, 1)  # warms up
        reference: dict[str, torch.Tensor] = {}

        def check(name: str, number: int, loss: float, grads: dict, reference: dict = reference) -> None:
            if not reference:
                reference.update(grads)
            assert all(torch.equal(g, reference[n]) for n, g in grads.items()), name

        seconds = {name: times.judged for name, times in interleaved(cases, args.passes, check).items()}
        shape = Shape.of(model.config, args.prompt, args.tokens, args.responses)
        ratio = seconds["without"] / seconds["captured"]
        limit = ours(shape, setting) / ours(shape, setting, captured=True)
        row = {"setting": setting, **{name: f"{s:.3f}" for name, s in seconds.items()}, "ratio": f"{ratio:.3f}"}
        rows.append(row | {"limit": f"{limit:.3f}", "capture_mb": f"{capture.nbytes / 1e6:.1f}"})
        what = f"{setting}, without over captured"
        comments.append(verdict(what, ratio, BAR) if setting == "exact" else f"{what}: {ratio:.4g}")
    comments = [
        f"{args.model.name}, float32; prompt of {args.prompt} tokens, {args.responses} responses of {args.tokens}; "
        f"{judged()} of a forward and backward, medians of {args.passes} interleaved passes",
        conditions(),
        *comments,
    ]
    show(rows, comments)
    write(RESULTS / "capture.csv", rows, comments)


if __name__ == "__main__":
    main()
