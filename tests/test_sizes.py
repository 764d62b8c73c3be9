"""Sizes that are measured: the same numbers, segments within the budget, and little of it left unused."""

import copy
import itertools
import logging
import math

import pytest
import torch
from torch.utils._pytree import tree_leaves

from longstraw_dist import LongStrawConfig, attach, replay
from longstraw_dist.attach import attachment_of
from longstraw_dist.failures import Place, describe
from longstraw_dist.graphs import count, saved_once
from longstraw_dist.groups import Segment, Sizes

from .models import ragged, tiny, weigh
from .reference import gradients, relative, stock_rows, worst

LONG = ((300, (5, 70, 0, 9, 30)), (1, (3, 1)), (40, ()))  # of several segments, before and after the measurement
EQUAL = ((1500, (65,) * 24),)  # 65: one behind a block of the delta rule, which pads


def auto(
    kind: str, budget: int, seed: int = 0, chunk: int | str = "auto", replayed: int | str | None = "auto", **more
):
    config = LongStrawConfig(
        prompt_chunk_size=chunk, responses_per_replay=replayed, segment_budget=budget, head_chunk_size=64, **more
    )
    return attach(tiny(kind, seed=seed, max_position_embeddings=4096), config)


def step(model, groups) -> None:
    out = model(prompt_groups=groups)
    weigh(out.logps, out.entropies).backward()


def found(model) -> Sizes:
    """What is agreed on, which the next call brings about."""
    with torch.no_grad():
        model(prompt_groups=ragged())
    return attachment_of(model).automatic.sizes


@pytest.fixture
def graphs(monkeypatch):
    """Bytes of each graph that a layer operation makes in backward, and its segment."""
    seen: list[tuple[int, Segment]] = []
    plain = replay.with_graph

    def with_graph(layer, stock, state, segment, x, capture_only):
        with saved_once(layer.module) as saved:
            graph = plain(layer, stock, state, segment, x, capture_only)
        apart = [*graph.view.past.values(), *tree_leaves(segment.calls[layer.index])]
        seen.append((count(graph, saved, apart), segment))
        return graph

    monkeypatch.setattr(replay, "with_graph", with_graph)
    return seen


def largest(graphs, chunks: bool) -> int:
    """Of the prompt chunks, or of the replays that could have been smaller."""
    return max(nbytes for nbytes, s in graphs if s.is_chunk == chunks and (chunks or len(s.lengths) > 1))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("mode", ["exact", "detached", "last:2"])
def test_the_same_in_every_mode(mode):
    check("llama", 230_000, prompt_grad=mode)


@pytest.mark.parametrize(
    ("kind", "budget"),
    [("mistral", 230_000), slow("qwen3_moe", 230_000), slow("glm_moe_dsa", 500_000)],
)
def test_the_same_for_every_state(kind, budget):
    check(kind, budget)


@pytest.mark.parametrize("budget", [1_700_000, slow(100)])
def test_the_same_for_a_recurrence(budget):
    """Of shorter prompts: the stock delta rule's own noise grows with them."""
    check("qwen3_5_text", budget, shapes=((150, (5, 20, 0, 9)), (1, (3, 1)), (4, ())), parameter_bar=3e-4)


@pytest.mark.parametrize(("chunk", "replayed"), [("auto", None), ("auto", 2), (50, "auto")])
def test_the_same_beside_a_number(chunk, replayed):
    check("llama", 230_000, chunk=chunk, replayed=replayed)


def test_the_same_where_nothing_fits(caplog):
    caplog.set_level(logging.WARNING)
    model = check("llama", 90, shapes=((20, (3, 2)),))
    assert found(model).chunk == found(model).replay == 1
    assert "segment_budget=90 bytes hold no more than one token's graph" in caplog.text


def check(kind: str, budget: int, shapes=LONG, parameter_bar: float = 1e-4, **config):
    """A call before the sizes are found and one with them, against the stock rows."""
    stock, ours = tiny(kind, max_position_embeddings=4096), auto(kind, budget, **config)
    layers, sizes = stock.config.num_hidden_layers, []
    detached = {"exact": 0, "detached": layers, "last:2": layers - 2}[config.get("prompt_grad", "exact")]
    for seed in (0, 1):
        groups = ragged(seed, shapes)
        results = []
        for model in (stock, ours):
            model.zero_grad()
            if model is stock:
                rows = stock_rows(model, groups, detached=detached)
            else:
                out = model(prompt_groups=groups)
                rows = out.logps, out.entropies
                sizes.append(attachment_of(model).automatic.sizes)
            weigh(*rows).backward()
            grads = {n: g for n, g in gradients(model).items() if g is not None}
            results.append((torch.cat([*rows[0], *rows[1]]).detach(), grads))
        (theirs, reference), (scores, grads) = results
        assert float((scores - theirs).abs().max()) <= 1e-5
        assert relative(grads, reference) <= 1e-5
        assert worst(grads, reference)[0] <= parameter_bar
    assert sizes[0] == Sizes() != sizes[1]
    return ours


@pytest.mark.parametrize(
    ("kind", "budget"), [("llama", 3 * 10**6), slow("qwen3_5_text", 6 * 10**6), slow("jamba", 6 * 10**6)]
)
def test_segments_fill_the_budget(graphs, kind, budget):
    """No segment is above it, and of a tenth more one would be."""
    model = auto(kind, budget)
    step(model, ragged(0, EQUAL))
    graphs.clear()
    step(model, ragged(1, EQUAL))
    sizes = attachment_of(model).automatic.sizes
    assert max(nbytes for nbytes, _ in graphs) <= budget
    count_of = max(len(s.lengths) for _, s in graphs)
    assert max(s.tokens for _, s in graphs if s.is_chunk) == sizes.chunk < 1499
    assert 2 <= count_of < 24
    graphs.clear()
    more = {"prompt_chunk_size": math.ceil(1.1 * sizes.chunk), "responses_per_replay": math.ceil(1.1 * count_of)}
    assert more["responses_per_replay"] > count_of
    larger = attach(tiny(kind, max_position_embeddings=4096), LongStrawConfig(**more))
    step(larger, ragged(1, EQUAL))
    assert largest(graphs, chunks=True) > budget
    assert largest(graphs, chunks=False) > budget


