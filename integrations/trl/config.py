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
        prompt_chunk_size (`int` or `"auto"`, *optional*, defaults to `2048`):
            Prompt tokens that a layer runs at once; `"auto"`: as many as `segment_budget` holds.
        responses_per_replay (`int` or `"auto"`, *optional*):
            Responses of a group that a layer replays at once; by default as many as `prompt_chunk_size` tokens hold,
            `"auto"`: as many as `segment_budget` holds.
        segment_budget (`int`, *optional*):
            Bytes that one layer's graph of a prompt chunk, or of a replay, may hold, for `"auto"`.
        head_chunk_size (`int`, *optional*):
            Tokens that the norm and the LM head run at once; by default half the hidden size.
        offload (`str`, *optional*):
            What each layer keeps in host memory until its backward: `"hidden"`, the packed hidden states; `"state"`,
            the prompts' state; `"all"`, both.
        activation_budget (`int`, *optional*, defaults to `0`):
            Bytes of graphs that a micro-batch may keep from forward to backward, in place of running them again.
        rollout_from_capture (`bool`, *optional*):
            With generation in this process (no vLLM), whether each distinct prompt runs once for all of its
            completions, and, while the parameters have not changed, not again in the update. Its state and hidden
            states stay in memory meanwhile; with `offload` they do not, and the update runs it again. By default
            wherever it can be done exactly; `True` refuses, by name, where not.
        capture_max_age (`int`, *optional*, defaults to `0`):
            Optimizer steps for which a prompt's state is used after the parameters have changed (`num_iterations` or
            `steps_per_generation` beyond one step), as in the LongStraw paper. Above 0 the result is biased by it, and
            `prompt_grad` must be `"detached"`.
        capture_max_drift (`float`, *optional*, defaults to `0.05`):
            Mean absolute difference of log-probs, of one response a rank, between such a state and a new one, above
            which the prompts are run again. Logged as `longstraw/capture_drift`.
    """

    prompt_grad: str = field(
        default="exact",
        metadata={"help": 'How far the gradient reaches into the prompt: "exact", "detached", "last:N".'},
    )
    # not `int | str`, of which transformers' parser would read numbers alone
    prompt_chunk_size: int | str | None = field(
        default=2048, metadata={"help": 'Prompt tokens that a layer runs at once, or "auto": by `segment_budget`.'}
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
    head_chunk_size: int | None = field(
        default=None,
        metadata={"help": "Tokens that the norm and the LM head run at once; by default half the hidden size."},
    )
    offload: str | None = field(
        default=None,
        metadata={"help": 'What each layer keeps in host memory: "hidden" states, prompt "state", "all".'},
    )

    activation_budget: int = field(
        default=0, metadata={"help": "Bytes of graphs that a micro-batch keeps instead of computing them again."}
    )

    rollout_from_capture: bool | None = field(
        default=None,
        metadata={"help": "Whether a prompt runs once for all of its completions; by default where that is exact."},
    )
    capture_max_age: int = field(
        default=0, metadata={"help": "Optimizer steps for which a prompt's old state is used (biased above 0)."}
    )
    capture_max_drift: float = field(
        default=0.05, metadata={"help": "Mean log-prob difference above which an old state is not used."}
    )

    def __post_init__(self):
        for name in ("prompt_chunk_size", "responses_per_replay"):
            if isinstance(value := getattr(self, name), str) and value.isdecimal():  # from a command line
                setattr(self, name, int(value))
        super().__post_init__()
        self.longstraw()  # a wrong knob is refused here, not at the first step
        if type(self.capture_max_age) is not int or self.capture_max_age < 0:
            raise ValueError(f"capture_max_age={self.capture_max_age!r} is not a number of optimizer steps.")
        if self.capture_max_age and self.prompt_grad != "detached":
            raise ValueError(
                f"capture_max_age={self.capture_max_age} beside prompt_grad={self.prompt_grad!r}: an old state has no "
                'exact gradient. Set prompt_grad="detached", or capture_max_age=0.'
            )
        if self.capture_max_age and self.offload is not None:
            raise ValueError(
                f"capture_max_age={self.capture_max_age} beside offload={self.offload!r}: captures stay on the "
                "model's device. Set one of them."
            )
        if not self.capture_max_drift > 0:
            raise ValueError(f"capture_max_drift={self.capture_max_drift!r} is not a difference above 0.")

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
