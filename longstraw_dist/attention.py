"""Prefix attention: a segment's own tokens (causal) and the prompt before it, merged by log-sum-exp.

    B batch (1)   H query heads   K key heads (H is a multiple of K)   N own tokens   T prompt tokens   D head size

    own     q_BHND x k_BKND  causal, each response to itself  -> o, lse      o = sum_i o_i exp(lse_i - lse)
    prompt  q_BHND x k_BKTD  no mask, all responses at once   -> o, lse      lse = logsumexp_i lse_i

There is no mask of prompt length, no copy of the prompt's K and V for each response, and none repeated for grouped
queries. Backward runs the kernels' own backward on each region, given the *merged* output and log-sum-exp: the
softmax weights exp(s - lse) are then those of the whole row (flash-attention 2, arXiv 2307.08691, algorithm 2).
A sliding window that is shorter than the row takes one region over the last `window - 1` prompt tokens and the own
ones instead. `KERNELS` says what runs a region.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from .flash import Flash2, Flash3, flash_fits
from .kernels import PYTORCH, note
from .state import View

NAME = "longstraw"  # of this attention among the models' attention implementations
IGNORED = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "num_items_in_batch"}


VIEW: ContextVar[View | None] = ContextVar("VIEW", default=None)  # of the layer that runs


def current_view() -> View:
    view = VIEW.get()
    assert view is not None, "only run() runs a layer"
    return view


@contextlib.contextmanager
def prefix_attention(config, view: View | None = None) -> Iterator[None]:
    """While it is open, the model's layers attend through this module, to the prompt in `view` and to their own
    tokens, and the model's masks are `Mask`s."""
    before, token = config._attn_implementation, VIEW.set(view)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        VIEW.reset(token)


SAMPLE = 3  # tokens of the row by which a blueprint asks its model


@dataclass(frozen=True)
class Mask:
    """What a layer is given for its mask: its `window`, or `None`, and the model's own function for which token
    `sees` which."""

    window: int | None
    sees: Callable

    @property
    def causal(self) -> bool:
        """Whether a token sees itself and those before it, of a window no more and no fewer than that."""
        if holds_tokens(self.sees):  # it looks them up, and has those of the blueprint's row alone
            row = torch.arange(SAMPLE, device="cpu")
            seen = self.sees(0, 0, row[:, None], row)
            return seen.is_meta or bool((seen.cpu() == (row[:, None] >= row)).all())
        size = self.window or 2**20
        key = torch.tensor([0, 1, size // 2 + 1], device="cpu")
        seen = [self.sees(0, 0, query, key) for query in (key - 1, key, key + size - 1, key + size)]
        return [t.unique().tolist() for t in seen] == [[False], [True], [True], [self.window is None]]


def holds_tokens(value: Any) -> bool:
    """Whether a function stands on a tensor of the row's tokens, by itself or by the functions that it is made of."""
    if isinstance(value, FunctionType):
        value = tuple(cell.cell_contents for cell in value.__closure__ or ())
    if isinstance(value, Tensor):
        return value.shape[-1:] == (SAMPLE,)
    return isinstance(value, tuple) and any(map(holds_tokens, value))


def read_mask(*, mask_function: Callable, local_size: int | None = None, **ignored) -> Mask:
    """Stands for transformers' own, which build tensors."""
    return Mask(local_size, mask_function)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    is_causal: bool = True,
    **ignored,
) -> tuple[Tensor, None]:
    """What a layer's attention calls inside a layer operation."""
    view = current_view()
    unknown = set(ignored) - IGNORED
    assert not unknown, f"{type(module).__name__} asks for attention that longstraw-dist does not have: {unknown}"
    assert dropout == 0.0, "find_dropout() looks at every module that has one"
    assert is_causal, f"{type(module).__name__} is not causal"
    if indices is not None:  # sparse attention: of what it may see, the keys that it has chosen
        chosen = torch.zeros_like(attention_mask).scatter_(-1, indices[:, None].long(), True)
        out = functional.scaled_dot_product_attention(query, key, value, chosen & attention_mask, scale=scaling)
        return out.transpose(1, 2), None
    assert isinstance(attention_mask, Mask), f"{type(module).__name__} attends by a mask of its own"
    window = attention_mask.window
    assert window == view.window, f"{type(module).__name__} attends by another mask than its layer was given"
    assert sliding_window in (None, window), f"{type(module).__name__} has another window than its mask"
    size = value.shape[-1]
    past = [view.past["keys"], view.past["values"]] if "keys" in view.past else []
    if view.joined:  # the layer has made keys and values of the whole past
        past = [t[:, :, : view.seen] for t in (key, value)] if view.seen else []
        key, value = key[:, :, view.seen :], value[:, :, view.seen :]
    if size != key.shape[-1]:  # the kernels want one size
        value, *past[1:] = (functional.pad(t, (0, key.shape[-1] - size)) for t in (value, *past[1:]))
    query = query.to(key.dtype)  # which the view has cast under autocast
    batch, tokens, lengths = len(query), query.shape[2], view.lengths
    if tokens != sum(lengths):  # stacked, where lengths are those before padding
        query, key, value = (t.transpose(0, 1).flatten(1, 2)[None] for t in (query, key, value))
        lengths = (tokens,) * batch
    out = PrefixAttention.apply(query, key, value, lengths, Scores(scaling, softcap, window), s_aux, *past)
    return out[..., :size].transpose(1, 2).reshape(batch, tokens, -1, size).contiguous(), None


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, read_mask)


