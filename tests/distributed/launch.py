"""Real processes for a test: `Ranks(2).run(function, ...)` runs it in each, and returns what each returned.

The processes start once and serve many tests, because importing torch, transformers and DeepSpeed is what takes the
time. They end, and start anew at the next run, after anything unforeseen: an exception, a death, or a hang (then the
stack of every rank is in the error). The process group is gloo, over a file; a function finds it initialized.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
GRACE_S = 10  # for the other ranks, after one has failed
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "localhost",  # never used: accelerate and DeepSpeed ask that it be there
    "MASTER_PORT": "29400",
    "DS_ACCELERATOR": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
}


# What a user starts two processes with, up to the port.
TORCHRUN = "-m torch.distributed.run --nproc_per_node 2 --master_port"
ACCELERATE = "-m accelerate.commands.launch --config_file configs/accelerate/"
ACCELERATE_ZERO3 = f"{ACCELERATE}zero3_cpu.yaml --main_process_port"
ACCELERATE_FSDP2 = f"{ACCELERATE}fsdp2.yaml --num_processes 2 --mixed_precision no --main_process_port"


def launch_script(launcher: str, script: list[str], folder: Path, timeout: float) -> tuple[int | str, str]:
    """Starts a script as a user does. Its exit code, or "a hang" after `timeout` seconds, and its output."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    if "zero3" in script or launcher == ACCELERATE_ZERO3:
        environment["DS_ACCELERATOR"] = "cpu"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *launcher.split(), port, *script],
            cwd=REPO,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = "a hang"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return code, (folder / "log").read_text(errors="replace")


class RankError(AssertionError):
    """Some rank raised, died or hung."""


class Ranks:
    def __init__(self, world: int):
        self.world = world
        self.processes: list = []
        self.pipes: list = []
        self.folder: Path | None = None

    def run(self, function: Callable, *args, timeout: float = 60, **kwargs) -> list[Any]:
        """`function(*args, **kwargs)` of each rank, in the order of ranks. `function` is one that a module defines.

        Raises `RankError` if a rank raises, dies, or has not finished after `timeout` seconds.
        """
        if not self.processes:
            self._start()
            timeout += 180  # on a busy machine DeepSpeed alone imports for a minute
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        deadline = time.monotonic() + timeout
        while len(results) + len(errors) < self.world and (left := deadline - time.monotonic()) > 0:
            waiting = {p: r for r, p in enumerate(self.pipes) if r not in results and r not in errors}
            for pipe in wait(list(waiting), left):
                rank = waiting[pipe]
                try:
                    value, error = pipe.recv()
                except EOFError:
                    value, error = None, "died"
                if error is None:
                    results[rank] = value
                else:
                    errors[rank] = error
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(results) == self.world:
            return [results[rank] for rank in range(self.world)]
        raise RankError(self._describe_and_stop(results, errors))

    def stop(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
        if self.folder is not None:
            shutil.rmtree(self.folder)
        self.processes, self.pipes, self.folder = [], [], None

    def _start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        context = multiprocessing.get_context("spawn")
        before = dict(os.environ)
        os.environ.update(ENVIRONMENT, WORLD_SIZE=str(self.world), LOCAL_WORLD_SIZE=str(self.world))
        try:
            for rank in range(self.world):
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(rank, self.world, self.folder, theirs), daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(ours)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def _describe_and_stop(self, results: dict[int, Any], errors: dict[int, str]) -> str:
        hung = [rank for rank in range(self.world) if rank not in results and rank not in errors]
        for rank in hung:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)  # writes its stack into its log
        time.sleep(0.5 if hung else 0)
        parts = [f"rank {rank} raised or died:\n{text}" for rank, text in sorted(errors.items())]
        parts += [f"rank {rank} did not finish; the end of its log:\n{self._log(rank)}" for rank in hung]
        parts += [
            f"rank {rank} died; the end of its log:\n{self._log(rank)}" for rank in errors if errors[rank] == "died"
        ]
        for process in self.processes:
            process.kill()
        self.stop()
        return "\n".join(parts)

    def _log(self, rank: int) -> str:
        assert self.folder is not None
        return (self.folder / f"rank{rank}.log").read_text(errors="replace")[-5000:]


def serve(rank: int, world: int, folder: Path, pipe) -> None:
    """The main loop of one process."""
    log = (folder / f"rank{rank}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    while (job := pipe.recv()) is not None:
        function, args, kwargs = job
        try:
            answer = function(*args, **kwargs), None
        except BaseException:
            answer = None, traceback.format_exc()
        log.flush()
        pipe.send(answer)
    dist.barrier()
    dist.destroy_process_group()
    log.flush()
    os._exit(0)  # leaving the interpreter takes many seconds once DeepSpeed is imported
