"""The counted FLOPs of benchmarks/flops.py, by hand on a shape small enough for that."""

import pytest

from benchmarks.flops import Shape, limits, one_mask, ours, prefix_grouper, stock

# hidden 4, intermediate 8, 2 query heads and 1 key head of size 2, vocabulary 10; P=5, two responses of 3
SMALL = Shape(2, 4, 8, 2, 1, 2, 10, 5, 3, 2)
Q, KV, MLP, HEAD = 2 * 4 * 4, 2 * (2 * 4 * 2), 3 * (2 * 4 * 8), 2 * 4 * 10  # FLOPs a row
LAYER = 2 * Q + KV + MLP
PAIR = 2 * (2 * 2 * 2)  # a query and a key: scores and values, 2 heads of size 2


def test_rows():
    assert (SMALL.q, SMALL.kv, SMALL.layer, SMALL.head, SMALL.attention(1)) == (Q, KV, LAYER, HEAD, PAIR)


def test_stock():
    gemm, attention, head = 8 * LAYER, 32 * PAIR, 4 * HEAD  # 8 tokens, 8 * 8 / 2 pairs, logits of R + 1 tokens
    assert stock(SMALL) == 2 * (2 * (3 * gemm + 3.5 * attention) + 3 * head)
    assert stock(SMALL, checkpointed=True) == 2 * (2 * (4 * gemm + 4.5 * attention) + 3 * head)


@pytest.mark.parametrize(
    ("peer", "pairs"),
    [
        (one_mask, 11 * 11),  # 5 + 2 * 3 tokens, each with each
        (prefix_grouper, 5 * 5 / 2 + 2 * (3 * 8)),  # each response's 3 tokens with the prompt's 5 and their own
    ],
)
def test_shared_prompt(peer, pairs):
    gemm, attention, head = 11 * LAYER, pairs * PAIR, 2 * 4 * HEAD  # logits of R + 1 tokens a response
    assert peer(SMALL) == 2 * (3 * gemm + 3.5 * attention) + 3 * head
    assert peer(SMALL, checkpointed=True) == 2 * (4 * gemm + 4.5 * attention) + 3 * head


@pytest.mark.parametrize(
    ("prompt_grad", "first", "last"),
    [
        # the prompt's 4 rows: how often they run forward, in the first layer; what they run in the last
        ("exact", 2, True),
        ("last:2", 2, True),
        ("last:1", 1, True),
        ("detached", 1, False),
    ],
)
def test_ours(prompt_grad, first, last):
    forward = 6 * LAYER + (6 * 4 + 2 * 4.5) * PAIR  # each of 6 rows reads 4 prompt tokens, and its own
    backward = 2 * 6 * LAYER + 2.5 * (6 * 4 + 2 * 4.5) * PAIR
    prompt_first = first * (4 * LAYER + 8 * PAIR) + (first == 2) * (2 * 4 * LAYER + 2.5 * 8 * PAIR)
    prompt_last = 4 * (Q + KV) + last * (4 * (Q + KV) + 2 * 4 * KV)
    responses = 3 * forward + 2 * backward  # both layers forward, the first one once more
    assert ours(SMALL, prompt_grad) == responses + prompt_first + prompt_last + 6 * 4 * HEAD
    second = 3 * LAYER + (3 * 4 + 4.5) * PAIR  # which is not in the first replay
    assert ours(SMALL, prompt_grad, replay=5) - ours(SMALL, prompt_grad) == second


def test_last_layer_whole():
    whole, attention = 4 * LAYER, 8 * PAIR
    assert ours(SMALL, last_layer_whole=True) - ours(SMALL) == 2 * (whole + attention - 4 * (Q + KV))


def test_a_captured_prompt_saves_its_forward():
    prompt = 4 * LAYER + 8 * PAIR + 4 * (Q + KV)  # the first layer, and the last's K and V
    for setting in ("exact", "detached"):
        assert ours(SMALL, setting) - ours(SMALL, setting, captured=True) == prompt


def test_kept_graphs_save_one_forward_of_what_backward_runs():
    responses = 6 * LAYER + (6 * 4 + 2 * 4.5) * PAIR  # of the first layer: the last one's are kept anyway
    prompt = 4 * LAYER + 8 * PAIR + 4 * (Q + KV)  # of the first layer, of the last
    assert ours(SMALL) - ours(SMALL, kept=True) == responses + prompt
    assert ours(SMALL, "detached") - ours(SMALL, "detached", kept=True) == responses


def test_limits_grow_with_the_group_and_the_detached_layers():
    shape = Shape(4, 256, 768, 4, 2, 64, 32_768, 4096, 64, 8)
    exact, last, detached = (limits(shape, s)[0] for s in ("exact", "last:2", "detached"))
    assert 5 < exact < last < detached < 15
    assert limits(shape)[1] > exact
