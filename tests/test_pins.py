"""What we copied from the libraries, or rely on though it is private. A failure says what moved, and where it matters.

It is no bug: read what changed there, follow it here, then `python -m tests.test_pins` prints the new digests.
"""

import hashlib
import inspect
import textwrap

import pytest
import torch
import torch.distributed as dist
import transformers
import trl
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedConfig, TrainingArguments, masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
    RecurrentGemmaRecurrentBlock,
    RecurrentGemmaRglru,
)
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils as trl_utils

from longstraw_dist.attention import NAME, Mask
from longstraw_dist.meter import COLLECTIVES
from longstraw_dist.refused import REFUSED
from longstraw_dist.support import SUPPORTED

from .models import tiny

# What is pinned -> (its source, digest of it, where and why we lean on it).
SOURCES = {
    "GRPOTrainer._prepare_inputs": (
        GRPOTrainer._prepare_inputs,
        "40caff99c2cf",
        "integrations/trl/trainer.py: _prepare_inputs is a copy of it, with shuffle_groups for shuffle_sequence_dict",
    ),
    "GRPOTrainer._get_per_token_logps_and_entropies": (
        GRPOTrainer._get_per_token_logps_and_entropies,
        "fecf708797b1",
        "integrations/trl/trainer.py: replaces it; what masked positions and float32 heads give must stay the same",
    ),
    "GRPOTrainer._compute_loss": (
        GRPOTrainer._compute_loss,
        "16c4f3917b9f",
        "integrations/trl/trainer.py: reuses it; a new call of the model beside the log-prob method would go unpacked",
    ),
    "GRPOTrainer.training_step": (
        GRPOTrainer.training_step,
        "15ea836c392b",
        "integrations/trl/trainer.py: training_step counts a step where the parent logs step_time",
    ),
    "trl shuffle_sequence_dict": (
        trl_utils.shuffle_sequence_dict,
        "bab038755e57",
        "integrations/trl/rows.py: shuffle_groups permutes the same kinds of values",
    ),
    "trl split_tensor_dict": (
        trl_utils.split_tensor_dict,
        "b61a5760a03e",
        "integrations/trl/trainer.py: cuts equal slices in order, so that shuffle_groups decides which groups are cut",
    ),
    "trl add_fused_lm_head": (
        trl_utils.add_fused_lm_head,
        "422d009f04b6",
        "longstraw_dist/attach.py: its forward passes prompt_groups on; temperature and the cast are applied by us",
    ),
    "accelerate DeepSpeedEngineWrapper.backward": (
        DeepSpeedEngineWrapper.backward,
        "c0a15bc3d483",
        "tests/trl_training.py: KeepGradients reads gradients between the last backward and the engine's step",
    ),
    "transformers GradientCheckpointingLayer.__init_subclass__": (
        GradientCheckpointingLayer.__init_subclass__,
        "9f660860758b",
        "longstraw_dist/recompute.py: no_checkpointing() turns it off by the flag of the instance",
    ),
    "transformers RecurrentGemmaRecurrentBlock.forward": (
        RecurrentGemmaRecurrentBlock.forward,
        "2181f09992ba",
        "longstraw_dist/rg_lru.py: block_forward stands in for it",
    ),
    "transformers RecurrentGemmaRglru.forward": (
        RecurrentGemmaRglru.forward,
        "368dc2bb8477",
        "longstraw_dist/rg_lru.py: it hands recurrent_states to the scan, and sets it to what the scan returns",
    ),
    "transformers RecurrentGemmaRglru._rnn_scan": (
        RecurrentGemmaRglru._rnn_scan,
        "c0ee84ae383f",
        "longstraw_dist/rg_lru.py: rnn_scan stands in for it",
    ),
}

# Options of the parents: each was looked at, whether it can be exact with log-probs from packed groups.
OPTIONS = {GRPOConfig: "ee64c101c3e2", TrainingArguments: "d9d69b523107"}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def source_of(thing) -> str:
    """Its source, without decorators' and indentation's accidents."""
    return textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))


def options_of(config: type) -> str:
    return " ".join(sorted(config.__dataclass_fields__))


@pytest.mark.parametrize("name", SOURCES)
def test_sources(name):
    thing, pinned, why = SOURCES[name]
    found = digest(source_of(thing))
    assert found == pinned, (
        f"{name} is another than the one we read (trl {trl.__version__}, transformers {transformers.__version__}): "
        f"{pinned} -> {found}. {why}."
    )


@pytest.mark.parametrize("config", OPTIONS, ids=lambda config: config.__name__)
def test_options(config):
    found = digest(options_of(config))
    assert found == OPTIONS[config], (
        f"{config.__name__} has other options than those we looked at ({OPTIONS[config]} -> {found}): for a new one, "
        "decide whether integrations/trl/refusals.py (refuse_inexact) must refuse it, and test it in "
        "tests/test_trl_drop_in.py or tests/test_trl_refusals.py."
    )


