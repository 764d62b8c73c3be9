"""Tiny checkpoints of the classes that Qwen3.6 and GLM-5.2 are released in, as a user has them: saved, named by their
path in a recipe, and trained by launch/train_grpo.py on two processes."""

import json
from functools import partial

import pytest
import torch
import yaml
from safetensors.torch import load_file

from ..models import inside_of_another, tiny
from ..trl_fixtures import CHARACTERS, prompts, tokenizer
from .launch import ACCELERATE_ZERO3, TORCHRUN, launch_script

STEPS = 3
QWEN, GLM = "Qwen3_5ForConditionalGeneration", "GlmMoeDsaForCausalLM"
MODELS = {QWEN: inside_of_another, GLM: partial(tiny, "glm_moe_dsa")}
ENGINES = {  # what starts it, its options on a CPU, and what it says of itself
    "zero3": (ACCELERATE_ZERO3, {"ddp_backend": "gloo"}, "2 processes, ZeRO-3: this one holds"),
    "ddp": (TORCHRUN, {"use_cpu": True}, "2 processes, a whole replica each"),
}
CASES = [*((name, "zero3", adapter) for name in MODELS for adapter in (False, True)), (QWEN, "ddp", False)]


def recipe(folder, **options):
    return {
        "model_name_or_path": str(folder / "model"),
        "dtype": "float32",
        "dataset_name": str(folder / "data"),
        "reward_funcs": ["tests.trl_fixtures.reward"],
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_completion_length": 8,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "bf16": False,
        "output_dir": str(folder / "run"),
        "logging_steps": 1,
        "save_steps": STEPS,
        "report_to": "none",
        **options,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine", "adapter"), CASES)
def test_three_steps(tmp_path, name, engine, adapter):
    model = MODELS[name](vocab_size=len(CHARACTERS))
    assert type(model).__name__ == name
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    prompts().to_json(tmp_path / "data" / "train.jsonl")
    launcher, options, sharding = ENGINES[engine]
    lora = {"use_peft": True, "lora_dropout": 0.0, "lora_r": 4, "lora_target_modules": "all-linear"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe(tmp_path, **options, **(lora if adapter else {}))))
    script = ["launch/train_grpo.py", "--config", str(tmp_path / "recipe.yaml")]
    code, output = launch_script(launcher, script, tmp_path, 280)
    assert code == 0, output[-4000:]
    assert sharding in output

    state = json.loads((tmp_path / "run" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    steps = [log for log in state["log_history"] if "reward" in log]
    assert len(steps) == STEPS
    assert all(0 < log["grad_norm"] < 1e4 and log["reward_std"] > 0 for log in steps)
    assert all(log["longstraw/prompt_tokens_saved"] > 0 for log in steps)
    if adapter:
        weights = load_file(tmp_path / "run" / "adapter_model.safetensors")
        trained = [t for n, t in weights.items() if "lora_B" in n and "visual" not in n and "indexer" not in n]
        assert trained
        assert all(t.any() for t in trained)
        return
    trained = type(model).from_pretrained(tmp_path / "run")
    text = [n for n, _ in model.named_parameters() if "visual" not in n and "indexer" not in n]
    before, after = dict(model.named_parameters()), dict(trained.named_parameters())
    unchanged = [n for n in text if torch.equal(before[n], after[n])]
    assert not unchanged
