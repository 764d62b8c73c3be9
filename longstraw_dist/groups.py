"""Prompt groups: what a caller hands in, what is wrong with it, and how it is packed.

    group 0: prompt a b c, responses [x y] and [z]      group 1: prompt d, response [w]

    prompt    a b                                        (the capture: P-1 tokens of each prompt, in chunks)
    response  c x | c | d                                (the last prompt token opens each response: R inputs)
    target    x y | z | w

The prompt rows and the response rows lie in two tensors, each `[1, tokens, hidden]`, because they are kept for
different times: `detached` keeps the responses alone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .config import LongStrawConfig

if TYPE_CHECKING:
    from .capture import Capture


@dataclass
class PromptGroup:
    """
    One prompt and its responses.

    Args:
        prompt_ids (`torch.Tensor`): int64 `[P]`, at least one token.
        response_ids (`list[torch.Tensor]`): int64 `[R_i]` each, on the same device; `R_i` may be 0.
        capture ([`Capture`], *optional*): of this prompt, from an earlier call: it does not run again in forward.
    """

    prompt_ids: Tensor
    response_ids: Sequence[Tensor]
    capture: "Capture | None" = None


@dataclass
class Segment:
    """The unit of a layer call: a prompt chunk, or the replay of one or more responses of one group."""

    rows: slice  # where it lies in the packed prompt rows (chunk) or response rows (replay)
    past: int  # prompt tokens that come before it
    lengths: tuple[int, ...]  # its sequences, one behind the other: one for a chunk, one a response for a replay
    calls: list[dict[str, Any]] = field(default_factory=list)  # each layer's arguments: blueprint.py
    relay: dict[str, Tensor] = field(default_factory=dict)  # what a layer left for the next one
    group: int = 0  # its place in the call
    number: int = 0  # chunks of the prompt before it
    is_chunk: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def name(self) -> str:
        if self.is_chunk:
            return f"prompt chunk of {self.tokens} tokens at {self.past} of group {self.group}"
        count = f"{len(self.lengths)} response{'s' * (len(self.lengths) > 1)}"
        return f"replay of {count} of group {self.group}, {self.tokens} tokens"

    def mask(self, device: torch.device) -> Tensor:
        """bool `[1, 1, tokens, past + tokens]`: what each token may see."""
        own = torch.block_diag(*(torch.ones(n, n, dtype=torch.bool, device=device).tril() for n in self.lengths))
        return torch.cat([own.new_ones(self.tokens, self.past), own], 1)[None, None]

    @property
    def longest(self) -> int:
        """Tokens of each sequence once they are stacked. Two at least behind a prompt: at one, a recurrent layer takes
        its decode path, which writes in place."""
        return max(*self.lengths, 2 if self.past else 1)

    def positions(self, device: torch.device) -> Tensor:
        """int64 `[1, tokens]`: where each token stands in its own sequence."""
        return torch.cat([torch.arange(self.past, self.past + n, device=device) for n in self.lengths])[None]

    def stacked_positions(self, device: torch.device) -> Tensor:
        """int64 `[sequences, longest]`"""
        return torch.arange(self.past, self.past + self.longest, device=device).expand(len(self.lengths), -1)

    def stack(self, x: Tensor) -> Tensor:
        """`[1, tokens, H] -> [sequences, longest, H]`, zero behind each sequence."""
        if set(self.lengths) == {self.longest}:
            return x.view(len(self.lengths), self.longest, -1)
        return torch.stack([pad(t, (0, 0, 0, self.longest - len(t))) for t in x[0].split(self.lengths)])

    def unstack(self, y: Tensor) -> Tensor:
        """`[sequences, longest, H] -> [1, tokens, H]`"""
        if set(self.lengths) == {self.longest}:
            return y.reshape(1, self.tokens, -1)
        return torch.cat([t[:n] for t, n in zip(y, self.lengths, strict=True)])[None]


@dataclass(frozen=True)
class Sizes:
    """How much runs at once where a knob is `"auto"`: sizes.py. The defaults hold until something is measured."""

    chunk: int = 256  # tokens of a prompt chunk
    replay: int = 256  # tokens of a replay
    each: int = 0  # more, for which each of its responses but one counts


@dataclass
class PackedGroup:
    captured: int  # P-1
    chunks: list[Segment]
    replays: list[Segment]
    capture: "Capture | None" = None  # from which the chunks are taken, instead of being run

    @property
    def rows(self) -> slice:
        """Where the chunks lie in the packed prompt rows."""
        return slice(self.chunks[0].rows.start, self.chunks[-1].rows.stop) if self.chunks else slice(0, 0)

    @property
    def segments(self) -> list[Segment]:
        return self.chunks + self.replays


@dataclass
class Packed:
    """All groups of one call, packed. `rows[i]` is where response i lies in the response rows (empty: R_i = 0)."""

    groups: list[PackedGroup]
    prompt_ids: Tensor  # int64 [prompt tokens]
    response_ids: Tensor  # int64 [response tokens]
    targets: Tensor  # int64 [response tokens]
    rows: list[slice]
    tokens_saved: int  # prompt tokens that a run row by row would forward again
    with_ends: bool = False  # the last token of each response is run too: routers count it
    scored: Tensor | None = None  # int64 [R_1 + R_2 + ...]: the response rows that have a target, if not all have
    weights: Tensor | None = None  # float32 [prompt tokens + response tokens]: in how many rows each stands

    @property
    def segments(self) -> list[Segment]:
        return [segment for group in self.groups for segment in group.segments]

    @property
    def run(self) -> int:
        """Prompt tokens that run in forward."""
        return sum(group.captured for group in self.groups if group.capture is None)

    @property
    def returned(self) -> int:
        """Response rows whose log-probs the caller gets: all but a dummy's."""
        return sum(rows.stop - rows.start for rows in self.rows)


