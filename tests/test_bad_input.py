"""Each wrong call raises a ValueError that names the value, before the model runs; the next good call is right."""

import copy
import math
import pickle

import pytest
import torch
import transformers
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from longstraw_dist import LongStrawConfig, PromptGroup, attach
from longstraw_dist.attach import attachment_of

from .models import ragged, tiny, weigh
from .reference import gradients, relative, stock_rows

CPU = torch.device("cpu")
IDS = torch.tensor([1, 2, 3])
BAD_CALLS = {
    "empty prompt": ([PromptGroup(IDS[:0], [IDS])], 1.0, r"prompt_groups\[0\].prompt_ids is empty"),
    "id too large": ([PromptGroup(IDS, [IDS + 95])], 1.0, "token id 98 is outside the vocabulary of 97"),
    "id negative": ([PromptGroup(IDS - 2, [IDS])], 1.0, "token id -1 is outside"),
    "dtype": ([PromptGroup(IDS.float(), [IDS])], 1.0, r"prompt_ids is torch.float32 with shape \(3,\)"),
    "int32": ([PromptGroup(IDS, [IDS.int()])], 1.0, r"response_ids\[0\] is torch.int32"),
    "shape": ([PromptGroup(IDS[None], [IDS])], 1.0, r"shape \(1, 3\)"),
    "device": ([PromptGroup(IDS, [IDS.to("meta")])], 1.0, "is on meta, the model on cpu"),
    "list of ints": ([PromptGroup([1, 2], [IDS])], 1.0, "prompt_ids is a list"),
    "one tensor of responses": ([PromptGroup(IDS, IDS)], 1.0, "response_ids is a Tensor"),
    "no group": ([(IDS, [IDS])], 1.0, r"prompt_groups\[0\] is a tuple"),
    "not a list": (PromptGroup(IDS, [IDS]), 1.0, "prompt_groups is a PromptGroup"),
    "NaN temperature": ([PromptGroup(IDS, [IDS])], math.nan, "temperature=nan"),
    "zero temperature": ([PromptGroup(IDS, [IDS])], 0.0, "temperature=0.0"),
    "temperature as text": ([PromptGroup(IDS, [IDS])], "1", "temperature='1'"),
}


GEMMA3N = transformers.Gemma3nTextConfig(
    vocab_size=9,
    vocab_size_per_layer_input=9,
    hidden_size=8,
    hidden_size_per_layer_input=4,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=1,
    num_key_value_heads=1,
    num_kv_shared_layers=0,
    head_dim=8,
    laurel_rank=2,
    pad_token_id=0,
)


@pytest.fixture
def model():
    return attach(tiny("llama"))


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_call(model, case):
    groups, temperature, message = BAD_CALLS[case]
    ran = []
    model.model.embed_tokens.register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match=message):
        model(prompt_groups=groups, temperature=temperature)
    assert not ran
    check_good_call(model)


def check_good_call(model):
    model.zero_grad()
    weigh(*stock_rows(model, ragged())).backward()
    reference = gradients(model)
    model.zero_grad()
    out = model(prompt_groups=ragged())
    weigh(out.logps, out.entropies).backward()
    assert relative(gradients(model), reference) <= 1e-5


def test_other_inputs_beside_prompt_groups(model):
    with pytest.raises(ValueError, match="input_ids"):
        model(prompt_groups=ragged(), input_ids=IDS[None])


def test_second_call_before_backward(model):
    first = model(prompt_groups=ragged())
    with pytest.raises(ValueError, match="before the backward of the last one"):
        model(prompt_groups=ragged())
    with torch.no_grad():
        model(prompt_groups=ragged())  # scoring in between is fine
    weigh(first.logps, first.entropies).backward()
    check_good_call(model)


def test_a_call_whose_graph_was_dropped_does_not_count(model):
    model(prompt_groups=ragged())
    check_good_call(model)


def test_config_of_another_kind():
    with pytest.raises(ValueError, match="got a dict for its config"):
        attach(tiny("llama"), {"prompt_grad": "exact"})


def test_attach_twice(model):
    with pytest.raises(ValueError, match="attached already"):
        attach(model)


def test_not_attached():
    with pytest.raises(ValueError, match="LlamaForCausalLM is not attached"):
        attachment_of(tiny("llama"))


def test_attach_after_wrapping():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        with pytest.raises(ValueError, match="got a DistributedDataParallel"):
            attach(DistributedDataParallel(tiny("llama")))
        sharded = tiny("llama")
        torch.distributed.fsdp.fully_shard(sharded)
        with pytest.raises(ValueError, match="got a FSDPLlamaForCausalLM"):
            attach(sharded)
        decoder = attach(tiny("llama"))
        torch.distributed.fsdp.fully_shard(decoder.model)
        with pytest.raises(ValueError, match="the decoder is a fully_shard unit of its own"):
            decoder(prompt_groups=ragged())
        for original in (False, True):
            fsdp1 = FullyShardedDataParallel(attach(tiny("llama")), use_orig_params=original, device_id=CPU)
            with pytest.raises(ValueError, match="FSDP1 is not supported"):
                fsdp1(prompt_groups=ragged())
    finally:
        torch.distributed.destroy_process_group()


