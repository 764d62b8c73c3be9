"""GRPO with PEFT adapters, GRPOTrainer and ours: the same updates; the reference is the model without its adapter."""

import peft
import pytest
from trl import GRPOTrainer

from longstraw_dist.integrations.trl import LongStrawGRPOTrainer

from .models import adapted
from .reference import relative, worst
from .trl_training import load_policy, make, norm, one_shuffle, save_models, scripted_rollouts, train

ADAPTERS = {
    "lora": ("qwen3", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "all-linear": ("qwen2", {"target_modules": "all-linear"}),
    "experts": ("qwen3_moe", {"target_parameters": ["mlp.experts.gate_up_proj"], "target_modules": ["o_proj"]}),
}


def adapter(settings) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, lora_alpha=32, lora_dropout=0.0, task_type="CAUSAL_LM", **settings)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("case", ADAPTERS)
def test_parity(tmp_path, record_property, case, beta):
    kind, settings = ADAPTERS[case]
    folder = save_models(tmp_path, kind)
    options = {"beta": beta, "learning_rate": 1e-2, "gradient_checkpointing": True}
    if kind == "qwen3_moe":
        options["router_aux_loss_coef"] = 0.0
    runs = []
    for cls in (GRPOTrainer, LongStrawGRPOTrainer):
        arguments = {"peft_config": adapter(settings), "rollout_func": scripted_rollouts()}
        runs.append(train(cls, folder, arguments=arguments, **options))
    theirs, ours = runs
    assert ours.trainer.ref_model is None
    errors = [relative(g, r) for g, r in zip(ours.gradients, theirs.gradients, strict=True)]
    update, moved = relative(ours.update, theirs.update), norm(theirs.update)
    print(f"gradients {errors[0]:.1e}, later {max(errors):.1e}; update {update:.1e} of {moved:.2g}")
    record_property("gradient_error", errors)
    assert all("lora_" in n for n in ours.gradients[0])
    assert min(norm(g) for g in theirs.gradients) > 1e-2
    assert errors[0] <= 1e-5
    assert max(errors) <= 1e-4
    error, name = worst(ours.gradients[0], theirs.gradients[0])
    assert error <= 1e-4, name
    assert moved > 0.1
    assert update <= 1e-3
    if beta:
        ours_kl, their_kl = ([log["kl"] for log in run.trainer.state.log_history if "kl" in log] for run in runs)
        assert max(ours_kl) > 1e-4, "the adapter is the reference"
        assert ours_kl == pytest.approx(their_kl, rel=1e-3, abs=1e-6)


def test_an_adapter_trained_before_is_the_reference(tmp_path):
    """TRL keeps a copy of it under the name "ref"."""
    folder = save_models(tmp_path, "qwen3")
    adapted(load_policy(folder), target_modules=["q_proj", "v_proj"], lora_alpha=4).save_pretrained(folder / "adapter")
    updates, kls = [], []
    for cls in (GRPOTrainer, LongStrawGRPOTrainer):
        model = peft.PeftModel.from_pretrained(load_policy(folder), folder / "adapter", is_trainable=True)
        trainer = make(
            cls, folder, model=model, beta=0.04, learning_rate=1e-2, arguments={"rollout_func": scripted_rollouts()}
        )
        assert "ref" in trainer.model.peft_config
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        with one_shuffle():
            trainer.train()
        updates.append({n: p.detach() - before[n] for n, p in trainer.model.named_parameters() if n in before})
        kls.append([log["kl"] for log in trainer.state.log_history if "kl" in log])
    assert norm(updates[0]) > 0.1
    assert relative(updates[1], updates[0]) <= 1e-3
    assert kls[1] == pytest.approx(kls[0], rel=1e-3, abs=1e-6)
