"""The conditions of a measurement, for the comment lines at the head of a CSV; and reading and writing such files."""

import csv
import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def conditions(device: str | torch.device = "cpu") -> str:
    on = f"{processor()}, {torch.get_num_threads()} threads"
    if torch.device(device).type == "cuda":
        on = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    return f"{datetime.date.today()}, {on}, {versions}"


def write(path: Path, rows: Sequence[dict], comments: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.writelines(f"# {line}\n" for line in comments)
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def verdict(what: str, measured: float, bar: float, at_least: bool = True) -> str:
    met = measured >= bar if at_least else measured <= bar
    return f"{what}: {measured:.4g}, bar {'>=' if at_least else '<='} {bar:.4g}: {'met' if met else 'MISSED'}"


def show(rows: Sequence[dict], comments: Sequence[str] = ()) -> None:
    """Prints the rows as a table, the conditions under it."""
    cells = [list(rows[0]), *[["" if v is None else str(v) for v in row.values()] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print(
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        )
    print(*comments, sep="\n")
