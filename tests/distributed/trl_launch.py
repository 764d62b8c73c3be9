"""Starts trl_script.py on two processes, as a user starts a script: `launch("zero3", folder, cases)`."""

import json
from pathlib import Path

import torch

from .launch import ACCELERATE_FSDP2, ACCELERATE_ZERO3, TORCHRUN, launch_script

COMMANDS = {"zero3": ACCELERATE_ZERO3, "fsdp2": ACCELERATE_FSDP2, "ddp": TORCHRUN}
KINDS = {"zero3": "DEEPSPEED", "fsdp2": "FSDP", "ddp": "MULTI_CPU"}
SHARDED = ("zero3", "fsdp2")


def launch(engine: str, folder: Path, cases: list[dict], timeout: int) -> tuple[dict[str, dict], str | None]:
    """What each case gave, and what went wrong, if anything."""
    (folder / "cases.json").write_text(json.dumps(cases))
    script = ["tests/distributed/trl_script.py", engine, str(folder)]
    code, output = launch_script(COMMANDS[engine], script, folder, timeout)
    tail = "\n".join(line for line in output.splitlines() if "Loading weights" not in line)[-4000:]
    if code != 0:
        return {}, f"{engine} ended with {code}:\n{tail}"
    return {case["name"]: torch.load(folder / f"{case['name']}.pt", weights_only=False) for case in cases}, None
