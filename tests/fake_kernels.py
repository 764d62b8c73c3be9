"""The packages of kernels.py with the signatures that they document, in plain PyTorch: what is handed to them, and in
which layout, shows on a CPU. What their kernels do with it does not."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from longstraw_dist import kernels
from longstraw_dist.attention import high
from longstraw_dist.kernels import unwrap

# taken now: while a layer runs, other functions stand there
GATED_DELTA_RULE = unwrap(qwen.torch_chunk_gated_delta_rule)
KIMI_DELTA_ATTENTION = unwrap(kimi.chunk_kimi_delta_attention)
MAMBA2_SCAN = unwrap(mamba2.mamba2_chunk_scan)
CONVOLUTION = unwrap(mamba2.causal_conv1d_fn)


def install(monkeypatch: pytest.MonkeyPatch, path: str, thing) -> None:
    """`thing` becomes what `path` imports, in packages that are there while the test runs."""
    *parts, name = path.split(".")
    for i in range(1, len(parts) + 1):
        full = ".".join(parts[:i])
        if full not in sys.modules:
            module = ModuleType(full)
            module.__spec__ = ModuleSpec(full, None)
            monkeypatch.setitem(sys.modules, full, module)
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
    setattr(importlib.import_module(".".join(parts)), name, thing)
    kernels.load.cache_clear()


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, **kwargs
):  # fmt: skip
    assert not kwargs
    state = {"initial_state": initial_state, "output_final_state": output_final_state}
    return GATED_DELTA_RULE(q, k, v, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **state)


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, cu_seqlens=None, **kwargs
):  # fmt: skip
    assert not kwargs
    assert not use_gate_in_kernel
    state = {"initial_state": initial_state, "output_final_state": output_final_state}
    return KIMI_DELTA_ATTENTION(q, k, v, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **state)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, return_varlen_states=False
):  # fmt: skip
    assert z is None
    assert not return_varlen_states
    return MAMBA2_SCAN(
        x, dt, A, B, C, chunk_size, D, dt_bias, initial_states, dt_softplus, dt_limit, return_final_states
    )


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
    activation=None
):  # fmt: skip
    assert initial_states is None
    assert not return_final_states
    return CONVOLUTION(x, weight, bias, activation)


MIXERS = {
    "fla.ops.gated_delta_rule.chunk_gated_delta_rule": chunk_gated_delta_rule,
    "fla.ops.kda.chunk_kda": chunk_kda,
    "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined": mamba_chunk_scan_combined,
    "causal_conv1d.causal_conv1d_fn": causal_conv1d_fn,
}


def weigh(q, k, scale, causal, left, right, softcap):
    """Scores `[B, H, N, T]`, aligned bottom right, and what a softcap multiplies their gradient with."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = scale * torch.einsum("bnhd,bthd->bhnt", q.to(high(q)), k.to(high(k)))
    slope = torch.ones_like(scores)
    if softcap > 0:
        t = (scores / softcap).tanh()
        scores, slope = softcap * t, 1 - t.square()
    n, t = scores.shape[2:]
    ahead = torch.arange(t) - torch.arange(t - n, t)[:, None]
    right = 0 if causal else right
    hidden = (ahead > right if right >= 0 else False) | (ahead < -left if left >= 0 else torch.zeros_like(ahead) > 0)
    return scores.masked_fill(hidden, -torch.inf), slope


def flash_forward(q, k, v, scale, causal, left, right, softcap):
    scores, _ = weigh(q, k, scale, causal, left, right, softcap)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhnt,bthd->bnhd", scores.softmax(-1), v.to(high(v))).to(q.dtype), scores.logsumexp(-1)


def flash_backward(g, q, k, v, o, lse, dq, dk, dv, scale, causal, left, right, softcap):
    assert lse.is_contiguous()
    groups = q.shape[2] // k.shape[2]
    g, q, k, v, o = (t.to(high(t)) for t in (g, q, k, v, o))
    scores, slope = weigh(q, k, scale, causal, left, right, softcap)
    p = (scores - lse[..., None]).exp()
    dp = torch.einsum("bnhd,bthd->bhnt", g, v.repeat_interleave(groups, 2))
    ds = scale * slope * p * (dp - (g * o).sum(-1).mT[..., None])
    dq.copy_(torch.einsum("bhnt,bthd->bnhd", ds, k.repeat_interleave(groups, 2)))
    dk.copy_(torch.einsum("bhnt,bnhd->bthd", ds, q).unflatten(2, (-1, groups)).sum(3))
    dv.copy_(torch.einsum("bhnt,bnhd->bthd", p, g).unflatten(2, (-1, groups)).sum(3))


def flash2_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax
):  # fmt: skip
    assert dropout_p == 0.0
    assert alibi_slopes is None
    assert not return_softmax
    o, lse = flash_forward(q, k, v, softmax_scale, causal, window_size_left, window_size_right, softcap)
    return o, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


def flash2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
    window_size_right, softcap, alibi_slopes, deterministic, rng_state=None
):  # fmt: skip
    assert dropout_p == 0.0
    assert alibi_slopes is None
    assert not deterministic
    limits = window_size_left, window_size_right
    flash_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, *limits, softcap)


def flash3_fwd(
    q, k, v, *, softmax_scale, is_causal, window_size_left, window_size_right, softcap, num_splits
):  # fmt: skip
    assert num_splits == 1
    o, lse = flash_forward(q, k, v, softmax_scale, is_causal, window_size_left, window_size_right, softcap)
    return o, lse, None, None


def flash3_bwd(
    dout, q, k, v, out, softmax_lse, *, dq, dk, dv, softmax_scale, is_causal, window_size_left, window_size_right,
    softcap, deterministic
):  # fmt: skip
    assert not deterministic
    limits = window_size_left, window_size_right
    flash_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, is_causal, *limits, softcap)


def install_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "flash_attn.flash_attn_interface._wrapped_flash_attn"
    install(monkeypatch, f"{module}_forward", flash2_forward)
    install(monkeypatch, f"{module}_backward", flash2_backward)
    operators = SimpleNamespace(fwd=flash3_fwd, bwd=flash3_bwd)
    monkeypatch.setattr(torch.ops, "flash_attn_3", operators, raising=False)
