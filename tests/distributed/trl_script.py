"""A training script, as a user has one, for test_trl_engines.py: trains each case in turn, and saves what came of it.

    accelerate launch --config_file ... tests/distributed/trl_script.py ENGINE FOLDER

FOLDER holds cases.json, a list of the arguments of `run`, and the folders of models; `NAME.pt` is added for each case.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO))

ENGINE, FOLDER = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)

if ENGINE == "zero3":
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, for a minute
if ENGINE == "fsdp2":
    # accelerate does not shard on a CPU by itself: it is told that the device is another. Needless on GPUs.
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU

from trl import GRPOTrainer  # noqa: E402

from longstraw_dist.attach import is_attached  # noqa: E402
from longstraw_dist.integrations.trl import LongStrawGRPOTrainer  # noqa: E402
from longstraw_dist.wrapping import is_partitioned  # noqa: E402
from tests import trl_rollouts, trl_training  # noqa: E402

TRAINERS = {cls.__name__: cls for cls in (GRPOTrainer, LongStrawGRPOTrainer)}
ENGINE_OPTIONS = {
    "zero3": {"use_cpu": False, "ddp_backend": "gloo"},
    "fsdp2": {"use_cpu": True, "accelerator_config": {"use_configured_state": True}},
    "ddp": {"use_cpu": True},
}


def arguments_of(rollouts: list[str] | None, evaluate: int, adapter: bool) -> dict:
    """`rollouts` names functions of trl_rollouts.py, `None` stands for TRL's generation."""
    arguments: dict = {}
    if adapter:
        import peft

        arguments["peft_config"] = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj", "up_proj"])
    if rollouts is not None:
        arguments["rollout_func"] = trl_rollouts.changed(*(getattr(trl_rollouts, name) for name in rollouts))
    if evaluate:
        arguments["eval_dataset"] = trl_training.prompts(evaluate)
    return arguments


def run(
    name: str,
    models: str,
    options: dict,
    trainer: str = "LongStrawGRPOTrainer",
    rollouts: list[str] | None = (),  # type: ignore[assignment]
    prompts: int = 16,
    twice: bool = False,
    stream: bool = False,
    vllm: bool = False,
    adapter: bool = False,
    evaluate: int = 0,
    resume: str | None = None,
    after: bool = False,
) -> dict:
    """One case. The first prompt is there `twice`, or all come in a `stream`. `resume` is the checkpoint, in FOLDER.
    `after` generates, evaluates and saves once it has trained."""
    dataset = trl_training.prompts(prompts)
    dataset = dataset.select([0, *range(prompts)]) if twice else dataset
    done = trl_training.train(
        TRAINERS[trainer],
        FOLDER / models,
        resume=resume and str(FOLDER / resume),
        prepare=trl_rollouts.simulate_vllm if vllm else None,
        dataset=dataset.to_iterable_dataset() if stream else dataset,
        arguments=arguments_of(rollouts, evaluate, adapter),
        **{**ENGINE_OPTIONS[ENGINE], "output_dir": str(FOLDER / name), **options},
    )
    made = done.trainer
    reference = None if made.ref_model is None else made.accelerator.unwrap_model(made.ref_model)
    found = {
        "world": (dist.get_world_size(), made.accelerator.num_processes, int(os.environ["WORLD_SIZE"])),
        "kind": made.accelerator.distributed_type.value,
        "partitioned": [is_partitioned(p) for p in trl_training.policy_of(made).parameters()],
        "run": dataclasses.replace(done, trainer=None),
    }
    if reference is not None:
        found["reference_partitioned"] = [is_partitioned(p) for p in reference.parameters()]
        found["reference_attached"] = is_attached(reference)
        found["reference"] = trl_training.whole_weights(reference)
    if after:  # all of them gather anew
        made.rollout_func, made.eval_dataset = None, trl_training.prompts(4)
        made.args.per_device_eval_batch_size = 4
        found["evaluation"] = made.evaluate()
        made.save_model(str(FOLDER / name / "saved"))
    if ENGINE == "fsdp2":  # the plugin outlives the case, and would look for its layer class in the next one's model
        made.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = None
    return found


def main() -> None:
    """Saves for each case what rank 0 found, with the micro-batches of all ranks one after the other."""
    for case in json.loads((FOLDER / "cases.json").read_text()):
        found = run(**case)
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (found["run"].batches, all(found["partitioned"])))
        found["run"].batches = [batch for batches, _ in everyone for batch in batches]
        found["partitioned_everywhere"] = all(ok for _, ok in everyone)
        if dist.get_rank() == 0:
            torch.save(found, FOLDER / f"{case['name']}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
