"""The little that an engine still needs to be told, and which wrapping is refused. The one file that names an engine.

ZeRO-3 must fetch a decoder layer as a whole, once a call: `attach` marks the layers as leaf modules (and a norm or an
LM head that PEFT has wrapped), before `deepspeed.initialize` registers its hooks. FSDP2 and DDP need nothing.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .blueprint import Blueprint


def refuse_wrapped(model: nn.Module) -> None:
    """Raises `ValueError` if an engine has wrapped the model already."""
    wrappers = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule, nn.DataParallel)
    if isinstance(model, wrappers) or type(model).__module__.startswith("deepspeed."):
        raise ValueError(
            f"attach() got a {type(model).__name__}: attach the model first, then wrap it (accelerator.prepare, "
            "deepspeed.initialize, fully_shard, DistributedDataParallel)."
        )
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError("attach() got a model with sharded parameters (tensor parallel): attach it before sharding.")


def mark_leaves(modules: list[nn.Module]) -> None:
    """Tells ZeRO-3 to gather each of the modules as a whole. Does nothing where DeepSpeed is not in use."""
    if "deepspeed" in sys.modules:
        from deepspeed.utils import set_z3_leaf_module

        for module in modules:
            if is_composed(module):
                set_z3_leaf_module(module, True)


def is_composed(module: nn.Module) -> bool:
    """Whether it has modules inside, as every layer has, and a norm or an LM head in PEFT's hands."""
    return any(True for _ in module.children())


def find_fault(model: Any, blueprint: Blueprint) -> str | None:
    """What is wrong with how the model is wrapped, or `None`. The same on every rank; costs no collective."""
    if isinstance(model.get_decoder(), FSDPModule):
        return "the decoder is a fully_shard unit of its own, which is never called: shard its layers and the model."
    if not isinstance(model, FSDPModule) and fsdp2_units(model):
        return "FSDP2 shards the model's layers, or a module around it, but not the model: fully_shard it too, last."
    if vars(model).get("_is_fsdp_managed_module") and not isinstance(model, FSDPModule):
        return "FSDP1 is not supported, it replaces the parameters: use FSDP2 (fully_shard, or fsdp_version: 2)."
    whole = {f"layer {i}": layer for i, layer in enumerate(blueprint.layers)}
    whole |= {"the norm": blueprint.norm, "the LM head": blueprint.head}
    for name, module in whole.items():
        for p in module.parameters() if is_composed(module) else ():
            if is_zero3(p) and "ds_z3_leaf_module" not in vars(p):
                return (
                    f"{name} is no ZeRO-3 leaf module, so ZeRO-3 would gather it in pieces: import deepspeed "
                    f'before attach(), or set "leaf_module": {{"classes": ["{type(module).__name__}"]}} under '
                    '"zero_optimization".'
                )
            break
        if any(unit is not module for unit in fsdp2_units(module)):
            return f"a module inside {name} is a fully_shard unit of its own: shard it as a whole."
    if isinstance(model, FSDPModule):
        dtype = model._get_fsdp_state()._mp_policy.output_dtype
        if dtype not in (None, torch.float32):
            return (
                f"FSDP2's MixedPrecisionPolicy(output_dtype={dtype}) would round the log-probs: use output_dtype=None."
            )
    return None


def fsdp2_units(module: nn.Module) -> list[Any]:
    """What `fully_shard` was applied to, inside the module or itself."""
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def is_deepspeed(p: Tensor) -> bool:
    return bool({"ds_id", "_hp_mapping"} & vars(p).keys())


def wants_zeros(p: Tensor) -> bool:
    """Whether the engine that reduces its gradient cannot do with none."""
    return is_deepspeed(p)


def is_zero3(p: Tensor) -> bool:
    return "ds_id" in vars(p)


def shard_size(p: Tensor) -> tuple[int, int]:
    """Elements of a parameter that this rank holds, and of the whole."""
    if is_zero3(p):
        return p.ds_tensor.numel(), p.ds_numel  # type: ignore[attr-defined]
    return p.to_local().numel() if isinstance(p, DTensor) else p.numel(), p.numel()


def held(root: Any, model: nn.Module) -> Iterator[Tensor]:
    """What this rank holds of the model's parameters and buffers: its shards, gathered or not at this moment. By name,
    since PEFT's `target_parameters` change places."""
    units = fsdp2_units(root)
    for unit in units:
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            yield from (p.sharded_param.to_local() for p in group.fsdp_params)
    for _, p in () if units else sorted(model.named_parameters()):
        yield p.ds_tensor if is_zero3(p) else p  # type: ignore[attr-defined]
    yield from (b for _, b in sorted(model.named_buffers()))


def is_partitioned(p: Tensor) -> bool:
    """Whether this rank holds only its shard of a parameter."""
    local, whole = shard_size(p)
    return local < whole