def test_log_prob_method():
    names = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    ours = ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"]
    ours.append("compute_aux_loss")
    assert names[: len(ours)] == ours, (
        "the log-prob method takes other arguments: integrations/trl/trainer.py overrides it with these"
    )


def test_fsdp2_policy(tmp_path):
    """`wrapping.find_fault` reads the output dtype there."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        module = fully_shard(torch.nn.Linear(2, 2), mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=torch.half))
    finally:
        dist.destroy_process_group()
    assert isinstance(module, FSDPModule)
    assert module._get_fsdp_state()._mp_policy.output_dtype == torch.half, "longstraw_dist/wrapping.py: find_fault"


# Of *_single_coalesced. Nothing in torch 2.13, DeepSpeed or accelerate calls them from Python.
OLD_NAMES = {"allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"}


def test_process_group_methods():
    """What count_collectives() replaces, and puts back. Methods that it does not know would go uncounted."""
    methods = {name for name in vars(dist.ProcessGroup) if not name.startswith("_")}
    counted = {name for names in COLLECTIVES.values() for name in names}
    assert counted <= methods, f"gone from ProcessGroup: {counted - methods}; longstraw_dist/meter.py counts them"
    kinds = ("all_gather", "allgather", "reduce_scatter", "all_reduce", "allreduce", "broadcast")
    new = {name for name in methods if name.startswith(kinds)} - counted - OLD_NAMES
    assert not new, f"ProcessGroup has {new}: longstraw_dist/meter.py, COLLECTIVES does not count them"


def test_zero3_leaves():
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.utils import set_z3_leaf_module, z3_leaf_module

    module = torch.nn.Linear(2, 2)
    set_z3_leaf_module(module, True)
    assert z3_leaf_module(module), "longstraw_dist/wrapping.py: mark_leaves"
    assert "param.ds_z3_leaf_module = module" in inspect.getsource(parameter_offload), (
        "DeepSpeed no longer marks a leaf's parameters: longstraw_dist/wrapping.py, find_fault looks for the mark"
    )


def test_attention_is_chosen_by_the_config():
    """`prefix_attention` swaps it there while a segment runs, in the sub-configs too."""
    assert isinstance(PreTrainedConfig._attn_implementation, property)
    config = tiny("llama").config
    config._attn_implementation = NAME
    assert config._attn_implementation == NAME, "longstraw_dist/attention.py: prefix_attention"


def test_masks_for_our_attention():
    """A model builds its masks by the function that is registered for its attention, and says how far they reach."""
    config = tiny("mistral").config
    config._attn_implementation = NAME
    x, positions = torch.zeros(1, 4, 32), torch.arange(4)[None]
    makers = {masking_utils.create_causal_mask: None, masking_utils.create_sliding_window_causal_mask: 6}
    for make, window in makers.items():
        mask = make(config, x, None, None, position_ids=positions)
        assert isinstance(mask, Mask), f"{make.__name__}: longstraw_dist/attention.py, read_mask"
        assert (mask.window, mask.causal) == (window, True), f"{make.__name__}: longstraw_dist/attention.py, Mask"


def test_every_type_is_supported_or_refused():
    types = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert not set(SUPPORTED) & set(REFUSED)
    new = types - set(SUPPORTED) - set(REFUSED)
    assert not new, (
        f"transformers {transformers.__version__} has new causal LMs: {sorted(new)}. A row in "
        "tests/more_architectures.py says whether each is exact: longstraw_dist/support.py, or else refused.py."
    )
    gone = (set(SUPPORTED) | set(REFUSED)) - types
    assert not gone, f"transformers {transformers.__version__} has no causal LMs {sorted(gone)}: longstraw_dist/"


SCHEMAS = {  # longstraw_dist/attention.py, FlashCPU and FlashCUDA, call these by position
    "_scaled_dot_product_flash_attention_for_cpu": "35df1dcc7278",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "cdd1691f211e",
    "_scaled_dot_product_flash_attention": "dd4beb317406",
    "_scaled_dot_product_flash_attention_backward": "e7752d82645d",
}


def schema_of(name: str) -> str:
    return str(getattr(torch.ops.aten, name).default._schema)


@pytest.mark.parametrize("name", SCHEMAS)
def test_flash_schemas(name):
    assert digest(schema_of(name)) == SCHEMAS[name], (
        f"torch {torch.__version__} has another signature: {schema_of(name)}. longstraw_dist/attention.py calls it"
    )


def test_checkpointing_flag():
    model = tiny("llama")
    model.gradient_checkpointing_enable()
    flags = [vars(layer).get("gradient_checkpointing") for layer in model.model.layers]
    assert flags == [True] * 3, "longstraw_dist/recompute.py: no_checkpointing() looks for it on each layer's instance"
    assert all(isinstance(layer, GradientCheckpointingLayer) for layer in model.model.layers)


if __name__ == "__main__":
    for pinned, (thing, _, _) in SOURCES.items():
        print(pinned, digest(source_of(thing)))
    for config in OPTIONS:
        print(config.__name__, digest(options_of(config)))
    for op in SCHEMAS:
        print(op, digest(schema_of(op)))
