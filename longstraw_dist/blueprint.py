"""An HF causal LM seen as embed -> layers -> norm -> head, and the arguments that each layer takes for a segment.

The model's own forward says it: a *ghost* of the model, a shallow copy with no parameter and no hook and a stub in
place of every module that has parameters, runs on the segment's positions, and the stubs note what they are called
with. No real module is called, so no engine gathers anything and ranks with different segments stay in step. Rotary
embeddings, masks and whatever else a layer takes come out as the architecture makes them; nothing here names one.
"""

import contextlib
import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    KVSharingDict,
    LinearAttentionCacheLayerMixin,
)

from .attention import SAMPLE, Mask, prefix_attention
from .groups import Segment
from .indexer import find_indexer
from .traits import Traits


class Reached(Exception):
    """A stub behind which nothing is wanted was called."""


class Stub(nn.Module):
    """Stands for a module with parameters: notes its arguments, all but the first by name, and returns a tensor of the
    right shape. It has the module's settings, and of its weight the dtype."""

    def __init__(self, module: nn.Module, width: int):
        super().__init__()
        vars(self).update(
            {k: v for k, v in vars(module).items() if not k.startswith("_") and k not in {*vars(self), "forward"}}
        )
        if isinstance(weight := module._parameters.get("weight"), Tensor):
            self.weight = torch.empty(0, dtype=weight.dtype)
        self.names = list(inspect.signature(type(module).forward).parameters)[2:]  # behind `self` and the first
        self.width = width
        self.ends = False  # whether the run ends here
        self.returns = 0  # length of the tuple that its output opens, or 0 for a tensor
        self.tokens = [object() for _ in range(SAMPLE)]  # stand for the rest of the tuple
        self.forget()

    def forget(self) -> None:
        self.args: tuple = ()
        self.kwargs: dict[str, Any] = {}
        self.out: Tensor | None = None  # set beforehand, it is handed on

    def forward(self, *args, **kwargs):
        self.args, rest = args[:1], args[1:]
        self.kwargs = dict(zip(self.names[: len(rest)], rest, strict=True)) | kwargs
        if self.ends:
            raise Reached
        if self.out is None:
            self.out = blank(args[0], args[0].shape[:-1], self.width)
        return self.out if not self.returns else (self.out, *self.tokens[: self.returns - 1])


def blank(like: Tensor, rows: Sequence[int], width: int) -> Tensor:
    """`[*rows, width]` with one element of memory; differentiable as `like` is."""
    return like.new_empty(1).requires_grad_(like.requires_grad).expand(*rows, width)


class Unread(KVSharingDict):
    """Where a layer puts its keys and values for later layers, of which there are none: support.py. Keeps nothing."""

    def __setitem__(self, key, value) -> None:
        pass


