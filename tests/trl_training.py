"""Trains with TRL's GRPOTrainer or with ours, and keeps what they are compared by: `train(GRPOTrainer, folder, ...)`.

The same rows reach both: the same shuffle, and either TRL's own generation or completions that depend on nothing but
a row's place in the global batch. The reference model is not the policy at its start, so that the KL term counts.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from longstraw_dist.integrations.trl import LongStrawGRPOConfig, LongStrawGRPOTrainer
from longstraw_dist.integrations.trl.rows import shuffle_groups
from longstraw_dist.wrapping import is_zero3

from .models import tiny
from .trl_fixtures import prompts, reward, tokenizer

CONFIGS: dict[type, type] = {GRPOTrainer: GRPOConfig, LongStrawGRPOTrainer: LongStrawGRPOConfig}
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "gradient_accumulation_steps": 2,
    "num_iterations": 2,
    "max_completion_length": 6,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "max_grad_norm": 0.0,  # clipping would hide a gradient of the wrong size
    "bf16": False,  # TRL's default is True
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}
APART = ("indexer", "visual")  # parameters without a gradient, stock's too
CHUNKS = {"prompt_chunk_size": 7, "responses_per_replay": 3, "head_chunk_size": 4}  # several of each


@dataclass
class Run:
    trainer: Any
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # before each optimizer step
    update: dict[str, Tensor] = field(default_factory=dict)  # what the steps changed the weights by
    batches: list[dict[str, Any]] = field(default_factory=list)  # the inputs of each micro-batch
    windows: list[int] = field(default_factory=list)  # into how many micro-batches the step of each is divided
    log: list[dict[str, Any]] = field(default_factory=list)  # what was logged
    gaps: list[float] = field(default_factory=list)  # between the entropies on both sides of each quantile

    def column(self, name: str) -> Tensor:
        return torch.cat([batch[name].flatten() for batch in self.batches])


def save_models(
    folder: Path, kind: str = "llama", tied: bool = False, dtype: torch.dtype = torch.float32, tok=None, **overrides
) -> Path:
    """Two ordinary folders, `policy` and `reference`, with weights that differ by 5 %."""
    tok = tok or tokenizer()
    policy, noise = (tiny(kind, tied, seed=seed, vocab_size=len(tok), **overrides) for seed in (0, 1))
    for name in ("policy", "reference"):
        policy.to(dtype).save_pretrained(folder / name)
        tok.save_pretrained(folder / name)
        with torch.no_grad():
            for p, other in zip(policy.parameters(), noise.parameters(), strict=True):
                p.add_(0.05 * other)
    return folder


def load_policy(folder: Path, dtype: torch.dtype = torch.float32):
    model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=dtype)
    model.config._name_or_path = str(folder / "reference")  # where TRL loads the reference model from
    return model


def make(cls: type, folder: Path, dataset=None, model=None, dtype=torch.float32, arguments=None, **options):
    """A trainer of `cls`, which records. `arguments` go to the constructor, `options` into its config."""
    options = {**OPTIONS, "output_dir": str(folder / cls.__name__), **options}
    if cls is LongStrawGRPOTrainer:
        options = {**CHUNKS, **options}
    arguments = {"reward_funcs": reward, "processing_class": tokenizer(), **(arguments or {})}
    recording = type(f"Recording{cls.__name__}", (Recording, cls), {})
    return recording(
        model=load_policy(folder, dtype) if model is None else model,
        args=CONFIGS[cls](**options),
        train_dataset=prompts() if dataset is None else dataset,
        **arguments,
    )


class Recording:
    """Notes each micro-batch's inputs, and how clear it is which entropies are high."""

    run: Run | None = None

    def _compute_loss(self, model, inputs):
        if self.run is not None and self.model.training:
            self.run.batches.append(inputs)
            self.run.windows.append(self.current_gradient_accumulation_steps)
        return super()._compute_loss(model, inputs)

    def get_high_entropy_mask(self, entropies, mask, threshold):
        high = super().get_high_entropy_mask(entropies, mask, threshold)
        if self.run is not None:
            end = entropies.new_full((1,), math.inf)
            low, top = (torch.cat([x, end]).min() for x in (entropies[high], -entropies[mask.bool() & ~high]))
            self.run.gaps.append(self.accelerator.gather(torch.stack([low, top])).view(-1, 2).amin(0).sum().item())
        return high


