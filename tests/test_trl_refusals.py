"""What the trainer refuses at construction, by name: each option under which the result could not be the parent's."""

import peft
import pytest
import torch
import transformers
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import BitsAndBytesConfig, ProcessorMixin, Trainer
from trl import GRPOConfig

from longstraw_dist import LongStrawConfig, attach
from longstraw_dist.integrations.trl import LongStrawGRPOConfig, LongStrawGRPOTrainer
from longstraw_dist.integrations.trl.refusals import refuse_apart

from .models import tiny
from .trl_fixtures import CHARACTERS, prompts, reward, tokenizer
from .trl_training import OPTIONS


@pytest.fixture
def construct(tmp_path):
    """`construct(options, model=..., **arguments)`: the trainer, on a llama of 3 layers."""

    def build(options=None, cls=LongStrawGRPOConfig, **arguments):
        args = cls(**{**OPTIONS, "output_dir": str(tmp_path), **(options or {})})
        arguments = {"train_dataset": prompts(), "processing_class": tokenizer(), **arguments}
        arguments.setdefault("model", tiny("llama", vocab_size=len(CHARACTERS)))
        return LongStrawGRPOTrainer(reward_funcs=reward, args=args, **arguments)

    return build


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompt_grad": "half"}, r"prompt_grad='half'"),
        ({"prompt_grad": "last:0"}, r"prompt_grad='last:0'"),
        ({"prompt_grad": "last:4"}, r"prompt_grad='last:4' asks for more than the 3 layers"),
        ({"prompt_chunk_size": 0}, "prompt_chunk_size=0"),
        ({"prompt_chunk_size": 10.5}, r"prompt_chunk_size=10\.5"),
        ({"responses_per_replay": 0}, "responses_per_replay=0"),
        ({"head_chunk_size": True}, "head_chunk_size=True"),
        ({"offload": "disk"}, "offload='disk'"),
        ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5\.0"),
        ({"torch_compile": True}, "torch_compile=True"),
        ({"torch_compile_backend": "eager"}, "torch_compile=True"),  # which it turns on
        # The parent's own:
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        (
            {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}},
            "fused_linear_cross",
        ),
        ({"sync_ref_model": True}, "sync_ref_model"),
        (
            {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"},
            "VESPO loss requires",
        ),
        ({"generation_batch_size": 6}, "generation_batch_size"),
        ({"generation_batch_size": 8, "steps_per_generation": 2}, "can not be both configured"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_options(construct, options, named):
    with pytest.raises(ValueError, match=named):
        construct(options)


def test_a_plain_config(construct):
    with pytest.raises(ValueError, match="GRPOConfig: pass a LongStrawGRPOConfig"):
        construct(cls=GRPOConfig)


@pytest.mark.parametrize("options", [{}, {"disable_dropout": True}])  # which leaves attention_dropout alone
def test_dropout(construct, options):
    model = tiny("llama", vocab_size=len(CHARACTERS), attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"dropout 0\.1.*attention_dropout=0\.0"):
        construct(options, model=model)


def test_another_model_type(construct):
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=len(CHARACTERS))
    with pytest.raises(ValueError, match='model type "gpt2" is not supported'):
        construct(model=transformers.GPT2LMHeadModel(config))


@pytest.mark.parametrize(
    "config",
    [
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    ],
    ids=lambda config: type(config).__name__,
)
def test_adapters(construct, config):
    with pytest.raises(ValueError, match="prompt learning"):
        construct(peft_config=config)


def test_dropout_of_adapters(construct):
    """PEFT's own default is 0, TRL's `ModelConfig` has 0.05."""
    with pytest.raises(ValueError, match=r"dropout 0\.05.*lora_dropout"):
        construct(peft_config=peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.05))


def test_quantization(construct):
    with pytest.raises(ValueError, match="quantization_config"):
        construct(quantization_config=BitsAndBytesConfig(load_in_8bit=True))


@pytest.mark.parametrize("column", ["image", "images"])
def test_image_columns(construct, column):
    with pytest.raises(ValueError, match=f"column '{column}'"):
        construct(train_dataset=Dataset.from_dict({"prompt": ["a"], column: ["b"]}))


def test_a_processor(construct):
    class Processor(ProcessorMixin):
        def __init__(self):
            self.tokenizer = tokenizer()

    with pytest.raises(ValueError, match="pass a tokenizer, not a processor"):
        construct(processing_class=Processor())


@pytest.fixture
def under_fsdp(monkeypatch):
    """The trainer finds this FSDP plugin in accelerate's state."""
    stock = Trainer.create_accelerator_and_postprocess

    def use(plugin):
        class WithPlugin:
            fsdp_plugin = plugin

            def __init__(self, state):
                self.state = state

            def __getattr__(self, name):
                return getattr(self.state, name)

        def create(self):
            stock(self)
            self.is_fsdp_enabled = True
            self.accelerator.state = WithPlugin(self.accelerator.state)

        monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", create)

    return use


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"fsdp_version": 1}, "FSDP1 is not supported: set fsdp_version: 2"),
        ({"fsdp_version": 2, "activation_checkpointing": True}, "fsdp_activation_checkpointing"),
    ],
)
def test_fsdp(construct, under_fsdp, settings, named):
    under_fsdp(FullyShardedDataParallelPlugin(**settings))
    with pytest.raises(ValueError, match=named):
        construct()


def test_fsdp_leaves_log_probs_in_float32(construct, under_fsdp):
    """accelerate's bf16 policy would round the root's outputs. Compute and reduction stay as configured."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)
    under_fsdp(plugin)
    construct()
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32, None)


def test_a_model_attached_with_other_settings(construct):
    model = attach(tiny("llama", vocab_size=len(CHARACTERS)), LongStrawConfig(prompt_grad="detached"))
    with pytest.raises(ValueError, match=r"attached with .*detached"):
        construct(model=model)
    construct({"prompt_grad": "detached"}, model=model)


def test_processes_that_would_train_apart(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuse_apart(2, DistributedType.MULTI_CPU)
    for processes in (1, 2):
        with pytest.raises(ValueError, match=f"2 processes were launched, but accelerate trains with {processes}"):
            refuse_apart(processes, DistributedType.NO)


def test_groups_that_are_cut_are_warned_of(construct, caplog):
    with caplog.at_level("WARNING"):
        construct()
        assert "is not a multiple" not in caplog.text
        construct({"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2})
    assert "per_device_train_batch_size=6 is not a multiple of num_generations=4" in caplog.text
