"""Each kernel that is installed, on a GPU, against PyTorch: `python -m pytest -m gpu tests/test_kernels_gpu.py`."""

import pytest
import torch

from longstraw_dist import LongStrawConfig, attach, attention, kernels
from longstraw_dist.attention import KERNELS, FlashCPU, Plain, PrefixAttention, Scores
from longstraw_dist.groups import PromptGroup
from longstraw_dist.kernels import MIXERS, PYTORCH

from .models import ragged, tiny
from .reference import relative
from .test_parity import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = "cuda"
BAR, FLOOR = 3.0, 1e-2  # error of the kernel over that of PyTorch in bfloat16, both against float32

# Kinds of one mixer each (and a convolution), in sizes that the kernels have.
DELTA_RULE = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
WIDE = {"hidden_size": 128, "intermediate_size": 128}
KINDS = {
    "qwen3_next": WIDE | DELTA_RULE | {"head_dim": 32},
    "kimi_linear": WIDE | {"linear_head_dim": 32},
    "nemotron_h": WIDE | {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32, "chunk_size": 64},
    "bamba": WIDE | {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_chunk_size": 64},
    "lfm2": WIDE,
    "jamba": WIDE,
}


def attend(inputs, lengths, scores, g, dtype):
    leaves = [t.to(dtype).requires_grad_() for t in inputs]
    q, k, v, *past = leaves
    out = PrefixAttention.apply(q, k, v, lengths, scores, None, *past)
    return [t.float() for t in (out, *torch.autograd.grad(out, leaves, g.to(dtype)))]


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k not in (FlashCPU, Plain)], ids=lambda k: k.name)
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(33, 33, 33), (70, 1, 20)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 2.0), (40, 2.0)])
def test_attention(kernel, size, lengths, window, softcap, monkeypatch):
    scores, past = Scores(size**-0.5, softcap, window), 300 if window is None else window - 1
    generator = torch.Generator().manual_seed(0)

    def draw(heads, tokens):
        return torch.randn(1, heads, tokens, size, generator=generator).bfloat16().float().to(DEVICE)

    n = sum(lengths)
    inputs, g = [draw(8, n), draw(2, n), draw(2, n), draw(2, past), draw(2, past)], draw(8, n)
    if not kernel.serves(inputs[0].bfloat16(), window, scores):
        pytest.skip(f"{kernel.name} is not installed, not for this GPU, or does not take this")
    results = {}
    for used, dtype in ((Plain, torch.float32), (Plain, torch.bfloat16), (kernel, torch.bfloat16)):
        monkeypatch.setattr(attention, "FORCE", used)
        results[used.name, dtype] = attend(inputs, lengths, scores, g, dtype)
    reference, plain, found = results.values()
    for exact, theirs, ours in zip(reference, plain, found, strict=True):
        own, error = ((t - exact).norm() / exact.norm() for t in (theirs, ours))
        assert error <= BAR * own + FLOOR


def packed(kind: str, dtype: torch.dtype):
    model = tiny(kind, dtype=torch.bfloat16, **KINDS[kind]).to(DEVICE, dtype)
    groups = [
        PromptGroup(group.prompt_ids.to(DEVICE), [ids.to(DEVICE) for ids in group.response_ids])
        for group in ragged(shapes=((150, (70, 33, 1)), (2, (5,))))
    ]
    out = attach(model, LongStrawConfig(prompt_chunk_size=64))(prompt_groups=groups, temperature=0.7)
    return run(model, (out.logps, out.entropies))


@pytest.mark.parametrize("kind", KINDS)
def test_mixers(kind, monkeypatch):
    """A packed call with the packages, its chunks continuing from states, against one without."""
    monkeypatch.setattr(kernels, "SERVED", {})
    found = packed(kind, torch.bfloat16)
    packages = {by for mixer in MIXERS.values() for by in kernels.SERVED.get(mixer.name, ())} - {PYTORCH}
    if not packages:
        pytest.skip(f"none of the packages that serve {kind} is installed")
    print(kernels.in_use())
    monkeypatch.setattr(kernels, "fits", lambda x: False)
    plain, reference = packed(kind, torch.bfloat16), packed(kind, torch.float32)
    for error, own in zip(errors(found, reference), errors(plain, reference), strict=True):
        assert error <= BAR * own + FLOOR


def errors(found, reference) -> tuple[float, float]:
    """Of the log-probs and entropies, and of the gradient, relative."""
    (scores, gradients), (exact_scores, exact_gradients) = found, reference
    return float((scores - exact_scores).norm() / exact_scores.norm()), relative(gradients, exact_gradients)
