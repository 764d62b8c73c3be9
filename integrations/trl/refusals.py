"""What the parent would take, and this trainer could not run as the parent does."""

import os
from typing import Any

from accelerate.utils import DistributedType
from transformers import ProcessorMixin

from .config import LongStrawGRPOConfig


def refuse_inexact(args, processing_class, train_dataset, eval_dataset, kwargs: dict[str, Any]) -> None:
    """Raises `ValueError` for what the parent would take, and this trainer could not run as the parent does."""
    if not isinstance(args, LongStrawGRPOConfig):
        raise ValueError(f"args is a {type(args).__name__}: pass a LongStrawGRPOConfig.")
    if kwargs.get("quantization_config") is not None:
        raise ValueError("quantization_config is not supported: load the model in float32 or bfloat16.")
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError("image inputs are not supported: pass a tokenizer, not a processor, as processing_class.")
    for dataset in (train_dataset, *(eval_dataset.values() if isinstance(eval_dataset, dict) else (eval_dataset,))):
        columns = set(getattr(dataset, "column_names", None) or ())
        if images := columns & {"image", "images"}:
            raise ValueError(f"image inputs are not supported: drop the column {sorted(images)[0]!r} of the data set.")
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            f"neftune_noise_alpha={args.neftune_noise_alpha} draws noise for each row, and a shared prompt has one: "
            "leave it out."
        )
    if args.torch_compile:
        raise ValueError("torch_compile=True is not supported: compile nothing, or wait for a later version.")


def refuse_apart(processes: int, kind: DistributedType) -> None:
    """Raises `ValueError` if this process does not train together with those that were launched with it: accelerate
    can start them so on a CPU, and each would train a model of its own."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if processes != launched or (launched > 1 and kind == DistributedType.NO):
        raise ValueError(
            f"{launched} processes were launched, but accelerate trains with {processes} ({kind.value}): they would "
            "train apart. On a CPU set use_cpu=True, which is DDP; for ZeRO-3 start with "
            "configs/accelerate/zero3_cpu.yaml, DS_ACCELERATOR=cpu and ddp_backend=gloo."
        )
