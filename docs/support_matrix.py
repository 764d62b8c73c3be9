"""Writes docs/support.md, and its short form in the README, from what the parity tests have recorded:

    python -m pytest -m "slow or not slow" tests/test_parity.py --junitxml parity.xml
    python -m pytest -m "slow or not slow" tests/distributed/test_wrapped.py --junitxml wrapped.xml
    python docs/support_matrix.py parity.xml wrapped.xml

A figure is the largest of the tests of its type that passed; a type or a mode without one stays empty, and a failed
test of parity ends the script. States and their bytes are measured here and now, at the tests' tiny sizes.
"""

import argparse
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/ holds the models

import torch

from longstraw_dist import attach
from longstraw_dist.attach import attachment_of
from longstraw_dist.state import PromptState
from longstraw_dist.state.pages import Carry, Grow, Window
from longstraw_dist.support import REFUSED, SUPPORTED
from tests.architectures import ARCHITECTURES, TIED
from tests.models import MODELS, ragged, tiny
from tests.more_architectures import FURTHER

ROOT = Path(__file__).parents[1]
MARKS = "<!-- support matrix: python docs/support_matrix.py -->\n", "<!-- end of support matrix -->\n"
MODES = ("exact", "last:2", "detached")
NAMES = {  # what a layer hands to its cache -> how the field calls it
    "keys": "K, V",
    "index": "index keys",
    "conv": "convolution",
    "recurrent": "recurrence",
    "linear": "recurrence",
}
INSIDE = {kind: f"{kind}_text" for kind in SUPPORTED if f"{kind}_text" in SUPPORTED}  # beside a model of images


def results(files: list[Path]) -> tuple[dict[str, dict[str, tuple[float, float]]], dict[str, set[str]]]:
    """type -> mode -> the largest error of a log-prob and of a whole gradient; type -> wrappings."""
    errors: dict = defaultdict(dict)
    wrappings: dict = defaultdict(set)
    for case in (case for file in files for case in ET.parse(file).iter("testcase")):
        found = {p.get("name"): p.get("value") for p in case.iter("property")}
        if "kind" not in found or case.find("skipped") is not None:
            continue
        if case.find("failure") is not None or case.find("error") is not None:
            raise SystemExit(f"{case.get('name')} failed: no matrix of a model that is not exact.")
        kind = found["kind"]
        if "wrapping" in found:
            wrappings[kind].add(found["wrapping"])
        else:
            before = errors[kind].get(found["mode"], (0.0, 0.0))
            now = float(found["log_prob"]), float(found["gradient"])
            errors[kind][found["mode"]] = tuple(map(max, before, now))
    return errors, wrappings


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
    model = attach(tiny(kind, tied=kind in TIED))
    with mock.patch.object(PromptState, "kept", noted), torch.no_grad():
        model(prompt_groups=ragged(shapes=((41, (3,)),)))
    traits = attachment_of(model).blueprint.traits
    names = dict.fromkeys(
        "latent, rope key" if name == "keys" and traits[0].joined else NAMES[name.split()[0]]
        for name in seen
        if name != "values"
    )
    if any(windows):
        where = "" if all(windows) else "in some layers "
        names = {f"{name}, {where}of a window" if name == "K, V" else name: None for name in names}
    growing = sum(size for grows, size in seen.values() if grows) / len(traits)
    carried = sum(size for grows, size in seen.values() if not grows) / len(traits)
    parts = [f"{growing:.0f} a token"] * bool(growing) + [f"{carried:.0f} a page"] * bool(carried)
    return "; ".join(names), ", ".join(parts)


def tensors_of(pages) -> list[torch.Tensor]:
    if isinstance(pages, Grow):
        return [pages.buffer]
    return list(pages.pages.values() if isinstance(pages, Carry) else pages.pages)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def long_form(states: dict, errors: dict, wrappings: dict) -> str:
    """Every type, and every one that is refused."""
    rows = []
    for kind in SUPPORTED:
        of = INSIDE.get(kind, kind)
        figures = [f"{errors[of][mode][1]:.0e}" if mode in errors[of] else "" for mode in MODES]
        log_probs = f"{max(pair[0] for pair in errors[of].values()):.0e}" if errors[of] else ""
        rows.append([kind, *states[of], log_probs, *figures, ", ".join(sorted(wrappings[of]))])
    head = [
        "`model_type`",
        "prompt state",
        "bytes in a layer",
        "log-probs",
        *MODES,
        "held against stock when wrapped in",
    ]
    by_reason: dict[str, list[str]] = defaultdict(list)
    for kind, reason in REFUSED.items():
        by_reason[reason].append(kind)
    refused = table(["why", "`model_type`"], [[why, ", ".join(kinds)] for why, kinds in by_reason.items()])
    return f"{PREFACE}\n{table(head, rows)}\n{REFUSAL}\n{refused}"


def short_form(states: dict) -> str:
    """The types, by what they remember."""
    by_state: dict[str, list[str]] = defaultdict(list)
    for kind in SUPPORTED:
        by_state[states[INSIDE.get(kind, kind)][0]].append(kind)
    rows = [[state, ", ".join(kinds)] for state, kinds in sorted(by_state.items(), key=lambda pair: -len(pair[1]))]
    return table(["prompt state of a layer", "`model_type`"], rows)


PREFACE = """# Support matrix

Generated by `docs/support_matrix.py` from the results of the parity tests, in float32 on a CPU, against the stock
model run response by response: the largest difference of a log-prob or an entropy, and the largest relative error of
the whole gradient, for each `prompt_grad`; for `last:2` and `detached` against the same rows with the prompt's state
held constant, so that their bias does not show. The bar is 1e-5, or twice the stock model's own noise where that is
larger (the delta rule). Bytes are the tests' tiny models', in float32: of what grows, a token and layer; of what each
chunk replaces, a page. Wrappings: two processes each, gradients and three optimizer steps; every type is the same
chain of operations to an engine, so one of each kind of state is run in the fast tests, and all dense ones in the
slow ones.
"""
REFUSAL = "## Refused by name\n\n`attach` refuses the other causal LMs of this transformers version, saying why.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="what pytest --junitxml wrote")
    errors, wrappings = results(parser.parse_args().results)
    if unheld := [kind for kind in SUPPORTED if "exact" not in errors[INSIDE.get(kind, kind)]]:
        raise SystemExit(f"no result of {', '.join(unheld)}")
    states = {kind: prompt_state(kind) for kind in MODELS | ARCHITECTURES | FURTHER if kind in SUPPORTED}
    (ROOT / "docs" / "support.md").write_text(long_form(states, errors, wrappings))
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    readme.write_text(before + MARKS[0] + short_form(states) + MARKS[1] + after)


if __name__ == "__main__":
    main()
