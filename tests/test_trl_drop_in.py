"""A TRL script with the two class names changed: construction, rollouts, evaluation, metrics, checkpoints, data."""

import math

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, training_args
from trl import GRPOTrainer, TrlParser
from trl.trainer.utils import shuffle_sequence_dict

from longstraw_dist import LongStrawConfig
from longstraw_dist.attach import is_attached
from longstraw_dist.groups import find_groups
from longstraw_dist.integrations.trl import LongStrawGRPOConfig, LongStrawGRPOTrainer
from longstraw_dist.integrations.trl.rows import shuffle_groups

from .trl_fixtures import prompts, reward, tokenizer
from .trl_training import CONFIGS, OPTIONS, make, one_shuffle, save_models, scripted_rollouts, train, weights_of

BOTH = (GRPOTrainer, LongStrawGRPOTrainer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("drop_in"), "qwen3")


def config(cls, tmp_path, **options):
    return CONFIGS[cls](**{**OPTIONS, "output_dir": str(tmp_path / "out"), **options})


def test_positional_arguments_and_a_path(folder, tmp_path):
    """The tokenizer too comes from the folder."""
    losses = []
    for cls in BOTH:
        args = config(cls, tmp_path, max_steps=1, model_init_kwargs={"dtype": "float32"})
        trainer = cls(str(folder / "policy"), [reward], args, prompts(), prompts(4))
        with one_shuffle():
            losses.append(trainer.train().training_loss)
    assert math.isclose(*losses, rel_tol=1e-4)


def test_keyword_arguments(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = LongStrawGRPOTrainer(
        model=model,
        reward_funcs=[reward, reward],
        args=config(LongStrawGRPOTrainer, tmp_path, reward_weights=[0.25, 0.75]),
        train_dataset=prompts(),
        eval_dataset={"a": prompts(4), "b": prompts(4)},
        processing_class=tokenizer(),
        reward_processing_classes=None,
        callbacks=[],
        optimizers=(optimizer, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=scripted_rollouts(),
        environment_factory=None,
    )
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer


def test_no_arguments(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)  # TRL's default is bf16 on a GPU
    trainer = LongStrawGRPOTrainer(str(folder / "policy"), reward, train_dataset=prompts())
    stock = GRPOTrainer(str(folder / "policy"), reward, train_dataset=prompts())
    assert isinstance(trainer.args, LongStrawGRPOConfig)
    for name, value in stock.args.to_dict().items():
        assert trainer.args.to_dict()[name] == value, name


def test_command_line(tmp_path):
    (args,) = TrlParser((LongStrawGRPOConfig,)).parse_args_and_config(
        f"--output_dir {tmp_path} --use_cpu --prompt_grad last:2 --prompt_chunk_size 64 --responses_per_replay 3 "
        "--head_chunk_size 32 --offload all".split()
    )
    engine = args.longstraw()
    assert (engine.prompt_grad, engine.prompt_chunk_size, engine.responses_per_replay) == ("last:2", 64, 3)
    assert (engine.head_chunk_size, engine.offload) == (32, "all")
    command = f"--output_dir {tmp_path} --use_cpu --activation_budget 1000"
    (args,) = TrlParser((LongStrawGRPOConfig,)).parse_args_and_config(command.split())
    assert args.longstraw().activation_budget == 1000
    assert LongStrawGRPOConfig(str(tmp_path), use_cpu=True).longstraw() == type(engine)()


@pytest.mark.parametrize("chunk", ["auto", 64])
def test_auto_from_a_command_line_and_from_a_recipe(tmp_path, chunk):
    knobs = {"prompt_chunk_size": chunk, "responses_per_replay": "auto", "segment_budget": 10**9}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"output_dir": str(tmp_path), "use_cpu": True, **knobs}))
    command = [f"--{name}={value}" for name, value in knobs.items()]
    for arguments in (["--config", str(recipe)], ["--output_dir", str(tmp_path), "--use_cpu", *command]):
        (args,) = TrlParser((LongStrawGRPOConfig,)).parse_args_and_config(arguments)
        assert args.longstraw() == LongStrawConfig(**knobs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        pytest.param({"use_transformers_continuous_batching": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rollouts_are_those_of_stock(folder, options):
    """Generation is the model's own: the same completions at the same seed, token for token."""
    rollouts = []
    for cls in BOTH:
        trainer = make(cls, folder, **options)
        trainer.model.train()
        torch.manual_seed(7)
        rollouts.append(trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader()))))
    assert rollouts[0].keys() == rollouts[1].keys()
    for name, theirs in rollouts[0].items():
        exact = "logps" not in name
        torch.testing.assert_close(rollouts[1][name], theirs, rtol=0, atol=0 if exact else 1e-5)
    assert rollouts[0]["old_per_token_logps"].abs().max() > 1, "num_iterations=2 scores the old policy"


