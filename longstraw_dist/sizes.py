"""How much runs at once where a knob is `"auto"`: as much as `segment_budget` holds, by a measurement.

The first call with a backward runs small segments and, in the first layer of each kind, a few samples more, behind the
longest prompt. What their graphs hold (graphs.py) gives two curves for that layer, of chunks and of replays:

    bytes = fixed + responses * sequence + tokens * token + tokens^2 * square

where the tokens of a recurrent layer are those that it pads its responses to. From the next call on segments are as
large as the curves of all layers allow, on every rank: each says in the one all-reduce of a call what it has measured,
and all follow the least. What backward needs beside the graph is not in it. Where a layer makes keys of the past anew
(latents) or scores all of it (sparse attention), a graph grows with the prompt: there a prompt that is longer than
those before is measured too, and sizes can shrink.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .blueprint import Blueprint
from .config import LongStrawConfig
from .graphs import count, saved_once
from .groups import Packed, PackedGroup, Segment, Sizes
from .kernels import log_once
from .replay import Layer, with_graph
from .state import PromptState
from .wrapping import shard_size

TABLES = ("gptj", "codegen")  # whose positions end with a table
MARGIN = 0.01  # of the budget: some layers' graphs are not quite on a curve
Curve = tuple[float, float, float]  # fixed, token, square


class Automatic:
    """
    The sizes of one attached model. A copy of the model keeps them.

    Attributes:
        sizes (`Sizes`): of the next call, the same on all ranks.
        measured (`tuple[int, int, int]`): this rank's own, as numbers; zeros before it has measured.
    """

    def __init__(self, config: LongStrawConfig):
        self.budget = config.segment_budget
        self.sizes, self.agreed = Sizes(), False
        self.measured = 0, 0, 0
        self.past = -1  # tokens of the longest prompt that was measured here
        self.measured_with: Any = None  # on what a graph's size depends, besides

    def begin(self, packed: Packed, plan: Blueprint, like: Tensor) -> "Measurement | None":
        """For a call with a backward, if it is to measure: a dummy's is not."""
        if self.budget is None or not packed.returned:
            return None
        grows = any(traits.joined or traits.indexed for traits in plan.traits)
        if (now := conditions(plan, like)) != self.measured_with:
            self.measured_with, self.measured, self.agreed, self.past = now, (0, 0, 0), False, -1
        due = not self.agreed or (grows and longest(packed).captured > self.past)
        return Measurement(packed, plan, like) if due else None

    def take(self, measurement: "Measurement") -> None:
        """Notes what this rank has found. All ranks follow at the next call."""
        assert self.budget is not None
        self.past = measurement.group.captured
        room = self.budget * (1 - MARGIN)
        found = [fill(room, *curves) for curves in measurement.found.values()]
        if measurement.recurrent:  # the last chunk may be a token longer
            found = [(max(chunk - 1, 1), replay, each) for chunk, replay, each in found]
        self.measured = least([self.measured, *found])

    def agree(self, of_all: Sequence[Sequence[int]]) -> None:
        """Takes what every rank has measured, in the order of ranks."""
        chunk, replay, each = least(of_all)
        if self.budget is None or not chunk:
            return
        self.sizes, self.agreed = Sizes(chunk, replay, each), True
        log_once(
            f"segment_budget={self.budget} holds prompt chunks of {chunk} tokens, and replays of {replay}, where each "
            f"response but one counts as {each} more."
        )
        if chunk == 1:
            log_once(f"segment_budget={self.budget} bytes hold no more than one token's graph.", logging.WARNING)


