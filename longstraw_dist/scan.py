"""The selective scan of Mamba (arXiv 2312.00752, section 3) from an initial state, which the stock one sets to zero.

    h_t = exp(A dt_t) h_{t-1} + dt_t B_t x_t        y_t = C_t h_t + D x_t, gated by silu(z_t)

    b batch   d channels   t tokens   n state size

It stands in for transformers' `mamba_selective_scan` (mamba, falcon_mamba, jamba): stand_ins.py.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from .attention import current_view
from .kernels import PYTORCH, note


def selective_scan(
    x_bdt: Tensor,
    dt_bdt: Tensor,
    A_dn: Tensor,
    B_bnt: Tensor,
    C_bnt: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **ignored,
):
    """As transformers' function, with its arguments. Costs about 2 sqrt(t) steps of the recurrence in Python."""
    note("Mamba scan", PYTORCH)
    if delta_bias is not None:
        dt_bdt = dt_bdt + delta_bias.to(dt_bdt.dtype)[..., None]
    if delta_softplus:
        dt_bdt = functional.softplus(dt_bdt)
    a = torch.exp(A_dn[:, None] * dt_bdt[..., None])
    b = dt_bdt[..., None] * B_bnt.mT[:, None].float() * x_bdt[..., None].float()
    h0 = current_view().get_recurrent_state(0)
    states = LinearRecurrence.apply(a, b, torch.zeros_like(b[:, :, 0]) if h0 is None else h0)
    y = torch.einsum("bdtn,bnt->bdt", states.to(x_bdt.dtype), C_bnt)
    if D is not None:
        y = y + x_bdt * D[:, None]
    if z is not None:
        y = y * functional.silu(z)
    return (y, states[:, :, -1]) if return_last_state else y


class LinearRecurrence(torch.autograd.Function):
    """`apply(a_bdtn, b_bdtn, h_bdn) -> h_bdtn`, with h_t = a_t h_{t-1} + b_t. Kept for backward: `a`, `h` and all
    states."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
        states = recur(a, b, h0)
        ctx.save_for_backward(a, h0, states)
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g: Tensor):
        a, h0, states = ctx.saved_tensors
        # the gradient of a state is a recurrence too, back in time: g_t + a_{t+1} (that of state t+1)
        later = torch.cat([a[:, :, 1:], torch.zeros_like(a[:, :, :1])], 2)
        db = recur(later.flip(2), g.flip(2), torch.zeros_like(h0)).flip(2)
        before = torch.cat([h0[:, :, None].to(states.dtype), states[:, :, :-1]], 2)
        return db * before, db, (db[:, :, 0] * a[:, :, 0]).to(h0.dtype)


def recur(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    """All states, in chunks of sqrt(t) tokens: the chunks run side by side from zero, then each takes over the state
    before it."""
    tokens = a.shape[2]
    size = math.ceil(math.sqrt(tokens))
    padded = -tokens % size
    a, b = (functional.pad(t, (0, 0, 0, padded)).unflatten(2, (-1, size)) for t in (a, b))
    states, decay = torch.empty_like(b), torch.empty_like(a)
    states[:, :, :, 0], decay[:, :, :, 0] = b[:, :, :, 0], a[:, :, :, 0]
    for i in range(1, size):
        states[:, :, :, i] = a[:, :, :, i] * states[:, :, :, i - 1] + b[:, :, :, i]
        decay[:, :, :, i] = a[:, :, :, i] * decay[:, :, :, i - 1]
    h = h0.to(b.dtype)
    for chunk in range(states.shape[2]):
        states[:, :, chunk] += decay[:, :, chunk] * h[:, :, None]
        h = states[:, :, chunk, -1]
    return states.flatten(2, 3)[:, :, :tokens]
