"""An exception in the middle of a call is told where it is, out of memory what to turn; changed weights raise."""

import contextlib

import pytest
import torch

from longstraw_dist import LongStrawConfig, PromptGroup, attach
from longstraw_dist.attach import attachment_of
from longstraw_dist.failures import Place, describe
from longstraw_dist.groups import pack

from .models import ragged, tiny, weigh

GROUPS = [(3, (2,)), (12, (2, 2, 7))]  # captured: 2, and 11 in chunks of 5
CONFIG = LongStrawConfig(prompt_chunk_size=5, head_chunk_size=4)
# Calls of a layer: the first group's chunk and replay; three chunks, two replays of the second's. Then the backward.
SEGMENTS = [
    "prompt chunk of 2 tokens at 0 of group 0",
    "replay of 1 response of group 0, 2 tokens",
    "prompt chunk of 5 tokens at 0 of group 1",
    "prompt chunk of 5 tokens at 5 of group 1",
    "prompt chunk of 1 tokens at 10 of group 1",
    "replay of 2 responses of group 1, 4 tokens",
    "replay of 1 response of group 1, 7 tokens",
]
BACKWARD = [SEGMENTS[i] for i in (1, 0, 5, 6, 4, 3, 2)]
ROWS = [f"response tokens {a} to {b}" for a, b in ((0, 3), (4, 7), (8, 11), (12, 12))]


class Injected(Exception):
    """Raised by a module."""


@contextlib.contextmanager
def failing(module: torch.nn.Module, call: int, error: BaseException):
    """The module raises at its call number `call`, from 0."""
    left = [call]

    def forward(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return type(module).forward(module, *args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def notes_of(module: str, call: int, error: BaseException | None = None) -> str:
    model = attach(tiny("llama"), CONFIG)
    error = error or Injected()

    def step():
        out = model(prompt_groups=ragged(0, GROUPS))
        weigh(out.logps, out.entropies).backward()

    with failing(model.get_submodule(module), call, error), pytest.raises(type(error)) as caught:
        step()
    assert attachment_of(model).place.module is None
    return "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("call", range(14))
def test_layer_and_segment_are_named(call):
    phase, segments = ("forward", SEGMENTS) if call < 7 else ("backward", BACKWARD)
    assert notes_of("model.layers.1.mlp", call) == f"longstraw-dist: {phase} of layer 1, {segments[call % 7]}"


@pytest.mark.parametrize("call", range(8))
@pytest.mark.parametrize(("module", "name"), [("model.norm", "the norm"), ("lm_head", "the LM head")])
def test_norm_and_head_are_named(module, name, call):
    phase = "forward" if call < 4 else "backward"
    assert notes_of(module, call) == f"longstraw-dist: {phase} of {name}, {ROWS[call % 4]}"


def test_what_comes_before_the_layers_is_named():
    assert notes_of("model.embed_tokens", 0) == "longstraw-dist: forward of the embedding"


def too_much() -> Exception:
    """What torch's allocator raises on a CPU."""
    try:
        torch.empty(1 << 50, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("a petabyte was there")


@pytest.mark.parametrize("error", [too_much(), torch.OutOfMemoryError("CUDA out of memory."), MemoryError()], ids=repr)
def test_out_of_memory_is_told_from_the_rest(error):
    assert notes_of("model.layers.1.mlp", 12, error) == (
        "longstraw-dist: backward of layer 1, prompt chunk of 5 tokens at 5 of group 1: out of memory. To go on, "
        "lower prompt_chunk_size=5, or put fewer tokens into a call."
    )


CUDA, CPU = torch.device("cuda"), torch.device("cpu")
OFFLOAD = 'set offload="all", which keeps hidden states and prompt state in host memory'
FEWER = "put fewer tokens into a call"
CHUNK, REPLAY, LONE, WHOLE = 2, 5, 6, None
KNOBS = [  # (segment, config, device, the ways out)
    (CHUNK, {}, CPU, ["lower prompt_chunk_size=5", FEWER]),
    (CHUNK, {}, CUDA, ["lower prompt_chunk_size=5", OFFLOAD, FEWER]),
    (CHUNK, {"offload": "hidden"}, CUDA, ["lower prompt_chunk_size=5", FEWER]),
    (REPLAY, {}, CPU, ["lower prompt_chunk_size=5", "set responses_per_replay=1", FEWER]),
    (REPLAY, {"responses_per_replay": 2}, CPU, ["lower responses_per_replay=2", FEWER]),
    (LONE, {"responses_per_replay": 2}, CPU, [FEWER]),
    (WHOLE, {}, CUDA, [OFFLOAD, FEWER]),
    (WHOLE, {"activation_budget": 9}, CPU, ["lower activation_budget=9", FEWER]),
    (slice(0, 4), {}, CPU, ["lower head_chunk_size=4", FEWER]),
    (slice(0, 4), {"head_chunk_size": None}, CPU, ["set head_chunk_size below 4", FEWER]),
    (slice(12, 13), {}, CPU, [FEWER]),
]


@pytest.mark.parametrize(("where", "settings", "device", "ways"), KNOBS)
def test_only_the_knobs_that_help_are_named(where, settings, device, ways):
    config = LongStrawConfig(**{"prompt_chunk_size": 5, "head_chunk_size": 4, **settings})
    segments = [s for group in pack(ragged(0, GROUPS), config, CPU).groups for s in group.segments]
    place = Place("it", segments[where] if isinstance(where, int) else where)
    text = describe(torch.OutOfMemoryError(), place, "forward", config, device)
    assert text.endswith(f": out of memory. To go on, {', or '.join(ways)}.")


@pytest.mark.parametrize("offload", ["hidden", None])
def test_a_call_that_keeps_nothing_has_nothing_to_move(offload):
    for error in (torch.OutOfMemoryError(), too_much()):
        text = describe(error, Place("layer 1"), "forward", LongStrawConfig(offload=offload), CUDA, recording=False)
        assert text.endswith(f"memory. To go on, {FEWER}.")


@pytest.mark.parametrize("offload", ["hidden", None])
def test_host_memory_of_an_accelerator_is_another(offload):
    text = describe(too_much(), Place("layer 1"), "forward", LongStrawConfig(offload=offload), CUDA)
    assert "out of host memory" in text
    assert ("offload=None" in text) == (offload == "hidden")


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("parameter", "named"),
    [
        ("model.layers.1.mlp.up_proj.weight", "mlp.up_proj.weight of layer 1"),
        ("model.norm.weight", "weight of the norm"),
        ("lm_head.weight", "weight of the LM head"),
    ],
)
def test_weights_changed_before_backward_are_refused(parameter, named, frozen):
    """Autograd refuses them in a stock backward; here the recompute would run with the new ones."""
    for packed in (False, True):
        model = tiny("llama")
        model.get_parameter(parameter).requires_grad_(not frozen)
        if packed:
            out = attach(model)(prompt_groups=[PromptGroup(torch.arange(5), [torch.arange(3)])])
            loss = weigh(out.logps, out.entropies)
        else:
            loss = model(input_ids=torch.arange(8)[None]).logits.logsumexp(-1).sum()
        with torch.no_grad():
            model.get_parameter(parameter).mul_(1.5)
        with pytest.raises(
            RuntimeError, match=f"{named} was modified in place" if packed else "modified by an inplace"
        ):
            loss.backward()
