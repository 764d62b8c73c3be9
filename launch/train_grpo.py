"""Trains with exact shared-prompt GRPO. Options are TRL's own, from a recipe or the command line:

    accelerate launch --config_file configs/accelerate/zero3.yaml launch/train_grpo.py --config configs/recipes/X.yaml

Behaves like `trl grpo`: the same data sets (local folders of JSONL too), reward functions by import path from the
current folder, PEFT and quantization options. Added to it: a run of several processes is refused unless they train
together and hold shards (`check_sharding`); one line a step; at the end a table of what each step cost, and
`reward.png` in the output folder.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from datasets import load_dataset
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)

from longstraw_dist.integrations.trl import LongStrawGRPOConfig, LongStrawGRPOTrainer
from longstraw_dist.wrapping import shard_size

matplotlib.use("Agg")

if os.environ.get("DS_ACCELERATOR") == "cpu":
    import deepspeed

    # DeepSpeed would compile a shared-memory all-reduce while it starts: a minute, and a C++ compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@dataclass
class GRPOScriptArguments(ScriptArguments):
    """
    Args:
        reward_funcs (`list[str]`):
            Import paths of reward functions, looked up from the current folder first, e.g. `"my_lib.rewards.exact"`.
    """

    reward_funcs: list[str] = field(
        default_factory=list,
        metadata={"help": "Import paths of reward functions, looked up from the current folder first."},
    )


def parser() -> TrlParser:
    kinds: Any = (GRPOScriptArguments, LongStrawGRPOConfig, ModelConfig, DatasetMixtureConfig)
    return TrlParser(kinds)


def load_reward(path: str) -> Callable:
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(
            f"reward_funcs: {path!r} is no import path. Write module.function, e.g. launch.rewards.short_answer."
        )
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        error.add_note(f"reward_funcs: {path!r} could not be imported; looked up first in {os.getcwd()}.")
        raise
    if not callable(function):
        raise ValueError(f"reward_funcs: {path!r} is a {type(function).__name__}, not a function.")
    return function


def load_splits(name: str, config: str | None, streaming: bool) -> Any:
    """The splits of a folder of JSONL, or of a hub id; what is neither is said so beside the error of `datasets`."""
    if Path(name).is_file():
        raise ValueError(f"dataset_name: {name!r} is a file. Name its folder: train.jsonl in it is the split train.")
    try:
        return load_dataset(name, name=config, streaming=streaming)
    except Exception as error:
        if not Path(name).exists():
            error.add_note(f"dataset_name: there is no folder {name!r} in {os.getcwd()}: taken for a hub id.")
        raise


def pick_split(dataset: Any, split: str, option: str) -> Any:
    if split not in dataset:
        raise ValueError(f"{option}: the data has no split {split!r}, only {', '.join(sorted(dataset))}.")
    return dataset[split]


def check_sharding(model: torch.nn.Module, accelerator: Accelerator) -> str:
    """Raises `RuntimeError` if the launched processes train apart or hold whole parameters; else says how they train.

    A launcher can start N processes that each believe to be alone: accelerate on a CPU does, where its configuration
    and the trainer's arguments disagree. The run looks healthy, and trains N models. Costs one all-reduce of a number.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    world = dist.get_world_size() if dist.is_initialized() else 1
    kind = accelerator.distributed_type
    # accelerate makes kind NO of an FSDP2 file on a CPU: several processes, and no gradient passes between them.
    if not launched == world == accelerator.num_processes or (world > 1 and kind == DistributedType.NO):
        raise RuntimeError(
            f"{launched} processes were launched, torch.distributed joins {world}, accelerate trains with "
            f"{accelerator.num_processes} (distributed type {kind.value}): they would train apart. Start with a file "
            "of configs/accelerate (FSDP2: on GPUs only); on a CPU with DS_ACCELERATOR=cpu, ddp_backend: gloo and no "
            "mixed_precision in that file, as launch/quickstart.sh does."
        )
    if world == 1:
        return "1 process"
    if kind == DistributedType.DEEPSPEED and accelerator.state.deepspeed_plugin.zero_stage < 3:
        return f"{world} processes, DeepSpeed ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    if kind not in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        return f"{world} processes, a whole replica each ({kind.value})"

    sizes = {name: shard_size(p) for name, p in model.named_parameters()}
    # A parameter with fewer rows than ranks lies whole on one of them; what ZeRO-3 cuts is at most padded to one more.
    whole = [name for name, (local, full) in sizes.items() if full >= 1024 and local >= full]
    if whole:
        raise RuntimeError(
            f"{len(whole)} of {len(sizes)} parameters, first {whole[0]}, lie whole on each of the {world} processes, "
            f"though accelerate reports {kind.value}. Start with a file of configs/accelerate."
        )
    local, full = (sum(part) for part in zip(*sizes.values(), strict=True))
    held = torch.tensor(local, device=accelerator.device)
    dist.all_reduce(held)
    if held.item() < full:
        raise RuntimeError(f"The {world} processes hold {held.item()} of {full} parameter elements: some are lost.")
    stage = "ZeRO-3" if kind == DistributedType.DEEPSPEED else "FSDP2"
    return f"{world} processes, {stage}: this one holds {local:,} of {full:,} parameters"


class RefuseUnsharded(TrainerCallback):
    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.accelerator.print(check_sharding(model, self.accelerator))