def test_resume(folder, tmp_path):
    """Four steps, and two plus two from the checkpoint: the same weights."""
    options = {"num_iterations": 1, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "beta": 0.04}
    whole = make(LongStrawGRPOTrainer, folder, output_dir=str(tmp_path), **options)
    whole.train()
    again = make(LongStrawGRPOTrainer, folder, output_dir=str(tmp_path), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 4
    start = make(LongStrawGRPOTrainer, folder)
    for name, weight in weights_of(whole).items():
        assert torch.equal(weights_of(again)[name], weight), name
        assert not torch.equal(weights_of(start)[name], weight), name


def test_saved_model_is_an_ordinary_one(folder, tmp_path):
    run = train(LongStrawGRPOTrainer, folder, max_steps=1)
    run.trainer.save_model(str(tmp_path / "saved"))
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not is_attached(loaded)
    assert loaded.config._attn_implementation == "sdpa"
    for name, weight in weights_of(run.trainer).items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    ids = torch.arange(5)[None]
    torch.testing.assert_close(loaded(ids).logits, run.trainer.model.eval()(ids).logits)


def batch_of(*rows_of_group: int, seed: int = 0) -> dict:
    """Rows with the number of their group in every field; those of a group do not lie side by side."""
    members = [g for g, n in enumerate(rows_of_group) for _ in range(n)]
    members = [members[i] for i in torch.randperm(len(members), generator=torch.Generator().manual_seed(seed))]
    group, row = torch.tensor(members), torch.arange(len(members))
    return {
        "prompt_ids": torch.stack([torch.zeros_like(group), group + 5], 1),  # a padding token first
        "prompt_mask": torch.tensor([[0, 1]] * len(members)),
        "completion_ids": row[:, None].clone(),
        "completion_mask": torch.ones(len(members), 1, dtype=torch.long),
        "advantages": row.float(),
        "old_per_token_logps": row[:, None] / 10,
        "ref_per_token_logps": None,
        "num_items_in_batch": torch.tensor(len(members)),
        "text": [f"row {i}" for i in row],
    }


def test_shuffle_keeps_groups_and_loses_nothing():
    batch = batch_of(4, 4, 4, 4)
    torch.manual_seed(0)
    orders = set()
    for _ in range(10):
        out = shuffle_groups(batch)
        row = out["completion_ids"][:, 0]
        assert sorted(row.tolist()) == list(range(16))
        groups = out["prompt_ids"][:, 1].tolist()
        assert all(len(set(groups[i : i + 4])) == 1 for i in range(0, 16, 4))
        assert out["text"] == [f"row {i}" for i in row]
        assert torch.equal(out["advantages"], row.float())
        assert torch.equal(out["old_per_token_logps"], row[:, None] / 10)
        assert out["prompt_ids"][:, 1].tolist() == [batch["prompt_ids"][i, 1] for i in row]
        assert out["ref_per_token_logps"] is None
        assert out["num_items_in_batch"] == 16
        orders.add(tuple(groups))
    assert len(orders) > 5, "it shuffles"
    assert torch.equal(batch["advantages"], torch.arange(16.0)), "in place"


def test_shuffle_draws_as_the_parents_does():
    """So that the rollouts that follow are the parent's, at the same seed."""
    batch = batch_of(4, 4, 4, 4)
    states = []
    for shuffle in (shuffle_groups, shuffle_sequence_dict):
        torch.manual_seed(0)
        shuffle(batch)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize(
    ("sizes", "split", "cuts"),
    [
        ((4, 4, 4, 4), 4, 0),
        ((8, 8), 4, 2),  # a group is larger than a micro-batch: into as few as can be
        ((2, 4, 2), 2, 0),  # the ends of groups that span ranks
        ((1, 4, 3), 2, 0),
        ((1,) * 8, 4, 0),
    ],
)
def test_micro_batches_cut_few_groups(sizes, split, cuts):
    for seed in range(10):
        torch.manual_seed(seed)
        groups = shuffle_groups(batch_of(*sizes, seed=seed))["prompt_ids"][:, 1].tolist()
        n = len(groups) // split
        micro = [set(groups[i : i + n]) for i in range(0, len(groups), n)]
        assert sum(len(groups) for groups in micro) - len(sizes) <= cuts


def test_prompts_that_differ_in_padding_alone_are_one_group():
    """An environment may pad twice; and a prompt that begins like another is another."""
    ids = torch.tensor([[0, 0, 5, 6, 9], [0, 0, 5, 6, 8], [0, 5, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    groups, order = find_groups(ids, mask, 1)
    assert [g.prompt_ids.tolist() for g in groups] == [[5, 6], [5, 5, 6]]
    assert order == [(0, 1), (1, 1), (2, 1)]
