"""Every wrapping that the tests hold against the reference, behind one interface. Runs in the processes of launch.py.

`wrap("zero3", lambda: tiny("llama"), ...)` attaches, wraps and returns a `Wrapped`: call it, `backward`, `step`, and
read the full gradients and weights, which are collectives. DeepSpeed is imported before `attach`, as a user must.
"""

import contextlib
import functools
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from longstraw_dist import LongStrawConfig, attach

from ..models import ragged, weigh

ZERO = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_init": 3, "zero3_from_pretrained": 3}
SHARDED = ("zero3", "zero3_init", "fsdp2", "fsdp2_one_group", "fsdp2_accelerate")
SGD = functools.partial(torch.optim.SGD, lr=1e-2)
WRAPPINGS = ("ddp", "zero1", "zero2", "zero3", "zero3_init", "fsdp2", "fsdp2_one_group", "fsdp2_accelerate")


SHAPES = [[(11, (4, 2)), (1, (3,))], [(19, (1, 5, 3))]]  # of each of two ranks' groups, for `train`


class Wrapped:
    """A wrapped model with its optimizer. `module` is what the trainer calls, `model` the causal LM inside.

    `no_sync` puts the reduction of gradients off until the last micro-batch, where the engine can.
    """

    def __init__(self, module: Any, model: PreTrainedModel, optimizer: Any, accumulation: int, clip: float | None):
        self.module, self.model, self.optimizer = module, model, optimizer
        self.accumulation, self.clip, self.no_sync, self.micro_batch = accumulation, clip, False, 0

    def __call__(self, *args, **kwargs) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def micro_batch_of_step(self):
        """Forward and backward of one micro-batch stand inside."""
        self.micro_batch += 1
        with self.reduction(not self.no_sync or self.micro_batch % self.accumulation == 0):
            yield

    @contextlib.contextmanager
    def reduction(self, on: bool):
        assert on, f"{type(self).__name__} cannot put the reduction off"
        yield

    def backward(self, loss: Tensor) -> None:
        (loss / self.accumulation).backward()

    def step(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        """Full gradients, averaged over ranks and micro-batches, before clipping."""
        return {n: full(or_zeros(p.grad, p)) for n, p in self.model.named_parameters() if p.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        return {n: full(p.detach()) for n, p in self.model.named_parameters()}

    def is_sharded(self) -> bool:
        """Whether this rank holds a part of every parameter and nothing else."""
        return all(isinstance(p, DTensor) for p in self.model.parameters())


class DDP(Wrapped):
    autocast = False  # to bfloat16

    def __call__(self, *args, **kwargs) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def reduction(self, on: bool):
        with contextlib.nullcontext() if on else self.module.no_sync():
            yield


class FSDP2(Wrapped):
    accelerator: Any = None  # where it wraps

    @contextlib.contextmanager
    def reduction(self, on: bool):
        self.model.set_requires_gradient_sync(on)
        yield


class ZeRO(Wrapped):
    stage: int

    def backward(self, loss: Tensor) -> None:
        self.module.backward(loss)

    @contextlib.contextmanager
    def micro_batch_of_step(self):
        yield
        if (self.micro_batch + 1) % self.accumulation:  # the last one's is in `step`
            self.module.step()
        self.micro_batch += 1

    def step(self) -> None:
        self.module.step()

    def gradients(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        return {n: safe_get_full_grad(p).clone() for n, p in self.model.named_parameters() if p.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.model.parameters()), enabled=self.stage == 3):
            return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def is_sharded(self) -> bool:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        parameters = list(self.model.parameters())
        return all(
            p.ds_status == ZeroParamStatus.NOT_AVAILABLE and p.numel() == 0 and p.ds_tensor.numel() < p.ds_numel
            for p in parameters
        )


def train(wrapped: Wrapped, seed: int) -> None:
    """One optimizer step of one micro-batch, on two ranks."""
    rank = dist.get_rank()
    with wrapped.micro_batch_of_step():
        out = wrapped(prompt_groups=ragged(seed + rank, SHAPES[rank]), temperature=0.7)
        wrapped.backward(0.05 * weigh(out.logps, out.entropies, seed) + out.anchor)
    wrapped.step()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def or_zeros(gradient: Tensor | None, p: Tensor) -> Tensor:
    """A trainable parameter that takes no part has none."""
    return torch.zeros_like(p.detach()) if gradient is None else gradient.clone()


def full(t: Tensor) -> Tensor:
    return t.full_tensor().clone() if isinstance(t, DTensor) else t.clone()


def wrap(
    name: str,
    build: Callable[[], PreTrainedModel],
    config: LongStrawConfig | None = LongStrawConfig(),  # noqa: B008
    optimizer: Callable = SGD,
    accumulation: int = 1,
    clip: float | None = None,
    bf16: bool = False,
    **settings,
) -> Wrapped:
    """
    Args:
        name (`str`): one of `WRAPPINGS`, or "zero3_from_pretrained".
        build (`Callable`): makes the causal LM; called on every rank.
        config (`LongStrawConfig`, *optional*): what to attach it with; `None` leaves it stock.
        optimizer (`Callable`): makes the optimizer of a list of parameters.
        settings: into DDP's or `fully_shard`'s arguments (`mesh_shape` makes an HSDP mesh, `inside` shards the
            model that PEFT has wrapped), or ZeRO's
            `zero_optimization`, where `None` leaves a value at DeepSpeed's default.
    """
    gc.collect()  # engines of earlier tests
    if name in ZERO:
        import_deepspeed()
    builders = {"zero3_init": build_in_shards, "zero3_from_pretrained": load_in_shards}
    model = builders[name](build, **settings) if name in builders else build()
    if config is not None:
        attach(model, config)
    return wrap_engine(name, model, optimizer, accumulation, clip, bf16, **settings)


def wrap_engine(name, model, optimizer=SGD, accumulation=1, clip=None, bf16=False, **settings) -> Wrapped:
    """`wrap` without `attach`."""
    wrapper = wrap_zero if name in ZERO else wrap_ddp if name == "ddp" else wrap_fsdp2
    return wrapper(name, model, optimizer, accumulation, clip, bf16, settings)


def wrap_ddp(name, model, optimizer, accumulation, clip, bf16, settings) -> Wrapped:
    module = DistributedDataParallel(model, **settings)
    wrapped = DDP(module, model, optimizer(trainable(model)), accumulation, clip)
    wrapped.autocast = bf16
    return wrapped


def wrap_fsdp2(name, model, optimizer, accumulation, clip, bf16, settings) -> Wrapped:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, None) if bf16 else MixedPrecisionPolicy()
    policy = settings.pop("mp_policy", policy)
    if name == "fsdp2_accelerate":
        accelerator = make_accelerator(type(model.get_decoder().layers[0]).__name__, policy, "bf16" if bf16 else "no")
        module, made = accelerator.prepare(model, optimizer(trainable(model)))
        wrapped = FSDP2(module, module, made, accumulation, clip)
        wrapped.accelerator = accelerator
        return wrapped
    shape = settings.pop("mesh_shape", (dist.get_world_size(),))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    root = model.get_base_model() if settings.pop("inside", False) else model  # of PEFT's
    settings = {"mesh": mesh, "mp_policy": policy, **settings}
    for unit in units(list(model.get_decoder().layers)) if name == "fsdp2" else ():
        fully_shard(unit, **settings)
    fully_shard(root, **settings)
    return FSDP2(model, model, optimizer(trainable(model)), accumulation, clip)


def units(layers: list[nn.Module]) -> list[Any]:
    """A unit for each layer; layers that share a parameter must be one, or `fully_shard` would shard it twice."""
    grouped: list[list[nn.Module]] = []
    for layer in layers:
        mine = set(layer.parameters())
        group = next((g for g in grouped if any(mine & set(other.parameters()) for other in g)), None)
        if group is None:
            grouped.append([layer])
        else:
            group.append(layer)
    return [group if len(group) > 1 else group[0] for group in grouped]


def make_accelerator(layer: str, policy: MixedPrecisionPolicy | None, mixed_precision: str = "no"):
    """accelerate does not shard on a CPU by itself: it is told that the device is another. Without a policy it makes
    one of `mixed_precision`."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    try:
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[layer],
            cpu_ram_efficient_loading=False,
            mixed_precision_policy=policy,
        )
        accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision=mixed_precision)
    finally:
        del os.environ["ACCELERATE_USE_FSDP"]
    assert accelerator.num_processes == dist.get_world_size()
    return accelerator


def import_deepspeed():
    """DeepSpeed without the extension that it would compile for its CPU collectives."""
    import logging

    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def zero_config(stage: int, accumulation=1, clip=None, bf16=False, settings=None) -> dict[str, Any]:
    sharding = {  # gather late, release at once: a tiny model would stay gathered as a whole otherwise
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
    }
    optimization = {
        "stage": stage,
        "reduce_bucket_size": 10_000_000,
        "overlap_comm": False,
        **(sharding if stage == 3 else {}),
        **(settings or {}),
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip or 0.0,
        "bf16": {"enabled": bf16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": {k: v for k, v in optimization.items() if v is not None},
    }


def build_in_shards(build: Callable[[], PreTrainedModel], **settings) -> PreTrainedModel:
    """The model of `build`, made under `zero.Init`."""
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("gloo", verbose=False)
    whole = build()
    with deepspeed.zero.Init(config_dict_or_path=zero_config(3, settings=settings)):
        model = type(whole)(whole.config).train()
    for n, p in model.named_parameters():
        with deepspeed.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
            if dist.get_rank() == 0:
                p.copy_(whole.get_parameter(n))
    return model


def load_in_shards(build: Callable[[], PreTrainedModel], **settings) -> PreTrainedModel:
    """The model of `build`, saved and loaded as a user loads one under ZeRO-3."""
    from transformers.integrations import HfDeepSpeedConfig

    import_deepspeed().init_distributed("gloo", verbose=False)
    whole = build()
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            whole.save_pretrained(folder)
        dist.barrier()
        alive = HfDeepSpeedConfig(zero_config(3, settings=settings))
        model = type(whole).from_pretrained(folder, dtype=torch.float32).train()
        del alive
    return model


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """The same empty folder on every rank. Not awaited after an exception, which may be one rank's alone."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        yield folders[0]
        dist.barrier()


def wrap_zero(name, model, optimizer, accumulation, clip, bf16, settings) -> Wrapped:
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("gloo", verbose=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer(trainable(model)),
        config=zero_config(ZERO[name], accumulation, clip, bf16, settings),
    )
    wrapped = ZeRO(engine, model, engine.optimizer, accumulation, clip)
    wrapped.stage = ZERO[name]
    assert wrapped.stage < 3 or wrapped.is_sharded()
    return wrapped