class KeepGradients(TrainerCallback):
    """Notes the full gradients, averaged over ranks and micro-batches, before each optimizer step."""

    def __init__(self, run: Run):
        self.run = run

    def on_train_begin(self, args, state, control, **kwargs):
        if self.run.trainer.is_deepspeed_enabled:  # accelerate steps the engine right behind the last backward
            engine = self.run.trainer.deepspeed
            step = engine.step

            def keep_and_step(*args, **kwargs):
                self.keep()
                return step(*args, **kwargs)

            engine.step = keep_and_step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if not self.run.trainer.is_deepspeed_enabled:
            self.keep()

    def keep(self) -> None:
        if self.run.trainer.is_deepspeed_enabled:
            from deepspeed.utils import safe_get_full_grad

            read = safe_get_full_grad
        else:
            read = full_gradient
        policy = policy_of(self.run.trainer)
        found = {
            n: read(p)
            for n, p in policy.named_parameters()
            if p.requires_grad and not any(part in n for part in APART)
        }
        self.run.gradients.append({n: g.clone() for n, g in found.items()})


def full_gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return full(p.grad)


def full(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def policy_of(trainer) -> nn.Module:
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)


def weights_of(trainer) -> dict[str, Tensor]:
    """Full weights, in float32, at least those that are trained; a collective under an engine that shards."""
    if trainer.is_deepspeed_enabled:
        from deepspeed.utils import safe_get_full_fp32_param

        trained = {n: p for n, p in policy_of(trainer).named_parameters() if p.requires_grad}
        return {n: safe_get_full_fp32_param(p).clone() for n, p in trained.items()}
    return whole_weights(policy_of(trainer))


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The same of a model that has no optimizer."""
    if any(is_zero3(p) for p in model.parameters()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return {n: p.detach().float().clone() for n, p in model.named_parameters()}
    return {n: full(p.detach()).float().clone() for n, p in model.named_parameters()}


@contextlib.contextmanager
def one_shuffle() -> Iterator[None]:
    """Both trainers shuffle by group, and draw the same numbers for it."""
    before = grpo_trainer.shuffle_sequence_dict
    grpo_trainer.shuffle_sequence_dict = shuffle_groups
    try:
        yield
    finally:
        grpo_trainer.shuffle_sequence_dict = before


def scripted_rollouts(width: int = 6):
    """A `rollout_func` whose completions depend on a row's place in the global batch, not on who generates it."""
    calls = 0

    def rollout(batch: list[str], trainer) -> dict[str, list]:
        nonlocal calls
        tok, calls = trainer.processing_class, calls + 1
        completions = []
        for i in range(len(batch)):
            row = trainer.accelerator.process_index * len(batch) + i
            generator = torch.Generator().manual_seed(1000 * calls + row)
            length = int(torch.randint(1, width + 1, (), generator=generator))
            ids = torch.randint(3, len(tok), (length,), generator=generator).tolist()
            completions.append(ids if length == width else [*ids, tok.eos_token_id])
        ids = [tok(text)["input_ids"] for text in batch]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    return rollout


def train(cls: type, folder: Path, resume: str | None = None, prepare: Callable | None = None, **options) -> Run:
    """`resume` is the checkpoint to go on from; the update is from the first weights all the same. `prepare(trainer)`
    comes before it trains."""
    trainer = make(cls, folder, **options)
    if prepare is not None:
        prepare(trainer)
    run = Run(trainer)
    trainer.run = run
    trainer.add_callback(KeepGradients(run))
    before = load_file(folder / "policy" / "model.safetensors")  # ZeRO-3 would partition a loaded model
    adapters = {n: p.detach().float().clone() for n, p in trainer.model.named_parameters() if "lora_" in n}
    before = adapters or before
    with one_shuffle():
        trainer.train(resume_from_checkpoint=resume)
    run.update = {n: w - before[n].float() for n, w in weights_of(trainer).items() if n in before}
    run.log = list(trainer.state.log_history)
    return run


def norm(tensors: dict[str, Tensor]) -> float:
    return float(sum(t.double().square().sum() for t in tensors.values()) ** 0.5)
