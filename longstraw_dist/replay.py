"""The layer operation: one prompt and its responses through one layer, as ONE autograd operation.

             prompt chunks (no graph)        responses (no graph)               what is kept
    forward   x: [ p0 | p1 | p2 ] ------------> [ r1 ] [ r2 ] ... [ rG ] -> y       x, and the prompt's state
                     \\____ state ____/  read by every response

    backward  g: for each replay: recompute with graph (*), torch.autograd.grad -> g_x, dState += , dW +=
                 for each prompt chunk, last to first: recompute, fed g_y and dState -> g_x, dState of what came before
                 return g_x and ONE gradient per parameter
              (*) not the last layer's first replay: only the head runs between its forward and its backward

Seen from outside, the model is a chain of layers that runs forward once and backward once: an engine that gathers
parameters per layer gathers them twice, whatever the number of responses, chunks and groups, and reduces one gradient.
Inside, only `torch.autograd.grad` runs, never `.backward()`: no parameter hook of an engine fires early. The idea of
taking the graph apart is LongStraw's (arXiv 2607.14952, section 3); the prompt's gradient is what it cuts off.

    N prompt rows, M response rows (all groups of the call)   H hidden
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .attention import Mask, prefix_attention
from .capture import Capture, CapturedLayer
from .failures import Place
from .gradients import Gradients, edges_of
from .graphs import Budget, Graph, count, saved_once
from .groups import Packed, PackedGroup, Segment
from .indexer import blocks_of_queries
from .kernels import served_mixers
from .meter import Meter
from .recompute import Autocast, no_checkpointing, refuse_changed, watched
from .stand_ins import standing_in
from .state import Captured, PromptState, View
from .traits import Traits


@dataclass
class Progress:
    """How far the backward of one call has come: the head's operation begins it, the first trained layer's ends it."""

    begun: bool = False
    ended: bool = False


@dataclass
class Call:
    """One packed call: what all of its operations share."""

    packed: Packed
    config: Any  # the model's, whose attention is swapped while a segment runs
    meter: Meter
    progress: Progress
    place: Place  # where it is, for whoever catches an exception
    budget: Budget
    opening: Segment | None  # backward begins with it: its graph in the last layer is kept without a budget
    captures: list[Capture | None]  # to be made, of each packed group
    guard: Callable[[str], AbstractContextManager]  # around the backward of the operation with this name
    measure: Callable[..., None] | None = None  # a layer's graphs, where sizes are to be found: sizes.py


@dataclass
class Layer:
    """One layer of one call: what the operation needs to know besides its tensors."""

    call: Call
    module: nn.Module
    index: int
    exact: bool  # whether the gradient reaches the prompt here
    first: bool  # no gradient goes below: nothing there is trained
    last: bool  # nothing reads the prompt's output of the last layer
    traits: Traits

    @property
    def routed(self) -> bool:
        """Whether its router's logits are wanted."""
        return self.call.packed.with_ends and self.traits.router is not None

    @property
    def name(self) -> str:
        return f"layer {self.index}"


