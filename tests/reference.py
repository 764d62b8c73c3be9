"""The slow, plain reference: the stock model, one response at a time, in one process. Far too slow for training.

`detached` and `last:N` are stock rows too, in which the keys and values of the captured prompt tokens are detached in
every layer that is not exact, and the prompt's hidden states where the exact layers begin.
"""

import contextlib

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as softcapped

from longstraw_dist import PromptGroup

CUT = {"tokens": 0, "layers": 0}  # captured tokens of the row that runs, and the number of detached layers


def cut_attention(module, query, key, value, mask, **kwargs):
    if module.layer_idx < CUT["layers"]:
        t = CUT["tokens"]
        key, value = (torch.cat([x[:, :, :t].detach(), x[:, :, t:]], 2) for x in (key, value))
    if kwargs.get("softcap") is not None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril() if mask is None else mask
        return softcapped(module, query, key, value, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf), **kwargs)
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


AttentionInterface.register("cut", cut_attention)
AttentionMaskInterface.register("cut", sdpa_mask)


@contextlib.contextmanager
def cut_prompt(model: nn.Module, detached_layers: int):
    """Stock rows of `model` are cut below `model.layers[detached_layers]`."""
    if detached_layers == 0:  # nothing to cut: the model as it is
        yield
        return
    before = model.config._attn_implementation
    model.config._attn_implementation = "cut"
    layers = model.get_decoder().layers

    def cut_hidden(module, args):
        t = CUT["tokens"]
        return (torch.cat([args[0][:, :t].detach(), args[0][:, t:]], 1), *args[1:])

    exact = layers[detached_layers : detached_layers + 1] if detached_layers else []
    hooks = [layer.register_forward_pre_hook(cut_hidden) for layer in exact]
    CUT["layers"] = detached_layers
    try:
        yield
    finally:
        model.config._attn_implementation = before
        for hook in hooks:
            hook.remove()


def stock_rows(model: nn.Module, groups: list[PromptGroup], temperature: float = 1.0):
    """Log-probs and entropies, `[R_i]` each, from one forward of prompt + response for each response."""
    logps: list[Tensor] = []
    entropies: list[Tensor] = []
    for group in groups:
        for response in group.response_ids:
            CUT["tokens"] = p = len(group.prompt_ids) - 1
            logits = model(input_ids=torch.cat([group.prompt_ids, response])[None]).logits[0, p : p + len(response)]
            high = torch.promote_types(logits.dtype, torch.float32)
            log_p = (logits.to(high) / temperature).log_softmax(-1)
            logps.append(log_p.gather(-1, response[:, None])[:, 0])
            entropies.append(-(log_p.exp() * log_p).sum(-1))
    return logps, entropies


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def relative(grads: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """|g - g_ref| / |g_ref| over all parameters together."""
    assert grads.keys() == reference.keys()
    difference = sum((grads[n].double() - g.double()).square().sum() for n, g in reference.items())
    return float((difference / sum(g.double().square().sum() for g in reference.values())) ** 0.5)


def worst(grads: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error of one parameter's gradient, its denominator floored at 1e-3 of the whole gradient's
    norm over the root of the number of parameters; and its name."""
    whole = float(sum(g.double().square().sum() for g in reference.values()) ** 0.5)
    floor = 1e-3 * whole / len(reference) ** 0.5
    errors = {
        n: float((grads[n].double() - g.double()).norm()) / max(float(g.double().norm()), floor)
        for n, g in reference.items()
    }
    name = max(errors, key=errors.__getitem__)
    return errors[name], name
