"""Seconds of forward and backward of a whole group on a real model: exact against stock rows, one by one.

    run with   python -m benchmarks.real_step [--model quickstart/SmolLM2-135M-Instruct --prompt 1000 --passes 5]
    try it     python -m benchmarks.real_step --prompt 64 --responses 2 --tokens 4 --passes 1 --no-save

In one process, and on two gloo ranks under ZeRO-3 (tests/distributed), each with a group of its own and one thread.
Stock runs one row at a time and accumulates gradients. Prompt and responses are pieces of this repository's LICENSE.
Both models have the same weights and run in turn, pass by pass; the first pass warms up, and in it the whole gradients
are compared (averaged over the ranks). A rank's seconds end when all ranks are done. The optimizer's step is not
timed, and changes nothing (learning rate 0). Bar: exact 4 times as fast as stock, in either case.
"""

import argparse
import functools
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from longstraw_dist import LongStrawConfig, PromptGroup, attach
from tests.distributed.launch import Ranks
from tests.distributed.wrappings import Wrapped, wrap

from . import models
from .conditions import RESULTS, conditions, show, verdict, write
from .flops import Shape, ours, stock
from .real_model import load

LICENSE = Path(__file__).parent.parent / "LICENSE"
BAR, ERROR = 4.0, 1e-5
SGD = functools.partial(torch.optim.SGD, lr=0.0)
OURS = {"exact": LongStrawConfig(), "exact, graphs kept": LongStrawConfig(activation_budget=2**40)}
STOCK = "stock rows"


def text_group(folder: Path, prompt: int, responses: int, tokens: int, rank: int) -> PromptGroup:
    """Pieces of the LICENSE, other ones on each rank."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(LICENSE.read_text(), return_tensors="pt").input_ids[0].roll(-500 * rank)
    assert len(ids) >= prompt + responses * tokens, len(ids)
    return PromptGroup(ids[:prompt], list(ids[prompt : prompt + responses * tokens].split(tokens)))


def build(case: str, folder: Path, responses: int, engine: str | None) -> Wrapped:
    config, accumulation = (OURS[case], 1) if case in OURS else (None, responses)
    if engine is not None:
        return wrap(engine, lambda: load(folder), config, SGD, accumulation)
    model = load(folder)
    if config is not None:
        attach(model, config)
    return Wrapped(model, model, SGD(model.parameters()), accumulation, None)


def step(wrapped: Wrapped, group: PromptGroup, w: list[torch.Tensor]) -> float:
    """Forward and backward of `sum_i w_i logp_i / responses`, packed or row by row. Returns the sum."""
    if wrapped.accumulation == 1:
        with wrapped.micro_batch_of_step():
            out = wrapped(prompt_groups=[group])
            loss = torch.stack([(w_ * logps).sum() for w_, logps in zip(w, out.logps, strict=True)]).sum()
            wrapped.backward(loss / len(w))
        return float(loss.detach())
    total = 0.0
    for response, w_ in zip(group.response_ids, w, strict=True):
        row = torch.cat([group.prompt_ids, response])[None]
        with wrapped.micro_batch_of_step():
            logits = wrapped(input_ids=row, use_cache=False, logits_to_keep=len(response) + 1).logits
            loss = (w_ * models.target_logps(logits, response[None])[0]).sum()
            del logits
            wrapped.backward(loss)  # which divides by their number
        total += float(loss.detach())
    return total


def measure(
    cases: list[str], folder: Path, prompt: int, responses: int, tokens: int, passes: int, engine: str | None = None
) -> dict[str, dict]:
    """Of one rank and each case: the seconds of each pass, and the relative error of the gradient."""
    torch.set_num_threads(1)
    group = text_group(folder, prompt, responses, tokens, dist.get_rank() if engine else 0)
    w = models.weights(group)
    built = {case: build(case, folder, responses, engine) for case in cases}
    found: dict[str, dict] = {case: {"seconds": []} for case in cases}
    for number in range(passes + 1):
        for case, wrapped in built.items():
            if engine:
                dist.barrier()
            start = time.perf_counter()
            loss = step(wrapped, group, w)
            if engine:
                dist.barrier()
            if number:
                found[case]["seconds"].append(time.perf_counter() - start)
            else:
                grads = wrapped.gradients()
                if case == STOCK:
                    reference, stock_loss = grads, loss
                found[case]["error"] = models.compare(grads, reference)[0]
                assert abs(loss - stock_loss) <= 1e-4 * abs(stock_loss), (case, loss, stock_loss)
                del grads
            wrapped.step()
        if not number:
            del reference
    return found


def rows_of(where: str, found: dict[str, dict], shape: Shape) -> list[dict]:
    median = {case: statistics.median(of["seconds"]) for case, of in found.items()}
    rows = []
    for case, of in found.items():
        row: dict = {
            "where": where,
            "case": case,
            "seconds": f"{median[case]:.3f}",
            "min": f"{min(of['seconds']):.3f}",
        }
        flops = ours(shape, kept=OURS[case].activation_budget > 0) if case in OURS else stock(shape)
        row |= {"over_stock": f"{median[STOCK] / median[case]:.2f}", "limit": f"{stock(shape) / flops:.2f}"}
        rows.append(row | {"bar": BAR if case == "exact" else None, "gradient_error": f"{of['error']:.1e}"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("quickstart/SmolLM2-135M-Instruct"))
    for name, default in {"prompt": 1000, "responses": 8, "tokens": 32, "passes": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cases", nargs="+", default=[*OURS], help="beside stock rows")
    parser.add_argument("--where", nargs="+", default=["one process", "zero3, two ranks"])
    parser.add_argument("--timeout", type=float, default=7200, help="seconds for the two ranks")
    parser.add_argument("--no-save", action="store_true", help=f"leave {RESULTS.name}/real_step.csv as it is")
    args = parser.parse_args()
    torch.set_num_threads(1)

    given = ([STOCK, *args.cases], args.model.resolve(), args.prompt, args.responses, args.tokens, args.passes)
    config = transformers.AutoConfig.from_pretrained(args.model)
    shape = Shape.of(config, args.prompt, args.tokens, args.responses)
    rows, comments = [], []
    for where in args.where:
        if where == "one process":
            found = measure(*given)
        else:
            ranks = Ranks(2)
            try:
                found = ranks.run(measure, *given, where.partition(",")[0], timeout=args.timeout)[0]
            finally:
                ranks.stop()
        rows += rows_of(where, found, shape)
        for row in rows[-len(args.cases) :]:
            what = f"{where}: {row['case']} over stock rows"
            ratio = row["over_stock"]
            comments.append(verdict(what, float(ratio), BAR) if row["bar"] else f"{what}: {ratio}")
            print(comments[-1], flush=True)
            assert found[row["case"]]["error"] <= ERROR, row
    comments = [
        f"{args.model.name}, {shape.layers} layers, float32; prompt of {args.prompt} tokens, {args.responses} "
        f"responses of {args.tokens}, of LICENSE; medians of {args.passes} interleaved passes, one thread a process",
        conditions(),
        *comments,
    ]
    show(rows, comments)
    if not args.no_save:
        write(RESULTS / "real_step.csv", rows, comments)


if __name__ == "__main__":
    main()