def find_root(models: Sequence[nn.Module]) -> nn.Module:
    """Which of the models, one around the other, an engine has wrapped; the outermost if none."""
    active = DistributedDataParallel._active_ddp_module
    for model in models:
        if isinstance(model, FSDPModule) or (active is not None and active.module is model):
            return model
    return models[0]


def engine_of(model: nn.Module) -> str:
    """Which engine calls the model, while it does: `"DeepSpeed"`, `"FSDP2"`, `"DDP"` or `"none"`."""
    if isinstance(model, FSDPModule):
        return "FSDP2"
    if any(is_deepspeed(p) for p in model.parameters()):
        return "DeepSpeed"
    active = DistributedDataParallel._active_ddp_module
    return "DDP" if active is not None and active.module is model else "none"


# What each engine keeps of a backward that an exception ended in the middle, and what to do about it.
AFTER_FAILURE = {
    "FSDP2": "FSDP2 still holds gathered parameters and part of a gradient. Call recover(model), which "
    "drops all gradients, and begin the accumulation window again.",
    "DDP": "DistributedDataParallel still waits for the gradients that this backward did not reach: "
    "wrap the model again.",
    "DeepSpeed": "DeepSpeed still holds part of this backward's gradient, and can neither finish nor "
    "drop it. Rebuild the engine (deepspeed.initialize) from the last checkpoint.",
}


def reshard_after(model: nn.Module) -> None:
    """During a forward that no backward follows: when it ends, no FSDP2 unit stays gathered. FSDP2 itself keeps those
    of `reshard_after_forward=False`, the root by default, and after an optimizer step they would hold old weights."""
    if not isinstance(model, FSDPModule):
        return

    def reshard(*_) -> None:  # runs behind FSDP2's own hook, which is older
        hook.remove()
        for unit in fsdp2_units(model):
            unit.reshard()

    hook = model.register_forward_hook(reshard, always_call=True)


def reshard_before_training(model: nn.Module) -> None:
    """During a forward of the model's own without a graph, `generate`'s for one: FSDP2 will hold on to the units of
    `reshard_after_forward=False`, the root by default, and not see an optimizer step that comes before the next
    forward. So a packed call, or one with a graph, gathers them anew."""
    if not isinstance(model, FSDPModule) or "_longstraw_reshard" in vars(model):
        return

    def reshard(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:  # runs before FSDP2's own hook
        if "prompt_groups" in kwargs or torch.is_grad_enabled():
            vars(module).pop("_longstraw_reshard").remove()
            for unit in fsdp2_units(module):
                unit.reshard()

    handle = model.register_forward_pre_hook(reshard, prepend=True, with_kwargs=True)
    vars(model)["_longstraw_reshard"] = handle


def release(model: nn.Module) -> None:
    """After an exception in a forward: no layer is left gathered. An optimizer step would not reach what is, and the
    next forward would run with the old weights."""
    if isinstance(model, FSDPModule):
        model.reset_iter_state()
    parameters: Iterator[Any] = model.parameters()  # DeepSpeed adds attributes to each
    for p in parameters:
        if is_zero3(p) and p.ds_status.name == "AVAILABLE" and not p.ds_persist:
            p.ds_active_sub_modules.clear()
            p.partition()


def recover(model: nn.Module, engine: str) -> None:
    """Puts the engine back after an exception in a backward, or raises `ValueError` where that cannot be done."""
    if not isinstance(model, FSDPModule):
        raise ValueError(AFTER_FAILURE[engine])
    model.reset_iter_state()
    for unit in fsdp2_units(model):
        unit.unshard()  # the gradients of gathered parameters outlive the reset, and the optimizer's zero_grad
        unit.zero_grad()
        unit.reshard()
    model.zero_grad()


def agree(
    fault: str | None, recording: bool, device: torch.device, measured: Sequence[int] = (0, 0, 0)
) -> tuple[str | None, list[list[int]]]:
    """
    Lets every rank know what any rank found wrong, so that all raise the same error and none waits for another; and
    what every rank `measured`: its numbers, as many on each.

    Costs one all-reduce of a small tensor on the default process group; one more collective if there is a fault.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return fault, [list(measured)]
    said = torch.zeros(dist.get_world_size(), 1 + len(measured), dtype=torch.int64, device=device)
    said[dist.get_rank()] = torch.tensor([4 if fault else 1 + recording, *measured])
    dist.all_reduce(said)
    seen, of_all = said[:, 0].tolist(), said[:, 1:].tolist()
    if 4 in seen:
        faults: list[str | None] = [None] * len(seen)
        dist.all_gather_object(faults, fault)
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(faults) if text), of_all
    if len(set(seen)) > 1:
        scoring = [i for i, f in enumerate(seen) if f == 1]
        return f"ranks {scoring} call under torch.no_grad(), the others do not.", of_all
    return None, of_all
