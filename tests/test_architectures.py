"""What is particular to an architecture: that its state matters, where it lies, what it computes at once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw_dist import LongStrawConfig, PromptGroup, attach, indexer

from .architectures import ARCHITECTURES
from .models import AROUND, inside_of_another, ragged, tiny
from .more_architectures import FURTHER
from .reference import stock_rows
from .test_parity import check, errors, run


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in FURTHER)])
def test_the_state_matters(kind):
    """The same tokens in another order are another prompt."""
    model = attach(tiny(kind))
    groups = ragged(shapes=((23, (5, 3)),))
    turned = [PromptGroup(torch.cat([g.prompt_ids[:-1].flip(0), g.prompt_ids[-1:]]), g.response_ids) for g in groups]
    with torch.no_grad():
        a, b = (torch.cat(model(prompt_groups=g).logps) for g in (groups, turned))
    assert (a - b).abs().max() > 1e-2


@pytest.mark.parametrize("name", AROUND)
def test_a_text_model_inside_of_another(name):
    """As released checkpoints are, with text prompts, in which ids of images may stand."""
    model = inside_of_another(name, pad_token_id=0)
    for n, p in model.named_parameters():
        p.requires_grad_("language_model" in n or "lm_head" in n)
    check(model, ragged(), LongStrawConfig(prompt_chunk_size=7), parameter_bar=3e-4)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_index_scores_in_blocks(kind, monkeypatch):
    """The scores that are alive at once are bounded, and the choice is that of all of them together."""
    largest = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.relu.default:
                largest.append(out.numel())
            return out

    model, groups = tiny(kind), ragged()
    stock = run(model, stock_rows(model, groups, 0.7))
    monkeypatch.setattr(indexer, "SCORES", 32 * 100)
    attach(model, LongStrawConfig(prompt_chunk_size=16))
    with Largest():
        out = model(prompt_groups=groups, temperature=0.7)
    found = errors(run(model, (out.logps, out.entropies)), stock)
    assert max(largest) <= 32 * 100
    assert all(error <= bar for error, bar in zip(found, (1e-5, 1e-5, 3e-4), strict=True))
