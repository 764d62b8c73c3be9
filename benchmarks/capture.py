"""Forward and backward of a group whose prompt an earlier call has captured, as TRL's rollout does, against without.

    run with   python -m benchmarks.capture [--model quickstart/SmolLM2-135M-Instruct --passes 5]

The same group as in real_step.py; exact, and detached, where a prompt that does not run in forward costs nothing at
all. Making the capture is the rollout's, and is not timed. Gradients must be the same to the bit. CPU seconds of one
thread. Bar: exact, at least 1.2 times faster. Its limit in counted FLOPs is below.
"""

import argparse
import dataclasses
import statistics
import time
from pathlib import Path

import torch

from longstraw_dist import LongStrawConfig, PromptGroup, attach

from . import models
from .conditions import RESULTS, conditions, show, write
from .flops import Shape, ours
from .real_model import load
from .real_step import text_group

BAR = 1.2


def prompt_forward(s: Shape) -> float:
    """FLOPs of the prompt's forward, of which the last layer makes K and V alone."""
    p = s.prompt - 1
    return (s.layers - 1) * (p * s.layer + s.attention(p * p / 2)) + p * (s.q + s.kv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("quickstart/SmolLM2-135M-Instruct"))
    for name, default in {"prompt": 1000, "responses": 8, "tokens": 32, "passes": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    group = text_group(args.model, args.prompt, args.responses, args.tokens, 0)
    w, rows, comments = models.weights(group), [], []
    for setting in ("exact", "detached"):
        model = attach(load(args.model), LongStrawConfig(prompt_grad=setting))
        with torch.no_grad():
            (capture,) = model(prompt_groups=[PromptGroup(group.prompt_ids, [])], capture=True).captures
        groups = {"without": group, "captured": dataclasses.replace(group, capture=capture)}
        seconds: dict[str, list[float]] = {name: [] for name in groups}
        for number in range(args.passes + 1):
            found = {}
            for name, each in groups.items():
                begin = time.process_time()
                models.step_packed(model, each, w)
                seconds[name].append(time.process_time() - begin)
                found[name] = models.gradients(model)
            if not number:
                assert all(torch.equal(g, found["captured"][n]) for n, g in found["without"].items())
            del found
        median = {name: statistics.median(times[1:]) for name, times in seconds.items()}
        config = model.config
        config.head_dim = config.hidden_size // config.num_attention_heads
        shape = Shape.of(config, args.prompt, args.tokens, args.responses)
        ratio, flops = median["without"] / median["captured"], ours(shape, setting)
        row = {"setting": setting, **{name: f"{s:.3f}" for name, s in median.items()}, "ratio": f"{ratio:.3f}"}
        row |= {"limit": f"{flops / (flops - prompt_forward(shape)):.3f}", "capture_mb": f"{capture.nbytes / 1e6:.1f}"}
        rows.append(row)
        verdict = f", bar {BAR}: {'met' if ratio >= BAR else 'MISSED'}" if setting == "exact" else ""
        comments.append(f"{setting}, captured: {ratio:.3f} times faster{verdict}")
    comments = [
        f"{args.model.name}, float32; prompt of {args.prompt} tokens, {args.responses} responses of {args.tokens}; "
        f"CPU seconds of a forward and backward, medians of {args.passes} interleaved passes",
        conditions(),
        *comments,
    ]
    show(rows, comments)
    write(RESULTS / "capture.csv", rows, comments)


if __name__ == "__main__":
    main()
