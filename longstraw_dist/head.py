"""Final norm and LM head, in token chunks: log-probs and entropies of the responses, and their gradient.

    M response rows   H hidden   V vocabulary   C rows of a chunk

    z_CV = finish(head(x_CH)) / temperature,  lse_C = logsumexp(z)
    logp = z[target] - lse,  entropy = lse - sum_v p_v z_v
    dz   = g_logp (onehot(target) - p) - g_entropy p (log p + entropy)

No `[tokens, vocabulary]` tensor is larger than one chunk, in forward or in backward: the logits are computed again
there, and their gradient is written in their place.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .gradients import Gradients
from .recompute import Autocast, refuse_changed, watched
from .replay import Call, Progress

BLOCKS = {"cpu": 2**18, "cuda": 2**25}  # logits: of a core's cache; of what keeps a GPU busy


@dataclass
class Rows:
    """Norm or head of one call."""

    call: Call
    chunk_size: int
    name: str
    module: nn.Module
    temperature: float = 1.0
    leave: Callable[[Tensor], Tensor] | None = None  # what the model does with its hidden states before the head
    finish: Callable[[Tensor], Tensor] | None = None  # and with its logits behind it

    def logits(self, stock: Callable, x: Tensor) -> Tensor:
        z = stock(x if self.leave is None else self.leave(x))
        return z if self.finish is None else self.finish(z)

    def chunks(self, tokens: int) -> Iterator[slice]:
        for begin in range(0, tokens, self.chunk_size):
            chunk = slice(begin, min(begin + self.chunk_size, tokens))
            self.call.place.at(self.name, chunk)
            yield chunk
        self.call.place.at(self.name)


@dataclass
class CallGraph:
    """Stands for the graph of one call: lives as long as that does."""

    progress: Progress


class NormOperation(torch.autograd.Function):
    """`apply(rows, stock, x_1MH, *parameters) -> y_1MH`: a module that works row by row, in chunks of rows.
    Kept for backward: `x`."""

    @staticmethod
    def forward(ctx, rows: Rows, stock: Callable, x: Tensor, *parameters: Tensor):
        ctx.rows, ctx.autocast = rows, Autocast(x.device.type)
        ctx.save_for_backward(x)
        if any(ctx.needs_input_grad):
            rows.call.meter.keeps("hidden", [x])
        with ctx.autocast.restored(), watched(ctx, rows.module):
            return torch.cat([stock(x[:, c]) for c in rows.chunks(x.shape[1])], 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g: Tensor):
        rows = ctx.rows
        with rows.call.guard(rows.name), ctx.autocast.restored(), torch.enable_grad():
            refuse_changed(rows.name, rows.module, ctx.versions)
            (saved,) = ctx.saved_tensors
            gx, gradients = torch.empty_like(saved), Gradients(rows.module, ctx.names)
            for c in rows.chunks(saved.shape[1]):
                x = saved[:, c].detach().requires_grad_()
                gx[:, c] = gradients.vjp([rows.module.forward(x)], [g[:, c]], [x])[0]
            sums = gradients.sums()
        return None, None, gx, *sums


class HeadOperation(torch.autograd.Function):
    """
    `apply(rows, graph, stock, x_1MH, *parameters) -> scores_2M`

    `stock` maps hidden states to logits. `scores` are log-probs and entropies, float32 (float64 for a float64 model),
    without a dummy response's. Costs: the head's matrix runs twice forward and once backward. Kept for backward: `x`,
    and two numbers a row.
    """

    @staticmethod
    def forward(ctx, rows: Rows, graph: CallGraph, stock: Callable, x: Tensor, *parameters: Tensor):
        ctx.rows, ctx.graph, ctx.autocast = rows, graph, Autocast(x.device.type)
        logps, entropies, lses = [], [], []
        with ctx.autocast.restored(), watched(ctx, rows.module):
            for c in rows.chunks(x.shape[1]):
                logits = rows.logits(stock, x[:, c])[0]
                for b in blocks(logits):
                    z = scaled(logits[b], rows.temperature)
                    top = z.amax(-1, keepdim=True)
                    d = z - top
                    p = d.exp()
                    total = p.sum(-1)
                    lses.append(top[:, 0] + total.log())
                    logps.append(z.gather(-1, rows.call.packed.targets[c][b, None])[:, 0] - lses[-1])
                    entropies.append(total.log() - torch.linalg.vecdot(p, d) / total)
                    del z, d, p
                del logits
        logp, entropy, lse = torch.cat(logps), torch.cat(entropies), torch.cat(lses)
        ctx.save_for_backward(x, lse, entropy)
        rows.call.meter.keeps("hidden", [x])
        return torch.stack([logp, entropy])[:, : rows.call.packed.returned].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g: Tensor):
        ctx.graph.progress.begun = True
        rows, packed = ctx.rows, ctx.rows.call.packed
        with rows.call.guard(rows.name), ctx.autocast.restored(), torch.enable_grad():
            refuse_changed(rows.name, rows.module, ctx.versions)
            saved, lse, entropy = ctx.saved_tensors
            g_logp, g_entropy = functional.pad(g, (0, len(lse) - packed.returned))[..., None] / rows.temperature
            bonus_wanted = bool(g_entropy.any())
            gx, gradients = torch.empty_like(saved), Gradients(rows.module, ctx.names)
            for c in rows.chunks(saved.shape[1]):
                x = saved[:, c].detach().requires_grad_()
                logits = rows.logits(rows.module.forward, x)
                with torch.no_grad():
                    dz = logits.detach()  # the logits' own memory
                    for b in blocks(dz[0]):
                        z, g_b = dz[0, b], g_logp[c][b]
                        d = scaled(z, rows.temperature).sub_(lse[c][b, None])  # log p
                        weight = -g_b  # of p
                        if bonus_wanted:
                            weight = weight - g_entropy[c][b] * (d + entropy[c][b, None])
                        d.exp_().mul_(weight).scatter_add_(-1, packed.targets[c][b, None], g_b)
                        if d.data_ptr() != z.data_ptr():
                            z.copy_(d)
                gx[:, c] = gradients.vjp([logits], [dz], [x])[0]
                del logits, dz, z, d, weight
            sums = gradients.sums()
        return None, None, None, gx, *sums


def blocks(logits: Tensor) -> Iterator[slice]:
    """Rows of a chunk that are worked on at a time, in float32."""
    rows, vocabulary = logits.shape
    size = max(1, BLOCKS.get(logits.device.type, rows * vocabulary) // vocabulary)
    return (slice(begin, begin + size) for begin in range(0, rows, size))


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """float32 or wider; in the logits' own memory where the dtype allows."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return z if temperature == 1.0 else z.div_(temperature)
