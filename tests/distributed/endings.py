"""How a job of several processes ends when one of them fails: `endings(function, ...)` runs it in each, as a script of
its own would run, and tells of each process its exit code, its output, and the seconds from the fault to its end.

The processes are forked from one that has imported everything, so that a case takes seconds. No launcher looks after
them: a process that waits for a dead one ends by itself, or within the process group's timeout.
"""

import datetime
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import torch
from torch import nn

from .launch import ENVIRONMENT

PRELOAD = [  # what a case would import anew each time
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "tokenizers.implementations",
    "tests.distributed.wrappings",
    "tests.trl_training",
]


@dataclass
class Ending:
    code: int | None  # `None`: it had to be killed
    seconds: float  # since the fault
    output: str


def endings(function: Callable, *args, folder: Path, world: int = 2, timeout: float = 150) -> list[Ending]:
    """`function(rank, *args)` in each process. It calls `fault(folder)` where something is to go wrong."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)  # of the process that the others are forked from
    try:
        processes = [context.Process(target=work, args=(rank, world, folder, function, args)) for rank in range(world)]
        for process in processes:
            process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    deadline, ends = time.monotonic() + timeout, {}
    while len(ends) < world and (left := deadline - time.monotonic()) > 0:
        running = {p.sentinel: rank for rank, p in enumerate(processes) if rank not in ends}
        for sentinel in wait(list(running), left):
            ends[running[sentinel]] = time.time()
        if (folder / "hangs").exists() and len(ends) == world - 1:  # it will not end by itself
            break
    for process in processes:
        process.kill()
        process.join()
    since = float((folder / "fault").read_text()) if (folder / "fault").exists() else time.time()
    return [
        Ending(
            processes[rank].exitcode if rank in ends else None,
            ends.get(rank, time.time()) - since,
            (folder / f"rank{rank}.log").read_text(errors="replace"),
        )
        for rank in range(world)
    ]


def work(rank: int, world: int, folder: Path, function: Callable, args: tuple) -> None:
    """The life of one process."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    log = (folder / f"rank{rank}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
    )
    try:
        function(rank, *args)
    except BaseException:
        traceback.print_exc()
        log.flush()
        os._exit(1)
    torch.distributed.destroy_process_group()


def wait_at_most(seconds: float) -> None:
    """The timeout of every process group, those of the engines too; not from the start, which may be slow."""
    for group in torch.distributed.distributed_c10d._world.pg_map:
        torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


class Injected(Exception):
    """Raised by a layer."""


def fault(folder: Path) -> None:
    """From here on the seconds count."""
    (folder / "fault").write_text(str(time.time()))


def go_wrong(kind: str, folder: Path) -> None:
    """What happens to a process, here and now."""
    fault(folder)
    if kind == "exception":
        raise Injected("a layer's own")
    if kind == "out of memory":
        torch.empty(1 << 50, dtype=torch.uint8)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hangs":
        (folder / "hangs").touch()
        os.kill(os.getpid(), signal.SIGSTOP)


def break_layer(layer: nn.Module, call: int, kind: str, folder: Path) -> None:
    """The layer's MLP goes wrong at its call number `call`, from 1."""
    mlp, calls = layer.mlp, [0]

    def broken(x):
        calls[0] += 1
        if calls[0] == call:
            go_wrong(kind, folder)
        return type(mlp).forward(mlp, x)

    mlp.forward = broken
