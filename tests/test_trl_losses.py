"""`_compute_loss` of GRPOTrainer and of ours on the same inputs: every objective with every mask; loss, gradient and
metrics. The cross product is 8 losses x 2 levels x 2^5 switches, and once more for an adapter with its base model as
reference; what comes from the inputs alone stands beside it."""

import functools
import itertools

import peft
import pytest
import torch
from trl import GRPOTrainer
from trl.trainer.utils import use_adapter

from longstraw_dist import PromptGroup
from longstraw_dist.integrations.trl import LongStrawGRPOTrainer
from longstraw_dist.integrations.trl.rows import equal_where_same

from .models import drift, tokens
from .reference import gradients, relative, worst
from .trl_fixtures import CHARACTERS
from .trl_training import make, norm, save_models

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
PROMPTS = [(9, 4), (23, 2), (1, 1), (14, 1)]  # (tokens, rows); rows of a group do not lie side by side
COMPLETIONS = [5, 1, 6, 2, 6, 3, 1, 6]
ORDER = [3, 0, 5, 7, 1, 4, 2, 6]
POLICIES = {  # what is trained, as arguments of the trainer: an adapter's reference is the model without it
    "all parameters": {},
    "adapter": {"peft_config": peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])},
}
SWITCHES = {  # name -> what is set on the trainer
    "beta": {"beta": 0.04},
    "entropy": {"entropy_coef": 0.1},
    "quantile": {"top_entropy_quantile": 0.4},
    "off_policy": {"off_policy_mask_threshold": 0.02},
    "vllm": {"use_vllm": True, "vllm_importance_sampling_correction": True},
}
OFF = {"beta": 0.0, "entropy_coef": 0.0}


@pytest.fixture(
    scope="module", params=[pytest.param(p, marks=pytest.mark.slow if POLICIES[p] else ()) for p in POLICIES]
)
def trainers(request, tmp_path_factory):
    folder = save_models(tmp_path_factory.mktemp("losses"), "qwen3", num_hidden_layers=2)
    arguments = POLICIES[request.param]
    both = [make(cls, folder, beta=0.04, arguments=arguments) for cls in (GRPOTrainer, LongStrawGRPOTrainer)]
    for trainer in both:
        if is_adapted(trainer):
            drift(trainer.model)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 2
    return both


@pytest.fixture(autouse=True)
def _reset(trainers, monkeypatch):
    """What a case sets on a trainer lasts as long as the case."""
    before = [dict(vars(trainer)) for trainer in trainers]
    yield
    for trainer, attributes in zip(trainers, before, strict=True):
        vars(trainer).clear()
        vars(trainer).update(attributes)


def is_adapted(trainer) -> bool:
    return isinstance(trainer.model, peft.PeftModel)


def inputs(trainer) -> dict[str, torch.Tensor]:
    """A micro-batch of 8 rows in 4 groups, off policy, with another reference; advantages of both signs."""
    generator = torch.Generator().manual_seed(3)
    rows = [prompt for n, rows in PROMPTS for prompt in [tokens(n, generator, len(CHARACTERS))] * rows]
    rows = [rows[i] for i in ORDER]
    width, length = max(map(len, rows)), max(COMPLETIONS)
    batch = {
        "prompt_ids": torch.stack([torch.cat([torch.zeros(width - len(t), dtype=torch.long), t]) for t in rows]),
        "prompt_mask": torch.stack([(torch.arange(width) >= width - len(t)).long() for t in rows]),
        "completion_mask": torch.stack([(torch.arange(length) < n).long() for n in COMPLETIONS]),
        "advantages": torch.randn(len(rows), generator=generator),
    }
    batch["completion_ids"] = tokens(len(rows) * length, generator, len(CHARACTERS)).view(-1, length)
    batch["completion_ids"] *= batch["completion_mask"]
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))

    def score():
        with torch.no_grad():
            return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)[0]

    logps = score()

    def drifted(scale):
        return logps + scale * torch.randn(logps.shape, generator=generator) * batch["completion_mask"]

    batch |= {"old_per_token_logps": drifted(0.3), "ref_per_token_logps": drifted(0.5)}
    batch["sampling_per_token_logps"] = drifted(0.4)
    if is_adapted(trainer):
        with use_adapter(trainer.model, None):
            batch["ref_per_token_logps"] = score()
    return batch


