"""Who serves what: on a CPU never a package, and nowhere one that would drop a state. With packages that are fakes."""

import inspect
import sys

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longstraw_dist import LongStrawConfig, attach, kernels
from longstraw_dist.kernels import MIXERS, PYTORCH, unwrap
from longstraw_dist.support import SUPPORTED

from . import fake_kernels
from .architectures import TIED
from .fake_kernels import install
from .models import ragged, tiny
from .reference import stock_rows
from .test_parity import errors, run

KINDS = (
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba",
    "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2",
)  # fmt: skip
SHAPES = ((23, (5, 3)), (2, (1,)))


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(kernels, "SERVED", {})
    for function in (kernels.load, kernels.log_once):
        function.cache_clear()
    yield
    kernels.load.cache_clear()


def namespace_of(kind: str) -> dict:
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    return vars(sys.modules[model.__module__])


def wrapped_by_transformers(names: dict) -> dict:
    """Functions for which transformers would take a package's."""
    functions = {name: f for name, f in names.items() if inspect.isfunction(f) and f is not inspect.unwrap(f)}
    return {name: f for name, f in functions.items() if f.__code__.co_filename.endswith("hub_kernels.py")}


def packed(kind: str):
    model = attach(tiny(kind, tied=kind in TIED), LongStrawConfig(prompt_chunk_size=7))
    out = model(prompt_groups=ragged(shapes=SHAPES), temperature=0.7)
    return run(model, (out.logps, out.entropies))


def stock(kind: str):
    model = tiny(kind, tied=kind in TIED)
    return run(model, stock_rows(model, ragged(shapes=SHAPES), 0.7))


def test_the_table_is_complete():
    found = {}
    for kind in SUPPORTED:
        here = wrapped_by_transformers(namespace_of(kind))
        found |= here
    assert set(found) == {*MIXERS, "mamba_selective_scan"}
    for name, mixer in MIXERS.items():
        if mixer.kernel is not None:
            takes = inspect.signature(unwrap(found[name])).parameters
            assert {n for n in takes if "_state" in n and n != "hidden_states"} == set(mixer.states), name


@pytest.mark.parametrize("kind", KINDS)
def test_packages_serve_where_they_fit(kind, monkeypatch):
    """As on a GPU: transformers' layers call the packages' signatures right."""
    scores, gradients = packed(kind)
    assert {by for served in kernels.SERVED.values() for by in served} <= {PYTORCH, "torch flash (CPU)"}
    before = dict(kernels.SERVED)
    kernels.SERVED.clear()
    for path, function in fake_kernels.MIXERS.items():
        install(monkeypatch, path, function)
    monkeypatch.setattr(kernels, "fits", lambda x: True)
    found, found_gradients = packed(kind)
    assert kernels.SERVED.keys() == before.keys()
    for mixer in MIXERS.values():
        if mixer.name in kernels.SERVED:
            assert mixer.kernel is not None, f"{mixer.name} runs in a packed call"
            assert kernels.SERVED[mixer.name] == {mixer.kernel.partition(".")[0]}
    torch.testing.assert_close(found, scores)
    for name, g in gradients.items():
        torch.testing.assert_close(found_gradients[name], g)


def broken(*args, **kwargs):
    raise RuntimeError("needs a GPU")


def as_module(func):
    """What the package `kernels`, where it is installed, makes of a function."""

    class Func(nn.Module):
        def forward(self, *args, **kwargs):
            return func(*args, **kwargs)

    return Func()


@pytest.mark.parametrize("form", [lambda f: f, as_module], ids=["function", "module"])
@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear", "mamba2"])
def test_an_installed_package_does_not_break_a_cpu_run(kind, form, monkeypatch):
    expected, names = stock(kind), namespace_of(kind)
    for name, mixer in MIXERS.items():
        if name in names and mixer.kernel is not None:
            package, *inner, function = mixer.kernel.split(".")
            install(monkeypatch, mixer.kernel, broken)
            decorate = use_kernel_func_from_hub_with_fallback(function, package, ".".join(inner) or None)
            monkeypatch.setitem(names, name, form(decorate(unwrap(names[name]))))
    with pytest.raises(RuntimeError, match="needs a GPU"):
        stock(kind)
    log_prob, gradient, _ = errors(packed(kind), expected)
    assert log_prob < 1e-5
    assert gradient < 1e-5


def test_a_kernel_that_would_drop_a_state_does_not_serve(monkeypatch):
    expected, calls = stock("qwen3_next"), []

    def from_zero(q, k, v, g, beta, output_final_state=False, use_qk_l2norm_in_kernel=False):
        calls.append(q.shape)
        return fake_kernels.chunk_gated_delta_rule(
            q, k, v, g, beta, output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
        )

    install(monkeypatch, MIXERS["torch_chunk_gated_delta_rule"].kernel, from_zero)
    monkeypatch.setattr(kernels, "fits", lambda x: True)
    log_prob, gradient, _ = errors(packed("qwen3_next"), expected)
    assert log_prob < 1e-5
    assert gradient < 1e-5
    assert calls, "first chunks begin at zero"
    assert kernels.SERVED["gated delta rule"] == {"fla", PYTORCH}


def test_a_kernel_that_returns_no_state_does_not_serve(monkeypatch):
    def stateless(q, k, v, g, beta, initial_state=None, use_qk_l2norm_in_kernel=False):
        raise AssertionError

    install(monkeypatch, MIXERS["torch_chunk_gated_delta_rule"].kernel, stateless)
    monkeypatch.setattr(kernels, "fits", lambda x: True)
    packed("qwen3_next")
    assert kernels.SERVED["gated delta rule"] == {PYTORCH}


def test_a_package_that_does_not_load_is_named(monkeypatch, caplog):
    install(monkeypatch, "causal_conv1d.something_else", broken)
    monkeypatch.setattr(kernels, "fits", lambda x: True)
    packed("lfm2")
    assert kernels.SERVED["causal convolution"] == {PYTORCH}
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "longstraw" in r.getMessage()]
    assert "causal_conv1d.causal_conv1d_fn is installed, but does not load" in warning


def test_the_log_says_once_what_is_in_use(caplog):
    caplog.set_level("INFO", logger="longstraw_dist")
    model = attach(tiny("qwen3_next"))
    for _ in range(2):
        with torch.no_grad():
            model(prompt_groups=ragged(shapes=SHAPES))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "longstraw_dist.kernels"]
    assert line == (
        "longstraw-dist: attention: torch flash (CPU); causal convolution: PyTorch; gated delta rule: PyTorch"
    )
    assert line.endswith(kernels.in_use())


def test_names_come_back():
    """Also after an exception: the model's own forward finds what it had."""
    names = namespace_of("qwen3_next")
    before = {name: names[name] for name in MIXERS if name in names}

    def fail():
        with kernels.served_mixers(names["__name__"]):
            assert all(names[name] is not function for name, function in before.items())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert before == {name: names[name] for name in before}