def pack(
    groups: Sequence[PromptGroup],
    config: LongStrawConfig,
    device: torch.device,
    recurrent: bool = False,
    with_ends: bool = False,
    capturing: bool = False,
    auto: Sizes = Sizes(),
) -> Packed:
    """Lays the groups out. For a `recurrent` model no prompt chunk but the first has one token; `with_ends`, a
    response of R tokens has R + 1 inputs; `capturing`, a prompt without responses is run too. Where no response is to
    run, one dummy does, so that this rank makes the module calls that the others make; its log-probs are not
    returned."""
    if not any(len(r) or with_ends for group in groups for r in group.response_ids):
        dummy = torch.zeros(1, dtype=torch.int64, device=device)
        groups_run = [*(groups if capturing else ()), PromptGroup(dummy, [dummy])]
        packed = pack(groups_run, config, device, recurrent, with_ends, capturing, auto)
        packed.rows, packed.tokens_saved = [slice(0, 0) for g in groups for _ in g.response_ids], 0
        packed.weights = None if packed.weights is None else torch.zeros_like(packed.weights)
        return packed

    out, prompts, inputs, targets, rows, weights = [], [], [], [], [], []
    p = r = saved = 0
    size = config.prompt_chunk_size if isinstance(config.prompt_chunk_size, int) else auto.chunk
    for number, group in enumerate(groups):
        prompt = group.prompt_ids
        filled = [t for t in group.response_ids if len(t) or with_ends]
        captured = len(prompt) - 1 if filled or capturing else 0  # a prompt that nobody reads is not run
        capture = group.capture if captured else None
        chunks = []
        spans = capture.chunks if capture else split_prompt(captured, size, recurrent)
        for i, (begin, end) in enumerate(spans):
            lies = slice(p + begin, p + end)
            chunks.append(Segment(lies, begin, (end - begin,), group=number, number=i, is_chunk=True))
        prompts.append(prompt[:captured])
        p += captured

        begin = r
        for ids in group.response_ids:
            rows.append(slice(r, r + len(ids)))
            r += len(ids) + with_ends
        for ids in filled:
            inputs += [prompt[-1:], ids[: len(ids) - 1 + with_ends]]
            targets.append(ids)
        weights.append(torch.full((captured,), len(filled), dtype=torch.float32, device=device))
        replays = []
        for lengths in split_replays([len(t) + with_ends for t in filled], config, recurrent, auto):
            lies = slice(begin, begin + sum(lengths))
            replays.append(Segment(lies, captured, lengths, group=number, number=len(chunks)))
            begin += sum(lengths)
        out.append(PackedGroup(captured, chunks, replays, capture))
        saved += captured * max(len(filled) - 1, 0)
    packed = Packed(out, torch.cat(prompts), torch.cat(inputs), torch.cat(targets), rows, saved, with_ends)
    if with_ends:
        packed.scored = torch.cat([torch.arange(lies.start, lies.stop, device=device) for lies in rows])
        if len(packed.scored) == 0:  # the head runs on every rank
            packed.scored, packed.targets = torch.zeros(2, 1, dtype=torch.int64, device=device)
        packed.weights = torch.cat([*weights, torch.ones(len(packed.response_ids), device=device)])
    return packed


