"""Log-probs, entropies and every parameter's gradient against the stock model, response by response."""

import pytest
import torch

from longstraw_dist import LongStrawConfig, attach
from longstraw_dist.config import exact_layers

from .models import MODELS, ragged, tiny, weigh
from .reference import gradients, relative, stock_rows, worst


def check(model, groups, config, temperature=0.7, bar=1e-5):
    layers = model.config.num_hidden_layers
    logps, entropies = stock_rows(model, groups, temperature, layers - exact_layers(config.prompt_grad, layers))
    weigh(logps, entropies).backward()
    reference = gradients(model)
    model.zero_grad()

    attach(model, config)
    out = model(prompt_groups=groups, temperature=temperature)
    weigh(out.logps, out.entropies).backward()
    assert [len(t) for t in out.logps] == [len(t) for t in logps]
    for ours, stock in zip([*out.logps, *out.entropies], [*logps, *entropies], strict=True):
        torch.testing.assert_close(ours, stock, rtol=0, atol=bar)
    assert relative(gradients(model), reference) <= bar
    error, name = worst(gradients(model), reference)
    assert error <= 10 * bar, name


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", ["exact", "detached", "last:2"])
@pytest.mark.parametrize("kind", MODELS)
def test_parity(kind, mode, tied, chunk):
    check(tiny(kind, tied), ragged(), LongStrawConfig(prompt_grad=mode, prompt_chunk_size=chunk, head_chunk_size=4))