class LayerOperation(torch.autograd.Function):
    """
    `apply(layer, stock, x_prompt_1NH, x_response_1MH, *parameters)
        -> (y_prompt_1NH | None, y_response_1MH, router_prompt_1NE | None, router_response_1ME | None)`

    `stock` is the layer's own forward at the time of the call. Costs: each row runs once in forward; in backward each
    response row runs at most once more forward and once backward, and each prompt row too where the prompt's gradient
    is exact. Kept for backward: `x_response`, the prompt's state, and `x_prompt` where the prompt's gradient is exact;
    and the graphs of segments, within `activation_budget`, which are not run again.
    """

    @staticmethod
    def forward(ctx, layer: Layer, stock: Callable, x_prompt: Tensor, x_response: Tensor, *parameters: Tensor):
        ctx.autocast = Autocast(x_response.device.type)
        ctx.graphs = {}
        y_prompt = y_response = r_prompt = r_response = None
        states, kept = [], []
        segments = layer.call.packed.segments
        for group in layer.call.packed.groups:
            if group.capture is not None:
                group.capture.relay(layer.index, group.chunks)
        relays = {id(segment): segment.relay for segment in segments}
        ctx.relay = [list(relay) for relay in relays.values()]
        relayed = [t for relay in relays.values() for t in relay.values()]
        with no_checkpointing(layer.module), ctx.autocast.restored(), watched(ctx, layer.module):
            only = layer.last and not layer.routed
            for group, making in zip(layer.call.packed.groups, layer.call.captures, strict=True):
                if group.capture is None:
                    state = PromptState(group.captured, layer.traits)
                else:
                    state = group.capture.state(layer.index)
                    y_prompt = put_captured(y_prompt, x_prompt, group.rows, group.capture.hidden(layer.index + 1))
                for chunk in group.chunks if group.capture is None else ():
                    y, view = forward_segment(ctx, layer, stock, state, chunk, x_prompt, layer.exact, only)
                    state.write(chunk, view)
                    if not layer.last:  # where it is None on every rank: engines run a hook for each output
                        y_prompt = put(y_prompt, x_prompt, chunk.rows, y)
                    r_prompt = put(r_prompt, x_prompt, chunk.rows, view.routed)
                for replay in group.replays:
                    y, view = forward_segment(ctx, layer, stock, state, replay, x_response)
                    y_response = put(y_response, x_response, replay.rows, y)
                    r_response = put(r_response, x_response, replay.rows, view.routed)
                if layer.call.measure is not None and any(ctx.needs_input_grad):
                    layer.call.measure(layer, stock, group, state, x_response)
                states.append(state)
                kept.append(
                    state.kept(layer.exact, group.chunks[0].tokens * x_prompt[0, :1].nbytes if group.chunks else 0)
                )
                if making is not None:
                    making.layers.append(capture_layer(layer, state, kept[-1], x_prompt, group, relays))
        if y_prompt is None and not layer.last:
            y_prompt = torch.empty_like(x_prompt)
        if r_prompt is None and r_response is not None:
            r_prompt = r_response[:, :0].clone()

        layer.call.place.at(layer.name)
        ctx.layer, ctx.states = layer, states
        hidden = [x_response, x_prompt] if layer.exact else [x_response]
        state_tensors = [t for tensors in kept for t in tensors]
        ctx.save_for_backward(*hidden, *relayed, *state_tensors)
        if layer.last:
            for segment in segments:
                segment.relay = {}
        ctx.set_materialize_grads(False)
        if not layer.exact:
            ctx.mark_non_differentiable(*(t for t in (y_prompt, r_prompt) if t is not None))
        if any(ctx.needs_input_grad):
            layer.call.meter.keeps("hidden", hidden)
            layer.call.meter.keeps("state", state_tensors)
        return y_prompt, y_response, r_prompt, r_response

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g_prompt, g_response, gr_prompt, gr_response):
        layer, exact, call = ctx.layer, ctx.layer.exact, ctx.layer.call
        stock = layer.module.forward  # looked up anew: a wrapper may have swapped the class
        with call.guard(layer.name), no_checkpointing(layer.module), ctx.autocast.restored(), torch.enable_grad():
            refuse_changed(layer.name, layer.module, ctx.versions)
            x_response, *saved = ctx.saved_tensors
            x_prompt = saved.pop(0) if exact else x_response[:, :0]
            kept = iter(saved)
            for segment, names in zip(call.packed.segments, ctx.relay, strict=True):
                segment.relay = {name: next(kept) for name in names}
            if g_response is None:
                g_response = torch.zeros_like(x_response)
            gx_response, gx_prompt = torch.empty_like(x_response), torch.empty_like(x_prompt)
            gradients = Gradients(layer.module, ctx.names)
            for group, state in zip(call.packed.groups, ctx.states, strict=True):
                state.load(kept)
                again = functools.partial(backward_segment, layer, stock, state, gradients, ctx.graphs)
                for replay in group.replays:
                    gx_response[:, replay.rows] = again(replay, x_response, g_response, gr_response)
                for chunk in reversed(group.chunks) if exact else ():
                    for earlier in state.missing(chunk, group.chunks) if id(chunk) not in ctx.graphs else ():
                        with torch.no_grad():
                            view = state.open(earlier)
                            run(layer, stock, earlier, x_prompt[:, earlier.rows], view)
                        state.restore(earlier, view)
                    gx_prompt[:, chunk.rows] = again(chunk, x_prompt, g_prompt, gr_prompt, captured=True)
                state.clear()
            sums = gradients.sums()
        call.progress.ended |= layer.first
        return None, None, gx_prompt if exact else None, gx_response, *sums


def run(layer: Layer, stock: Callable, segment: Segment, x: Tensor, view: View) -> Tensor | None:
    """The stock layer on one segment, with the prompt's state for its cache; `None` if only its state is wanted."""
    layer.call.place.at(layer.name, segment)
    with contextlib.ExitStack() as ours, contextlib.suppress(Captured):
        ours.enter_context(prefix_attention(layer.call.config, view))
        ours.enter_context(served_mixers(layer.traits.source))
        ours.enter_context(standing_in(layer.traits.source))
        ours.enter_context(blocks_of_queries(layer.traits.indexer))
        kwargs = segment.calls[layer.index] | {name: segment.relay.get(name) for name in layer.traits.relay}
        if layer.traits.indexed:
            kwargs["attention_mask"] = segment.mask(x.device)
        view.window = next((value.window for value in kwargs.values() if isinstance(value, Mask)), None)
        x = segment.stack(x) if layer.traits.stacked else x
        if layer.traits.embedded:  # the rows are hidden states and, behind them, embeddings
            x, embeddings = x.chunk(2, -1)
            kwargs |= dict.fromkeys(layer.traits.embedded, embeddings)
        with router_logits(layer) as routed:
            y = stock(x, **kwargs, **{layer.traits.cache: view})
        if routed:
            logits = routed[0].view(*x.shape[:2], -1)
            view.routed = segment.unstack(logits) if layer.traits.stacked else logits
        segment.relay = {name: y[place] for name, place in layer.traits.relay.items() if y[place] is not None}
        y = y if isinstance(y, Tensor) else y[0]
        if layer.traits.embedded:
            y = torch.cat([y, embeddings], -1)
        return segment.unstack(y) if layer.traits.stacked else y
    return None


