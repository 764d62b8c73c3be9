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

    gradients = Gradients(module.parameters())
    for x, gs in zip(xs, cotangents, strict=True):
        gradients.vjp(module(x), gs, [x.clone().requires_grad_()])
    ours = gradients.sums()

    for x, gs in zip(xs, untouched, strict=True):
        torch.autograd.backward(module(x), gs)
    for p, g in zip(module.parameters(), ours, strict=True):
        torch.testing.assert_close(g, p.grad)
    for gs, before in zip(cotangents, untouched, strict=True):
        assert all(torch.equal(g, b) for g, b in zip(gs, before, strict=True))


def test_a_matrix_in_memory_of_its_own_is_not_copied(monkeypatch):
    real, made = torch.autograd.grad, []
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kwargs: made.append(real(*args, **kwargs)) or made[-1])
    linear, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    gradients = Gradients(linear.parameters())
    gradients.vjp([linear(x)], [torch.randn(3, 4)], [x])
    weight, _ = gradients.sums()
    assert weight.data_ptr() == made[0][1].data_ptr()
