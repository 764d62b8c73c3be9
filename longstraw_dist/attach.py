"""attach(): gives a causal LM its packed mode, and refuses by name what cannot be exact.

Only `model.forward` is replaced, and for good: it passes every call without `prompt_groups` on to the forward that it
found. Layers, norm and head are called as the modules that they are, with their hooks, and keep their forward; the
packed one stands in for it while such a call lasts.
"""

import functools
import types
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from . import adapters, wrapping
from .adapters import base_of
from .attachment import Attachment
from .config import LongStrawConfig
from .support import refuse_inexact


def attach(model: Any, config: LongStrawConfig | None = None) -> Any:
    """
    Lets `model(prompt_groups=[PromptGroup(...), ...], temperature=1.0)` run each group's prompt once.

    Call it before accelerate, DeepSpeed, `fully_shard` or DDP wraps the model; wrap, train, generate and save as ever
    afterwards. A call without `prompt_groups` is the model's own forward.

    Such a call costs one forward of every prompt and response token; its backward at most one more forward and one
    backward of each (of the response tokens alone where the prompt is detached). With ZeRO-3 and FSDP2 a layer is
    gathered once in forward and once in backward, and its gradient reduce-scattered once. One small all-reduce a call
    lets all ranks raise what one rank finds wrong, so every rank of the default process group must make the call. One
    call with a graph a backward: put all groups of a micro-batch into it.

    With `capture=True` its output has `captures`, one for each group, also of one without responses. A group that is
    given its capture costs no forward of the prompt; its backward is the same.

    Args:
        model (`PreTrainedModel` or `peft.PeftModel`): a causal LM of a supported type. Add adapters before.
        config ([`LongStrawConfig`], *optional*): how to run it.

    Returns:
        The model itself.

    Raises:
        `ValueError`: for a type, a setting or a wrapping that is not supported, naming it and what to do.
    """
    config = LongStrawConfig() if config is None else config
    if not isinstance(config, LongStrawConfig):
        raise ValueError(f"attach() got a {type(config).__name__} for its config: pass a LongStrawConfig, or none.")
    root = model
    if isinstance(model, nn.Module):
        wrapping.refuse_wrapped(model)
        adapters.refuse_adapters(model)
        model = base_of(model)
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise ValueError(f"attach() got a {type(model).__name__}: pass a transformers causal LM.")
    if is_attached(model):
        raise ValueError(f"this {type(model).__name__} is attached already: attach() it once.")
    refuse_inexact(model)
    attachment = Attachment(model, config, root)
    layers = attachment.blueprint.layers
    if attachment.exact_layers > len(layers):
        raise ValueError(f"prompt_grad={config.prompt_grad!r} asks for more than the {len(layers)} layers.")
    wrapping.mark_leaves([*layers, attachment.blueprint.norm, attachment.blueprint.head])
    vars(model)["_longstraw"] = attachment

    patched = vars(model).get("forward")  # by TRL or accelerate, on the instance

    @functools.wraps(type(model).forward)  # generate() and Trainer read the signature
    def forward(self, *args, prompt_groups=None, temperature=1.0, capture=False, output_router_logits=None, **kwargs):
        if prompt_groups is not None:
            given = [name for name, value in kwargs.items() if value is not None]  # PEFT hands on all of its own
            unknown = (*args, *given)
            return attachment_of(self).run(prompt_groups, temperature, capture, output_router_logits, unknown)
        if output_router_logits is not None:
            kwargs["output_router_logits"] = output_router_logits
        if capture:
            raise ValueError("capture=True without prompt_groups: it captures their prompts.")
        if not torch.is_grad_enabled():
            wrapping.reshard_before_training(attachment_of(self).root)
        if patched is None:
            return type(self).forward(self, *args, **kwargs)
        if isinstance(patched, types.MethodType):  # not bound to the model that a copy was made of
            return patched.__func__(self, *args, **kwargs)
        return patched(*args, **kwargs)

    model.forward = types.MethodType(forward, model)
    return root


def recover(model: PreTrainedModel) -> None:
    """
    After an exception in the middle of a backward whose note says so: makes the next step possible. Call it on every
    rank. Under FSDP2 it drops all gradients, for which it gathers each unit once; without an engine there is nothing
    to do. An exception in a forward needs no recovery: run that micro-batch again.

    Raises:
        `ValueError`: if the engine cannot be put back and must be rebuilt, saying why.
    """
    attachment_of(model).recover()


def is_attached(model: nn.Module) -> bool:
    return "_longstraw" in vars(base_of(model))


def attachment_of(model: nn.Module) -> Attachment:
    """What `attach` left on the (unwrapped) model. Raises `ValueError` if it never was."""
    if not is_attached(model):
        raise ValueError(f"this {type(model).__name__} is not attached: call attach(model) before it is wrapped.")
    return vars(base_of(model))["_longstraw"]
