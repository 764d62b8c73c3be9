"""What attach() leaves on a model: its blueprint, its settings, and `run`, one packed call."""

import contextlib
import copy
import functools
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import adapters, failures, kernels, wrapping
from .blueprint import Blueprint
from .capture import Capture, checksums, stands_on
from .config import LongStrawConfig, exact_layers
from .graphs import Budget
from .groups import PromptGroup, find_fault, pack
from .head import CallGraph, HeadOperation, NormOperation, Rows
from .meter import Meter
from .output import LongStrawOutput
from .replay import Call, Layer, LayerOperation, Progress
from .sizes import Automatic
from .stand_ins import replaced
from .storage import Host
from .support import find_dropout


class Attachment:
    """Everything that an attached model carries: its blueprint, its settings, what happened."""

    def __init__(self, model: PreTrainedModel, config: LongStrawConfig, root: nn.Module):
        self.model, self.config = model, config
        self.around = [m for m in root.modules() if any(n is model for n in m.modules())]  # outermost first
        self.adapted = len(adapters.tuners(model))
        self.blueprint = Blueprint(model)
        self.meter = Meter()
        self.place = failures.Place()
        self.automatic = Automatic(config)
        self._forget()

    def _forget(self) -> None:
        self.pending: weakref.ref[CallGraph] | None = None  # the graph of the last call, while it lives
        self.engine = "none"  # that called last
        self.applied: list[tuple] = []  # adapters of the last call with a graph
        self.progress = Progress()  # of the last call's backward
        self.failed: str | None = None  # what a backward that ended in the middle has left behind

    def __deepcopy__(self, memo: dict) -> "Attachment":
        twin = object.__new__(Attachment)
        memo[id(self)] = twin
        twin.model, twin.around = copy.deepcopy(self.model, memo), copy.deepcopy(self.around, memo)
        twin.config, twin.meter, twin.adapted = self.config, Meter(), self.adapted
        twin.blueprint = copy.deepcopy(self.blueprint, memo)
        twin.place, twin.automatic = failures.Place(), copy.copy(self.automatic)
        twin._forget()
        return twin

    def __reduce__(self):
        raise TypeError("an attached model cannot be pickled: use save_pretrained, or save its state_dict.")

    @property
    def root(self) -> nn.Module:
        """What an engine wraps: the model, or one of PEFT's around it."""
        return wrapping.find_root(self.around)

    @property
    def exact_layers(self) -> int:
        return exact_layers(self.config.prompt_grad, len(self.blueprint.layers))

    def run(
        self,
        groups: Sequence[PromptGroup],
        temperature: float,
        capturing: bool,
        router_logits: bool | None,
        unknown: tuple,
    ) -> LongStrawOutput:
        """One packed call. Whatever may be wrong on one rank is found here, before the first parameter is gathered."""
        recording = torch.is_grad_enabled()
        device = self.blueprint.device
        self.engine = wrapping.engine_of(self.root)
        if not recording:
            wrapping.reshard_after(self.root)
        try:
            try:
                if router_logits is None:
                    router_logits = bool(self.blueprint.config.to_dict().get("output_router_logits"))
                fault = self._find_fault(groups, temperature, router_logits, unknown, recording, device)
                if capturing and torch.is_inference_mode_enabled():
                    fault = "capture=True in inference mode: no backward could use it. Capture under torch.no_grad()."
            except Exception as error:  # whatever it is, the other ranks wait to hear of it
                fault = f"the input cannot be checked: {error!r}"
            fault, measured = wrapping.agree(fault, recording, device, self.automatic.measured)
            self.automatic.agree(measured)
            if fault is not None:
                raise ValueError(fault)
            with self._named("forward", recording):
                out = self._run(groups, temperature, capturing, bool(router_logits), recording, device)
            kernels.log_once(kernels.in_use())
            return out
        except BaseException:
            wrapping.release(self.root)
            raise

    @contextlib.contextmanager
    def _named(self, phase: str, recording: bool = True) -> Iterator[None]:
        """Adds to an exception where it happened, and how memory would suffice."""
        try:
            yield
        except BaseException as error:
            text = failures.describe(error, self.place, phase, self.config, self.blueprint.device, recording)
            error.add_note(f"longstraw-dist: {text}")
            raise
        finally:
            self.place.at(None)

    @contextlib.contextmanager
    def _backward(self, module: str) -> Iterator[None]:
        """Around each operation's backward: adds to an exception what it leaves behind in the engine, too."""
        self.place.at(module)
        try:
            with self._named("backward"):
                if adapters.applied(self.model) != self.applied:
                    raise ValueError("the active adapters changed between a forward and its backward.")
                yield
        except BaseException as error:
            self._fail()
            if self.failed:
                error.add_note(f"longstraw-dist: {self.failed}")
            raise

    def _fail(self) -> None:
        """Notes that a backward ended in the middle, and whether the engine minds."""
        self.progress, self.pending = Progress(), None
        self.failed = wrapping.AFTER_FAILURE.get(self.engine)

    def recover(self) -> None:
        if self.failed is not None:
            wrapping.recover(self.root, self.engine)
            self.failed = None

    def _find_fault(self, groups, temperature, router_logits, unknown, recording, device) -> str | None:
        if unknown:
            return f"prompt_groups takes no other input beside temperature and capture, but got {unknown[0]!r}."
        if recording and self.progress.begun and not self.progress.ended:
            self._fail()  # outside of the operations, in an engine's hook for one
        if recording and self.failed is not None:
            return f"the last backward ended in the middle. {self.failed}"
        if recording and self._has_pending_graph():
            return (
                "a call with prompt_groups came before the backward of the last one: engines reduce one backward a "
                "forward, so pass all groups of a micro-batch in one call (or score under torch.no_grad())."
            )
        if router_logits and not (self.blueprint.balance and any(t.router for t in self.blueprint.traits)):
            return "output_router_logits=True, but the model has no routers with an auxiliary loss."
        if self.model.training and (fault := find_dropout(self.model)) is not None:
            return fault
        if (fault := self.blueprint.find_change(self.model)) is not None:
            return fault
        if (fault := adapters.find_fault(self.model, self.adapted, len(self.around) > 1)) is not None:
            return fault
        vocabulary = self.blueprint.config.vocab_size
        fault = wrapping.find_fault(self.root, self.blueprint) or find_fault(groups, temperature, vocabulary, device)
        return fault or self._find_fault_of_captures(groups, router_logits)

    def _find_fault_of_captures(self, groups: Sequence[PromptGroup], router_logits: bool) -> str | None:
        if all(group.capture is None for group in groups):
            return None
        if router_logits:
            return "a capture holds no router logits: leave out output_router_logits, or the captures."
        stale = self.exact_layers == 0
        now = self.stands_on(parameters=not stale)
        for i, group in enumerate(groups):
            if group.capture is None:
                continue
            if not isinstance(group.capture, Capture):
                return f"prompt_groups[{i}].capture is a {type(group.capture).__name__}: pass a Capture, or None."
            if (fault := group.capture.find_fault(self, group.prompt_ids, now, stale)) is not None:
                return f"prompt_groups[{i}].capture {fault}"
        return None

    def stands_on(self, parameters: bool = True) -> dict[str, Any]:
        """What a capture made now would hold for. `parameters` are read for it, once."""
        found = stands_on(self.model, self.blueprint.config, self.blueprint.device)
        return found | {"parameters": checksums(wrapping.held(self.root, self.model))} if parameters else found

    def _has_pending_graph(self) -> bool:
        if self.progress.begun or self.pending is None or self.pending() is None:
            return False
        gc.collect()  # a graph that only a cycle keeps alive will see no backward
        return self.pending() is not None

    def _run(
        self, groups, temperature, capturing: bool, with_ends: bool, recording: bool, device: torch.device
    ) -> LongStrawOutput:
        plan, config = self.blueprint, self.config
        if recording:
            self.applied = adapters.applied(self.model)
        self.place.at("the embedding")
        packed = pack(groups, config, device, plan.recurrent, with_ends, capturing, self.automatic.sizes)
        self.meter.begin(packed.run, len(packed.prompt_ids) - packed.run, packed.tokens_saved, recording)
        captures: list[Capture | None] = [None] * len(packed.groups)
        if capturing:
            made_with = self.stands_on()
            for i, (group, wanted) in enumerate(zip(packed.groups, groups, strict=False)):  # behind them, a dummy
                if group.capture is None:
                    captures[i] = Capture(self, wanted.prompt_ids, group.chunks, made_with)

        ids = torch.cat([packed.prompt_ids, packed.response_ids])[None]
        embedded = plan.embedding(ids if plan.read is None else plan.read(ids))
        if plan.enter is not None:
            embedded = plan.enter(embedded)
        if plan.embedded:  # every layer reads them: they travel behind the hidden states
            embedded = torch.cat([embedded, embedded], -1)
        split = len(packed.prompt_ids)
        x_prompt, x_response = embedded[:, :split].clone(), embedded[:, split:].clone()  # a slice would keep both
        for group in packed.groups:
            for segment in group.segments:
                plan.describe(segment, x_response)
        progress = Progress(ended=True)
        budget = Budget(config.activation_budget if recording else 0)
        measuring = self.automatic.begin(packed, plan, x_response) if recording else None
        # its graph would stay on the device where all else is offloaded, and under autocast hold casts of weights
        cheap = config.offload is None and not torch.is_autocast_enabled(device.type)
        opening = next(r for group in packed.groups for r in group.replays) if recording and cheap else None
        call = Call(
            packed, plan.config, self.meter, progress, self.place, budget, opening, captures, self._backward, measuring
        )
        host = Host(config.offload, device) if config.offload and recording else None
        calling = functools.partial(self._call, host)
        first_exact = len(plan.layers) - self.exact_layers
        if first_exact > 0:
            x_prompt = x_prompt.detach()
        del embedded

        routed: list[Tensor] = []
        for i, module in enumerate(plan.layers):
            last = i == len(plan.layers) - 1
            exact = i >= first_exact
            first = recording and progress.ended and (x_response.requires_grad or trains(module))
            if first:  # no backward goes below
                progress.ended = False
                x_response.requires_grad_()  # ZeRO-3's layer hooks fire on the gradient of a layer's input
            layer = Layer(call, module, i, exact, first, last, plan.traits[i])
            self.place.at(layer.name)  # the engine gathers it before the operation begins
            x_prompt, x_response, *logits = calling(i, module, LayerOperation, (layer,), (x_prompt, x_response))
            if layer.routed:
                routed.append(torch.cat(logits, 1)[0])
        if measuring is not None:
            self.automatic.take(measuring)
            call.measure = measuring = None
        if plan.embedded:
            x_response = x_response.chunk(2, -1)[0]
        if packed.scored is not None:
            x_response = x_response[:, packed.scored]
        rows = functools.partial(Rows, call, config.head_chunk_size or max(1, x_response.shape[-1] // 2))
        self.place.at("the norm")
        behind = len(plan.layers)
        x_response = calling(behind, plan.norm, NormOperation, (rows("the norm", plan.norm),), (x_response,))
        if recording and not x_response.requires_grad and trains(plan.head):
            x_response.requires_grad_()  # for its hooks too
        graph = CallGraph(progress)
        self.place.at("the LM head")
        head = rows("the LM head", plan.head, float(temperature), leave=plan.leave, finish=plan.finish)
        scores = calling(behind + 1, plan.head, HeadOperation, (head, graph), (x_response,))
        if routed:
            aux_loss = self._auxiliary_loss(routed, packed.weights)
            scores = torch.cat([scores, torch.stack([aux_loss, aux_loss.new_zeros(())])[:, None].to(scores.dtype)], 1)
        if recording:
            self.pending, self.progress = weakref.ref(graph), progress
        made = [new or group.capture for new, group in zip(captures, groups, strict=False)] if capturing else None
        return LongStrawOutput(scores=scores, lengths=[r.stop - r.start for r in packed.rows], captures=made)

    def _auxiliary_loss(self, routed: list[Tensor], weights: Tensor | None) -> Tensor:
        """The model's own, of all rows that its prompts and responses would be: a shared token counts once a row."""
        assert weights is not None
        assert self.blueprint.balance is not None
        if not weights.any():
            return torch.stack([logits.sum() for logits in routed]).sum() * 0
        model: Any = self.model
        return self.blueprint.balance(tuple(routed), model.num_experts, model.num_experts_per_tok, weights[None])

    @staticmethod
    def _call(
        host: Host | None,
        place: int,
        module: nn.Module,
        operation: type[torch.autograd.Function],
        setting: tuple,
        hidden: tuple,
    ):
        """Calls the module, hooks and all, with `operation` in place of its forward. `place` counts the calls."""

        def packed_forward(*hidden: Tensor):
            with contextlib.nullcontext() if host is None else host.saving(place, list(hidden)):
                return operation.apply(*setting, stock, *hidden, *module.parameters())

        stock = module.forward
        with replaced(module, "forward", packed_forward):
            return module(*hidden)


def trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
