"""What stands in for a model's own code while a layer runs, where that code cannot begin at a given state."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from . import rg_lru
from .scan import selective_scan

STAND_INS: dict[str, Any] = {
    "mamba_selective_scan": selective_scan,
    "RecurrentGemmaRecurrentBlock.forward": rg_lru.block_forward,
    "RecurrentGemmaRglru._rnn_scan": rg_lru.rnn_scan,
    "RecurrentGemmaRglru.recurrent_states": rg_lru.recurrent_states,
}


@contextlib.contextmanager
def standing_in(source: str) -> Iterator[None]:
    """While it is open, ours is in place of what the Python module `source` has of the above."""
    module = sys.modules[source]
    with contextlib.ExitStack() as stack:
        for path, ours in STAND_INS.items():
            first, _, rest = path.partition(".")
            if first in vars(module):
                owner, name = (vars(module)[first], rest) if rest else (module, first)
                stack.enter_context(replaced(owner, name, ours))
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    """`owner.name` is `by` while it is open. What was there before comes back afterwards; if nothing was, it goes."""
    before = [vars(owner)[name]] if name in vars(owner) else []
    setattr(owner, name, by)
    try:
        yield
    finally:
        if before:
            setattr(owner, name, before[0])
        else:
            delattr(owner, name)
