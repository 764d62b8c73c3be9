"""GRPOConfig and the engine's knobs, under the names that they have in `LongStrawConfig`."""

from dataclasses import dataclass, field

from trl import GRPOConfig

from longstraw_dist import LongStrawConfig


@dataclass
class LongStrawGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`LongStrawGRPOTrainer`]: every option of [`~trl.GRPOConfig`], with its meaning, and

    Args:
        prompt_grad (`str`, *optional*, defaults to `"exact"`):
            How far the gradient reaches into the prompt: `"exact"`, `"detached"` (biased) or `"last:N"`.
        prompt_chunk_size (`int` or `"auto"`, *optional*, defaults to `1024`):
            Prompt tokens that a layer runs at once; `"auto"`: as many as `segment_budget` holds.
        responses_per_replay (`int` or `"auto"`, *optional*):
            Responses of a group that a layer replays at once; by default as many as `prompt_chunk_size` tokens hold,
            `"auto"`: as many as `segment_budget` holds.
        segment_budget (`int`, *optional*):
            Bytes that one layer's graph of a prompt chunk, or of a replay, may hold, for `"auto"`.
        head_chunk_size (`int`, *optional*, defaults to `128`):
            Tokens that the norm and the LM head run at once.
        offload (`str`, *optional*):
            What each layer keeps in host memory until its backward: `"hidden"`, the packed hidden states; `"state"`,
            the prompts' state; `"all"`, both.
        activation_budget (`int`, *optional*, defaults to `0`):
            Bytes of graphs that a micro-batch may keep from forward to backward, in place of running them again.
    """

    prompt_grad: str = field(
        default="exact",
        metadata={"help": 'How far the gradient reaches into the prompt: "exact", "detached", "last:N".'},
    )
    # not `int | str`, of which transformers' parser would read numbers alone
    prompt_chunk_size: int | str | None = field(
        default=1024, metadata={"help": 'Prompt tokens that a layer runs at once, or "auto": by `segment_budget`.'}
    )
    responses_per_replay: int | str | None = field(
        default=None,
        metadata={
            "help": "Responses replayed at once; by default as many as fit into `prompt_chunk_size` tokens. "
            '"auto": by `segment_budget`.'
        },
    )
    segment_budget: int | None = field(
        default=None, metadata={"help": "Bytes that the graph of a prompt chunk, or of a replay, may hold."}
    )
    head_chunk_size: int = field(default=128, metadata={"help": "Tokens that the norm and the LM head run at once."})
    offload: str | None = field(
        default=None,
        metadata={"help": 'What each layer keeps in host memory: "hidden" states, prompt "state", "all".'},
    )

    activation_budget: int = field(
        default=0, metadata={"help": "Bytes of graphs that a micro-batch keeps instead of computing them again."}
    )

    def __post_init__(self):
        for name in ("prompt_chunk_size", "responses_per_replay"):
            if isinstance(value := getattr(self, name), str) and value.isdecimal():  # from a command line
                setattr(self, name, int(value))
        super().__post_init__()
        self.longstraw()  # a wrong knob is refused here, not at the first step

    def longstraw(self) -> LongStrawConfig:
        """The engine's part. Raises `ValueError` on a value outside its range."""
        return LongStrawConfig(
            prompt_grad=self.prompt_grad,
            prompt_chunk_size=self.prompt_chunk_size,  # type: ignore[arg-type]  # which refuses None
            responses_per_replay=self.responses_per_replay,
            segment_budget=self.segment_budget,
            head_chunk_size=self.head_chunk_size,
            offload=self.offload,
            activation_budget=self.activation_budget,
        )