def split_prompt(tokens: int, size: int, recurrent: bool) -> list[tuple[int, int]]:
    """Begin and end of each chunk."""
    if recurrent:
        size = max(size, 2)
    chunks = [(begin, min(begin + size, tokens)) for begin in range(0, tokens, size)]
    if recurrent and len(chunks) > 1 and tokens - chunks[-1][0] == 1:
        chunks[-2:] = [(chunks[-2][0], tokens)]
    return chunks


def split_replays(
    lengths: list[int],
    config: LongStrawConfig,
    recurrent: bool = False,
    auto: Sizes = Sizes(),
) -> Iterable[tuple[int, ...]]:
    """Cuts a group's responses, in order, into replays."""
    most, size = config.responses_per_replay, config.prompt_chunk_size
    replay: list[int] = []
    for n in lengths:
        if isinstance(most, int):
            full = len(replay) == most
        elif most is None and isinstance(size, int):
            full = sum(replay) + n > size
        else:  # a recurrent layer stacks them, each as long as the longest
            tokens = max(*replay, n, 2) * (len(replay) + 1) if recurrent else sum(replay) + n
            full = tokens + len(replay) * auto.each > auto.replay
        if replay and full:
            yield tuple(replay)
            replay = []
        replay.append(n)
    if replay:
        yield tuple(replay)


def find_fault(groups: Any, temperature: Any, vocabulary: int, device: torch.device) -> str | None:
    """What is wrong with a call's input, in words that name the value; `None` if nothing. Reads the ids once."""
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        return f"temperature={temperature!r} is not a number: pass the float that the logits are divided by."
    if not (math.isfinite(temperature) and temperature > 0):
        return f"temperature={temperature!r} cannot divide logits: pass a finite number above 0."
    if not isinstance(groups, list | tuple):
        return f"prompt_groups is a {type(groups).__name__}: pass a list of PromptGroup."
    ids: list[Tensor] = []
    for i, group in enumerate(groups):
        if not isinstance(group, PromptGroup):
            return f"prompt_groups[{i}] is a {type(group).__name__}: pass PromptGroup(prompt_ids, [response_ids])."
        if not isinstance(group.response_ids, list | tuple):
            return f"prompt_groups[{i}].response_ids is a {type(group.response_ids).__name__}: pass a list."
        named = [("prompt_ids", group.prompt_ids)]
        named += [(f"response_ids[{j}]", t) for j, t in enumerate(group.response_ids)]
        for name, t in named:
            where = f"prompt_groups[{i}].{name}"
            if not isinstance(t, Tensor):
                return f"{where} is a {type(t).__name__}: pass a 1-D int64 tensor."
            if t.dtype != torch.int64 or t.dim() != 1:
                return f"{where} is {t.dtype} with shape {tuple(t.shape)}: pass a 1-D int64 tensor."
            if t.device != device:
                return f"{where} is on {t.device}, the model on {device}: move it there."
            ids.append(t)
        if len(group.prompt_ids) == 0:
            return f"prompt_groups[{i}].prompt_ids is empty: a prompt needs at least one token (a BOS will do)."
    if ids:
        flat = torch.cat(ids)
        low, high = torch.aminmax(flat)
        if low < 0 or high >= vocabulary:
            bad = int(low) if low < 0 else int(high)
            return f"token id {bad} is outside the vocabulary of {vocabulary} tokens (0 to {vocabulary - 1})."
    return None


def find_groups(
    input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int
) -> tuple[list[PromptGroup], list[tuple[int, int]]]:
    """
    Finds the prompt groups of a padded batch: rows whose prompts are equal, token by token, wherever they stand.

    Args:
        input_ids (`torch.Tensor`): int64 `[B, P + C]`, prompts padded on the left, completions on the right.
        attention_mask (`torch.Tensor`): `[B, P + C]`, 0 on padding. A completion may be masked as a whole.
        logits_to_keep (`int`): C.

    Returns:
        The groups, and for each response, in the groups' order, its row and its number of tokens.
    """
    split = input_ids.shape[1] - logits_to_keep
    lengths = attention_mask[:, split:].sum(1).tolist()
    begins = (split - attention_mask[:, :split].sum(1)).tolist()
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, (ids, begin) in enumerate(zip(input_ids[:, :split].tolist(), begins, strict=True)):
        rows_of.setdefault(tuple(ids[begin:]), []).append(row)
    groups, order = [], []
    for rows in rows_of.values():
        responses = [input_ids[row, split : split + lengths[row]] for row in rows]
        groups.append(PromptGroup(input_ids[rows[0], begins[rows[0]] : split], responses))
        order += [(row, lengths[row]) for row in rows]
    return groups, order
