"""Seconds of a whole GRPO step in TRL, rollout and optimizer included: LongStrawGRPOTrainer against GRPOTrainer.

    run with   python -m benchmarks.trl_step [--model quickstart/SmolLM2-135M-Instruct --passes 3]
    try it     python -m benchmarks.trl_step --prompt 48 --responses 2 --tokens 4 --passes 1 --no-save

One process, generation in it, float32, every completion `--tokens` long. `stock` is TRL's default: all rows of the
group in one batch, checkpointed. Every trainer is built once; pass by pass each takes one step of `train()` in turn,
from the same seed, and the first pass warms up. Rollout is `_generate_and_score_completions`, update is all else of
the step. The gradient norm of the first pass tells that the trainers do the same. Bar: 3.5 times `stock`.

`stock, not checkpointed` is left out by default: its graph of 8 rows of 1,032 tokens takes about 20 GB.
"""

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from longstraw_dist.integrations.trl import LongStrawGRPOConfig, LongStrawGRPOTrainer

from .conditions import RESULTS, conditions, show, verdict, write
from .timing import judged, options

LICENSE = Path(__file__).parent.parent / "LICENSE"
BAR = 3.5  # of the whole step, over stock
UPDATE_BAR = 1.2  # of the update that reads the rollout's capture, over one that runs the prompt
OURS: tuple[type, type] = (LongStrawGRPOTrainer, LongStrawGRPOConfig)
THEIRS: tuple[type, type] = (GRPOTrainer, GRPOConfig)
ROWS = {"per_device_train_batch_size": 1}  # and as many accumulation steps as there are responses
PLAIN = {"gradient_checkpointing": False}
CASES: dict[str, tuple[tuple[type, type], dict[str, Any]]] = {
    "stock": (THEIRS, {}),
    "stock, not checkpointed": (THEIRS, PLAIN),
    "stock row by row": (THEIRS, ROWS),
    "stock row by row, not checkpointed": (THEIRS, ROWS | PLAIN),
    "ours": (OURS, {}),
    "ours, prompts not kept": (OURS, {"rollout_from_capture": False}),
}


def text_prompts(tokenizer, tokens: int) -> Dataset:
    """Four prompts of so many tokens, of the LICENSE."""
    ids = tokenizer(LICENSE.read_text()).input_ids
    texts = [tokenizer.decode(ids[begin : begin + tokens]) for begin in range(0, 1200, 300)]
    for text in texts:
        assert abs(len(tokenizer(text).input_ids) - tokens) <= 3, len(tokenizer(text).input_ids)
    return Dataset.from_dict({"prompt": texts})


def reward(completions: list[str], **kwargs) -> list[float]:
    """A random number for each text, always the same."""
    return [random.Random(text).random() for text in completions]


class Clock(TrainerCallback):
    """Seconds of each optimizer step of a trainer, and of the rollout in it: CPU seconds where one thread runs."""

    def __init__(self, trainer: Any):
        self.now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        self.steps: list[float] = []
        self.rollouts: list[float] = []
        self.rollout = self.begin = 0.0
        generate = trainer._generate_and_score_completions

        def timed(*args, **kwargs):
            begin = self.now()
            out = generate(*args, **kwargs)
            self.rollout += self.now() - begin
            return out

        trainer._generate_and_score_completions = timed
        trainer.add_callback(self)

    def on_step_begin(self, args, state, control, **kwargs):
        self.begin, self.rollout = self.now(), 0.0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(self.now() - self.begin)
        self.rollouts.append(self.rollout)


def build(case: str, args, tokenizer, dataset: Dataset, folder: str) -> Any:
    (trainer, config), extra = CASES[case]
    settings = {
        "output_dir": folder,
        "num_generations": args.responses,
        "per_device_train_batch_size": args.responses,
        "max_completion_length": args.tokens,
        "generation_kwargs": {"min_new_tokens": args.tokens},
        "temperature": 1.0,
        "beta": 0.0,
        "max_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        **extra,
    }
    steps = args.responses // settings["per_device_train_batch_size"]
    return trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=reward,
        args=config(**settings, gradient_accumulation_steps=steps, steps_per_generation=steps),
        train_dataset=dataset,
        processing_class=tokenizer,
    )


def main() -> None:
    parser = options(__doc__, prompt=1000, responses=8, tokens=32, passes=3)
    parser.add_argument("--model", type=Path, default=Path("quickstart/SmolLM2-135M-Instruct"))
    parser.add_argument("--cases", nargs="+", default=[case for case in CASES if case != "stock, not checkpointed"])
    parser.add_argument("--no-save", action="store_true", help=f"leave {RESULTS.name}/trl_step.csv as it is")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    dataset = text_prompts(tokenizer, args.prompt)
    with tempfile.TemporaryDirectory() as folder:
        trainers = {case: build(case, args, tokenizer, dataset, folder) for case in args.cases}
        clocks = {case: Clock(trainer) for case, trainer in trainers.items()}
        logs: dict[str, dict] = {}  # of the first pass
        for number in range(args.passes + 1):
            for case, trainer in trainers.items():
                transformers.set_seed(number)
                trainer.train()
                log = next(log for log in trainer.state.log_history if "grad_norm" in log)
                logs.setdefault(case, log)
                assert log["completions/mean_length"] == args.tokens, log
                print(f"pass {number}, {case}: {clocks[case].steps[-1]:.2f} s", flush=True)

    rows = []
    median = {case: statistics.median(clock.steps[1:]) for case, clock in clocks.items()}
    for case, clock in clocks.items():
        rollout = statistics.median(clock.rollouts[1:])
        update = statistics.median(s - r for s, r in zip(clock.steps[1:], clock.rollouts[1:], strict=True))
        row = {"case": case, "seconds": f"{median[case]:.3f}", "rollout": f"{rollout:.3f}", "update": f"{update:.3f}"}
        for base in args.cases:
            if base.startswith("stock"):
                row[f"over {base}"] = f"{median[base] / median[case]:.2f}"
        rows.append(row | {"grad_norm": f"{float(logs[case]['grad_norm']):.5g}"})
    comments = [
        f"{args.model.name}, float32; one GRPO step: a prompt of {args.prompt} tokens of LICENSE, {args.responses} "
        f"completions of {args.tokens}; medians of {args.passes} interleaved passes; grad_norm of the first pass; "
        f"{judged()}",
        conditions(),
    ]
    if {"stock", "ours"} <= median.keys():
        ratio = median["stock"] / median["ours"]
        comments.append(verdict("ours over stock", ratio, BAR))
    updates = {row["case"]: float(row["update"]) for row in rows}
    if {"ours", "ours, prompts not kept"} <= updates.keys():
        ratio = updates["ours, prompts not kept"] / updates["ours"]
        comments.append(verdict("update without over with the rollout's capture", ratio, UPDATE_BAR))
    show(rows, comments)
    if not args.no_save:
        write(RESULTS / "trl_step.csv", rows, comments)


if __name__ == "__main__":
    main()
