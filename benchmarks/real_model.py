"""How far each `prompt_grad` is from the stock gradient, on a real language model and a real prompt.

    run with   python -m benchmarks.real_model [--model quickstart/SmolLM2-135M-Instruct]

The model folder comes from `python launch/prepare_quickstart.py`. The prompt is the start of this repository's LICENSE
(700 tokens), the responses are sampled by the model. The gradient of sum_i w_i logp_i with random w_i is compared with
that of stock rows, all parameters together: relative error |g - g_ref| / |g_ref|, and cosine. `exact` has a bar.
"""

import argparse
import time
from pathlib import Path

import torch
import transformers

from longstraw_dist import LongStrawConfig, PromptGroup, attach

from . import models
from .conditions import RESULTS, conditions, show, write

BAR = 1e-5  # relative error of "exact", float32


def load(path: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()


def sample(model, prompt: torch.Tensor, responses: int, tokens: int) -> PromptGroup:
    torch.manual_seed(0)
    out = model.eval().generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        num_return_sequences=responses,
    )
    model.train()
    return PromptGroup(prompt, list(out[:, len(prompt) :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("quickstart/SmolLM2-135M-Instruct"))
    parser.add_argument("--prompt", type=int, default=700)
    parser.add_argument("--responses", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--settings", nargs="+", default=["exact", "last:25", "last:20", "last:10", "detached"])
    args = parser.parse_args()

    text = (Path(__file__).parent.parent / "LICENSE").read_text()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = load(args.model)
    prompt = tokenizer(text, return_tensors="pt").input_ids[0, : args.prompt]
    assert len(prompt) == args.prompt
    group = sample(model, prompt, args.responses, args.tokens)
    w = models.weights(group)

    start = time.perf_counter()
    loss = models.step_rows(model, group, w)
    stock_seconds = time.perf_counter() - start
    reference = models.gradients(model)
    rows = [
        {"setting": "stock rows", "relative_error": "0", "cosine": "1", "bar": None, "seconds": f"{stock_seconds:.2f}"}
    ]
    for setting in args.settings:
        model = load(args.model)
        attach(model, LongStrawConfig(prompt_grad=setting))
        start = time.perf_counter()
        ours = models.step_packed(model, group, w)
        seconds = time.perf_counter() - start
        error, cosine = models.compare(models.gradients(model), reference)
        assert abs(ours - loss) <= 1e-4 * abs(loss), (setting, ours, loss)
        row = {"setting": setting, "relative_error": f"{error:.3g}", "cosine": f"{cosine:.6f}"}
        rows.append(row | {"bar": BAR if setting == "exact" else None, "seconds": f"{seconds:.2f}"})
        print(rows[-1], flush=True)
        assert setting != "exact" or error <= BAR, error
    comments = [
        f"{args.model.name}, {model.config.num_hidden_layers} layers, float32; prompt: {args.prompt} tokens of "
        f"LICENSE; {args.responses} responses of {args.tokens} sampled by the model; one pass, so seconds are rough",
        conditions(),
    ]
    show(rows, comments)
    write(RESULTS / "real_model.csv", rows, comments)


if __name__ == "__main__":
    main()