class OneLineProgress(ProgressCallback):
    """The Trainer's bar, with the few numbers that one watches in place of the whole dictionary of metrics."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        kind = "eval_" if "eval_reward" in logs else ""
        if state.is_world_process_zero and f"{kind}reward" in logs:
            shown = {"reward": "reward", "reward_std": "std", "entropy": "entropy", "kl": "kl", "step_time": "seconds"}
            line = "  ".join(f"{label} {logs[kind + key]:.3g}" for key, label in shown.items() if kind + key in logs)
            tqdm.write(f"{'eval' if kind else 'step'} {state.global_step:>4}  {line}")


# Column title -> metric, and how it is written. `kl` exists only with beta > 0.
STEP_COLUMNS = {
    "reward": ("reward", "{:.3f}"),
    "kl": ("kl", "{:.4f}"),
    "entropy": ("entropy", "{:.2f}"),
    "seconds": ("step_time", "{:.1f}"),
    "all-gathers": ("longstraw/all_gathers", "{:.0f}"),
    "reduce-scatters": ("longstraw/reduce_scatters", "{:.0f}"),
    "all-reduces": ("longstraw/all_reduces", "{:.0f}"),
    "prompt tokens run": ("longstraw/prompt_tokens_captured", "{:,.0f}"),
    "prompt tokens not run again": ("longstraw/prompt_tokens_saved", "{:,.0f}"),
}


def step_table(steps: list[dict], rows: int = 24) -> Table:
    """At most `rows` of the logged steps, evenly spaced. The counts are this process's, of its last update."""
    columns = {title: column for title, column in STEP_COLUMNS.items() if title != "kl" or "kl" in steps[0]}
    table = Table(title="steps")
    for title in ("step", *columns):
        table.add_column(title, justify="right")
    for log in steps[:: -(-len(steps) // rows)]:
        table.add_row(str(log["step"]), *(form.format(log[key]) for key, form in columns.values()))
    return table


def run_table(steps: list[dict], prompt_grad: str) -> Table:
    """What ran and what it took, in this process: bytes are the highest of all steps, seconds the mean of a step."""

    def mean(key: str, logs: list[dict] = steps) -> float:
        return sum(log[key] for log in logs) / len(logs)

    def gib(kind: str) -> str:
        return f"{max(log[f'longstraw/{kind}_bytes'] for log in steps) / 2**30:.2f} GiB"

    third = -(-len(steps) // 3)
    seconds = (
        f"{name} {mean(f'longstraw/seconds/{name}'):.1f}" for name in ("rollout", "score", "forward", "backward")
    )
    table = Table(title="run", show_header=False)
    table.add_row("prompt_grad", f"{prompt_grad} ({steps[-1]['longstraw/prompt_grad_layers']:.0f} layers exact)")
    table.add_row(
        "reward",
        f"{mean('reward', steps[:third]):.3f} in the first third, {mean('reward', steps[-third:]):.3f} in the last",
    )
    table.add_row("seconds of a step", f"{mean('step_time'):.1f}: {', '.join(seconds)}")
    table.add_row("kept for backward", f"hidden states {gib('hidden')}, prompt state {gib('state')}")
    table.add_row("peak memory of this process", gib("peak"))
    return table


def draw_reward(steps: list[dict], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    numbers = [log["step"] for log in steps]
    reward, spread = ([log[key] for log in steps] for key in ("reward", "reward_std"))
    axes.plot(numbers, reward, marker="o", markersize=3)
    low, high = ([r + sign * s for r, s in zip(reward, spread, strict=True)] for sign in (-1, 1))
    axes.fill_between(numbers, low, high, alpha=0.15)
    axes.set(xlabel="optimizer step", ylabel="mean reward (band: std)", title="reward")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    try:
        parsed = parser().parse_args_and_config(fail_with_unknown_args=True)
    except ValueError as error:
        # accelerate asks for a group that one process never made; on a CPU it starts one without a word.
        if "WORLD_SIZE" not in os.environ and "process group" in str(error):
            error.add_note(
                "One process was started, and ddp_backend is for several: leave it out (on a CPU use_cpu: true), or "
                "start with accelerate launch and a file of configs/accelerate."
            )
        raise
    script_args, training_args, model_args, dataset_args = parsed
    if not script_args.reward_funcs:
        raise ValueError("reward_funcs is empty: name at least one, e.g. --reward_funcs launch.rewards.short_answer.")
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    if dataset_args.datasets:
        dataset = get_dataset(dataset_args)
    elif script_args.dataset_name:
        dataset = load_splits(script_args.dataset_name, script_args.dataset_config, script_args.dataset_streaming)
    else:
        raise ValueError("No data: set dataset_name (a local folder of JSONL, or a hub id) or datasets in the recipe.")

    trainer = LongStrawGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[load_reward(path) for path in script_args.reward_funcs],
        args=training_args,
        train_dataset=pick_split(dataset, script_args.dataset_train_split, "dataset_train_split"),
        eval_dataset=pick_split(dataset, script_args.dataset_test_split, "dataset_test_split")
        if training_args.eval_strategy != "no"
        else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.add_callback(RefuseUnsharded(trainer.accelerator))
    if not training_args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(OneLineProgress())

    resume: Any = training_args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resume in ("true", "True") else resume)  # a word on a command line
    trainer.save_model(training_args.output_dir)
    steps = [log for log in trainer.state.log_history if "reward" in log]
    if trainer.accelerator.is_main_process and steps:
        console = Console(width=None if sys.stdout.isatty() else 119)  # a file has no width of its own
        console.print(step_table(steps), run_table(steps, training_args.prompt_grad))
        draw_reward(steps, Path(training_args.output_dir) / "reward.png")
        print(f"model and reward.png: {training_args.output_dir}")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)

    # Ranks that leave without waiting for each other were seen to abort at exit.
    trainer.accelerator.wait_for_everyone()
    trainer.end()


if __name__ == "__main__":
    main()