class Blueprint:
    """
    Args:
        model (`PreTrainedModel`): a causal LM, not wrapped.

    Raises:
        `ValueError`: if the model is not a plain chain embed -> layers -> norm -> head, saying where it leaves it.

    Attributes:
        embedding, layers, norm, head: the model's own modules, to be called in this order. A norm without parameters
            is part of `leave`.
        read (`Callable`): which ids it embeds for those that it gets (padding for an image's), or `None`.
        enter (`Callable`): what the model does with its embeddings before the first layer (a scale), or `None`.
        leave (`Callable`): what it does with its hidden states before the head (a scale), or `None`.
        finish (`Callable`): what it does with its logits behind the head (a softcap, a scale), or `None`.
        traits (`list[Traits]`): of each layer.
        recurrent (`bool`): whether any layer has a recurrence.
        balance (`Callable`): the model's own auxiliary loss of its routers' logits, or `None`.
    """

    def __init__(self, model: PreTrainedModel):
        self.config = model.config.get_text_config()
        self.empty = DynamicCache(config=self.config)  # with one, a model does not look for packed rows in positions
        base = model.get_decoder()
        lists = [(n, c) for n, c in base.named_children() if isinstance(c, nn.ModuleList)]
        (name, layers), *others = [(n, c) for n, c in lists if any(True for _ in c.parameters())]
        if others:
            raise ValueError(f"{type(model).__name__} has several lists of layers: {name}, {others[0][0]}, ...")
        self.layers: list[nn.Module] = list(layers)
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.ghost = bare(base)
        self.takes_positions = "position_ids" in inspect.signature(type(base).forward).parameters
        width = self.config.hidden_size
        stubs = {c: Stub(c, width) for c in base.children() if any(True for _ in c.parameters())}
        self.stubs = [Stub(layer, width) for layer in self.layers]
        for n, c in base.named_children():
            if c is layers:
                self.ghost._modules[n] = nn.ModuleList(self.stubs)
            else:
                self.ghost._modules[n] = stubs[c] if c in stubs else bare(c)
        self.end = Stub(self.head, 5)
        self.whole = self._around(model, base)
        if self.embedding not in stubs:
            raise ValueError(f"{type(model).__name__} keeps its input embedding outside of its decoder.")
        self.begin = stubs[self.embedding]
        self.norm = self._prove(type(model).__name__, stubs)
        ids = torch.zeros(1, SAMPLE, dtype=torch.int64, device=self.device)
        self.read = None if same(self._read(ids), ids) else self._read
        self.enter = None if same(self._enter(x := self._sample()), x) else self._enter
        self.finish = None if self._hands_on_logits() else self._finish
        self.modules = named_modules(model)
        self.traits = self._find_traits(base)
        self.recurrent = any(traits.stacked for traits in self.traits)
        # fetched now: `fully_shard` swaps the model's class for one of another module
        self.balance: Callable | None = vars(sys.modules[type(model).__module__]).get("load_balancing_loss_func")

    def _find_traits(self, base: Any) -> list[Traits]:
        caches = self.empty.layers  # by which transformers says what a layer remembers
        recorded = (base._can_record_outputs or {}).get("router_logits")
        found = []
        for layer, cache in zip(self.layers, caches, strict=True):
            indexed = type(cache) is DynamicIndexedLayer
            found.append(
                Traits(
                    source=type(layer).__module__,
                    attends=type(cache) in (DynamicLayer, DynamicSlidingWindowLayer),
                    joined="kv_lora_rank" in self.config.to_dict(),
                    indexed=indexed,
                    indexer=find_indexer(layer) if indexed else None,
                    stacked=isinstance(cache, LinearAttentionCacheLayerMixin),
                    router=find_router(layer, recorded),
                    embedded=self.embedded,
                    relay=self.relay,
                    cache=self.cache,
                )
            )
        return found

    def _around(self, module: nn.Module, base: nn.Module) -> nn.Module:
        """The ghost of what stands around the decoder; it may lie deeper than one level, beside other encoders."""
        ghost = bare(module)
        stands_in: dict[nn.Module, nn.Module] = {base: self.ghost, self.head: self.end}
        for n, c in module.named_children():
            if c in stands_in:
                ghost._modules[n] = stands_in[c]
            else:
                ghost._modules[n] = self._around(c, base) if base in c.modules() else bare(c)
        return ghost

    def _sample(self) -> Tensor:
        return torch.linspace(-1, 1, SAMPLE * self.config.hidden_size, device=self.device).view(1, SAMPLE, -1)

    def _prove(self, kind: str, stubs: dict[nn.Module, Stub]) -> nn.Module:
        """Runs the whole model on its ghost and checks, storage by storage, that it is a chain. Returns the norm."""
        x = self._sample().requires_grad_()
        for returns in range(4):  # what a layer returns is tried
            for stub in self.stubs:
                stub.returns = returns
            try:
                self._run(self.whole, x)
            except (TypeError, ValueError, IndexError, AttributeError):
                if returns == 3:
                    raise
            else:
                if all(same(a.out, b.args[0]) for a, b in itertools.pairwise(self.stubs)):
                    break
            self.forget()
        norms = [c for c, stub in stubs.items() if stub.args and stub is not self.begin]
        if len(norms) > 1:
            raise ValueError(f"{kind} calls {len(norms)} modules beside its layers, where one norm is known.")
        self.behind = stubs[norms[0]] if norms else self.stubs[-1]
        hands_on = same(self.behind.out, self.end.args[0])
        for before, after in itertools.pairwise((*self.stubs, *(stubs[n] for n in norms))):
            if not after.args or not same(before.out, after.args[0]):
                raise ValueError(f"{kind} changes the hidden states between its layers and its norm.")
        extra = self.stubs[0].kwargs.items()
        self.embedded = tuple(name for name, value in extra if isinstance(value, Tensor) and value.requires_grad)
        self.cache = "layer_past" if "layer_past" in self.stubs[0].kwargs else "cache"
        for stub in self.stubs:
            if not stub.args or self.cache not in stub.kwargs:
                raise ValueError(f"{kind} calls its layers without `cache`.")
            for name in self.embedded:
                if not equal(stub.kwargs[name], self.stubs[0].args[0]):
                    raise ValueError(f"{kind} hands more to its layers than hidden states and embeddings.")
            if not all(mask.causal for mask in tree_leaves((stub.args, stub.kwargs)) if isinstance(mask, Mask)):
                raise ValueError(f"{kind} has a mask that is neither causal nor causal in a window.")
            for name, value in stub.kwargs.items():
                if name in self.embedded or any(value is token for other in self.stubs for token in other.tokens):
                    continue
                if any(t.requires_grad for t in tree_leaves(value) if isinstance(t, Tensor)):
                    raise ValueError(f"{kind} hands `{name}` to its layers, which depends on hidden states.")
        self.relay = {
            name: 1 + before.tokens.index(value)
            for before, after in itertools.pairwise(self.stubs)
            for name, value in after.kwargs.items()
            if any(value is token for token in before.tokens)
        }
        self.forget()
        for code, what in ((self._enter, "embeddings"), (self._leave, "last hidden states")):
            whole = code(x)
            if not all(equal(whole[:, i : i + 1], code(x[:, i : i + 1])) for i in range(SAMPLE)):
                raise ValueError(f"{kind} changes its {what} by more than each token for itself.")
        if self._leave(x.detach()).requires_grad:
            raise ValueError(f"{kind} hands more to its head than its last hidden states.")
        self.leave = None if hands_on else self._leave
        return norms[0] if norms else nn.Identity()

    def _run(self, ghost: nn.Module, x: Tensor, positions: Tensor | None = None, ids: Tensor | None = None) -> Any:
        """The model's own forward, or its decoder's, on embeddings `x`. Costs under a millisecond."""
        self.begin.out = x
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        given = {"position_ids": positions} if self.takes_positions else {}
        with prefix_attention(self.config):
            ids = torch.zeros_like(positions) if ids is None else ids
            return ghost(input_ids=ids, use_cache=False, cache=self.empty, **given)

    def _hands_on_logits(self) -> bool:
        """Whether the head's output is the model's. If not, what becomes of a logit must not depend on the others."""
        z = torch.linspace(-3, 3, 12, device=self.device).view(1, 3, 4)
        with torch.no_grad():
            out = self._finish(z)
            if same(out, z):
                return True
            alone = torch.stack([self._finish(t.view(1, 1, 1)) for t in z.flatten()]).view_as(z)
        if not equal(out, alone):
            raise ValueError("what the model does behind its head mixes logits of different tokens.")
        return False

    def _read(self, ids: Tensor) -> Tensor:
        """int64 `[1, N]`: the model's own code before its embedding."""
        x = blank(torch.empty(0, device=ids.device), ids.shape, self.config.hidden_size)
        self.begin.ends = True
        with contextlib.suppress(Reached):
            self._run(self.whole, x, ids=ids)
        self.begin.ends = False
        out = self.begin.args[0]
        self.forget()
        return out

    def _enter(self, x: Tensor) -> Tensor:
        """`[1, N, H]`: the model's own code before its first layer."""
        self._run(self.ghost, x)
        out = self.stubs[0].args[0]
        self.forget()
        return out

    def _leave(self, x: Tensor) -> Tensor:
        """`[1, C, H]`: the model's own code before its head."""
        self.behind.out = x
        self._run(self.whole, x.new_zeros(1).requires_grad_().expand_as(x))
        out = self.end.args[0]
        self.forget()
        return out

    def _finish(self, logits: Tensor) -> Tensor:
        """`[1, C, V]`: the model's own code behind its head."""
        self.end.out = logits
        with torch.no_grad():
            x = blank(logits, logits.shape[:2], self.config.hidden_size)
        out = self._run(self.whole, x)[0]
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
        forms = {traits.stacked for traits in self.traits}
        calls = {
            stacked: self._describe(segment.stacked_positions if stacked else segment.positions, like)
            for stacked in forms
        }
        segment.calls = [calls[traits.stacked][i] for i, traits in enumerate(self.traits)]

    def _describe(self, of: Callable, like: Tensor) -> list[dict[str, Any]]:
        positions = of(like.device)
        with torch.no_grad():
            self._run(self.ghost, like.new_empty(1).expand(*positions.shape, self.config.hidden_size), positions)
        apart = {self.cache, *self.relay}
        calls = [
            {k: Unread() if isinstance(v, KVSharingDict) else v for k, v in stub.kwargs.items() if k not in apart}
            for stub in self.stubs
        ]
        self.forget()
        return calls


def find_router(layer: nn.Module, recorded: Any) -> tuple[nn.Module, int] | None:
    """The module whose output transformers would record as router logits, and where they are in it."""
    if recorded is None:
        return None
    target = recorded if isinstance(recorded, type) else recorded.target_class
    place = 0 if isinstance(recorded, type) else recorded.index
    return next(((m, place) for m in layer.modules() if isinstance(m, target)), None)


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


def equal(a: Tensor, b: Tensor) -> bool:
    """On the meta device, where a model has no values yet, its structure alone is looked at."""
    return a.shape == b.shape and (a.is_meta or torch.equal(a, b))


def same(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.shape == b.shape and a.untyped_storage()._cdata == b.untyped_storage()._cdata
