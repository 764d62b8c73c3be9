"""Prefix attention against one softmax over all keys, by autograd: forward and every gradient."""

import pytest
import torch
from transformers import masking_utils

from longstraw_dist import attention
from longstraw_dist.attention import Flash2, Flash3, FlashCPU, Mask, Plain, PrefixAttention, Scores
from longstraw_dist.groups import Segment
from longstraw_dist.state import View

from .fake_kernels import install_flash

HEADS, KEY_HEADS, SIZE, SCALE = 4, 2, 8, 0.3


def draw(*lengths: int, heads: int, generator: torch.Generator):
    return [torch.randn(1, heads, n, SIZE, dtype=torch.float64, generator=generator).requires_grad_() for n in lengths]


def one_softmax(q, k, v, lengths, window, past, softcap=None):
    """Response by response, with the whole past and a mask, as float64 matrices."""
    outputs = []
    begin = 0
    for n in lengths:
        own = slice(begin, begin + n)
        keys, values = (
            torch.cat([*blocks, t[:, :, own]], 2).repeat_interleave(HEADS // KEY_HEADS, 1)
            for blocks, t in ((past[::2], k), (past[1::2], v))
        )
        distance = torch.arange(keys.shape[2] - n, keys.shape[2])[:, None] - torch.arange(keys.shape[2])
        hidden = (distance < 0) | (distance >= (window or 10**9))
        scores = SCALE * q[:, :, own] @ keys.mT
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        outputs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values)
        begin += n
    return torch.cat(outputs, 2)


KERNELS = [(FlashCPU, None), *((k, softcap) for k in (Plain, Flash2, Flash3) for softcap in (None, 0.5))]


@pytest.mark.parametrize(("kernels", "softcap"), KERNELS)
@pytest.mark.parametrize("lengths", [(5,), (3, 3, 3), (4, 1, 2)])
@pytest.mark.parametrize("blocks", [(), (7,), (4, 3)])
@pytest.mark.parametrize("window", [None, 1, 2, 6, 9, 40])
def test_against_one_softmax(kernels, softcap, lengths, blocks, window, monkeypatch):
    if window is not None and len(blocks) > 1:
        blocks = (sum(blocks),)  # a windowed past is one block
    install_flash(monkeypatch)
    monkeypatch.setattr(attention, "FORCE", kernels)
    monkeypatch.setattr(Plain, "SCORES", 100)  # several blocks of queries
    generator = torch.Generator().manual_seed(0)
    (q,) = draw(sum(lengths), heads=HEADS, generator=generator)
    k, v, *past = draw(*[sum(lengths)] * 2, *[n for n in blocks for _ in "kv"], heads=KEY_HEADS, generator=generator)
    expected = one_softmax(q, k, v, lengths, window, past, softcap)
    g = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    reference = torch.autograd.grad(expected, [q, k, v, *past], g)

    # as the layer operation hands it over: no more of the past than the window reads
    seen = past if window is None else [t[:, :, max(0, t.shape[2] - (window - 1)) :] for t in past]
    seen = [t for t in seen if t.shape[2]]
    out = PrefixAttention.apply(q, k, v, lengths, Scores(SCALE, softcap, window), None, *seen)
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(torch.autograd.grad(out, [q, k, v, *past], g, allow_unused=True), reference, strict=True):
        torch.testing.assert_close(torch.zeros_like(theirs) if ours is None else ours, theirs)


def test_a_constant_past_gets_no_gradient():
    generator = torch.Generator().manual_seed(0)
    (q,) = draw(3, heads=HEADS, generator=generator)
    k, v, past_k, past_v = draw(3, 3, 7, 7, heads=KEY_HEADS, generator=generator)
    out = PrefixAttention.apply(q, k, v, (3,), Scores(SCALE), None, past_k.detach(), past_v.detach())
    assert torch.autograd.grad(out.sum(), past_k, allow_unused=True) == (None,)


def test_unknown_arguments_are_refused():
    """What a model passes and this attention would ignore would be silently wrong (attention sinks, once, by 0.5)."""
    token = attention.VIEW.set(View({}, Segment(slice(0, 1), 0, (1,))))
    try:
        with pytest.raises(AssertionError, match="position_bias"):
            attention.attention_forward(
                torch.nn.Identity(), *[torch.zeros(1, 1, 1, 1)] * 3, None, scaling=1.0, position_bias=torch.zeros(1)
            )
    finally:
        attention.VIEW.reset(token)


@pytest.mark.parametrize(
    ("sees", "window", "causal"),
    [
        (masking_utils.causal_mask_function, None, True),
        (masking_utils.sliding_window_causal_mask_function(1), 1, True),
        (masking_utils.sliding_window_causal_mask_function(6), 6, True),
        (masking_utils.sliding_window_causal_mask_function(6), 7, False),
        (masking_utils.sliding_window_causal_mask_function(7), 6, False),
        (masking_utils.sliding_window_causal_mask_function(6), None, False),
        (masking_utils.bidirectional_mask_function, None, False),
        (masking_utils.sliding_window_bidirectional_mask_function(6), 6, False),
        (masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)), 8, False),
    ],
)
def test_masks(sees, window, causal):
    assert Mask(window, sees).causal == causal
