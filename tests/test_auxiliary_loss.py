"""The MoE auxiliary loss: the stock model's over all rows of a batch, and its gradient."""

import pytest
import torch

from longstraw_dist import LongStrawConfig, PromptGroup, attach

from .models import ragged, tiny, weigh
from .reference import gradients, relative, worst

KINDS = ["qwen3_moe", "mixtral", "qwen3_next", "gpt_oss", "minimax_m2", "jamba", "granitemoehybrid"]
FURTHER_KINDS = [
    "dbrx",
    "ernie4_5_moe",
    "flex_olmo",
    "flint",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "laguna",
    "lara_mini",
    "mellum",
    "olmoe",
    "qwen2_moe",
]
SHAPES = ((23, (5, 5, 0, 9)), (1, (3, 1)), (2, (4,)), (40, ()))


def padded(groups):
    """TRL's batch of the groups' rows: prompts padded on the left, responses on the right."""
    rows = [(group.prompt_ids, response) for group in groups for response in group.response_ids]
    width, length = max(len(p) for p, _ in rows), max(len(r) for _, r in rows)
    ids = torch.zeros(len(rows), width + length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, (prompt, response) in enumerate(rows):
        ids[i, width - len(prompt) : width + len(response)] = torch.cat([prompt, response])
        mask[i, width - len(prompt) : width + len(response)] = 1
    return ids, mask, width, rows


def stock(model, groups, coefficient):
    ids, mask, width, rows = padded(groups)
    out = model(
        input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0), output_router_logits=True
    )
    logps = []
    for i, (_, response) in enumerate(rows):
        log_p = out.logits[i, width - 1 : width - 1 + len(response)].log_softmax(-1)
        logps.append(log_p.gather(-1, response[:, None])[:, 0])
    (weigh(logps, []) + coefficient * out.aux_loss).backward()
    return out.aux_loss.detach(), gradients(model)


@pytest.mark.parametrize("coefficient", [0.1, 10.0])
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in FURTHER_KINDS)])
def test_as_stock(kind, coefficient):
    model, groups = tiny(kind), ragged(shapes=SHAPES)
    expected, reference = stock(model, groups, coefficient)
    model.zero_grad()
    attach(model, LongStrawConfig(prompt_chunk_size=8, responses_per_replay=2, head_chunk_size=4))
    out = model(prompt_groups=groups, output_router_logits=True)
    torch.testing.assert_close(out.aux_loss.detach(), expected, rtol=1e-5, atol=1e-5)
    (weigh(out.logps, []) + coefficient * out.aux_loss).backward()
    ours, reference = ({n: g for n, g in grads.items() if g is not None} for grads in (gradients(model), reference))
    assert relative(ours, reference) <= 1e-5
    error, name = worst(ours, reference)
    assert error <= 3e-4, name


def test_without_responses():
    model = attach(tiny("mixtral"))
    empty = torch.tensor([], dtype=torch.int64)
    for groups in ([], [PromptGroup(torch.tensor([1, 2]), [])]):
        out = model(prompt_groups=groups, output_router_logits=True)
        assert out.aux_loss == 0
        (out.aux_loss + out.anchor).backward()
    groups = [PromptGroup(torch.tensor([1, 2, 3]), [empty, empty])]
    expected, reference = stock(tiny("mixtral"), groups, 1.0)
    model.zero_grad()
    out = model(prompt_groups=groups, output_router_logits=True)
    torch.testing.assert_close(out.aux_loss.detach(), expected)
    (out.aux_loss + out.anchor).backward()
    assert relative(gradients(model), {n: torch.zeros(()) if g is None else g for n, g in reference.items()}) <= 1e-5


def test_a_model_without_routers():
    with pytest.raises(ValueError, match="no routers"):
        attach(tiny("llama"))(prompt_groups=ragged(), output_router_logits=True)
