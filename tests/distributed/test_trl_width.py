"""GRPOTrainer against ours, both on two processes under the same engine: objectives, schedules, data, checkpoints.

Stock on the same engine is the reference: TRL averages some terms over ranks. What it does not, test_trl_engines.py
holds against one process. All cases of an engine run in one start: minutes, so this is slow.
"""

import functools

import pytest
import torch

from ..trl_comparison import SGD, compare, rows
from ..trl_training import save_models
from .trl_launch import COMMANDS, KINDS, SHARDED, launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first case of an engine starts all
TRAINERS = ("LongStrawGRPOTrainer", "GRPOTrainer")
VLLM = {"rollouts": ["sample_elsewhere", "mask_some_tokens"], "vllm": True}
CORNERS = {  # of the cross product of test_trl_losses.py
    "plain": {"options": {"loss_type": "grpo"}},
    "all": {
        "options": {
            "loss_type": "dapo",
            "beta": 0.04,
            "entropy_coef": 0.1,
            "top_entropy_quantile": 0.85,
            "off_policy_mask_threshold": 0.05,
            "mask_truncated_completions": True,
        },
        **VLLM,
    },
    "sequences, an adapter": {
        "options": {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "beta": 0.04,
            "off_policy_mask_threshold": 0.05,
            "vllm_importance_sampling_mode": "sequence_truncate",
            "learning_rate": 0.15,
        },
        "adapter": True,
        **VLLM,
    },
    "gamma weights": {
        "options": {
            "loss_type": "vespo",
            "entropy_coef": 0.1,
            "top_entropy_quantile": 0.85,
            "steps_per_generation": 4,
            "gradient_checkpointing": True,
        }
    },
}
WIDTH = {
    "a generation for four steps": {"options": {"steps_per_generation": 4, "loss_type": "bnpo", "max_steps": 6}},
    "a short last window": {
        "options": {
            "gradient_accumulation_steps": 3,
            "steps_per_generation": 4,
            "num_iterations": 1,
            "max_steps": -1,
            "num_train_epochs": 1,
        },
        "prompts": 18,
    },
    "groups and a half": {"options": {"per_device_train_batch_size": 6, "num_generations": 4, "beta": 0.04}},
    "one prompt here, two there": {
        "options": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "shuffle_dataset": False},
        "twice": True,
    },
    "a group on both ranks": {"options": {"num_generations": 8, "gradient_accumulation_steps": 1}},
    "truncated on one rank": {
        "options": {"mask_truncated_completions": True, "beta": 0.04, "entropy_coef": 0.1},
        "rollouts": ["end_nowhere_on_rank_1"],
    },
    "prompts that differ": {"options": {"loss_type": "dapo"}, "rollouts": ["differ_in_prompt", "mask_some_tokens"]},
    "a stream": {"options": {"steps_per_generation": 2, "max_steps": 4}, "prompts": 11, "stream": True},
    "evaluation": {
        "options": {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "per_device_eval_batch_size": 2,
            "num_generations_eval": 2,
            "beta": 0.04,
        },
        "evaluate": 5,
    },
    "sync_ref_model": {
        "options": {
            "beta": 0.04,
            "sync_ref_model": True,
            "ref_model_sync_steps": 1,
            "ref_model_mixup_alpha": 0.6,
        }
    },
}
CHECKPOINT = {"num_iterations": 1, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "beta": 0.04}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """`launched(engine, table) -> {(name, trainer): found}`."""

    @functools.cache
    def start(engine: str, table: str):
        folder = tmp_path_factory.mktemp(engine)
        save_models(folder / "models", "qwen3", num_hidden_layers=2)
        cases = []
        for trainer in TRAINERS:
            common = {"models": "models", "trainer": trainer}
            if table == "resume":
                whole = {"name": f"whole, {trainer}", "options": CHECKPOINT, "rollouts": None, **common}
                again = {"name": f"again, {trainer}", "resume": f"{whole['name']}/checkpoint-2"}
                cases += [whole, whole | again]
            else:
                chosen = CORNERS if table == "corners" else WIDTH
                for name, case in chosen.items():
                    cases.append(
                        {**case, "name": f"{name}, {trainer}", "options": {**SGD, **case["options"]}, **common}
                    )
        return launch(engine, folder, cases, timeout=120 + 15 * len(cases))

    def results(engine: str, table: str):
        found, fault = start(engine, table)
        assert fault is None, fault
        return found

    return results


def pair(results, name, kind):
    """Ours and stock's, after what must be so for the comparison to mean anything."""
    found = [results[f"{name}, {trainer}"] for trainer in TRAINERS]
    ours, theirs = found
    assert ours["world"] == theirs["world"] == (2, 2, 2)
    assert ours["kind"] == theirs["kind"] == kind
    assert all(ours["partitioned"]) == ours["partitioned_everywhere"] == (kind != "MULTI_CPU")  # stock's FSDP2 root
    return found  # stays gathered after an evaluation


@pytest.mark.parametrize("name", CORNERS)
@pytest.mark.parametrize("engine", SHARDED)
def test_corners(launched, record_property, engine, name):
    ours, theirs = (found["run"] for found in pair(launched(engine, "corners"), name, KINDS[engine]))
    compare(ours, theirs, record_property)
    if CORNERS[name].get("vllm"):
        assert ours.log[0]["sampling/sampling_logp_difference/max"] > 0.1
    if CORNERS[name].get("adapter"):
        assert all("lora_" in n for n in ours.gradients[0])
        assert ours.log[2]["kl"] > 1e-4, "the adapter is its own reference"


@pytest.mark.parametrize("name", WIDTH)
@pytest.mark.parametrize("engine", SHARDED)
def test_width(launched, record_property, engine, name):
    found, reference = pair(launched(engine, "width"), name, KINDS[engine])
    ours, theirs = found["run"], reference["run"]
    compare(ours, theirs, record_property)
    half = len(ours.batches) // 2
    if name == "a short last window":
        assert set(ours.windows) == {3, 2}
    distinct = [len({tuple(ids) for ids in rows(batch, "prompt")}) for batch in ours.batches]
    if name == "groups and a half":
        assert set(distinct) == {2}
    if name == "one prompt here, two there":
        assert (distinct[0], distinct[half]) == (1, 2)
    if name == "truncated on one rank":
        assert not any(batch["completion_mask"].any() for batch in ours.batches[half:])
        assert all(batch["completion_mask"].any() for batch in ours.batches[:half])
    if name == "evaluation":
        assert sum("eval_kl" in log for log in ours.log) == 3
    if name == "sync_ref_model":
        for n, weight in reference["reference"].items():
            torch.testing.assert_close(found["reference"][n], weight, rtol=0, atol=1e-4)
        assert ours.log[1]["kl"] != pytest.approx(ours.log[0]["kl"], rel=0.1)


@pytest.mark.parametrize("engine", COMMANDS)
def test_resume(launched, record_property, engine):
    """Four steps, and two plus two from the checkpoint, with TRL's generation: the same weights; stock's, resumed."""
    results = launched(engine, "resume")
    whole, whole_stock = (found["run"] for found in pair(results, "whole", KINDS[engine]))
    again, again_stock = (found["run"] for found in pair(results, "again", KINDS[engine]))
    compare(whole, whole_stock, adamw=True)
    assert len(again.gradients) == 2
    compare(again, again_stock, record_property, adamw=True)
    for n, change in whole.update.items():
        torch.testing.assert_close(again.update[n], change, rtol=0, atol=1e-7, msg=n)
