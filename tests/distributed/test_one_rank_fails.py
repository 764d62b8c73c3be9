"""One rank fails in the middle of a forward or a backward: every process ends, and the output names the cause.

No launcher ends the others here (`test_launchers.py` has them): they end because gloo tells them that a process is
gone, or, where the process is still there and hangs, within the process group's timeout.
"""

import itertools

import pytest
import torch
import torch.distributed as dist

from longstraw_dist import LongStrawConfig, PromptGroup

from ..models import VOCABULARY, ragged, tiny, weigh
from .endings import break_layer, endings, fault, wait_at_most
from .wrappings import wrap

GROUP_TIMEOUT_S = 10
SECONDS = 10  # at most, from the fault to a process's end, where nobody waits for a timeout
SHAPES = [[(11, (4, 2)), (1, (3,))], [(19, (1, 5, 3))]]
# Of rank 1 a layer runs 4 chunks and 3 replays; in backward first the replays, then the chunks from the last one.
CALLS = {"forward": 3, "backward": 7 + 3 + 2}
PLACE = "of layer 1, prompt chunk of 5 tokens at 10 of group 0"
KINDS = {  # what the output of rank 1 says, and its exit code
    "bad data": (f"ValueError: rank 1: token id {VOCABULARY} is outside the vocabulary", 1),
    "exception": ("Injected: a layer's own\nlongstraw-dist: rank 1, {where} " + PLACE, 1),
    "out of memory": ("rank 1, {where} " + PLACE + ": out of memory. To go on, lower prompt_chunk_size=5", 1),
    "killed": ("", -9),
    "hangs": ("", None),
}
SLOW = (("zero3", "backward", "hangs"), ("fsdp2", "forward", "hangs"), ("fsdp2", "backward", "hangs"))
CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] * (case in SLOW))
    for case in itertools.product(("zero3", "fsdp2"), CALLS, KINDS)
    if case[1:] != ("backward", "bad data")
]


def train(rank: int, name: str, where: str, kind: str, folder) -> None:
    """Three steps; in the second, rank 1 fails."""
    wrapped = wrap(name, lambda: tiny("llama"), LongStrawConfig(prompt_chunk_size=5, head_chunk_size=4))
    for step in range(3):
        if step == 1 and kind == "hangs":
            wait_at_most(GROUP_TIMEOUT_S)
        groups = ragged(rank, SHAPES[rank])
        if rank == 1 and step == 1 and kind == "bad data":
            fault(folder)
            groups = [PromptGroup(torch.tensor([1, VOCABULARY]), [torch.tensor([1])])]
        elif rank == 1 and step == 1:
            break_layer(wrapped.model.get_decoder().layers[1], CALLS[where], kind, folder)
        with wrapped.micro_batch_of_step():
            out = wrapped(prompt_groups=groups)
            wrapped.backward(weigh(out.logps, out.entropies) + out.anchor)
        wrapped.step()
        dist.barrier()


@pytest.mark.parametrize(("name", "where", "kind"), CASES)
def test_every_process_ends_and_the_cause_is_named(tmp_path, record_property, name, where, kind):
    other, failed = endings(train, name, where, kind, tmp_path, folder=tmp_path)
    text, code = KINDS[kind]
    record_property("seconds to end", max(other.seconds, 0 if kind == "hangs" else failed.seconds))
    assert (other.code, failed.code) == (1, code), other.output + failed.output
    assert text.format(where=where) in failed.output
    assert other.seconds <= SECONDS + (GROUP_TIMEOUT_S if kind == "hangs" else 0)
    if kind == "bad data":
        assert text in other.output
    else:
        assert ("Timed out" if kind == "hangs" else "Connection") in other.output
    if where == "forward" and kind != "bad data":
        assert "rank 0, forward of layer 2: it waited for another rank, which has ended or hangs." in other.output
