"""Tiny checkpoints of the classes that Qwen3.6 and GLM-5.2 are released in, as a user has them: saved, named by their
path in a recipe, and trained by launch/train_grpo.py on two processes with ZeRO-3."""

import json
import re

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from ..models import moderate, spread, tiny
from ..trl_fixtures import CHARACTERS, prompts, tokenizer
from .launch import ACCELERATE_ZERO3, launch_script

STEPS = 3


def qwen():
    text = tiny("qwen3_5_text", vocab_size=len(CHARACTERS)).config.to_dict()
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    model = transformers.Qwen3_5ForConditionalGeneration(config)
    spread(model, 0)
    moderate(model)
    return model


def glm():
    return tiny("glm_moe_dsa", vocab_size=len(CHARACTERS))


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
        "ddp_backend": "gloo",
        "output_dir": str(folder / "run"),
        "logging_steps": 1,
        "save_steps": STEPS,
        "report_to": "none",
        **options,
    }


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("build", [qwen, glm])
def test_three_steps(tmp_path, build, adapter):
    model = build()
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    prompts().to_json(tmp_path / "data" / "train.jsonl")
    lora = {"use_peft": True, "lora_dropout": 0.0, "lora_r": 4, "lora_target_modules": "all-linear"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe(tmp_path, **(lora if adapter else {}))))
    script = ["launch/train_grpo.py", "--config", str(tmp_path / "recipe.yaml")]
    code, output = launch_script(ACCELERATE_ZERO3, script, tmp_path, 280)
    assert code == 0, output[-4000:]
    assert re.search(r"2 processes, ZeRO-3: this one holds", output)

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