@contextlib.contextmanager
def router_logits(layer: Layer) -> Iterator[list[Tensor]]:
    """Collects what the layer's router says, where the auxiliary loss is wanted."""
    found: list[Tensor] = []
    if not layer.routed or layer.traits.router is None:
        yield found
        return
    router, place = layer.traits.router
    hook = router.register_forward_hook(
        lambda _, args, out: found.append(out[place] if isinstance(out, tuple) else out)
    )
    try:
        yield found
    finally:
        hook.remove()


def capture_layer(
    layer: Layer, state: PromptState, kept: list[Tensor], x_prompt: Tensor, group: PackedGroup, relays: dict
) -> CapturedLayer:
    """What later calls need of a prompt in this layer. The embeddings, of which the first begins, they have."""
    hidden = None
    if layer.exact and layer.index:
        hidden = x_prompt[:, group.rows].detach()
        if hidden.shape != x_prompt.shape:
            hidden = hidden.clone()  # a slice would keep all groups'
    state = copy.copy(state)
    state.traits = dataclasses.replace(layer.traits, router=None, indexer=None)  # it would keep the modules alive
    return CapturedLayer(state, kept, hidden, [dict(relays[id(chunk)]) for chunk in group.chunks])


def put_captured(into: Tensor | None, like: Tensor, rows: slice, hidden: Tensor | None) -> Tensor | None:
    """What a layer made of a prompt when that was captured."""
    if hidden is not None and hidden.shape[1] == like.shape[1]:  # all of it: no copy
        return hidden.detach()
    return put(into, like, rows, hidden)


def put(into: Tensor | None, like: Tensor, rows: slice, y: Tensor | None) -> Tensor | None:
    if y is None:
        return into
    if into is None:  # the layer's output dtype is known with its first output
        into = y.new_empty(*like.shape[:2], y.shape[-1])
    into[:, rows] = y
    return into


def forward_segment(ctx, layer, stock, state, segment, x, keep: bool = True, capture_only: bool = False):
    """Runs one segment. Its graph is kept if backward will want it (`keep`), and the call's budget allows or backward
    begins with it. Returns its output and its view."""
    budget = layer.call.budget
    at_once = layer.last and segment is layer.call.opening
    if not ((budget.left or at_once) and keep and any(ctx.needs_input_grad)):
        view = state.open(segment, capture_only=capture_only)
        return run(layer, stock, segment, x[:, segment.rows], view), view
    with saved_once(layer.module) as saved:
        graph = with_graph(layer, stock, state, segment, x, capture_only)
    graph.nbytes = count(graph, saved, kept_anyway=[*state.grown, *tree_leaves(segment.calls[layer.index])])
    if at_once or budget.take(graph.nbytes):
        graph.edges = edges_of(map(layer.module.get_parameter, ctx.names))
        ctx.graphs[id(segment)] = graph
        layer.call.meter.keeps("last_layer" if at_once else "graphs", [graph])
    return graph.y, graph.view


def with_graph(layer, stock, state, segment, x, capture_only: bool) -> Graph:
    x = x[:, segment.rows].detach().requires_grad_()
    view = state.open(segment, differentiable=layer.exact, capture_only=capture_only)
    with torch.enable_grad():
        return Graph(x, view, run(layer, stock, segment, x, view))


def backward_segment(
    layer: Layer,
    stock: Callable,
    state: PromptState,
    gradients: Gradients,
    graphs: dict[Any, Graph],
    segment: Segment,
    x: Tensor,
    g: Tensor | None,
    g_router: Tensor | None,
    captured: bool = False,
) -> Tensor:
    """Takes the gradient of one segment, whose graph was kept or is made again, from its output's and, where the
    segment was `captured`, its state's: the one of its `x` is returned, those of the past and of the parameters are
    added up. All else that it made is gone when the next segment starts."""
    graph = graphs.pop(id(segment), None)
    graph = graph or with_graph(layer, stock, state, segment, x, capture_only=g is None and g_router is None)
    view = graph.view
    outputs, cotangents = state.cotangents(segment, view) if captured else ([], [])
    for output, cotangent in ((graph.y, g), (view.routed, g_router)):
        if output is not None and cotangent is not None:
            outputs, cotangents = [*outputs, output], [*cotangents, cotangent[:, segment.rows]]
    gx, *g_past = gradients.vjp(outputs, cotangents, [graph.x, *view.leaves.values()], graph.edges)
    state.accumulate(segment, view, g_past)
    return gx
