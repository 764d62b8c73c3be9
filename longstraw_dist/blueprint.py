"""An HF causal LM seen as embed -> layers -> norm -> head, and the arguments that each layer takes for a segment.

The model's own forward says it: a *ghost* of the model, a shallow copy with no parameter and no hook and a stub in
place of every module that has parameters, runs on the segment's positions, and the stubs note what they are called
with. No real module is called, so no engine gathers anything and ranks with different segments stay in step. Rotary
embeddings, masks and whatever else a layer takes come out as the architecture makes them; nothing here names one.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import prefix_attention
from .groups import Segment


class Stub(nn.Module):
    """Stands for a module with parameters: notes its arguments, and returns a tensor of the right shape."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.forget()

    def forget(self) -> None:
        self.args: tuple = ()
        self.kwargs: dict[str, Any] = {}
        self.out: Tensor | None = None  # set beforehand, it is handed on

    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        hidden = args[0]
        if self.out is None:
            self.out = hidden.new_empty(1).expand(*hidden.shape[:-1], self.width)
        return self.out


class Blueprint:
    """
    Args:
        model (`PreTrainedModel`): a causal LM, not wrapped.

    Raises:
        `ValueError`: if the model is not a plain chain embed -> layers -> norm -> head, saying where it leaves it.

    Attributes:
        embedding, layers, norm, head: the model's own modules, to be called in this order.
        finish (`Callable`): what the model does with its logits behind the head (a softcap, a scale), or `None`.
    """

    def __init__(self, model: PreTrainedModel):
        self.config = model.config
        base = model.get_decoder()
        (name, layers), *others = [(n, c) for n, c in base.named_children() if isinstance(c, nn.ModuleList)]
        if others:
            raise ValueError(f"{type(model).__name__} has several lists of layers: {name}, {others[0][0]}, ...")
        self.layers: list[nn.Module] = list(layers)
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.ghost = bare(base)
        stubs = {c: Stub(self.config.hidden_size) for c in base.children() if any(True for _ in c.parameters())}
        self.stubs = [Stub(self.config.hidden_size) for _ in self.layers]
        for n, c in base.named_children():
            if c is layers:
                self.ghost._modules[n] = nn.ModuleList(self.stubs)
            else:
                self.ghost._modules[n] = stubs[c] if c in stubs else bare(c)
        self.whole = bare(model)
        self.end = Stub(5)
        for n, c in model.named_children():
            self.whole._modules[n] = self.ghost if c is base else self.end if c is self.head else bare(c)
        self.norm = self._prove(model, stubs)
        self.forget()
        self.finish = None if self._hands_on_logits() else self._finish
        self.modules = named_modules(model)

    def _prove(self, model: PreTrainedModel, stubs: dict[nn.Module, Stub]) -> nn.Module:
        """Runs the whole model on its ghost and checks, storage by storage, that it is a chain. Returns the norm."""
        x = torch.empty(1, 3, self.config.hidden_size, device=self.device)
        with torch.no_grad():
            self._run(x)
        norms = [c for c, stub in stubs.items() if stub.args]
        kind = type(model).__name__
        if len(norms) != 1:
            raise ValueError(f"{kind} calls {len(norms)} modules beside its layers, where one norm is known.")
        sent: Tensor | None = x
        for stub in (*self.stubs, stubs[norms[0]], self.end):
            if len(stub.args) != 1 or not same(sent, stub.args[0]):
                raise ValueError(f"{kind} changes the hidden states between its layers, its norm and its head.")
            sent = stub.out
        if any("cache" not in stub.kwargs for stub in self.stubs):
            raise ValueError(f"{kind} calls its layers without `cache`.")
        return norms[0]

    def _run(self, x: Tensor) -> Tensor:
        """Logits of the whole ghost."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        with prefix_attention(self.config):
            return self.whole(inputs_embeds=x, position_ids=positions, use_cache=False)[0]

    def _hands_on_logits(self) -> bool:
        """Whether the head's output is the model's. If not, what becomes of a logit must not depend on the others."""
        z = torch.linspace(-3, 3, 12, device=self.device).view(1, 3, 4)
        with torch.no_grad():
            out = self._finish(z)
            if same(out, z):
                return True
            alone = torch.stack([self._finish(t.view(1, 1, 1)) for t in z.flatten()]).view_as(z)
        if not torch.equal(out, alone):
            raise ValueError("what the model does behind its head mixes logits of different tokens.")
        return False

    def _finish(self, logits: Tensor) -> Tensor:
        """`[1, C, V]`: the model's own code behind its head. Costs one run over stubs, under a millisecond."""
        self.end.out = logits
        out = self._run(logits.new_empty(1).expand(1, logits.shape[1], self.config.hidden_size))
        self.forget()
        return out

    def forget(self) -> None:
        """Lets go of what the stubs noted."""
        for stub in self.whole.modules():
            if isinstance(stub, Stub):
                stub.forget()

    def find_change(self, model: PreTrainedModel) -> str | None:
        """Names a module that is not the one that `attach` saw, whose gradient would be lost; or `None`."""
        now = named_modules(model)
        for name in now.keys() | self.modules.keys():
            if now.get(name) is not self.modules.get(name):
                return f"{name} was replaced after attach(): resize, add adapters or swap modules before it."
        return None

    @property
    def device(self) -> torch.device:
        """Where the model computes: there lie its buffers, which an engine neither shards nor offloads."""
        return next((b.device for b in self.ghost.buffers()), torch.device("cpu"))

    def describe(self, segment: Segment, like: Tensor) -> None:
        """Notes on the segment what each layer is called with, besides the hidden states and the cache.

        `like` gives dtype and device. Costs one run of the model's own forward over stubs: under a millisecond.
        """
        x = like.new_empty(1).expand(1, segment.tokens, self.config.hidden_size)
        with prefix_attention(self.config), torch.no_grad():
            self.ghost(inputs_embeds=x, position_ids=segment.positions(like.device), use_cache=False)
        segment.calls = [{k: v for k, v in stub.kwargs.items() if k != "cache"} for stub in self.stubs]
        self.forget()


def named_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that a blueprint stands on: the decoder's children, its layers and the head."""
    base = model.get_decoder()
    children = dict(base.named_children())
    lists = {
        f"{n}.{i}": layer for n, c in children.items() if isinstance(c, nn.ModuleList) for i, layer in enumerate(c)
    }
    ends = {"the input embedding": model.get_input_embeddings(), "the LM head": model.get_output_embeddings()}
    return {**children, **lists, **ends}


def bare(module: nn.Module) -> nn.Module:
    """A shallow copy without parameters and hooks. Its buffers are the module's own, and move with them."""
    ghost = copy.copy(module)
    hooks = {k: type(v)() for k, v in vars(module).items() if "_hooks" in k and isinstance(v, dict)}
    ghost.__dict__.update(hooks, _parameters={}, _modules=dict(module._modules))
    ghost.__dict__.pop("forward", None)
    ghost.__dict__["gradient_checkpointing"] = False
    for name, child in module._modules.items():
        if child is not None and not any(True for _ in child.parameters()):
            ghost._modules[name] = bare(child)
    return ghost


def same(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.shape == b.shape and a.untyped_storage()._cdata == b.untyped_storage()._cdata
