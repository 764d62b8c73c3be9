"""Which kernel serves what. A package serves where it is installed, on CUDA and for 16-bit tensors; none is needed.

    what                    kernel, the first that fits                          from a state   otherwise
    attention               flash-attention 3 (Hopper), flash-attention 2,                      attention.py, Plain
                            torch's flash for CUDA, torch's flash for the CPU
    gated delta rule        fla                                                  yes            transformers' PyTorch
    Kimi delta attention    fla                                                  yes            transformers' PyTorch
    Mamba-2 scan            mamba_ssm                                            yes            transformers' PyTorch
    causal convolution      causal_conv1d                                        (see below)    transformers' PyTorch
    Mamba scan              none: mamba_ssm's takes no state, and drops the                     scan.py
                            gradient of the one that it returns
    one token, in place     none: decoding, which no segment does                               transformers' PyTorch
    fused with projections  none: where there is no cache, which a segment has                  transformers' PyTorch

"From a state": the kernel takes the state that a segment continues from, and differentiates it and the one it returns.
A convolution needs none: the view puts the inputs of the past before the segment's own.

transformers chooses a package's function when a model's file is imported, whatever the device will be, and drops
keyword arguments that it does not take, a state too. While a layer operation runs, `served_mixers` decides instead.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

PYTORCH = "PyTorch"


@dataclass(frozen=True)
class Mixer:
    """
    Args:
        name (`str`): what it is called in the log.
        kernel (`str`, *optional*): the package's function that serves it. Called like transformers' own.
        states (`tuple[str, ...]`): arguments for the state that goes in and for the one that comes out. A kernel that
            does not take one that is given does not serve.
    """

    name: str
    kernel: str | None = None
    states: tuple[str, ...] = ()


MIXERS = {  # transformers' function -> what serves it
    "torch_chunk_gated_delta_rule": Mixer(
        "gated delta rule",
        "fla.ops.gated_delta_rule.chunk_gated_delta_rule",
        ("initial_state", "output_final_state"),
    ),
    "chunk_kimi_delta_attention": Mixer(
        "Kimi delta attention", "fla.ops.kda.chunk_kda", ("initial_state", "output_final_state")
    ),
    "mamba2_chunk_scan": Mixer(
        "Mamba-2 scan",
        "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined",
        ("initial_states", "return_final_states"),
    ),
    "causal_conv1d_fn": Mixer("causal convolution", "causal_conv1d.causal_conv1d_fn"),
    "torch_recurrent_gated_delta_rule": Mixer("gated delta rule of one token"),
    "recurrent_kimi_delta_attention": Mixer("Kimi delta attention of one token"),
    "mamba_selective_state_update": Mixer("Mamba scan of one token"),
    "mamba2_selective_state_update": Mixer("Mamba-2 scan of one token"),
    "causal_conv1d_update": Mixer("causal convolution of one token"),
    "mamba_inner_fn": Mixer("fused Mamba"),
    "mamba2_split_conv1d_scan_combined": Mixer("fused Mamba-2"),
}


@contextlib.contextmanager
def served_mixers(source: str) -> Iterator[None]:
    """While it is open, code in the module of this name finds in place of each mixer what serves it."""
    names = vars(sys.modules[source])
    stock = {name: names[name] for name in MIXERS if name in names}
    names.update({name: serve(MIXERS[name], function) for name, function in stock.items()})
    try:
        yield
    finally:
        names.update(stock)


def serve(mixer: Mixer, stock: Callable) -> Callable:
    """What is called in the place of transformers' `stock`."""
    plain, package = unwrap(stock), (mixer.kernel or "").partition(".")[0]

    def call(x: Tensor, *args, **kwargs):
        kernel = load(mixer.kernel) if mixer.kernel is not None and fits(x) else None
        given = {name for name in mixer.states if kwargs.get(name) is not None and kwargs[name] is not False}
        if kernel is None or not given <= parameters(kernel):
            note(mixer.name, PYTORCH)
            return plain(x, *args, **kwargs)
        note(mixer.name, package)
        return kernel(x, *args, **{name: value for name, value in kwargs.items() if name in parameters(kernel)})

    return call


def unwrap(stock: Callable) -> Callable:
    """transformers' PyTorch below its choice of a package; the package `kernels` makes a module of the two."""
    if isinstance(stock, nn.Module):
        stock = inspect.getclosurevars(type(stock).forward).nonlocals["func"]
    return inspect.unwrap(stock)


def fits(x: Tensor) -> bool:
    """Whether packages' kernels are for it. float32 is left to PyTorch: fla refuses it, Triton multiplies in TF32."""
    return x.device.type == "cuda" and x.dtype in (torch.float16, torch.bfloat16)


@functools.cache
def load(path: str) -> Any:
    """What a package has under this path; `None` if it is not installed. Warns where it is, and does not load."""
    module, _, name = path.rpartition(".")
    if importlib.util.find_spec(path.partition(".")[0]) is None:
        return None
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # built for another torch, too old, no compiler: whatever it is, PyTorch does it
        logger.warning(f"longstraw-dist: {path} is installed, but does not load, and is not used: {error!r}")
        return None


@functools.cache
def parameters(kernel: Callable) -> frozenset[str]:
    return frozenset(inspect.signature(kernel).parameters)


SERVED: dict[str, set[str]] = {}  # in this process: what, and by which kernels


def note(what: str, by: str) -> None:
    SERVED.setdefault(what, set()).add(by)


def in_use() -> str:
    """What has served in this process, as "attention: torch flash (CPU); gated delta rule: PyTorch". Known once a
    packed call ran: engines move a model, and cast it, after `attach`."""
    return "; ".join(f"{what}: {', '.join(sorted(by))}" for what, by in sorted(SERVED.items()))


@functools.cache
def log_once(text: str, level: int = logging.INFO) -> None:
    logger.log(level, f"longstraw-dist: {text}")
