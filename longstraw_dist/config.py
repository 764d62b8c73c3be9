"""Every knob of the engine: its unit, its default, its check."""

from dataclasses import dataclass

from .storage import KINDS


@dataclass(frozen=True)
class LongStrawConfig:
    r"""
    How a prompt group is run. No setting changes the objective; only `prompt_grad` changes the gradient.

    Args:
        prompt_grad (`str`, *optional*, defaults to `"exact"`):
            How far the gradient reaches into the prompt. `"exact"`: everywhere, equal to the stock gradient.
            `"detached"`: the prompt's state is a constant in every layer (LongStraw, arXiv 2607.14952, section 3): no
            backward for the prompt, its hidden states are not kept, and the gradient is biased. `"last:N"`: exact in
            the last N layers, detached below.
        prompt_chunk_size (`int` or `"auto"`, *optional*, defaults to `2048`):
            Prompt tokens a layer runs at once. In backward, one layer's graph of one chunk is alive at a time.
            `"auto"`: as many as `segment_budget` holds.
        responses_per_replay (`int` or `"auto"`, *optional*):
            Responses of a group that a layer replays at once. By default as many as fit into `prompt_chunk_size`
            tokens, at least one, so that a replay's graph is no larger than a prompt chunk's. `"auto"`, which is the
            default beside `prompt_chunk_size="auto"`: as many as `segment_budget` holds. A response is never cut.
        head_chunk_size (`int`, *optional*):
            Tokens that the norm and the LM head run at once: no `[tokens, vocabulary]` tensor is larger than this. By
            default half the hidden size: their logits are then half as large as the head's weight.
        offload (`str`, *optional*):
            What lies in host memory (pinned when the model is on an accelerator) from a layer's forward until its
            backward: `"hidden"`, the packed hidden states; `"state"`, the prompts' state; `"all"`, both. They come
            back for it, on CUDA one layer ahead. `None` keeps both on the model's device.
        activation_budget (`int`, *optional*, defaults to `0`):
            Bytes of graphs that one call may keep from forward to backward, instead of running their layers forward
            once more. Spent from the first layer on; the result is the same to the bit. Not counted in it: the graph
            of the last layer's first replay, with which backward begins, is kept unless `offload` is set or autocast
            is on.
        segment_budget (`int`, *optional*):
            Bytes that one layer's graph of one prompt chunk, or of one replay of several responses, may hold in
            backward. For `"auto"`: the first call with a backward measures, and runs small segments (sizes.py).

    Raises:
        `ValueError`: on a value outside its range, naming it.
    """

    prompt_grad: str = "exact"
    prompt_chunk_size: int | str = 2048
    responses_per_replay: int | str | None = None
    head_chunk_size: int | None = None
    offload: str | None = None
    activation_budget: int = 0
    segment_budget: int | None = None

    def __post_init__(self):
        exact_layers(self.prompt_grad, 1)
        for name in ("prompt_chunk_size", "responses_per_replay", "head_chunk_size"):
            value = getattr(self, name)
            if name != "prompt_chunk_size" and value is None:
                continue
            if name != "head_chunk_size" and value == "auto":
                if self.segment_budget is None:
                    raise ValueError(
                        f'{name}="auto" needs segment_budget, the bytes that one graph may hold: set it too, or a '
                        "number in place of it."
                    )
                continue
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} is not a positive integer: it counts what runs at once.")
        if self.segment_budget is not None and (type(self.segment_budget) is not int or self.segment_budget < 1):
            raise ValueError(f"segment_budget={self.segment_budget!r} is not a number of bytes above 0.")
        if self.segment_budget is not None and not self.is_auto:
            raise ValueError(
                f"segment_budget={self.segment_budget} without a size to choose: set prompt_chunk_size or "
                'responses_per_replay to "auto".'
            )
        if type(self.activation_budget) is not int or self.activation_budget < 0:
            raise ValueError(
                f"activation_budget={self.activation_budget!r} is not a number of bytes: 0 buys no graph."
            )
        if self.offload not in (None, *KINDS):
            raise ValueError(f"offload={self.offload!r} is unknown: choose one of {', '.join(KINDS)}, or None.")
        if self.offload is not None and self.activation_budget:
            raise ValueError(
                f"offload={self.offload!r} beside activation_budget={self.activation_budget}: a kept graph holds its "
                "layer's hidden states and prompt state on the device. Set one of them."
            )

    @property
    def is_auto(self) -> bool:
        return "auto" in (self.prompt_chunk_size, self.responses_per_replay)


def exact_layers(prompt_grad: str, layers: int) -> int:
    """Number of layers, counted from the last, whose prompt gradient is exact. Raises `ValueError` if malformed."""
    if prompt_grad == "exact":
        return layers
    if prompt_grad == "detached":
        return 0
    kind, _, count = prompt_grad.partition(":") if isinstance(prompt_grad, str) else ("", "", "")
    if kind != "last" or not count.isdecimal() or int(count) < 1:
        raise ValueError(f'prompt_grad={prompt_grad!r} is unknown: choose "exact", "detached" or "last:N", N >= 1.')
    return int(count)
