"""Writes the support matrix into the README, from what the models do here and now: `python docs/support_matrix.py`.

Each type is attached at a tiny size and held against the stock model run one response at a time, in float32: the
largest difference of a log-prob, and the relative error of the whole gradient, for an exact and for a detached prompt.
The state is measured too: the bytes that a layer of the tiny model keeps of a prompt token, or in one page.
With `--check` it fails if the README says otherwise (as to types and states; the errors vary with the machine).
"""

import argparse
import re
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/ holds the models and the reference

import torch

from longstraw_dist import LongStrawConfig, attach
from longstraw_dist.attach import attachment_of
from longstraw_dist.state import PromptState
from longstraw_dist.state.pages import Carry, Grow, Window
from longstraw_dist.support import SUPPORTED
from tests.architectures import ARCHITECTURES
from tests.models import MODELS, ragged, tiny, weigh
from tests.more_architectures import FURTHER
from tests.reference import cut_prompt, gradients, relative, stock_rows

README = Path(__file__).parents[1] / "README.md"
MARKS = "<!-- support matrix: python docs/support_matrix.py -->", "<!-- end of support matrix -->"
COLUMNS = (
    "`model_type`",
    "prompt state",
    "bytes in a layer",
    "log-probs",
    "exact",
    "detached (see below)",
)
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"


def error(kind: str, mode: str) -> tuple[float, float]:
    """Largest log-prob difference and relative gradient error against stock rows, cut where `mode` cuts."""
    model, groups = build(kind), ragged()
    with cut_prompt(model, 0 if mode == "exact" else model.config.num_hidden_layers):
        logps, entropies = stock_rows(model, groups)
        weigh(logps, entropies).backward()
    reference = {n: g for n, g in gradients(model).items() if g is not None}
    model.zero_grad()
    out = attach(model, LongStrawConfig(prompt_grad=mode, prompt_chunk_size=7))(prompt_groups=groups)
    weigh(out.logps, out.entropies).backward()
    difference = max((a - b).abs().max().item() for a, b in zip(out.logps, logps, strict=True) if len(a))
    return difference, relative({n: g for n, g in gradients(model).items() if g is not None}, reference)


NAMES = {  # what a layer hands to its cache -> how the field calls it
    "keys": "K, V",
    "index": "index keys",
    "conv": "convolution",
    "recurrent": "recurrence",
    "linear": "recurrence",
}


def prompt_state(kind: str) -> tuple[str, str]:
    """Which states the layers keep, and bytes: of what grows, a token and layer on average; of the rest, a page."""
    seen: dict[str, tuple[bool, int]] = {}
    windows: list[bool] = []

    def noted(state, exact, hidden_bytes):
        for name, pages in state.pages.items():
            grows = not isinstance(pages, Carry)
            windows.append(isinstance(pages, Window))
            size = sum(t.nbytes for t in tensors_of(pages)) // (state.tokens if grows else max(1, len(pages.pages)))
            seen[name] = (grows, seen.get(name, (grows, 0))[1] + size)
        return kept(state, exact, hidden_bytes)

    kept = PromptState.kept
    model = attach(build(kind))
    with mock.patch.object(PromptState, "kept", noted), torch.no_grad():
        model(prompt_groups=ragged(shapes=((41, (3,)),)))
    latent = "kv_lora_rank" in model.config.get_text_config().to_dict()
    names = dict.fromkeys(
        "latent, rope key" if name == "keys" and latent else NAMES[name.split()[0]]
        for name in seen
        if name != "values"
    )
    traits = attachment_of(model).blueprint.traits
    if any(windows):
        settings = FURTHER[kind] if kind in FURTHER else (MODELS | ARCHITECTURES)[kind][1]
        where = "in some layers " if "layer_types" in settings else ""
        names = {f"{name}, {where}of a window" if name == "K, V" else name: None for name in names}
    layers = len(traits)
    growing = sum(size for grows, size in seen.values() if grows) / layers
    carried = sum(size for grows, size in seen.values() if not grows) / layers
    parts = [f"{growing:.0f} a token"] * bool(growing) + [f"{carried:.0f} a page"] * bool(carried)
    return "; ".join(names), ", ".join(parts)


def tensors_of(pages) -> list[torch.Tensor]:
    if isinstance(pages, Grow):
        return [pages.buffer]
    return list(pages.pages.values() if isinstance(pages, Carry) else pages.pages)


def build(kind: str):
    return tiny(kind, tied=kind == "zamba2")  # whose blocks are shared by tying them


def rows() -> str:
    lines = []
    for kind in SUPPORTED:
        if f"{kind}_text" in SUPPORTED:  # the same layers, inside of a model that sees
            continue
        exact = error(kind, "exact")
        detached = f"{error(kind, 'detached')[1]:.0e}" if kind in MODELS else ""
        state, size = prompt_state(kind)
        lines.append(f"| {kind} | {state} | {size} | {exact[0]:.0e} | {exact[1]:.0e} | {detached} |")
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
