"""The cases of benchmarks/step.py at tiny sizes: every peer has the gradient of stock rows, as `measure` asserts."""

import pytest
import torch

from benchmarks import models, step
from benchmarks.conditions import verdict
from benchmarks.peers import PEERS, missing, one_mask
from longstraw_dist import PromptGroup


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5_text"])
def test_every_case(kind, monkeypatch):
    for name, size in {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}.items():
        monkeypatch.setitem(models.SETTINGS, name, size)
    cases = [case for case in (*PEERS, *step.OURS) if missing(case, kind) is None]
    layers = 2 if kind == "qwen3" else 4
    runs = step.measure(cases, kind, layers, models.prompt_group(30, 5, 3, vocabulary=97), passes=1)
    assert all(run.error < step.GRADIENT[kind] for case, run in runs.items() if case not in ("last:2", "detached"))
    rows, verdicts = step.table(runs, {"exact": (1.0, None)})
    assert [row["case"] for row in rows] == cases
    assert sum("exact over stock rows" in line for line in verdicts) == 1


def test_one_mask():
    ids = torch.arange(6)
    mask = one_mask(PromptGroup(ids[:2], [ids[2:4], ids[4:5]]))[0, 0]
    expected = ["10000", "11000", "11100", "11110", "11001"]
    assert ["".join(str(int(seen)) for seen in row) for row in mask] == expected


def test_verdict():
    assert verdict("a", 1.2, 1.0) == "a: 1.2, bar >= 1: met"
    assert verdict("a", 1.2, 1.0, at_least=False) == "a: 1.2, bar <= 1: MISSED"
