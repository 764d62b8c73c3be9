"""Nothing is left behind: after a step, and after an exception in the middle of one, the model is the stock model."""

import copy
import inspect

import pytest
import torch

from longstraw_dist import LongStrawConfig, attach

from .models import ragged, tiny, weigh
from .reference import gradients, relative, stock_rows

IDS = torch.tensor([[1, 2, 3, 4]])


def snapshot(model) -> dict:
    """Everything that a call might forget to put back, module by module."""
    state = {"attention": model.config._attn_implementation, "grad": torch.is_grad_enabled()}
    for name, module in model.named_modules():
        hooks = {k: len(v) for k, v in vars(module).items() if "_hooks" in k}
        state[name] = (hooks, sorted(k for k in vars(module)), vars(module).get("gradient_checkpointing"))
    return state


def check_stock(model, reference) -> None:
    """Stock forward, generate, state dict and the next step are what they are without us."""
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, reference(input_ids=IDS).logits)
        generated = [m.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0) for m in (model, reference)]
    assert torch.equal(*generated)
    assert list(model.state_dict()) == list(reference.state_dict())
    model.train()
    model.zero_grad()
    reference.zero_grad()
    weigh(*stock_rows(reference, ragged())).backward()
    out = model(prompt_groups=ragged())
    weigh(out.logps, out.entropies).backward()
    assert relative(gradients(model), gradients(reference)) <= 1e-5


def test_after_a_step():
    model = attach(tiny("qwen3"), LongStrawConfig(prompt_chunk_size=8))
    model.gradient_checkpointing_enable()
    before = snapshot(model)
    out = model(prompt_groups=ragged())
    assert snapshot(model) == before
    weigh(out.logps, out.entropies).backward()
    assert snapshot(model) == before
    model.gradient_checkpointing_disable()
    check_stock(model, tiny("qwen3"))


@pytest.mark.parametrize("generated_before", [False, True])
def test_states_that_stock_keeps_on_its_modules(generated_before):
    """recurrent_gemma's, from the last `generate` or stock forward: not read, and still there afterwards."""
    model, reference = (tiny("recurrent_gemma") for _ in range(2))
    attach(model, LongStrawConfig(prompt_chunk_size=8))
    if generated_before:
        for m in (model, reference):
            m.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0)
    before = states_on_modules(model)
    assert all((t is not None) == generated_before for t in before)
    classes = {type(m): dict(vars(type(m))) for m in model.modules()}
    for _ in range(2):
        model.zero_grad()
        out = model(prompt_groups=ragged())
        weigh(out.logps, out.entropies).backward()
        assert all(a is b for a, b in zip(states_on_modules(model), before, strict=True))
        assert all(dict(vars(kind)) == attributes for kind, attributes in classes.items())
    weigh(*stock_rows(reference, ragged())).backward()
    assert relative(gradients(model), gradients(reference)) <= 1e-5
    check_stock(model, reference)


def states_on_modules(model) -> list:
    names = ("conv1d_state", "recurrent_states")
    return [v for m in model.modules() for k, v in vars(m).items() if k in names]


@pytest.mark.parametrize("during", ["forward", "backward"])
def test_after_an_exception(during, monkeypatch):
    model = attach(tiny("llama"), LongStrawConfig(prompt_chunk_size=8))
    model.gradient_checkpointing_enable()
    before = snapshot(model)
    mlp = model.model.layers[1].mlp
    real, calls = mlp.forward, []

    def failing(x):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of luck")
        return real(x)

    if during == "forward":
        mlp.forward = failing
        with pytest.raises(RuntimeError, match="out of luck"):
            model(prompt_groups=ragged())
    else:
        out = model(prompt_groups=ragged())
        mlp.forward = failing
        with pytest.raises(RuntimeError, match="out of luck"):
            weigh(out.logps, out.entropies).backward()
        del out
    del mlp.forward
    assert snapshot(model) == before
    model.gradient_checkpointing_disable()
    check_stock(model, tiny("llama"))


def test_save_and_load(tmp_path):
    model = attach(tiny("llama", tied=True))
    model(prompt_groups=ragged()).anchor.backward()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(loaded(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits)
    assert loaded.config._attn_implementation == model.config._attn_implementation


def test_signature_is_the_models_own():
    """generate() validates its arguments against it, and the Trainer drops the columns that it does not name."""
    assert inspect.signature(attach(tiny("llama")).forward).parameters.keys() >= {"input_ids", "attention_mask"}


@pytest.mark.parametrize("kind", ["llama", "jamba"])
def test_deepcopy_is_independent(kind):
    model = attach(tiny(kind))
    pending = model(prompt_groups=ragged())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.1)
    assert not torch.equal(twin(input_ids=IDS).logits, model(input_ids=IDS).logits)
    twin(input_ids=IDS).logits.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    twin.zero_grad()
    del pending
    out = twin(prompt_groups=ragged())
    weigh(out.logps, out.entropies).backward()
    assert all(p.grad is None for p in model.parameters())
    reference = tiny(kind)
    reference.load_state_dict(twin.state_dict())
    assert torch.equal(twin(input_ids=IDS).logits, reference(input_ids=IDS).logits)
    weigh(*stock_rows(reference, ragged())).backward()
    assert relative(gradients(twin), gradients(reference)) <= 1e-5


def test_forwards_patched_on_the_instance_are_honoured():
    """As TRL's cast_lm_head_to_fp32 is, before and after attach."""
    for late in (False, True):
        model, reference = tiny("llama"), tiny("llama")
        if late:
            attach(model)
        for m in (model, reference):
            head, mlp = m.lm_head, m.model.layers[1].mlp
            head.forward = lambda x, w=head.weight: torch.nn.functional.linear(2 * x, w)
            mlp.forward = lambda x, mlp=mlp: 0.5 * type(mlp).forward(mlp, x)
        if not late:
            attach(model)
        weigh(*stock_rows(reference, ragged())).backward()
        patched = model.lm_head.forward
        out = model(prompt_groups=ragged())
        weigh(out.logps, out.entropies).backward()
        assert model.lm_head.forward is patched
        assert relative(gradients(model), gradients(reference)) <= 1e-5
