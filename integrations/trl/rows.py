"""Between the rows of TRL's batches and the groups of a packed call."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longstraw_dist.groups import PromptGroup, find_groups


def pad_rows(values: list[Tensor], order: list[tuple[int, int]], width: int) -> Tensor:
    """`[R_i]` for each response, in the groups' order -> `[rows, width]` in the batch's, zero behind each response."""
    rows = {row: F.pad(value, (0, width - n)) for value, (row, n) in zip(values, order, strict=True)}
    return torch.stack([rows[row] for row in range(len(rows))])


def equal_where_same(entropies: list[Tensor], groups: list[PromptGroup]) -> list[Tensor]:
    """
    Gives tokens of a group that follow the same tokens, as its first ones do, one entropy bit for bit. Where responses
    are replayed apart theirs differ by rounding; in the parent's batch they are equal, and a quantile has all of them
    above it or none. Gradients stay each token's own.
    """
    out: list[Tensor] = []
    values = iter(entropies)
    for group in groups:
        before: list[tuple[list[int], Tensor]] = []
        for response in group.response_ids:
            ids, value = response.tolist(), next(values)
            if ids and before:
                shared = ((min(common_prefix(ids, other) + 1, len(ids), len(v)), v) for other, v in before)
                n, first = max(shared, key=lambda pair: pair[0])
                value = torch.cat([value[:n] + (first[:n] - value[:n]).detach(), value[n:]])
            if ids:
                before.append((ids, value))
            out.append(value)
    return out


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def shuffle_groups(batch: dict[str, Any]) -> dict[str, Any]:
    """
    Shuffles the rows of a generation batch by group: rows with equal prompts stay together, and large groups come
    first, so that a split into micro-batches cuts few of them.
    """
    groups, order = find_groups(
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
        batch["completion_ids"].shape[1],
    )
    rows = iter(row for row, _ in order)
    members = [[next(rows) for _ in group.response_ids] for group in groups]
    place = torch.randperm(len(order)).tolist()  # as many random numbers as the parent draws: the same rollouts follow
    members.sort(key=lambda rows: (-len(rows), min(place[row] for row in rows)))
    permutation = [row for rows in members for row in rows]

    def permute(value):
        if value is None or (isinstance(value, Tensor) and value.ndim == 0):
            return value
        return value[permutation] if isinstance(value, Tensor) else [value[i] for i in permutation]

    return {key: permute(value) for key, value in batch.items()}