def correction(batch, level: str) -> torch.Tensor:
    """vLLM's importance-sampling ratio, truncated: `[B, T]`, or `[B, 1]` at the level of sequences."""
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * batch["completion_mask"]
    return (difference if level == "token" else difference.sum(-1, keepdim=True)).exp().clamp(0.5, 1.5)


def loss_and_gradient(trainer, batch, settings, **backward):
    for name, value in settings.items():
        assert hasattr(trainer, name), name
        setattr(trainer, name, value)
    trainer._entropy_bonus_enabled = trainer.entropy_coef != 0.0
    trainer._metrics["train"].clear()
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, dict(batch))
    loss.backward(**backward)
    trained = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    return loss.item(), {n: g for n, g in gradients(trainer.model).items() if n in trained}


def check(trainers, batch, settings, **backward) -> tuple[float, float, float]:
    """Compares loss, gradient and metrics. Returns stock's loss, the error of the gradient, and its size."""
    their_loss, theirs = loss_and_gradient(trainers[0], batch, settings, **backward)
    our_loss, ours = loss_and_gradient(trainers[1], batch, settings)
    error, size = relative(ours, theirs), norm(theirs)
    assert size > 1e-2, settings
    assert abs(our_loss - their_loss) <= 1e-5 * max(1, abs(their_loss)), settings
    assert error <= 1e-5, settings
    worst_error, name = worst(ours, theirs)
    assert worst_error <= 1e-4, (name, settings)
    stock_metrics, metrics = (trainer._metrics["train"] for trainer in trainers)
    assert metrics.keys() == stock_metrics.keys()
    for name, values in stock_metrics.items():
        torch.testing.assert_close(metrics[name], values, rtol=1e-4, atol=1e-4, msg=f"{name}, {settings}")
    return their_loss, error, size


@pytest.fixture(scope="module")
def stock_scores(trainers):
    """Stock's log-probs and entropies of the micro-batch, with their graph: the same for every objective."""
    stock, scores = trainers[0], []
    score = stock._get_per_token_logps_and_entropies

    @functools.wraps(score)
    def once(*args, **kwargs):
        if not scores:
            scores.append(score(*args, **kwargs))
        return scores[0]

    return once


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_cross_product(trainers, stock_scores, record_property, loss_type, level):
    """All 32 combinations of the switches, an adapter's the 16 with its reference; each changes the loss."""
    batch, losses, errors, sizes = inputs(trainers[0]), [], [], []
    batch["importance_sampling_ratio"] = correction(batch, "token" if loss_type == "vespo" else level)
    trainers[0]._get_per_token_logps_and_entropies = stock_scores
    untouched = {name: getattr(trainers[0], name) for setting in SWITCHES.values() for name in setting}
    for chosen in itertools.product([True] if is_adapted(trainers[0]) else [False, True], *[[False, True]] * 4):
        settings = {**untouched, **OFF, "loss_type": loss_type, "importance_sampling_level": level}
        for on, setting in zip(chosen, SWITCHES.values(), strict=True):
            settings |= setting if on else {}
        given = dict(batch)
        if not settings["use_vllm"]:
            del given["sampling_per_token_logps"], given["importance_sampling_ratio"]
        loss, error, size = check(trainers, given, settings, retain_graph=True)
        losses.append(loss)
        errors.append(error)
        sizes.append(size)
    record_property("gradient_error", f"{max(errors):.2e}, norms {min(sizes):.2g} to {max(sizes):.2g}")
    print(f"{loss_type} {level}: {max(errors):.1e}, norms {min(sizes):.2g} to {max(sizes):.2g}")
    assert len({f"{loss:.6g}" for loss in losses}) == len(losses) >= 16, "a switch that changes nothing"


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("mask", ["completion", "tool", "on_policy", "delta", "bias_correction"])
def test_masks_and_corrections(trainers, record_property, monkeypatch, mask, loss_type):
    batch = inputs(trainers[0])
    settings = {"loss_type": loss_type, "beta": 0.04, "entropy_coef": 0.1}
    generator = torch.Generator().manual_seed(4)
    if mask == "completion":  # what mask_truncated_completions makes of two rows
        batch["completion_mask"][[1, 4]] = 0
    elif mask == "tool":
        batch["tool_mask"] = (torch.rand(batch["completion_mask"].shape, generator=generator) < 0.6).long()
    elif mask == "on_policy":
        del batch["old_per_token_logps"]
    elif mask == "delta":
        for trainer in trainers:
            monkeypatch.setattr(trainer.args, "delta", 1.3)
    else:
        for trainer in trainers:
            monkeypatch.setattr(trainer.args, "use_bias_correction_kl", True)
    _, error, size = check(trainers, batch, settings)
    record_property("gradient_error", f"{error:.2e} of {size:.2g}")


