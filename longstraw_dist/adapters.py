"""PEFT adapters inside of a model: where the model is, and which adapters run as the layers that they are part of.

The one file that names PEFT. An adapter that changes weights (LoRA and its kin) is a part of its layer like any other;
one that changes the sequence (prompt learning) or asks for arguments of its own is not.
"""

import functools
import sys

from torch import nn
from transformers import PreTrainedModel

KINDS = ("LORA", "IA3", "VERA")  # `peft_type`, tested
# Settings of a LoRA that is not the same function again, in pieces: it begins to act at a token, draws at random, or
# takes its gradient from averages over a call.
INEXACT = ("alora_invocation_tokens", "monteclora_config", "velora_config")


def base_of(model: nn.Module) -> nn.Module:
    """The model that `get_peft_model` wrapped, or the model itself."""
    if "peft" in sys.modules:
        from peft import PeftModel

        if isinstance(model, PeftModel) and not any(c.is_prompt_learning for c in model.peft_config.values()):
            return model.get_base_model()
    return model


def tuners(model: nn.Module) -> list:
    """The adapted modules."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def refuse_adapters(model: nn.Module) -> None:
    """Raises `ValueError` for an adapter that does not run as a part of its layer, naming it."""
    if type(model).__module__.startswith("peft.") and not isinstance(base_of(model), PreTrainedModel):
        raise ValueError(
            f"a {type(model).__name__} of this kind changes the sequence or the call, not only weights (prompt "
            f"learning, mixed adapters): use one of {', '.join(KINDS)}."
        )
    if (fault := find_inexact(base_of(model))) is not None:
        raise ValueError(fault)


def find_inexact(model: nn.Module) -> str | None:
    """Names an adapter, or a setting of it, that is not supported."""
    for name, config in vars(model).get("peft_config", {}).items():
        setting = next((s for s in INEXACT if vars(config).get(s)), None)
        if config.peft_type not in KINDS or setting is not None:
            kind = config.peft_type.value + (f" with {setting}" if config.peft_type in KINDS else "")
            return f'adapter "{name}" is of type {kind}, which is not supported: use {", ".join(KINDS)}.'
    return None


def find_fault(model: nn.Module, adapted: int, wrapped: bool) -> str | None:
    """What changed since `attach` saw `adapted` modules with adapters, in a model that PEFT had `wrapped` or not."""
    found = tuners(model)
    if len(found) != adapted and not wrapped:
        return "adapters were added after attach(): attach the model that get_peft_model returns."
    if (fault := find_inexact(model)) is not None:
        return fault
    for tuner in found:
        for hook in tuner._forward_pre_hooks.values():
            if isinstance(hook, functools.partial) and "adapter_names" in hook.keywords:
                return "adapter_names chooses an adapter for each row, and there are no rows: use set_adapter()."
    return None


def applied(model: nn.Module) -> list[tuple]:
    """What each adapted module applies now: which adapters at which scale, unless they are disabled or merged."""
    return [
        (t.disable_adapters, *t.merged_adapters, *((a, vars(t).get("scaling", {}).get(a)) for a in t.active_adapters))
        for t in tuners(model)
    ]
