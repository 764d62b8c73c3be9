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


def end_nowhere_on_rank_1(out, generator, trainer) -> None:
    """All completions of the second process are truncated, and some of the first's."""
    if trainer.accelerator.process_index == 1:
        out["completion_ids"] = [[5 + i % 40] * 6 for i in range(len(out["completion_ids"]))]


def differ_in_prompt(out, generator, trainer) -> None:
    out["prompt_ids"] = [[*ids, 3 + i % 2] for i, ids in enumerate(out["prompt_ids"])]


def sample_elsewhere(out, generator, trainer) -> None:
    """Log-probs as of another engine, near those of a policy that knows nothing. One of ten is not known."""
    out["logprobs"] = [
        [None if x > -3.6 else x for x in (0.4 * torch.randn(len(ids), generator=generator) - 4.1).tolist()]
        for ids in out["completion_ids"]
    ]


class Engine:
    """In place of vLLM, which a `rollout_func` would ask: its weights are kept in sync, and nothing else."""

    synced = 0

    def sync_weights(self):
        self.synced += 1


def simulate_vllm(trainer) -> None:
    trainer.use_vllm, trainer._last_loaded_step, trainer.vllm_generation = True, -1, Engine()