def test_equal_entropies_of_responses_of_any_length():
    """The third response shares one token with both of the others, and the place behind it with the second alone."""
    ids = [torch.tensor(t) for t in ([5], [5, 7], [5, 8])]
    values = [torch.tensor(v) for v in ([1.0], [1.0 + 1e-6, 2.0], [1.0 - 1e-6, 2.0 + 1e-6])]
    equal = equal_where_same(values, [PromptGroup(torch.tensor([3]), ids)])
    assert [v.tolist() for v in equal] == [[1.0], [1.0, 2.0], [1.0, 2.0]]


def test_quantiles_between_equal_entropies(trainers):
    """The rows of a group begin with one distribution. Stock's batch gives it one entropy, bit for bit, so that all of
    these tokens are high or none."""
    batch, noted = inputs(trainers[0]), []
    for trainer in trainers:

        def note(entropies, mask, threshold, stock=trainer.get_high_entropy_mask):
            noted.append(entropies[mask.bool()].detach().sort().values)
            return stock(entropies, mask, threshold)

        trainer.get_high_entropy_mask = note
    settings = {"loss_type": "grpo", "entropy_coef": 0.1}
    check(trainers, batch, {**settings, "top_entropy_quantile": 0.99})
    theirs, ours = noted
    equal = (theirs[1:] == theirs[:-1]).nonzero().flatten().tolist()
    assert len(equal) >= 4, "three of a group of four, one of a group of two"
    assert torch.equal(ours[equal], ours[[i + 1 for i in equal]])
    for i in equal:
        check(trainers, batch, {**settings, "top_entropy_quantile": 1 - (i + 0.5) / (len(theirs) - 1)})


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_all_rows_masked(trainers, loss_type, entropy_coef):
    """Backward works, and every parameter's gradient is there and zero."""
    batch = inputs(trainers[0])
    batch["completion_mask"] = torch.zeros_like(batch["completion_mask"])
    settings = {"loss_type": loss_type, "beta": 0.04, "entropy_coef": entropy_coef}
    (their_loss, theirs), (our_loss, ours) = [loss_and_gradient(t, batch, settings) for t in trainers]
    assert our_loss == their_loss == 0
    assert all(g is not None and not g.any() for g in (*ours.values(), *theirs.values()))


@torch.no_grad()
def test_entropies_and_logps_are_zero_on_padding(trainers):
    batch = inputs(trainers[0])
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    for batch_size in (None, 3):  # the last slice is smaller
        found = [
            t._get_per_token_logps_and_entropies(t.model, ids, mask, 6, batch_size=batch_size, compute_entropy=True)
            for t in trainers
        ]
        for theirs, ours in zip(*found, strict=True):
            if theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
                assert not ours[batch["completion_mask"] == 0].any()
    found = [t._get_per_token_logps_and_entropies(t.model, ids, mask, 6) for t in trainers]
    assert [entropies for _, entropies, _ in found] == [None, None]
