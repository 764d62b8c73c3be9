"""The packages flash-attention 2 and 3, as kernels of attention.py: 16-bit, windows, softcaps, grouped queries.

Tensors lie by token, `[B, N, H, D]`. Of more keys than queries the last query sees all, and each before it one less,
as regions with a window want it (bottom right, since 2.1).
"""

from typing import Any

import torch
from torch import Tensor

from .kernels import fits, load


class Flash3:
    """On Hopper."""

    name = "flash-attention 3"
    PACKAGE = "flash_attn_interface.flash_attn_func"  # registers the operators

    @staticmethod
    def serves(q, window, scores) -> bool:
        return flash_fits(q) and capability(q)[0] == 9 and load(Flash3.PACKAGE) is not None

    @staticmethod
    def forward(q, k, v, causal, window, scores):
        o, lse, *_ = torch.ops.flash_attn_3.fwd(*by_token(q, k, v), num_splits=1, **Flash3.say(causal, window, scores))
        return o.transpose(1, 2), lse

    @staticmethod
    def backward(g, q, k, v, o, lse, causal, window, scores):
        g, q, k, v, o = by_token(g, q, k, v, o)
        grads = {"dq": q.new_empty(q.shape), "dk": k.new_empty(k.shape), "dv": v.new_empty(v.shape)}
        options = Flash3.say(causal, window, scores) | {"deterministic": deterministic()}
        torch.ops.flash_attn_3.bwd(g, q, k, v, o, lse.contiguous(), **grads, **options)
        return by_head(*grads.values())

    @staticmethod
    def say(causal, window, scores) -> dict[str, Any]:
        left, right = reach(causal, window)
        sides = {"is_causal": causal, "window_size_left": left, "window_size_right": right}
        return sides | {"softmax_scale": scores.scale, "softcap": scores.softcap or 0.0}


class Flash2:
    """From version 2.7 on; on Ampere and later."""

    name = "flash-attention 2"
    FORWARD, BACKWARD = (
        f"flash_attn.flash_attn_interface._wrapped_flash_attn_{way}" for way in ("forward", "backward")
    )

    @staticmethod
    def serves(q, window, scores) -> bool:
        return flash_fits(q) and capability(q)[0] >= 8 and load(Flash2.FORWARD) is not None

    @staticmethod
    def forward(q, k, v, causal, window, scores):
        options = (0.0, scores.scale, causal, *reach(causal, window), scores.softcap or 0.0, None, False)
        o, lse, *_ = load(Flash2.FORWARD)(*by_token(q, k, v), *options)
        return o.transpose(1, 2), lse

    @staticmethod
    def backward(g, q, k, v, o, lse, causal, window, scores):
        g, q, k, v, o = by_token(g, q, k, v, o)
        grads = [t.new_empty(t.shape) for t in (q, k, v)]
        options = (0.0, scores.scale, causal, *reach(causal, window), scores.softcap or 0.0, None, deterministic())
        load(Flash2.BACKWARD)(g, q, k, v, o, lse.contiguous(), *grads, *options)
        return by_head(*grads)


def by_token(*tensors: Tensor) -> list[Tensor]:
    """`[B, H, N, D] -> [B, N, H, D]`, of heads that are dense."""
    return [(t if t.stride(-1) == 1 else t.contiguous()).transpose(1, 2) for t in tensors]


def by_head(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def reach(causal: bool, window: int | None) -> tuple[int, int]:
    """How many keys before and behind its own a query sees; -1 for all."""
    return -1 if window is None else window - 1, 0 if causal else -1


def deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def flash_fits(q: Tensor) -> bool:
    return fits(q) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def capability(q: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(q.device)
