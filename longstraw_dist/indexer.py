"""The indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556), run on blocks of queries.

It scores every key for every query and head, in float32: for 1,024 queries of 32 heads over 131,072 keys that is
17 GB at once. A block sees the keys up to its own end, among which all that it may choose from lie.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .stand_ins import replaced

SCORES = 2**26  # of a block: 256 MB


def find_indexer(layer: nn.Module) -> nn.Module | None:
    """Every type calls it so; a layer that is handed its choice has none."""
    return next((m for name, m in layer.named_modules() if name.rpartition(".")[2] == "indexer"), None)


@contextlib.contextmanager
def blocks_of_queries(indexer: Any) -> Iterator[None]:
    """While it is open, the indexer runs block by block. Keys go into its cache with their block."""
    if indexer is None:
        yield
        return
    stock = indexer.forward

    def forward(hidden: Tensor, q_resid: Tensor, rotary: tuple, mask: Tensor, position_ids: Tensor, cache) -> Tensor:
        tokens, past = mask.shape[1], mask.shape[2] - mask.shape[1]
        size = max(1, SCORES // (indexer.n_heads * mask.shape[2] * len(hidden)))
        chosen = []
        for rows in (slice(i, min(i + size, tokens)) for i in range(0, tokens, size)):
            of_rows = [t[:, rows] for t in (hidden, q_resid, *rotary, position_ids)]
            seen = mask[:, rows, : past + rows.stop]
            chosen.append(stock(*of_rows[:2], tuple(of_rows[2:4]), seen, of_rows[4], cache=cache))
        most = max(t.shape[-1] for t in chosen)  # a block with fewer has chosen every key, the first one included
        return torch.cat([pad(t, (0, most - t.shape[-1])) for t in chosen], 1)

    with replaced(indexer, "forward", forward):
        yield