@dataclass(frozen=True)
class Scores:
    """What a layer does with q k^T before the softmax: `softcap * tanh(scale * q k^T / softcap)`, in a window."""

    scale: float
    softcap: float | None = None
    window: int | None = None


class PrefixAttention(torch.autograd.Function):
    """`forward(q_BHND, k_BKND, v_BKND, lengths, scores, sinks_H, past_k, past_v, ...) -> o_BHND`. The past comes in
    blocks, oldest first; its gradient is returned like any other, one tensor a block. A sink is a score of each query
    that weighs nothing (gpt_oss)."""

    @staticmethod
    def forward(ctx, q, k, v, lengths, scores: Scores, sinks, *past):
        out = lse = None
        for region in split_regions(q, lengths, scores.window, past):
            with torch.autocast(q.device.type, enabled=False):  # q, k and v are cast already
                inputs = region.take(q, k, v, past)
                o, o_lse = kernels(q, region.window, scores).forward(*inputs, region.causal, region.window, scores)
            o, o_lse = region.unfold(o), region.unfold(o_lse[..., None])[..., 0]
            if out is None or lse is None:
                if o.shape == q.shape:  # it covers all rows
                    out, lse = o, o_lse
                    continue
                out, lse = o.new_empty(q.shape), o_lse.new_empty(q.shape[:3])
            merge_(out[:, :, region.rows], lse[:, :, region.rows], o, o_lse, region.first)
        assert out is not None
        assert lse is not None
        if sinks is not None:
            both = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out.mul_((lse - both).exp()[..., None])
            lse = both
        ctx.save_for_backward(q, k, v, sinks, out, lse, *past)
        ctx.lengths, ctx.scores = lengths, scores
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        q, k, v, sinks, out, lse, *past = ctx.saved_tensors
        dsinks = None
        if sinks is not None:
            weight = (sinks.to(lse.dtype)[:, None] - lse).exp()
            dsinks = -(weight * (g * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        sums: list[Tensor | None] = [None] * (3 + len(past))  # of q, k, v and the past
        for region in split_regions(q, ctx.lengths, ctx.scores.window, past):
            g_, o_, l_ = (region.fold(t[:, :, region.rows]) for t in (g, out, lse[..., None]))
            with torch.autocast(q.device.type, enabled=False):
                grads = kernels(q, region.window, ctx.scores).backward(
                    g_, *region.take(q, k, v, past), o_, l_[..., 0], region.causal, region.window, ctx.scores
                )
            for i, rows, g_ in region.give(*grads):
                if ctx.needs_input_grad[(i if i < 3 else i + 3)]:
                    sums[i] = add_rows(sums[i], g_, rows, like=(q, k, v, *past)[i])
        dq, dk, dv, *dpast = sums
        return dq, dk, dv, None, None, dsinks, *dpast


@dataclass
class Region:
    """Some query rows against some keys, as one kernel call: equal sequences are folded into the batch."""

    rows: slice
    first: bool  # no region before it wrote these rows
    block: int | None = None  # of the past, whose keys it reads
    own: bool = False  # reads the rows' own keys too
    causal: bool = False  # the last query sees all keys, and each before it one less
    window: int | None = None  # of those that it sees, it reads this many
    skip: int = 0  # keys of the block that are too old for the window
    batch: int = 1

    def fold(self, t: Tensor) -> Tensor:
        """`[1, H, batch * n, D] -> [batch, H, n, D]`"""
        return t if self.batch == 1 else t[0].unflatten(1, (self.batch, -1)).transpose(0, 1)

    def unfold(self, t: Tensor) -> Tensor:
        return t if self.batch == 1 else t.transpose(0, 1).flatten(1, 2)[None]

    def take(self, q, k, v, past) -> tuple[Tensor, Tensor, Tensor]:
        keys = []
        if self.block is not None:
            keys.append([t[:, :, self.skip :] for t in past[2 * self.block : 2 * self.block + 2]])
        if self.own:
            keys.append([self.fold(t[:, :, self.rows]) for t in (k, v)])
        k_, v_ = keys[0] if len(keys) == 1 else (torch.cat(pair, 2) for pair in zip(*keys, strict=True))
        return self.fold(q[:, :, self.rows]), k_, v_

    def give(self, gq, *gkv) -> Iterator[tuple[int, slice, Tensor]]:
        """Of what was taken, the place among (q, k, v, past...), the rows and their gradient."""
        yield 0, self.rows, self.unfold(gq)
        split = 0
        if self.block is not None:
            split = gkv[0].shape[2] - (self.rows.stop - self.rows.start if self.own else 0)
            for i, g in enumerate(gkv):
                yield 3 + 2 * self.block + i, slice(self.skip, None), g[:, :, :split]
        if self.own:
            for i, g in enumerate(gkv):
                yield 1 + i, self.rows, self.unfold(g[:, :, split:])


def add_rows(total: Tensor | None, g: Tensor, rows: slice, like: Tensor) -> Tensor:
    """Adds to some rows of a sum; what covers all of them begins it."""
    if total is None:
        if g.shape == like.shape:
            return g
        total = torch.zeros_like(like)
    total[:, :, rows] += g
    return total


def split_regions(q: Tensor, lengths: tuple[int, ...], window: int | None, past: Sequence[Tensor]) -> list[Region]:
    seen = sum(t.shape[2] for t in past[::2])
    spans = [slice(end - n, end) for n, end in zip(lengths, accumulate(lengths), strict=True)]
    if window is not None and seen + max(lengths) > window:
        assert len(past) <= 2, "a windowed past is one block"
        return [windowed_region(span, window, seen) for span in spans]
    whole, alone = slice(0, q.shape[2]), not past
    regions = [Region(whole, first=i == 0, block=i) for i in range(len(past) // 2)]
    if len(set(lengths)) == 1:
        return [*regions, Region(whole, first=alone, own=True, causal=True, batch=len(lengths))]
    return regions + [Region(span, first=alone, own=True, causal=True) for span in spans]


def windowed_region(rows: slice, window: int, seen: int) -> Region:
    skip = max(0, seen - (window - 1))
    block = 0 if seen > skip else None
    return Region(rows, first=True, block=block, own=True, causal=True, window=window, skip=skip)


def merge_(out: Tensor, lse: Tensor, o: Tensor, o_lse: Tensor, first: bool) -> None:
    """Merges a region's output and log-sum-exp into the running ones, in place."""
    if first:
        out.copy_(o)
        lse.copy_(o_lse)
        return
    both = torch.logaddexp(lse, o_lse)
    out.mul_((lse - both).exp_()[..., None]).addcmul_(o, (o_lse - both).exp_()[..., None])
    lse.copy_(both)


class FlashCUDA:
    """torch's flash-attention 2 for CUDA: 16-bit, no window, grouped queries, head sizes in steps of 8 up to 256. It
    reads the log-sum-exp as if contiguous."""

    name = "torch flash (CUDA)"

    @staticmethod
    def serves(q, window, scores) -> bool:
        return flash_fits(q) and window is None and scores.softcap is None

    @staticmethod
    def forward(q, k, v, causal, window, scores):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scores.scale)[:2]

    @staticmethod
    def backward(g, q, k, v, o, lse, causal, window, scores):
        none, lse = torch.empty(0, dtype=torch.int64, device=q.device), lse.contiguous()
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            g, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none, scale=scores.scale
        )


class FlashCPU:
    """torch's flash kernels for the CPU: any floating dtype, any mask, grouped queries."""

    name = "torch flash (CPU)"

    @staticmethod
    def serves(q, window, scores) -> bool:
        return q.device.type == "cpu" and scores.softcap is None

    @staticmethod
    def forward(q, k, v, causal, window, scores):
        causal, mask = causal and window is None, make_mask(q, k, window)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scores.scale
        )

    @staticmethod
    def backward(g, q, k, v, o, lse, causal, window, scores):
        causal, mask = causal and window is None, make_mask(q, k, window)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, o, lse, 0.0, causal, attn_mask=mask, scale=scores.scale
        )


def make_mask(q: Tensor, k: Tensor, window: int | None) -> Tensor | None:
    """What to add to scores `[N, T]`: query i, at key T - N + i, sees the keys at a distance of 0 to window - 1."""
    if window is None:
        return None
    n, t = q.shape[2], k.shape[2]
    distance = torch.arange(t - n, t, device=q.device)[:, None] - torch.arange(t, device=q.device)
    return q.new_zeros(n, t).masked_fill_((distance < 0) | (distance >= window), -torch.inf)


class Plain:
    """The definition, for what the flash kernels do not take: a softcap, for one. Holds the scores of a block of
    queries, in float32."""

    name = PYTORCH
    SCORES = 2**24  # of a block

    @staticmethod
    def serves(q, window, scores) -> bool:
        return True

    @staticmethod
    def blocks(q, k) -> list[slice]:
        n = max(1, Plain.SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
        return [slice(i, i + n) for i in range(0, q.shape[2], n)]

    @staticmethod
    def weigh(q, k, rows: slice, causal, mask: Tensor | None, scores: Scores) -> tuple[Tensor, Tensor | None]:
        """Scores of some queries, and what their softcap multiplies a gradient with."""
        s = scores.scale * torch.einsum("bkgnd,bktd->bkgnt", group_queries(q[:, :, rows], k), k.to(high(k)))
        slope = None
        if scores.softcap is not None:
            t = (s / scores.softcap).tanh_()
            s, slope = scores.softcap * t, 1 - t.square()
        if causal:
            s = s + torch.full(s.shape[-2:], -torch.inf, device=q.device).triu(1 + rows.start)
        return s if mask is None else s + mask[rows], slope

    @staticmethod
    def forward(q, k, v, causal, window, scores):
        causal, mask = causal and window is None, make_mask(q, k, window)
        o, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=high(q))
        for rows in Plain.blocks(q, k):
            s, _ = Plain.weigh(q, k, rows, causal, mask, scores)
            lse_ = s.logsumexp(-1)
            p = (s - lse_[..., None]).exp()
            o[:, :, rows] = torch.einsum("bkgnt,bktd->bkgnd", p, v.to(high(v))).flatten(1, 2)
            lse[:, :, rows] = lse_.flatten(1, 2)
        return o, lse

    @staticmethod
    def backward(g, q, k, v, o, lse, causal, window, scores):
        causal, mask = causal and window is None, make_mask(q, k, window)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=high(k)), torch.zeros_like(v, dtype=high(v))
        for rows in Plain.blocks(q, k):
            qg, gg, og = (group_queries(t[:, :, rows], k) for t in (q, g, o))
            s, slope = Plain.weigh(q, k, rows, causal, mask, scores)
            p = (s - lse[:, :, rows].unflatten(1, (k.shape[1], -1))[..., None]).exp()
            dv += torch.einsum("bkgnt,bkgnd->bktd", p, gg)
            dp = torch.einsum("bkgnd,bktd->bkgnt", gg, v.to(high(v)))
            ds = scores.scale * p * (dp - (gg * og).sum(-1, keepdim=True))
            if slope is not None:
                ds *= slope
            dq[:, :, rows] = torch.einsum("bkgnt,bktd->bkgnd", ds, k.to(high(k))).flatten(1, 2)
            dk += torch.einsum("bkgnt,bkgnd->bktd", ds, qg)
        return dq, dk.to(k.dtype), dv.to(v.dtype)


def group_queries(q: Tensor, k: Tensor) -> Tensor:
    return q.to(high(q)).unflatten(1, (k.shape[1], -1))


def high(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


# `forward(q, k, v, causal, window, scores) -> (o, lse)`, and its backward, given the merged `o` and `lse`. A causal
# region is square, or has a window: then the last query stands at the last key.
Kernels = type[Flash3] | type[Flash2] | type[FlashCUDA] | type[FlashCPU] | type[Plain]
KERNELS: tuple[Kernels, ...] = (Flash3, Flash2, FlashCUDA, FlashCPU, Plain)
FORCE: Kernels | None = None  # tests set it to Plain: the slow path in place of the fast one


def kernels(q: Tensor, window: int | None, scores: Scores) -> Kernels:
    """The first that serves."""
    found = FORCE or next(k for k in KERNELS if k.serves(q, window, scores))
    note("attention", found.name)
    return found
