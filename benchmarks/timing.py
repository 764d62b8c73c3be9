"""Timing of steps, and the options that every script of it has.

Cases run one after the other, pass by pass, so that a busy moment of the machine falls on all of them; a figure is the
median of the passes. The CPU seconds beside the wall's tell a busy machine from a slow step. A bar is judged in CPU
seconds where one thread ran, else in the wall's (the CPU seconds of several threads count those that wait).
"""

import argparse
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from .models import Case, gradients

K = TypeVar("K", bound=Hashable)


@dataclass
class Times:
    """Seconds of one case, pass by pass."""

    wall_passes: list[float] = field(default_factory=list)
    cpu_passes: list[float] = field(default_factory=list)

    @property
    def wall(self) -> float:
        return statistics.median(self.wall_passes)

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_passes)

    @property
    def judged(self) -> float:
        return self.cpu if torch.get_num_threads() == 1 else self.wall


def interleaved(
    cases: Mapping[K, Case], passes: int, then: Callable[[K, int, float, dict[str, Tensor]], None] = lambda *_: None
) -> dict[K, Times]:
    """Runs each case once a pass; `then(case, pass, loss, gradients)` follows each and is not timed."""
    times: dict[K, Times] = {name: Times() for name in cases}
    for number in range(passes):
        for name, case in cases.items():
            wall, cpu = time.perf_counter(), time.process_time()
            loss = case()
            times[name].wall_passes.append(time.perf_counter() - wall)
            times[name].cpu_passes.append(time.process_time() - cpu)
            then(name, number, loss, gradients(case.model))
    return times


def judged() -> str:
    """Of which seconds the ratios are that a bar is held against."""
    return "CPU seconds" if torch.get_num_threads() == 1 else "wall seconds"


def options(description: str | None, **sizes: int) -> argparse.ArgumentParser:
    """With an option for each size, and `--threads`."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser
