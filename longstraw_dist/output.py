"""What a packed call returns: one tensor, and how it is read."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from .capture import Capture


@dataclass
class LongStrawOutput(ModelOutput):
    """
    One tensor carries the whole graph: ZeRO-3 runs a hook for each tensor of an output that a gradient reaches, and
    the hooks must be as many on every rank, whatever its responses and its loss.

    Args:
        scores (`torch.Tensor`): float32 `[2, R_1 + R_2 + ...]`: log-probs, entropies; with `output_router_logits`, one
            column more, whose first row is the auxiliary loss.
        lengths (`list[int]`): R_i of each response, group by group, in order.
        captures (`list[Capture]`): with `capture=True`, one for each group.

    Attributes:
        logps (`list[torch.Tensor]`): float32 `[R_i]` for each response; differentiable.
        entropies (`list[torch.Tensor]`): the entropy of each of these distributions, same shapes; differentiable.
        aux_loss (`torch.Tensor`): the model's load balancing loss of all rows, or `None`; differentiable.
        anchor (`torch.Tensor`): a float32 zero, connected to every layer. A rank whose loss may be empty adds it, so
            that its backward makes the collectives that the other ranks' make.
    """

    scores: Tensor
    lengths: list[int] | None = None
    captures: "list[Capture] | None" = None

    @functools.cached_property
    def logps(self) -> list[Tensor]:
        return self._split(0)

    @functools.cached_property
    def entropies(self) -> list[Tensor]:
        return self._split(1)

    @functools.cached_property
    def aux_loss(self) -> Tensor | None:
        with self._as_computed():
            return self.scores[0, -1].clone() if self.scores.shape[1] > sum(self.lengths or ()) else None

    @functools.cached_property
    def anchor(self) -> Tensor:
        with self._as_computed():
            return self.scores[:, :0].sum()

    def _split(self, kind: int) -> list[Tensor]:
        """One tensor a response, of its own storage: a view would keep them all."""
        with self._as_computed():
            return (
                [t.clone() for t in self.scores[kind, : sum(self.lengths)].split(self.lengths)] if self.lengths else []
            )

    @contextlib.contextmanager
    def _as_computed(self) -> Iterator[None]:
        """Differentiable if the scores are, wherever they are first looked at: a metric's `no_grad`, for one."""
        with torch.inference_mode(self.scores.is_inference()), torch.set_grad_enabled(self.scores.requires_grad):
            yield
