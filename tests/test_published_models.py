"""The models of configs/models/, at their published dimensions and without weights: what they keep of a prompt."""

from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from transformers import AutoConfig

from longstraw_dist import attach
from longstraw_dist.attach import attachment_of
from longstraw_dist.failures import Place
from longstraw_dist.graphs import Budget
from longstraw_dist.groups import Packed, Segment
from longstraw_dist.meter import Meter
from longstraw_dist.replay import Call, Layer, Progress, run
from longstraw_dist.state import View

CONFIGS = Path(__file__).parents[1] / "configs" / "models"
TOKENS = 64
KINDS = {"keys": "K, V", "values": "K, V", "index": "index", "conv 0": "convolution", "recurrent 0": "recurrent"}
PUBLISHED = {  # billions of parameters; in bfloat16, bytes a token of what grows and bytes a page of what is carried
    "Qwen3.6-27B": (27, {"K, V": 16 * 4096}, {"convolution": 48 * 81_920, "recurrent": 48 * 3_145_728}),
    "GLM-5.2": (743, {"latent": 78 * 1152, "index": 21 * 256}, {}),
}


def state_of(layer: Layer, segment: Segment, config) -> dict[str, torch.Tensor]:
    """What a layer hands to its cache, on the meta device; it is left as soon as that is all."""
    enough = {"conv 0", "recurrent 0"} if layer.traits.stacked else {"keys", "values"}
    if layer.traits.indexed and config.indexer_types[layer.index] == "full":
        enough.add("index")
    view = View({}, segment, frozenset(enough), layer.traits.joined)
    x = torch.empty(1, segment.tokens, config.hidden_size, dtype=torch.bfloat16, device="meta")
    with mock.patch.object(torch, "is_autocast_enabled", return_value=False):
        run(layer, layer.module.forward, segment, x, view)
    return view.new


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_of_prompt_state(name):
    config = AutoConfig.from_pretrained(CONFIGS / name)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config).to(torch.bfloat16)
    attach(model)
    plan = attachment_of(model).blueprint
    assert sum(p.numel() for p in model.parameters()) // 10**9 == PUBLISHED[name][0]

    segment = Segment(slice(0, TOKENS), 0, (TOKENS,), is_chunk=True)
    plan.describe(segment, torch.empty(0, dtype=torch.bfloat16, device="meta"))
    empty = torch.empty(0, dtype=torch.int64)
    packed = Packed([], empty, empty, empty, [], 0)
    call = Call(packed, plan.config, Meter(), Progress(), Place(), Budget(0), None, [None], lambda _: None)
    growing, carried = Counter(), Counter()
    for i, module in enumerate(plan.layers):
        layer = Layer(call, module, i, True, i == 0, False, plan.traits[i])
        for key, t in state_of(layer, segment, plan.config).items():
            kind = "latent" if layer.traits.joined and key in ("keys", "values") else KINDS[key]
            if key in ("keys", "values", "index"):
                growing[kind] += t.nbytes // TOKENS
            else:
                carried[kind] += t.nbytes
    print(f"{name}, {len(plan.layers)} layers: bytes a token {dict(growing)}, bytes a page {dict(carried)}")
    assert (dict(growing), dict(carried)) == PUBLISHED[name][1:]
