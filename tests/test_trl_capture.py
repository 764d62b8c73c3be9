"""Rollouts from captured prompts, updates that read what the rollout captured, and captures that are old."""

from unittest import mock

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

from longstraw_dist import rollout
from longstraw_dist.integrations.trl import LongStrawGRPOConfig, LongStrawGRPOTrainer

from .models import EXPERTS, adapted, tiny
from .trl_comparison import SGD, compare, compare_inputs
from .trl_fixtures import prompts, tokenizer
from .trl_training import OPTIONS, load_policy, make, save_models, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("captures"), "qwen3", num_hidden_layers=2)


def train_both(folder, **options):
    """On completions that each trainer samples itself."""
    ours = {k: options.pop(k) for k in list(options) if k in ("rollout_from_capture", "offload", "prompt_grad")}
    options = {**SGD, "num_iterations": 1, **options}
    return train(LongStrawGRPOTrainer, folder, **options, **ours), train(GRPOTrainer, folder, **options)


def column(run, name: str) -> list[float]:
    return [log[f"longstraw/{name}"] for log in run.log if f"longstraw/{name}" in log]


def prompt_tokens(run) -> int:
    """P-1 of each distinct prompt of the micro-batches, once."""
    found = {}
    for batch in run.batches:
        for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True):
            found[tuple(ids[mask.bool()].tolist())] = int(mask.sum()) - 1
    return sum(found.values())


CASES = {
    "plain": {},
    "two steps a batch": {"steps_per_generation": 4},
    "reference": {"beta": 0.04},
    "two iterations": {"num_iterations": 2},
    "cut groups": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "offload": {"offload": "all"},
    "padded": {"pad_to_multiple_of": 16},
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[] if name in ("plain", "two steps a batch") else [pytest.mark.slow])
        for name, options in CASES.items()
    ],
)
def test_parity(folder, record_property, options):
    """The same completions, and the same updates from them; old captures are not used."""
    compare(*train_both(folder, **options), record_property)


def test_greedy_tokens(folder):
    options = {"generation_kwargs": {"do_sample": False}, "max_completion_length": 24, "max_steps": 2}
    compare_inputs(*train_both(folder, **options))


def test_each_prompt_runs_once(folder):
    """In the rollout; not again in the update, nor in the score of the old policy."""
    run, _ = train_both(folder, max_steps=1, gradient_accumulation_steps=2)
    assert column(run, "prompt_tokens_captured") == [prompt_tokens(run)]
    assert column(run, "prompt_tokens_reused") == [prompt_tokens(run)]
    assert column(run, "captured_bytes")[0] > 0
    off, _ = train_both(folder, max_steps=1, gradient_accumulation_steps=2, rollout_from_capture=False)
    assert column(off, "prompt_tokens_captured") == [prompt_tokens(off)]
    assert column(off, "prompt_tokens_reused") == [0]
    assert all(torch.equal(run.update[n], w) for n, w in off.update.items()), "not a bit differs"


def test_the_update_runs_no_prompt(folder):
    """Counted by the calls of a layer with prompt rows in forward: none between rollout and backward."""
    seen = []
    trainer = make(LongStrawGRPOTrainer, folder, **SGD, max_steps=2, num_iterations=1)
    meter = trainer._attachment.meter
    compute = trainer._compute_loss

    def counted(*args):
        before = meter.prompt_tokens_captured
        loss = compute(*args)
        seen.append(meter.prompt_tokens_captured - before)
        return loss

    with mock.patch.object(trainer, "_compute_loss", counted):
        trainer.train()
    assert seen == [0] * 4


@pytest.mark.parametrize(
    ("kind", "settings"), [("qwen3", {}), pytest.param("qwen3_moe", EXPERTS, marks=pytest.mark.slow)]
)
def test_adapters(tmp_path, record_property, kind, settings):
    """The reference is the policy without its adapter: what the policy captured is not for it."""
    runs, folder = [], save_models(tmp_path, kind)
    options = SGD | ({"router_aux_loss_coef": 0.0} if settings else {})
    for cls in (LongStrawGRPOTrainer, GRPOTrainer):
        model = adapted(load_policy(folder), **settings)
        runs.append(train(cls, folder, model=model, beta=0.04, num_iterations=1, **options))
    compare(*runs, record_property)
    assert max(column(runs[0], "prompt_tokens_reused")) > 0


@pytest.mark.slow
def test_mixed_precision(folder):
    """Under autocast what the rollout captured is what the update would compute."""
    with_captures, without = (
        train(LongStrawGRPOTrainer, folder, bf16=True, num_iterations=1, rollout_from_capture=on, **SGD)
        for on in (True, False)
    )
    assert max(column(with_captures, "prompt_tokens_reused")) > 0
    for a, b in zip(with_captures.batches, without.batches, strict=True):
        assert torch.equal(a["prompt_ids"], b["prompt_ids"])


def test_prompts_of_one_token(folder):
    dataset = Dataset.from_dict({"prompt": ["a", "b", "c", "d"] * 4})
    ours, theirs = (
        train(cls, folder, dataset=dataset, num_iterations=1, **SGD) for cls in (LongStrawGRPOTrainer, GRPOTrainer)
    )
    compare(ours, theirs)


