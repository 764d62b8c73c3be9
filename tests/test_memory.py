"""What a step keeps, storage by storage, and for how long: in every mode, with and without offload.

A kept slice keeps its whole storage: each kept tensor must be exactly as large as its storage.
"""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import Tensor

from benchmarks import models as benchmark
from benchmarks.live import LiveStorages
from longstraw_dist import LongStrawConfig, attach
from longstraw_dist.config import exact_layers
from longstraw_dist.storage import HOST

from .models import ragged, tiny, weigh

SHAPES = ((23, (5, 5, 0, 9)), (1, (3,)), (12, (3, 4)))
N, M, H, K, D = 22 + 11, 29, 32, 2, 16  # prompt rows, response rows; the tiny Qwen3
ROTARY = 4 * 2 * D * (N + M)
NUMBERS = 8 * 8 * (N + M)  # ids, targets, positions, log-probs, entropies, log-sum-exps
HEAD = 4 * 2 * M  # what the head keeps beside hidden states: log-sum-exps and entropies
MODES = ["exact", "detached", "last:2"]


@contextlib.contextmanager
def no_collector():
    """What is freed inside is freed by its last reference, not by a search for cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def kept_by_operation(tensor: Tensor) -> dict[str, list[list[Tensor]]]:
    """What the operations of the graph behind `tensor` keep, by kind of operation, last layer first."""
    kept: dict[str, list[list[Tensor]]] = {}
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if "Operation" in node.name():
            kept.setdefault(node.name().removesuffix("OperationBackward"), []).append(list(node.saved_tensors))
        nodes += [n for n, _ in node.next_functions]
    return kept


def expected_state() -> list[tuple[int, ...]]:
    return [(1, K, t, D) for t in (22, 11) for _ in "KV"]


def inputs(model, groups) -> list[Tensor]:
    ids = [t for g in groups for t in (g.prompt_ids, *g.response_ids)]
    return [*model.parameters(), *model.buffers(), *ids]


def parameter_gradients(model) -> int:
    return sum(s.nbytes() for s in {p.grad.untyped_storage() for p in model.parameters()})


@pytest.mark.parametrize("chunk", [7, 1024])
@pytest.mark.parametrize("mode", MODES)
def test_what_each_operation_keeps(mode, chunk):
    model = attach(tiny("qwen3"), LongStrawConfig(prompt_grad=mode, prompt_chunk_size=chunk))
    out = model(prompt_groups=ragged(shapes=SHAPES))
    kept = kept_by_operation(out.scores)
    shapes = {name: [[tuple(t.shape) for t in tensors] for tensors in each] for name, each in kept.items()}
    exact = exact_layers(mode, 3)
    assert shapes["Layer"] == [[(1, M, H), *([(1, N, H)] if i < exact else []), *expected_state()] for i in range(3)]
    assert shapes["Norm"] == [[(1, M, H)]]
    assert shapes["Head"] == [[(1, M, H), (M,), (M,)]]
    tensors = [t for each in kept.values() for group in each for t in group]
    for t in tensors:
        assert t.untyped_storage().nbytes() == t.nbytes, f"a kept tensor of shape {tuple(t.shape)} is a slice"
    assert len({t.untyped_storage()._cdata for t in tensors}) == len(tensors)


@pytest.mark.parametrize("offload", [None, "hidden", "state", "all"])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_else_lives_between_forward_and_backward(mode, offload):
    model, groups = tiny("qwen3"), ragged(shapes=SHAPES)
    attach(model, LongStrawConfig(prompt_grad=mode, offload=offload))
    with no_collector(), LiveStorages(ignored=inputs(model, groups)) as live:
        out = model(prompt_groups=groups)
        exact = exact_layers(mode, 3)
        hidden = 4 * H * (5 * M + exact * N)
        state = 3 * sum(4 * K * t * D for t in (22, 22, 11, 11))
        host = {None: 0, "hidden": hidden, "state": state + HEAD, "all": hidden + state + HEAD}[offload]
        assert live.live["host"] == host
        kept = dict(model._longstraw.meter.kept_bytes)
        first_graph = kept.pop("last_layer", 0)
        assert (first_graph > 0) == (offload is None)
        rest = live.live["device"] + host - hidden - state - first_graph
        assert 0 <= rest <= ROTARY + NUMBERS + HEAD
        assert kept == {"hidden": hidden, "state": state}
        del out
        assert live.live["device"] <= 0, "an abandoned graph does not die with its outputs"
        assert live.live["host"] == 0


@pytest.mark.parametrize("offload", [None, "hidden", "all"])
@pytest.mark.parametrize("mode", MODES)
def test_backward_leaves_the_parameters_gradients_alone(mode, offload):
    model, groups = tiny("qwen3"), ragged(shapes=SHAPES)
    attach(model, LongStrawConfig(prompt_grad=mode, offload=offload))
    with no_collector(), LiveStorages(ignored=inputs(model, groups)) as live:
        out = model(prompt_groups=groups)
        loss = weigh(out.logps, out.entropies)
        loss.backward()
        left = live.live["device"] - parameter_gradients(model)
        assert left <= ROTARY + NUMBERS, "the outputs keep something after backward"
        del out, loss
        assert live.live["device"] - parameter_gradients(model) <= 0
        assert live.live["host"] == 0
    assert len(HOST) == 0


def test_a_layer_frees_what_it_kept_when_its_backward_is_over():
    model, groups = tiny("qwen3"), ragged(shapes=SHAPES)
    attach(model, LongStrawConfig())
    out = model(prompt_groups=groups)
    kept = [[weakref.ref(t.untyped_storage()) for t in each] for each in kept_by_operation(out.scores)["Layer"]]
    alive = []
    for layer in model.model.layers:  # from a layer's second call on: the backward's own
        layer.input_layernorm.register_forward_pre_hook(
            lambda *_: alive.append(tuple(all(t() is not None for t in each) for each in kept))
        )
    weigh(out.logps, out.entropies).backward()
    assert list(dict.fromkeys(alive)) == [(True, True, True), (False, True, True), (False, False, True)]
    assert not any(t() is not None for each in kept for t in each)


@pytest.mark.parametrize("mode", MODES)
def test_scoring_keeps_nothing(mode):
    model, groups = tiny("qwen3"), ragged(shapes=SHAPES)
    attach(model, LongStrawConfig(prompt_grad=mode))
    with torch.no_grad(), no_collector(), LiveStorages(ignored=inputs(model, groups)) as live:
        out = model(prompt_groups=groups)
        assert out.scores.grad_fn is None
        assert live.live["device"] <= out.scores.nbytes
    assert model._longstraw.meter.kept_bytes == {}


@pytest.mark.parametrize(("temperature", "chunk"), [(1.0, 8), (0.7, 8), (1.0, None)])
def test_logits_exist_a_chunk_at_a_time(temperature, chunk):
    vocabulary = 32_768
    model = attach(tiny("qwen3", vocab_size=vocabulary), LongStrawConfig(head_chunk_size=chunk))
    parameters = {tuple(p.shape) for p in model.parameters()}
    widest = []

    def watch(t: Tensor) -> None:
        if vocabulary in t.shape and tuple(t.shape) not in parameters and tuple(t.shape[::-1]) not in parameters:
            widest.append(t.numel() // vocabulary)

    with LiveStorages(watch=watch):
        out = model(prompt_groups=ragged(shapes=SHAPES, vocabulary=vocabulary), temperature=temperature)
        forward = len(widest)
        weigh(out.logps, out.entropies).backward()
    assert forward > 0
    assert len(widest) > forward
    assert max(widest) == (chunk or H // 2)


@pytest.mark.parametrize(("offload", "tensors"), [(None, 2 + 3), ("hidden", 4)])
@pytest.mark.parametrize("chunk", [64, 512])
def test_growth_with_the_number_of_responses(chunk, offload, tensors):
    """Added responses add the hidden states that each layer keeps, and little else: in replays that are full at either
    number of responses (chunk 64), and in one replay, which must be gone when the prompt's turn comes (512)."""
    peaks = []
    for responses in (2, 8):
        model = benchmark.qwen3(num_hidden_layers=2, vocab_size=512)
        attach(model, LongStrawConfig(prompt_chunk_size=chunk, head_chunk_size=32, offload=offload))
        group = benchmark.prompt_group(513, 32, responses, vocabulary=512)
        with no_collector(), LiveStorages(ignored=inputs(model, [group])) as live:
            benchmark.step_packed(model, group, benchmark.weights(group))
        peaks.append(live.peak["device"])
    added = (8 - 2) * 32 * model.config.hidden_size * 4
    assert peaks[1] - peaks[0] <= 1.1 * tensors * added


