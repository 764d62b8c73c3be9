"""The sum over segments, where autograd hands out gradients that share their memory."""

import torch
from torch import nn

from longstraw_dist.gradients import Gradients


class Sums(nn.Module):
    """Its parameters' gradients are one tensor, the output's own; of `scale`, one number everywhere."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
        self.scale = nn.Parameter(torch.randn(3, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x + self.a + self.b), self.scale.sum(), self.a + self.b


def test_gradients_that_share_their_memory():
    torch.manual_seed(0)
    module, xs = Sums(), torch.randn(3, 3, 4)
    cotangents = [[torch.randn(3, 4), torch.randn(()), torch.randn(3, 4)] for _ in xs]
    untouched = [[g.clone() for g in gs] for gs in cotangents]

    gradients = Gradients(module, [name for name, _ in module.named_parameters()])
    for x, gs in zip(xs, cotangents, strict=True):
        gradients.vjp(module(x), gs, [x.clone().requires_grad_()])
    ours = gradients.sums()

    for x, gs in zip(xs, untouched, strict=True):
        torch.autograd.backward(module(x), gs)
    for p, g in zip(module.parameters(), ours, strict=True):
        torch.testing.assert_close(g, p.grad)
    for gs, before in zip(cotangents, untouched, strict=True):
        assert all(torch.equal(g, b) for g, b in zip(gs, before, strict=True))


class Workspace(torch.autograd.Function):
    """`x @ w.T`, whose backward writes the gradient of `w` into the same memory each time."""

    memory = torch.empty(4, 4)

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, torch.mm(g.T, x, out=Workspace.memory)


def test_a_gradient_in_memory_that_is_used_again():
    torch.manual_seed(0)
    module, xs, gs = nn.Linear(4, 4, bias=False), torch.randn(3, 3, 4), torch.randn(3, 3, 4)
    gradients = Gradients(module, [name for name, _ in module.named_parameters()])
    for x, g in zip(xs, gs, strict=True):
        x.requires_grad_()
        gradients.vjp([Workspace.apply(x, module.weight)], [g], [x])
    torch.testing.assert_close(gradients.sums()[0], torch.einsum("sno,sni->oi", gs, xs))