def test_only_the_first_turn_captures(folder):
    """How many follow is each rank's own, for its tools: they make no collective."""
    trainer, calls = make(LongStrawGRPOTrainer, folder, **SGD), []
    generate = trainer._generate_from_captures
    with mock.patch.object(
        trainer, "_generate_from_captures", lambda *args, **kw: calls.append(1) or generate(*args, **kw)
    ):
        trainer._turns = 0
        for _ in range(3):
            trainer._generate_single_turn([[5, 6, 7], [5, 6, 7]], None, {}, 2)
    assert calls == [1]


def test_evaluation_uses_no_old_captures(folder):
    found = []
    for options in ({}, {"capture_max_age": 8, "capture_max_drift": 10.0}):
        arguments = {"eval_dataset": prompts(4)}
        options = {**options, "eval_strategy": "steps", "eval_steps": 1, "beta": 0.04, "learning_rate": 1e-9}
        run = train(LongStrawGRPOTrainer, folder, prompt_grad="detached", arguments=arguments, **{**SGD, **options})
        found.append([log["eval_loss"] for log in run.log if "eval_loss" in log])
    assert found[0] == found[1]


def config(**options) -> LongStrawGRPOConfig:
    return LongStrawGRPOConfig(**{**OPTIONS, "output_dir": "unused", **options})


def test_refusals(folder):
    with pytest.raises(ValueError, match="an old state has no exact gradient"):
        config(capture_max_age=1)
    with pytest.raises(ValueError, match="capture_max_age=-1"):
        config(capture_max_age=-1, prompt_grad="detached")
    with pytest.raises(ValueError, match="beside offload='all'"):
        config(capture_max_age=1, prompt_grad="detached", offload="all")
    with pytest.raises(ValueError, match="capture_max_drift=0"):
        config(capture_max_drift=0)
    for options, match in (
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams=2"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"arguments": {"rollout_func": lambda *_: None}}, "do not come from `generate`"),
    ):
        with pytest.raises(ValueError, match=match):
            make(LongStrawGRPOTrainer, folder, rollout_from_capture=True, **options)
        assert not make(LongStrawGRPOTrainer, folder, **options).rollout_from_capture


@pytest.mark.parametrize("kind", ["mamba2", "minimax", "recurrent_gemma"])
def test_types_that_cannot(tmp_path, kind):
    """They generate as ever."""
    model = tiny(kind, vocab_size=len(tokenizer()))
    assert rollout.find_fault(model) is not None
    with pytest.raises(ValueError, match=type(model).__name__):
        make(LongStrawGRPOTrainer, tmp_path, model=model, rollout_from_capture=True)


OLD = {"capture_max_age": 3, "capture_max_drift": 10.0}


def aged(folder, **options):
    options = {"num_iterations": 4, "max_steps": 8, "gradient_accumulation_steps": 1, **SGD, **options}
    options = {"per_device_train_batch_size": 8, **options}
    return train(LongStrawGRPOTrainer, folder, prompt_grad="detached", dataset=prompts(8), **options)


def test_old_captures_are_used_and_watched(folder):
    """Of four iterations on two groups the first has new captures; then one is made anew, to watch the drift."""
    run, slower, fresh = aged(folder, **OLD), aged(folder, learning_rate=0.005, **OLD), aged(folder)
    drift = column(run, "capture_drift")
    assert len(drift) == 6, "three of each four steps"
    assert all(0 < small < large for small, large in zip(column(slower, "capture_drift"), drift, strict=True))
    assert column(fresh, "capture_drift") == []
    assert all(n > 0 for n in column(run, "prompt_tokens_reused"))
    ran, without = (column(each, "prompt_tokens_captured") for each in (run, fresh))
    assert all((a == b) if i % 4 == 0 else (0 < a < b) for i, (a, b) in enumerate(zip(ran, without, strict=True)))
    assert any(not torch.equal(run.update[n], w) for n, w in fresh.update.items())


def test_the_drift_is_that_of_the_age(folder):
    """One prompt a micro-batch, two a step: what is watched grows as old as what is not."""
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 6, "max_steps": 6}
    drift = column(aged(folder, **options, **{**OLD, "capture_max_age": 5}), "capture_drift")
    assert len(drift) == 5
    assert drift == sorted(drift)
    assert drift[-1] > 1.4 * drift[0]


def test_an_old_capture_is_used_for_its_age(folder):
    run = aged(folder, **{**OLD, "capture_max_age": 1})
    assert len(column(run, "capture_drift")) == 4, "two of each four steps: the third captures anew"


@pytest.mark.slow
def test_a_drift_beyond_the_bound_captures_anew(folder):
    """Then every step runs its prompts, as without old captures, to the bit."""
    run, fresh = aged(folder, capture_max_age=3, capture_max_drift=1e-9), aged(folder)
    assert len(column(run, "capture_drift")) == 6
    assert all(torch.equal(run.update[n], w) for n, w in fresh.update.items())
