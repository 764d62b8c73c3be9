"""The slow, plain reference: the stock model, one response at a time, in one process. Far too slow for training.

For `detached` and `last:N` a row is run in two calls, as transformers generates: the captured prompt tokens, then the
response on the cache that they left, whose tensors are constants in every layer that is not exact. So are the prompt's
hidden states where the exact layers begin.
"""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from longstraw_dist import PromptGroup


def stock_rows(model: nn.Module, groups: list[PromptGroup], temperature: float = 1.0, detached: int = 0):
    """Log-probs and entropies, `[R_i]` each, from one forward of prompt + response for each response. In the first
    `detached` layers the state of the prompt is a constant."""
    logps: list[Tensor] = []
    entropies: list[Tensor] = []
    for group in groups:
        for response in group.response_ids:
            p = len(group.prompt_ids) - 1
            ids = torch.cat([group.prompt_ids, response])[None]
            logits = cut_row(model, ids, p, detached) if detached and p else model(input_ids=ids).logits[:, p:]
            logits = logits[0, : len(response)]
            high = torch.promote_types(logits.dtype, torch.float32)
            log_p = (logits.to(high) / temperature).log_softmax(-1)
            logps.append(log_p.gather(-1, response[:, None])[:, 0])
            entropies.append(-(log_p.exp() * log_p).sum(-1))
    return logps, entropies


def cut_row(model: Any, ids: Tensor, captured: int, detached: int) -> Tensor:
    """`[1, N - captured, V]`: logits behind the first `captured` tokens, which the first layers see as constants."""
    lists = [c for c in model.get_decoder().children() if isinstance(c, nn.ModuleList)]
    layers = next(c for c in lists if any(True for _ in c.parameters()))
    with continued_states(layers[0]):
        hooks = [layer.register_forward_pre_hook(cut_hidden) for layer in layers[detached : detached + 1]]
        # zamba2 hands its embeddings to every layer: they come from below the exact ones
        hooks.append(model.get_input_embeddings().register_forward_hook(lambda module, args, out: out.detach()))
        if by_token := model.config.model_type == "recurrent_gemma":  # and keeps its states on its modules
            model.get_decoder()._setup_cache(model.config, 1, ids.device, model.dtype)
        own = model.config.model_type == "minimax"  # has a class of its own
        cache = MiniMaxCache() if own else DynamicCache(config=model.config.get_text_config())
        model(input_ids=ids[:, :captured], use_cache=True, cache=cache)
        for hook in hooks:
            hook.remove()
        modules = [m for layer in layers[:detached] for m in layer.modules()] if by_token else []
        for attributes in map(vars, (*cache.layers[:detached], *modules)):
            attributes.update({name: constant(t) for name, t in attributes.items() if not name.startswith("_")})
        if own:
            cache.linear_cache[:detached] = [constant(state) for state in cache.linear_cache[:detached]]
        cache.activate_past_recording()  # keeps others from it
        # one token more, that nothing sees: some layers write in place where there is one
        behind = torch.cat([ids[:, captured:], ids[:, -1:]], 1)
        positions = torch.arange(captured, captured + behind.shape[1])[None]  # bamba counts from its cache wrongly
        takes = "position_ids" in inspect.signature(model.forward).parameters
        logits = []
        for at in [slice(i, i + 1) for i in range(behind.shape[1])] if by_token else [slice(None)]:
            given = {"position_ids": positions[:, at]} if takes else {}
            logits.append(model(input_ids=behind[:, at], cache=cache, use_cache=True, **given).logits)
        return torch.cat(logits, 1)


def cut_hidden(module: nn.Module, args: tuple) -> tuple:
    return (args[0].detach(), *args[1:])


def constant(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: constant(t) for key, t in state.items()}
    return state.detach() if isinstance(state, Tensor) else state


@contextlib.contextmanager
def continued_states(layer: nn.Module) -> Iterator[None]:
    """The stock cache assigns a recurrent state where it would write in place, and a selective scan begins at the one
    that its layer has just read, where the stock one begins at zero."""
    read = Cache.get_recurrent_state
    begin: list[Tensor | None] = []
    names, scan = vars(sys.modules[type(layer).__module__]), "mamba_selective_scan"

    def reading(*args, **kwargs):
        begin[:] = [read(*args, **kwargs)]
        return begin[0]

    def assign(self, state, state_idx=0, **kwargs):
        self.recurrent_states[state_idx] = state
        return state

    def scanned(x, dt, A, B, C, D, z, delta_bias, **settings):
        """`x, dt, z: [b, d, t]`, `A: [d, n]`, `B, C: [b, n, t]`"""
        dt = functional.softplus(dt + delta_bias[:, None])
        h = torch.zeros(*x.shape[:2], A.shape[1], dtype=x.dtype) if begin[0] is None else begin[0]
        y = []
        for t in range(x.shape[2]):
            h = torch.exp(A * dt[:, :, t, None]) * h + dt[:, :, t, None] * B[:, None, :, t] * x[:, :, t, None]
            y.append((h * C[:, None, :, t]).sum(-1) + D * x[:, :, t])
        return torch.stack(y, -1) * functional.silu(z), h

    with (
        mock.patch.object(Cache, "get_recurrent_state", reading),
        mock.patch.object(LinearAttentionLayer, "update_recurrent_state", assign),
        mock.patch.dict(names, {scan: scanned} if scan in names else {}),
    ):
        yield


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
