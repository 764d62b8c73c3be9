"""The benchmark models: Qwen3, 4 layers of hidden 256, a real vocabulary, or its like of the hybrid Qwen3.5 (three
layers of the gated delta rule to one of attention), and a prompt group for them.

The weights are random and spread (singular values around 1), so that attention looks far and the prompt's state
matters: with a small initialization every gradient would agree with every other. The head is tied, as in the small
Qwen3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from longstraw_dist import LongStrawConfig, PromptGroup, attach

SETTINGS: dict[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 65_536,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
DELTA_RULE = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def qwen3(
    seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu", **overrides
) -> transformers.PreTrainedModel:
    """A random Qwen3 causal LM in training mode. `overrides` go into its config."""
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**SETTINGS, **overrides}))
    spread(model, seed)
    moved: nn.Module = model  # its own `to` is not typed
    moved.to(device=device, dtype=dtype)
    return model.train()


def qwen3_5_text(seed: int = 0, **overrides) -> transformers.PreTrainedModel:
    """A random causal LM of Qwen3.5's text model, float32. Its matrices are half as large: recurrences in float32 are
    ill-conditioned at large weights, the stock ones too."""
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**{**SETTINGS, **DELTA_RULE, **overrides}))
    spread(model, seed, size=0.5)
    return model.train()


MODELS = {"qwen3": qwen3, "qwen3_5_text": qwen3_5_text}


@torch.no_grad()
def spread(model: nn.Module, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.copy_(size * noise * p.shape[-1] ** -0.5 if p.dim() > 1 else 1 + 0.3 * noise)


def prompt_group(prompt: int, response: int, responses: int, seed: int = 0, vocabulary: int = 32_768) -> PromptGroup:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, vocabulary, (n,), generator=generator) for n in (prompt, *[response] * responses)]
    return PromptGroup(ids[0], ids[1:])


def weights(group: PromptGroup, seed: int = 1) -> list[Tensor]:
    """What the loss weighs each log-prob with: stands for advantages."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(r), generator=generator).to(r.device) for r in group.response_ids]


def target_logps(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probs of `targets` `[..., R]` from the last R + 1 logits of each row, as a trainer computes them."""
    logits = logits[..., :-1, :].float()
    return logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)


def step_rows(model: nn.Module, group: PromptGroup, w: list[Tensor]) -> float:
    """Stock, response by response: forward and backward of prompt + response, one at a time. Returns the loss."""
    total = 0.0
    for response, w_ in zip(group.response_ids, w, strict=True):
        row = torch.cat([group.prompt_ids, response])[None]
        logits = model(input_ids=row, use_cache=False, logits_to_keep=len(response) + 1).logits
        loss = (w_ * target_logps(logits, response[None])[0]).sum()
        del logits
        loss.backward()
        total += float(loss.detach())
    return total


def step_together(model: nn.Module, group: PromptGroup, w: list[Tensor]) -> float:
    """Stock, all rows (of one length) in one batch. Returns the loss."""
    responses = torch.stack(list(group.response_ids))
    rows = torch.cat([group.prompt_ids.expand(len(responses), -1), responses], 1)
    logits = model(input_ids=rows, use_cache=False, logits_to_keep=responses.shape[1] + 1).logits
    loss = (torch.stack(w) * target_logps(logits, responses)).sum()
    del logits
    loss.backward()
    return float(loss.detach())


def step_packed(model: nn.Module, group: PromptGroup, w: list[Tensor]) -> float:
    """Ours: one packed forward and backward. Returns the loss."""
    out = model(prompt_groups=[group])
    loss = sum((w_ * t).sum() for w_, t in zip(w, out.logps, strict=True))
    del out
    loss.backward()
    return float(loss.detach())


Step = Callable[[nn.Module, PromptGroup, list[Tensor]], float]


def prepare(
    step: Step, config: LongStrawConfig | None = None, checkpointed: bool = False, kind: str = "qwen3", **overrides
) -> Any:
    """A model for the step, attached or checkpointed, after a short one: thread pools, workspaces and a first import
    are not the measured step's."""
    model = MODELS[kind](**overrides)
    if config is not None:
        attach(model, config)
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    group = prompt_group(16, 2, 2, vocabulary=model.config.vocab_size)
    step(model, group, weights(group))
    model.zero_grad()
    return model


def about(layers: int, kind: str = "qwen3") -> str:
    return f"{kind} of {layers} layers, hidden 256, vocabulary 32,768, float32"


@dataclass
class Case:
    """A step of one model on one group."""

    model: Any
    step: Step
    group: PromptGroup

    def __post_init__(self):
        self.w = weights(self.group)

    def __call__(self) -> float:
        return self.step(self.model, self.group, self.w)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The model's gradients, taken off it."""
    taken = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return taken


def compare(grads: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, float]:
    """Of the whole gradients: relative error |g - g_ref| / |g_ref|, and cosine."""
    assert grads.keys() == reference.keys()
    difference = dot = square = square_ref = 0.0
    for name, r in reference.items():
        g, r = grads[name].double(), r.double()
        difference += float((g - r).square().sum())
        dot += float((g * r).sum())
        square += float(g.square().sum())
        square_ref += float(r.square().sum())
    return (difference / square_ref) ** 0.5, dot / (square * square_ref) ** 0.5
