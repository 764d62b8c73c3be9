"""The RG-LRU block of Griffin (arXiv 2402.19427, section 2.4) from an initial state. The stock one (recurrent_gemma)
keeps its state on its modules, and begins its convolution with zeros.

    h_t = a_t h_{t-1} + x_t, with the gates a_t and the gated input x_t of the stock code

It stands in for parts of `RecurrentGemmaRecurrentBlock` and `RecurrentGemmaRglru`: stand_ins.py.
"""

from typing import Any

import torch
from torch import Tensor

from .attention import current_view
from .scan import LinearRecurrence


def block_forward(block: Any, input_states: Tensor, position_ids: Tensor, **ignored) -> tuple[Tensor, None]:
    """As the stock method in training, with the last inputs of the convolution from the past."""
    tokens = input_states.shape[1]
    y_branch = block.act_fn(block.linear_y(input_states))
    x_branch = block.linear_x(input_states).transpose(1, 2)
    x_branch = current_view().update_conv_state(x_branch, 0, conv_kernel_size=block.conv1d_width)
    known = x_branch.shape[-1]  # the convolution pads both ends with zeros
    x_branch = block.conv_1d(x_branch)[..., known - tokens : known]
    x_branch = block.rg_lru(x_branch.transpose(1, 2), position_ids)
    return block.linear_out(x_branch * y_branch), None


def rnn_scan(
    rg_lru: Any,
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """As the stock method, which steps through the tokens one by one. Shapes `[B, T, W]`, of a state `[B, W]`."""
    a = (recurrent_gate * ~reset).type(acc_dtype)
    x = hidden_states.type(acc_dtype)
    h0 = torch.zeros_like(x[:, 0]) if recurrent_states is None else recurrent_states
    states = LinearRecurrence.apply(a[:, None], x[:, None], h0[:, None])[:, 0]
    return states.type(hidden_states.dtype), states[:, -1]


def hand_in(rg_lru: Any, state: Tensor) -> None:
    current_view().update_recurrent_state(state, 0)


# For the module's attribute of this name, which the stock forward hands to the scan, and sets to what that returns.
recurrent_states = property(lambda rg_lru: current_view().get_recurrent_state(0), hand_in)