def least(found: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """The sizes that suit all who have found some."""
    found = [sizes for sizes in found if sizes[0]]
    if not found:
        return 0, 0, 0
    chunks, replays, eaches = zip(*found, strict=True)
    return min(chunks), min(replays), max(eaches)


class Measurement:
    """
    Of one call. The layer operation calls it for each group, when the prompt's state is there.

    Costs seven segments with their graphs, one at a time, in one layer of each kind: of up to 385 tokens, 1537 where a
    recurrence pads to blocks of up to 256.
    """

    def __init__(self, packed: Packed, plan: Blueprint, like: Tensor):
        self.group, self.recurrent = longest(packed), plan.recurrent
        self.found: dict[Any, tuple[Curve, Curve, float]] = {}
        n = 256 if plan.recurrent else 64
        if plan.config.model_type in TABLES:
            n = max(min(n, (plan.config.max_position_embeddings - self.group.captured - 1) // 3), 1)
        chunks = [(i * n + 1,) for i in (1, 2, 3)]  # where padding to a block is most
        replays = [*((i * n + 1, i * n) for i in (1, 2, 3)), (n // 4 + 1, n // 4) * 4]
        self.samples = []
        for lengths in (*chunks, *replays):
            rows = slice(0, sum(lengths))
            self.samples.append(Segment(rows, self.group.captured, lengths, number=len(self.group.chunks)))
            plan.describe(self.samples[-1], like)

    def __call__(self, layer: Layer, stock: Callable, group: PackedGroup, state: PromptState, x: Tensor) -> None:
        parameters = layer.module.named_parameters()
        kind = layer.exact, *((name, shard_size(p)[1], p.requires_grad) for name, p in parameters)
        if group is not self.group or kind in self.found:
            return
        x = x[:, torch.arange(max(sample.tokens for sample in self.samples), device=x.device) % x.shape[1]]
        points = []
        for sample in self.samples:
            with saved_once(layer.module) as saved:
                graph = with_graph(layer, stock, state, sample, x, capture_only=False)
            nbytes = count(graph, saved, [*graph.view.past.values(), *tree_leaves(sample.calls[layer.index])])
            del graph
            tokens = len(sample.lengths) * sample.longest if layer.traits.stacked else sample.tokens
            points.append((tokens, nbytes))
        chunk, replay, (tokens, nbytes) = fit(points[:3]), fit(points[3:6]), points[6]
        sequence = max(nbytes - evaluate(replay, tokens), 0.0) / 6  # eight responses, where the curve is of two
        self.found[kind] = chunk, replay, sequence


def conditions(plan: Blueprint, like: Tensor) -> tuple:
    """What is trained, and in which dtype it runs."""
    kind = like.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return like.dtype, autocast, [p.requires_grad for layer in plan.layers for p in layer.parameters()]


def longest(packed: Packed) -> PackedGroup:
    return max((group for group in packed.groups if group.replays), key=lambda group: group.captured)


def evaluate(curve: Curve, tokens: int) -> float:
    fixed, token, square = curve
    return fixed + token * tokens + square * tokens**2


def fit(points: Sequence[tuple[int, int]]) -> Curve:
    """The parabola through three points at equal distances; above them where it would bend down, or begin below 0."""
    (t, one), (t_two, two), (_, three) = points
    step = t_two - t
    square = max(three - 2 * two + one, 0) / (2 * step**2)
    token = max((two - one) / step - square * (t + t_two), 1.0)
    return max(one - token * t - square * t**2, 0.0), token, square


def fill(room: float, chunk: Curve, replay: Curve, sequence: float) -> tuple[int, int, int]:
    """Tokens of a chunk and of a replay that there is room for, and how many a response more takes away."""
    fixed, token, square = replay
    tokens = solve((max(fixed - sequence, 0.0), token, square), room)
    return solve(chunk, room), tokens, math.ceil(sequence / (token + square * tokens))


def solve(curve: Curve, nbytes: float) -> int:
    """The most tokens that hold no more bytes; one at least."""
    fixed, token, square = curve
    rest = max(nbytes - fixed, 0.0)
    return max(min(int(2 * rest / (token + math.sqrt(token**2 + 4 * square * rest))), 2**31), 1)
