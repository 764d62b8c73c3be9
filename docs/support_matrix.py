"""Writes the support matrix into the README, from what the models do here and now: `python docs/support_matrix.py`.

Each type is attached at a tiny size and held against the stock model run one response at a time, in float32: the
largest difference of a log-prob, and the relative error of the whole gradient, for an exact and for a detached prompt.
The state is measured too: the bytes that a layer keeps of a prompt token, in units of its key heads and head size.
With `--check` it fails if the README says otherwise (as to types and states; the errors vary with the machine).
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/ holds the models and the reference

from longstraw_dist import LongStrawConfig, attach
from longstraw_dist.attach import attachment_of
from longstraw_dist.support import SUPPORTED
from tests.models import MODELS, ragged, tiny, weigh
from tests.reference import cut_prompt, gradients, relative, stock_rows

README = Path(__file__).parents[1] / "README.md"
MARKS = "<!-- support matrix: python docs/support_matrix.py -->", "<!-- end of support matrix -->"
COLUMNS = (
    "`model_type`",
    "prompt state",
    "bytes a token and layer",
    "log-probs",
    "exact",
    "detached (see below)",
)
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"


def error(kind: str, mode: str) -> tuple[float, float]:
    """Largest log-prob difference and relative gradient error against stock rows, cut where `mode` cuts."""
    model, groups = tiny(kind), ragged()
    with cut_prompt(model, 0 if mode == "exact" else model.config.num_hidden_layers):
        logps, entropies = stock_rows(model, groups)
        weigh(logps, entropies).backward()
    reference = gradients(model)
    model.zero_grad()
    out = attach(model, LongStrawConfig(prompt_grad=mode, prompt_chunk_size=7))(prompt_groups=groups)
    weigh(out.logps, out.entropies).backward()
    difference = max((a - b).abs().max().item() for a, b in zip(out.logps, logps, strict=True) if len(a))
    return difference, relative(gradients(model), reference)


def state_bytes(kind: str) -> str:
    """Measured, and told in the model's own numbers."""
    model = attach(tiny(kind))
    model(prompt_groups=ragged(shapes=((41, (3,)),)))
    config = model.config
    measured = attachment_of(model).meter.kept_bytes["state"] / 40 / config.num_hidden_layers
    keys = (
        2
        * config.num_key_value_heads
        * (MODELS[kind][1].get("head_dim") or config.hidden_size // config.num_attention_heads)
    )
    assert measured == keys * 4, "K and V of each captured token, in float32"
    return "2 x key heads x head size x itemsize"


def rows() -> str:
    lines = []
    for kind in SUPPORTED:
        settings = MODELS[kind][1]
        exact, detached = error(kind, "exact"), error(kind, "detached")
        state = "K, V"
        if "sliding_window" in settings:
            state += (
                ", in some layers read through a window" if "layer_types" in settings else ", read through a window"
            )
        lines.append(
            f"| {kind} | {state} | {state_bytes(kind)} | {max(exact[0], detached[0]):.0e} | {exact[1]:.0e} "
            f"| {detached[1]:.0e} |"
        )
    return HEADER + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the README instead of writing it")
    check = parser.parse_args().check
    begin, end = MARKS
    text = README.read_text()
    before, rest = text.split(begin)
    old, after = rest.split(end)
    new = f"\n{rows()}"
    if not check:
        README.write_text(before + begin + new + end + after)
    elif re.sub(r"\de-\d+", "", old) != re.sub(r"\de-\d+", "", new):
        raise SystemExit("the README's support matrix is not what the models do: run python docs/support_matrix.py")


if __name__ == "__main__":
    main()