def test_the_device_holds_one_layer_and_the_next_whatever_the_number_of_layers():
    peaks, gradients = [], []
    for layers in (3, 7):
        model = benchmark.qwen3(num_hidden_layers=layers, vocab_size=512)
        attach(model, LongStrawConfig(prompt_chunk_size=128, head_chunk_size=32, offload="all"))
        group = benchmark.prompt_group(1025, 32, 4, vocabulary=512)
        with no_collector(), LiveStorages(ignored=inputs(model, [group])) as live:
            benchmark.step_packed(model, group, benchmark.weights(group))
        gradients.append(parameter_gradients(model))
        peaks.append(live.peak["device"] - gradients[-1])
        assert live.peak["host"] > layers * 1024 * 4 * model.config.hidden_size
    assert peaks[1] <= 1.05 * peaks[0]


@pytest.mark.parametrize("chunk", [7, 1024])
def test_a_window_is_all_that_is_kept(chunk):
    """In the last layer too, which is left before it attends."""
    model, window = attach(tiny("mistral"), LongStrawConfig("detached", prompt_chunk_size=chunk)), 6
    model(prompt_groups=ragged(shapes=((41, (3,)),)))
    row = 2 * 2 * 8 * 4  # K and V of 2 heads of 8
    assert model._longstraw.meter.kept_bytes["state"] == 3 * (window - 1) * row