@pytest.mark.parametrize("kind", ["llama", *map(slow, ("qwen3_5_text", "jamba", "recurrent_gemma", "zamba2"))])
def test_ragged_replays_stay_below(graphs, kind):
    """Replays of many short responses, of few long ones, and of both."""
    budget = 3_000_000
    model = auto(kind, budget)
    step(model, ragged())
    for shapes in (((700, (7,) * 40 + (90,) * 7),), ((31, (1, 60, 2, 59, 3, 140, 2)),), ((2, (2,) * 30),)):
        graphs.clear()
        step(model, ragged(1, shapes))
        assert largest(graphs, chunks=False) <= budget


def test_the_largest_layer_counts(graphs):
    """In this model not the first."""
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    model = attach(
        tiny("qwen3_5_text", layer_types=kinds), LongStrawConfig(prompt_chunk_size="auto", segment_budget=2_000_000)
    )
    groups = ragged(0, ((400, (9,)),))
    step(model, groups)
    graphs.clear()
    step(model, groups)
    assert largest(graphs, chunks=True) <= 2_000_000


@pytest.mark.slow
def test_graphs_that_grow_faster_than_their_tokens(graphs):
    """A Mamba-2 scan has a term for each pair of blocks."""
    model = auto("mamba2", 30 * 10**6)
    for _ in range(2):
        graphs.clear()
        step(model, ragged(0, ((3600, (2,)),)))
    assert 27 * 10**6 <= largest(graphs, chunks=True) <= 30 * 10**6


@pytest.mark.slow
def test_frozen_layers_are_a_kind_of_their_own(graphs):
    """The graph of a frozen layer, here the first, holds less."""
    model = auto("llama", 1_000_000)
    for name, p in model.named_parameters():
        p.requires_grad_("layers.0." not in name)
    step(model, ragged(0, EQUAL))
    graphs.clear()
    step(model, ragged(0, EQUAL))
    assert 900_000 <= largest(graphs, chunks=True) <= 1_000_000


@pytest.mark.slow
def test_a_larger_budget_holds_more():
    for kind in ("llama", "qwen3_5_text"):
        sizes = []
        for budget in (10**6, 10**7, 10**9):
            model = auto(kind, budget)
            step(model, ragged())
            sizes.append(found(model))
        for small, large in itertools.pairwise(sizes):
            assert 9 * small.chunk <= large.chunk
            assert 9 * small.replay <= large.replay


def test_what_is_smaller_runs_at_once(graphs):
    model = auto("llama", 10**6)
    step(model, ragged())
    graphs.clear()
    step(model, ragged(0, ((9, (5, 4, 3)),)))
    assert {(s.is_chunk, s.lengths) for _, s in graphs} == {(True, (8,)), (False, (5, 4, 3))}


def test_scoring_measures_nothing():
    model = auto("llama", 10**6)
    assert found(model) == found(model) == Sizes()
    step(model, ragged())
    sizes = found(model)
    assert sizes != Sizes()
    step(model, ragged(1, LONG))
    assert found(model) == sizes, "they stay"


def test_a_copy_keeps_them():
    model = auto("llama", 10**6)
    step(model, ragged())
    twin = copy.deepcopy(model)
    assert found(twin) == found(model) != Sizes()


@pytest.mark.parametrize("kind", ["deepseek_v3", slow("glm_moe_dsa")])
def test_a_longer_prompt_is_measured_where_graphs_grow_with_it(graphs, kind):
    model = auto(kind, 3_000_000)
    step(model, ragged())
    small = found(model)
    for _ in range(2):
        graphs.clear()
        step(model, ragged(0, ((700, (3, 4)),)))
    assert attachment_of(model).automatic.sizes.chunk < small.chunk
    assert largest(graphs, chunks=True) <= 3_000_000


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"prompt_chunk_size": "auto"}, 'prompt_chunk_size="auto" needs segment_budget'),
        ({"responses_per_replay": "auto"}, 'responses_per_replay="auto" needs segment_budget'),
        ({"segment_budget": 9}, "segment_budget=9 without a size to choose"),
        ({"prompt_chunk_size": "auto", "segment_budget": 0}, "segment_budget=0 is not a number of bytes"),
        ({"prompt_chunk_size": "auto", "segment_budget": 1.5}, r"segment_budget=1\.5 is not a number"),
        ({"prompt_chunk_size": "all", "segment_budget": 9}, "prompt_chunk_size='all' is not"),
        ({"head_chunk_size": "auto"}, "head_chunk_size='auto' is not"),
    ],
)
def test_refusals(config, message):
    with pytest.raises(ValueError, match=message):
        LongStrawConfig(**config)


def test_out_of_memory_names_the_budget():
    config = LongStrawConfig(prompt_chunk_size="auto", segment_budget=9)
    chunk, pair = Segment(slice(0, 4), 0, (4,), is_chunk=True), Segment(slice(0, 4), 0, (2, 2))
    for segment, more in ((chunk, ""), (pair, "set responses_per_replay=1, or ")):
        text = describe(torch.OutOfMemoryError(), Place("it", segment), "forward", config, torch.device("cpu"))
        assert text.endswith(f"To go on, lower segment_budget=9, or {more}put fewer tokens into a call.")
