"""One rank of a job that a launcher started fails: the whole job ends in seconds, and its output names the cause.

The launchers end the other processes as soon as one has ended, so what counts is that the failed one does end.
"""

import itertools
import time

import pytest

from .launch import ACCELERATE_FSDP2, ACCELERATE_ZERO3, TORCHRUN, launch_script
from .test_one_rank_fails import CALLS, KINDS

SECONDS = 30  # at most, from the fault to the launcher's end; leaving the interpreter takes some of them
LAUNCHERS = {
    "torchrun": {"zero3": TORCHRUN, "fsdp2": TORCHRUN},
    "accelerate launch": {"zero3": ACCELERATE_ZERO3, "fsdp2": ACCELERATE_FSDP2},
}
FAST = {("torchrun", "zero3", "backward", "exception"), ("accelerate launch", "fsdp2", "forward", "killed")}
FAILURES = [kind for kind in KINDS if kind != "hangs"]  # a process that hangs is the others' process group's business
CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] * (case not in FAST))
    for case in itertools.product(LAUNCHERS, ("zero3", "fsdp2"), CALLS, FAILURES)
    if case[2:] != ("backward", "bad data")
]


@pytest.mark.parametrize(("launcher", "engine", "where", "kind"), CASES)
def test_the_job_ends_in_seconds(tmp_path, record_property, launcher, engine, where, kind):
    script = ["tests/distributed/failing_script.py", engine, where, kind, str(tmp_path)]
    code, output = launch_script(LAUNCHERS[launcher][engine], script, tmp_path, timeout=120)
    seconds = time.time() - float((tmp_path / "fault").read_text())
    record_property("seconds to end", seconds)
    assert code == 1, output
    assert seconds <= SECONDS
    plain = output.replace("[rank1]: ", "")
    text = "Signal 9 (SIGKILL) received" if kind == "killed" else KINDS[kind][0].format(where=where)
    assert text in plain, output
    assert "rank      : 1 (local_rank: 1)" in output
