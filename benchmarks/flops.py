"""Counted FLOPs of one GRPO step, and the arithmetic limit of the ratio stock / ours that they set.

    run with   python -m benchmarks.flops

Formulas of our own, because `torch.utils.flop_counter.FlopCounterMode` counts nothing for CPU attention. A
multiply-add is 2 FLOPs; norms, rotary embeddings, activations and softmax are not counted.

    GEMM                  2 FLOPs a matrix element and row; backward 2 forwards (input's gradient, weight's gradient)
    attention             4 * head size * query heads FLOPs a (query, key) pair; causal over n tokens: n * n / 2 pairs;
                          backward 2.5 forwards (flash kernels: the scores once more, dV, dP, dQ, dK); with a mask
                          every pair, as torch's kernel for CPUs computes what is masked out, too
    checkpointed          one more forward of every layer
    ours                  a layer's backward runs its forward once more, and so does the head's; not the replay with
                          which backward begins, in the last layer
"""

from dataclasses import dataclass, replace

from longstraw_dist.config import LongStrawConfig, exact_layers

ATTENTION_BACKWARD = 2.5
GEMM_BACKWARD = 2


@dataclass(frozen=True)
class Shape:
    """What of a model, a prompt group and a setting decides the FLOPs."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    prompt: int  # tokens
    response: int  # tokens each
    responses: int

    @classmethod
    def of(cls, config, prompt: int, response: int, responses: int) -> "Shape":
        """From a transformers config."""
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim or config.hidden_size // config.num_attention_heads,
            config.vocab_size,
            prompt,
            response,
            responses,
        )

    @property
    def q(self) -> int:  # a row's FLOPs in the query projection; the output projection's are the same
        return 2 * self.hidden * self.heads * self.head_size

    @property
    def kv(self) -> int:
        return 2 * 2 * self.hidden * self.key_heads * self.head_size

    @property
    def layer(self) -> int:
        return 2 * self.q + self.kv + 3 * 2 * self.hidden * self.intermediate

    @property
    def head(self) -> int:
        return 2 * self.hidden * self.vocabulary

    def attention(self, pairs: float) -> float:
        return 4 * self.head_size * self.heads * pairs


def stock(s: Shape, checkpointed: bool = False) -> float:
    """Stock, response by response, logits of the response alone (and of the one token more that trainers keep)."""
    n = s.prompt + s.response
    gemm, attention = n * s.layer, s.attention(n * n / 2)
    forward = gemm + attention
    backward = GEMM_BACKWARD * gemm + ATTENTION_BACKWARD * attention
    row = s.layers * (forward * (1 + checkpointed) + backward) + (s.response + 1) * s.head * (1 + GEMM_BACKWARD)
    return s.responses * row


def shared(s: Shape, pairs: float, checkpointed: bool = False) -> float:
    """Prompt and responses as one row through the stock layers, with so many pairs of attention in each."""
    gemm, attention = (s.prompt + s.responses * s.response) * s.layer, s.attention(pairs)
    forward = gemm + attention
    layer = forward * (1 + checkpointed) + GEMM_BACKWARD * gemm + ATTENTION_BACKWARD * attention
    return s.layers * layer + s.responses * (s.response + 1) * s.head * (1 + GEMM_BACKWARD)


def one_mask(s: Shape, checkpointed: bool = False) -> float:
    """One mask over the whole row: every pair of its tokens is computed."""
    return shared(s, (s.prompt + s.responses * s.response) ** 2, checkpointed)


def prefix_grouper(s: Shape, checkpointed: bool = False) -> float:
    """The prompt causally, then each response, with a mask, over the prompt and itself."""
    return shared(s, s.prompt**2 / 2 + s.responses * s.response * (s.prompt + s.response), checkpointed)


def ours(
    s: Shape,
    prompt_grad: str = "exact",
    last_layer_whole: bool = False,
    kept: bool = False,
    captured: bool = False,
    replay: int = int(LongStrawConfig.prompt_chunk_size),
) -> float:
    """
    The packed step as the engine runs it. In the last layer the prompt's rows give K and V and stop there; the stock
    layer makes Q before. `last_layer_whole`: they run through the whole layer, as the engine first did. `kept`: an
    `activation_budget` that holds every graph, so that no layer runs forward again. `captured`: the prompt's forward
    has run in an earlier call. `replay`: the tokens of one.
    """
    again = 0 if kept else 1
    p, r = s.prompt - 1, s.responses * s.response  # rows: the last prompt token opens each response
    prompt, prompt_attention = p * s.layer, s.attention(p * p / 2)
    response, response_attention = r * s.layer, s.attention(r * p + s.responses * s.response**2 / 2)
    exact = exact_layers(prompt_grad, s.layers)

    runs = 1 + again
    each_response = response * (runs + GEMM_BACKWARD) + response_attention * (runs + ATTENTION_BACKWARD)
    once = prompt + prompt_attention
    first = s.response * min(s.responses, max(1, replay // s.response))  # rows of the first replay
    total = s.layers * each_response
    total -= again * (first * s.layer + s.attention(first * p + first * s.response / 2))
    total += max(exact - 1, 0) * (again * once + prompt * GEMM_BACKWARD + prompt_attention * ATTENTION_BACKWARD)
    last = once if last_layer_whole else p * (s.q + s.kv)
    total += again * last + p * s.kv * GEMM_BACKWARD if exact else 0
    if not captured:
        total += (s.layers - 1) * once + last
    return total + r * s.head * (2 + GEMM_BACKWARD)


def limits(s: Shape, prompt_grad: str = "exact", kept: bool = False) -> tuple[float, float]:
    """Stock rows over ours, checkpointed rows over ours, were each FLOP to take the same time."""
    step = ours(s, prompt_grad, kept=kept)
    return stock(s) / step, stock(s, checkpointed=True) / step


def main() -> None:
    base = Shape(4, 256, 768, 4, 2, 64, 32_768, 4096, 64, 8)
    print("layers  prompt  responses  setting               limit  over checkpointed rows")
    for s in (base, replace(base, layers=16), replace(base, prompt=16_384, response=128), replace(base, responses=32)):
        for setting, kept in (("exact", False), ("exact", True), ("last:2", False), ("detached", False)):
            plain, checkpointed = limits(s, setting, kept)
            name = f"{setting}, graphs kept" if kept else setting
            print(
                f"{s.layers:6} {s.prompt:7} {s.responses:6}x{s.response:<4} {name:20}{plain:7.2f}{checkpointed:8.2f}"
            )


if __name__ == "__main__":
    main()
