"""What a rollout may bring beside completions, added to the scripted ones: `changed(mask_some_tokens, ...)`."""

from collections.abc import Callable

import torch

from .trl_training import scripted_rollouts


def changed(*changes: Callable, width: int = 6) -> Callable:
    """A `rollout_func`: the scripted completions, then `change(out, generator, trainer)` of each, in order."""
    scripted, generator = scripted_rollouts(width), torch.Generator().manual_seed(5)

    def rollout(batch, trainer):
        out = scripted(batch, trainer)
        for change in changes:
            change(out, generator, trainer)
        return out

    return rollout


def mask_some_tokens(out, generator, trainer) -> None:
    """An environment wrote two of five tokens, and all of the third row of each four."""
    out["env_mask"] = [
        (torch.rand(len(ids), generator=generator) < (0 if i % 4 == 2 else 0.6)).long().tolist()
        for i, ids in enumerate(out["completion_ids"])
    ]


def differ_in_prompt(out, generator, trainer) -> None:
    out["prompt_ids"] = [[*ids, 3 + i % 2] for i, ids in enumerate(out["prompt_ids"])]


@torch.no_grad()
def sample_elsewhere(out, generator, trainer) -> None:
    """Log-probs as of another engine: the policy's own and some noise. One of ten is not known."""
    out["logprobs"] = []
    for prompt, completion in zip(out["prompt_ids"], out["completion_ids"], strict=True):
        ids = torch.tensor([prompt + completion])
        logits = trainer.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        logps = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        logps += 0.4 * torch.randn(logps.shape, generator=generator)
        unknown = torch.rand(logps.shape, generator=generator) < 0.1
        out["logprobs"].append([None if none else x for none, x in zip(unknown, logps.tolist(), strict=True)])


class Engine:
    """In place of vLLM, which a `rollout_func` would ask: its weights are kept in sync, and nothing else."""

    synced = 0

    def sync_weights(self):
        self.synced += 1


def simulate_vllm(trainer) -> None:
    trainer.use_vllm, trainer._last_loaded_step, trainer.vllm_generation = True, -1, Engine()
