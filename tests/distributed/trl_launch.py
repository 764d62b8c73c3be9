"""Starts trl_script.py on two processes, as a user starts a script: `launch("zero3", folder, cases)`."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import torch

REPO = Path(__file__).parents[2]
LAUNCH = "-m accelerate.commands.launch --config_file configs/accelerate/"
COMMANDS = {
    "zero3": f"{LAUNCH}zero3_cpu.yaml",
    "fsdp2": f"{LAUNCH}fsdp2.yaml --num_processes 2 --mixed_precision no",
    "ddp": "-m torch.distributed.run --nproc_per_node 2",
}
PORTS = {"ddp": "--master_port"}
KINDS = {"zero3": "DEEPSPEED", "fsdp2": "FSDP", "ddp": "MULTI_CPU"}
SHARDED = ("zero3", "fsdp2")


def launch(engine: str, folder: Path, cases: list[dict], timeout: int) -> tuple[dict[str, dict], str | None]:
    """What each case gave, and what went wrong, if anything."""
    (folder / "cases.json").write_text(json.dumps(cases))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [*COMMANDS[engine].split(), PORTS.get(engine, "--main_process_port"), port]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    if engine == "zero3":
        environment["DS_ACCELERATOR"] = "cpu"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command, "tests/distributed/trl_script.py", engine, str(folder)],
            cwd=REPO,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = "a hang"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    tail = "\n".join(line for line in (folder / "log").read_text().splitlines() if "Loading weights" not in line)[
        -4000:
    ]
    if code != 0:
        return {}, f"{engine} ended with {code}:\n{tail}"
    return {case["name"]: torch.load(folder / f"{case['name']}.pt", weights_only=False) for case in cases}, None
