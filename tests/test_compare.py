"""The comparison with stock GRPO: its task, its reward, its verdict, and the whole script at a tiny size."""

import csv
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO))  # launch/ is a folder of scripts, not part of the installed package

from launch import compare_grpo, compare_report, lookup_task  # noqa: E402

from .trl_training import save_models  # noqa: E402


def test_the_answer_is_the_code_of_the_name_that_is_asked_for():
    for split in ("train", "held_out"):
        for row in lookup_task.examples(split, 40, seed=3):
            text, question = row["prompt"].rsplit("\n\n", 1)
            name = question.removeprefix("The code of ").removesuffix(" is")
            assert text.count(f"{name} has the code {row['answer']}.") == 1
            assert all(text.count(code) == 1 for code in row["codes"])
            assert row["prompt"].count(name) == 2
            for other in row["codes"]:  # what is left is the license, word for word
                before, after = text.split(f" has the code {other}.")
                text = f"{before.rpartition(' ')[0]}{after}"
            assert text.strip() in " ".join(lookup_task.TEXTS[split])


def test_held_out_prompts_share_neither_names_nor_text_with_training():
    assert not set(lookup_task.NAMES["train"]) & set(lookup_task.NAMES["held_out"])
    assert lookup_task.TEXTS["train"] + lookup_task.TEXTS["held_out"] == lookup_task.WORDS
    texts = {split: " ".join(words) for split, words in lookup_task.TEXTS.items()}
    for row in lookup_task.examples("held_out", 40, seed=0):
        assert not any(name in row["prompt"].split() for name in lookup_task.NAMES["train"])
    assert len(texts["held_out"]) > 1000


def test_data_are_the_same_for_the_same_seed():
    rows = lookup_task.examples("train", 24, seed=1)
    assert lookup_task.examples("train", 24, seed=1) == rows
    assert lookup_task.examples("train", 24, seed=2) != rows
    assert len({row["prompt"] for row in rows}) == 24


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (" 123.", 1.0),
        ("The code is 123, not 456", 1.0),
        (" 456 123", 0.0),  # the first number counts: a list earns what its head does
        (" 1234", 0.0),
        (" 12", 0.0),
        (" 1 2 3", 0.0),
        ("one hundred", 0.0),
        ("", 0.0),
    ],
)
def test_reward(text, score):
    assert lookup_task.correct_code([text], answer=["123"], codes=[["123", "456"]]) == [score]


def test_format_and_length_earn_what_a_guess_does():
    rows = lookup_task.examples("held_out", 192, seed=0)
    answers, chance = [row["answer"] for row in rows], 1 / lookup_task.FACTS
    scores = lookup_task.blind_scores(rows)
    assert all(scores[f"code {place} of {lookup_task.FACTS}"] == chance for place in range(1, lookup_task.FACTS + 1))
    assert max(scores.values()) < chance + 0.06
    every = [" ".join(row["codes"]) for row in rows]  # all of them, the longest answer
    assert sum(lookup_task.correct_code(every, answers)) == chance * len(rows)
    for text in ("", "I do not know.", " 555.", " ".join(map(str, range(100, 1000)))):
        assert sum(lookup_task.correct_code([text] * len(rows), answers)) <= 0.02 * len(rows)


def test_wilson_interval():
    # Newcombe 1998, table I: 81 of 263 and 15 of 148, 95 %.
    assert compare_report.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert compare_report.wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)


def row(arm: str, seed: int, after: float) -> dict:
    return {"arm": arm, "seed": seed, "after": after}


def test_verdict():
    stock = [row("stock", 0, 0.60), row("stock", 1, 0.70), row("stock", 2, 0.65)]
    near = [row("exact", 0, 0.62), row("exact", 1, 0.70), row("exact", 2, 0.65)]
    spread, means = compare_report.verdict(stock + near)
    assert "+0.020, +0.000, +0.000" in spread
    assert "0.100. Within the spread: met" in spread
    assert means.endswith("0.007 apart; 5% of stock is 0.033. Within it: met.")
    far = [row("exact", 0, 0.45), row("exact", 1, 0.70), row("exact", 2, 0.65)]
    spread, means = compare_report.verdict(stock + far)
    assert spread.endswith("NOT MET.")
    assert means.endswith("0.050 apart; 5% of stock is 0.033. Within it: NOT MET.")
    assert "no verdict" in compare_report.verdict(stock)[0]


def test_a_run_is_resumed_and_other_settings_are_refused(tmp_path):
    args = compare_grpo.CompareArguments(model="tiny")
    file = tmp_path / "exact-0.json"
    assert compare_grpo.once(file, args, lambda: {"seed": 0})["seed"] == 0
    assert compare_grpo.once(file, args, lambda: {"seed": 1})["seed"] == 0
    args.steps += 1
    with pytest.raises(ValueError, match="other settings"):
        compare_grpo.once(file, args, lambda: {"seed": 1})


@pytest.mark.slow
def test_the_whole_script(tmp_path, monkeypatch):
    model = save_models(tmp_path) / "policy"
    begin, end = compare_report.MARKS
    page = tmp_path / "learning.md"
    page.write_text(f"head\n{begin}\nstale\n{end}\nfoot\n")
    arms = ["stock", "exact", "last:1", "control"]
    options = {"model": model, "steps": 2, "held_out": 8, "output_dir": tmp_path / "runs"}
    options |= {"results_dir": tmp_path, "docs_dir": tmp_path}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["compare_grpo.py", *words, "--seeds", "5", "--arms", *arms])
    compare_grpo.main()

    lines = (tmp_path / "compare_grpo.csv").read_text().splitlines()
    rows = {row["arm"]: row for row in csv.DictReader(line for line in lines if not line.startswith("#"))}
    assert list(rows) == arms
    assert rows["control"]["after"] == rows["control"]["before"]
    assert (rows["exact"]["steps_as_stock"], rows["exact"]["held_out_as_stock"]) == ("2", "8")
    points = (tmp_path / "compare_grpo_curves.csv").read_text().splitlines()
    assert len(points) == 2 + 2 * len(arms)
    assert (tmp_path / "learning.png").stat().st_size > 1000
    text = page.read_text()
    assert text.startswith("head\n")
    assert text.endswith("foot\n")
    assert "stale" not in text
    assert f"| last:1 | {float(rows['last:1']['after']):.3f} (" in text

    monkeypatch.setattr(compare_grpo, "run", lambda *args: pytest.fail("a finished run was run again"))
    compare_grpo.main()
    assert page.read_text() == text