def test_unsupported_type():
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)
    with pytest.raises(ValueError, match='model type "gpt2" is not supported: it adds positions to its embeddings'):
        attach(transformers.GPT2LMHeadModel(config))
    with pytest.raises(ValueError, match=r"gemma3n_text.* several hidden states \(AltUp\)"):
        attach(transformers.Gemma3nForCausalLM(GEMMA3N))
    model = tiny("llama")
    model.config.model_type = "mine"
    with pytest.raises(ValueError, match='model type "mine" is not supported yet: afmoe, '):
        attach(model)
    with pytest.raises(ValueError, match="got a Linear"):
        attach(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="got a LlamaModel"):
        attach(tiny("llama").model)


def test_active_dropout():
    with pytest.raises(ValueError, match=r"dropout 0\.1"):
        attach(tiny("llama", attention_dropout=0.1))
    model = attach(tiny("qwen3"))
    model.model.layers[1].self_attn.attention_dropout = 0.2
    with pytest.raises(ValueError, match=r"layers.1.self_attn has attention_dropout 0.2"):
        model(prompt_groups=ragged())
    model.eval()
    model(prompt_groups=ragged())  # inactive


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, r"jitter_noise 0\.1"),
        ("starcoder2", {"residual_dropout": 0.1}, r"residual_dropout 0\.1"),
        ("dbrx", {"resid_pdrop": 0.1}, r"resid_pdrop 0\.1"),
        ("phi3", {"resid_pdrop": 0.1}, r"dropout 0\.1"),
    ],
)
def test_other_kinds_of_dropout(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        attach(tiny(kind, **settings))


def test_a_mask_that_is_not_causal():
    model = tiny("llama")
    model.config.is_causal = False
    with pytest.raises(ValueError, match="a mask that is neither causal nor causal in a window"):
        attach(model)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ("gemma4_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers=1: the last layers read keys"),
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": 8},
            "hidden_size_per_layer_input=8: each layer reads a second",
        ),
        ("qwen3_moe", {"experts_implementation": "sonicmoe"}, "experts_implementation='sonicmoe'"),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            "rope_type='dynamic'",
        ),
    ],
)
def test_settings_that_would_not_be_exact(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        attach(tiny(kind, **settings))


def test_rope_that_depends_on_the_call():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="rope_type='dynamic'"):
        attach(tiny("llama", rope_parameters=rope))


def test_more_exact_layers_than_layers():
    with pytest.raises(ValueError, match="prompt_grad='last:4' asks for more than the 3 layers"):
        attach(tiny("llama"), LongStrawConfig(prompt_grad="last:4"))


def swap_head(model):
    model.lm_head = torch.nn.Linear(32, 97, bias=False)


def swap_layer(model):
    model.model.layers[1] = tiny("llama", seed=1).model.layers[1]


@pytest.mark.parametrize(
    ("swap", "named"),
    [
        (lambda model: model.resize_token_embeddings(120), "the LM head|embed_tokens|the input embedding"),
        (swap_head, "the LM head was replaced"),
        (swap_layer, "layers.1 was replaced"),
        (lambda model: setattr(model.model, "rotary_emb", tiny("llama").model.rotary_emb), "rotary_emb was replaced"),
    ],
)
def test_modules_swapped_after_attach(model, swap, named):
    """The new one would get no gradient."""
    swap(model)
    with pytest.raises(ValueError, match=named):
        model(prompt_groups=ragged())


def test_a_parameter_from_outside():
    """A closure brings it into a layer, which cannot hand its gradient on."""
    model = tiny("llama")
    model.gate = torch.nn.Parameter(torch.ones(32))
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * model.gate)
    out = attach(model)(prompt_groups=ragged())
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(32,\) takes part that is not the module's own"):
        weigh(out.logps, out.entropies).backward()


def test_what_packed_tokens_would_pass_by():
    model = tiny("llama")
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="a forward hook on the LM head"):
        attach(model)
    model = tiny("llama")
    model.model.layers[1].register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))
    with pytest.raises(ValueError, match="a forward hook on layer 1"):
        attach(model)
    model = tiny("llama")
    model(input_ids=torch.arange(3)[None], output_hidden_states=True)  # leaves transformers' own hooks on the layers
    attach(model)
    model = tiny("llama")
    model.model.embed_tokens.scale_grad_by_freq = True
    with pytest.raises(ValueError, match="scale_grad_by_freq=True"):
        attach(model)
    model = tiny("llama")
    model.model.forward = model.model.forward
    with pytest.raises(ValueError, match="the decoder's forward is patched"):
        attach(model)
    model = tiny("llama")
    model.config = copy.deepcopy(model.config)
    with pytest.raises(ValueError, match="not the object that its layers read"):
        attach(model)
    model = tiny("llama")
    model.config._attn_implementation = "mine"
    with pytest.raises(ValueError, match="attn_implementation='mine'"):
        attach(model)


def test_an_input_that_cannot_be_checked(model):
    with pytest.raises(ValueError, match="cannot be checked: OverflowError"):
        model(prompt_groups=ragged(), temperature=10**400)
    check_good_call(model)


def test_pickle(model):
    with pytest.raises(TypeError, match="use save_pretrained"):
        pickle.dumps(model)
