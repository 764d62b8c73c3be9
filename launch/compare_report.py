"""What `compare_grpo.py` found: rows of the CSV file, the verdict, the figure, and the table in docs/learning.md."""

import math
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import processor, write
from launch.lookup_task import blind_scores, correct_code

matplotlib.use("Agg")

MARKS = "<!-- results: python launch/compare_grpo.py -->", "<!-- end of results -->"
BAR = 0.05  # exact against stock, means over the seeds, relative


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927)."""
    p, n = hits / count, count
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def summary(before: dict, runs: list[dict], answers: list[str]) -> list[dict[str, Any]]:
    """One row a run, as in the CSV file."""
    stock = {run["seed"]: run for run in runs if run["arm"] == "stock"}
    rows = []
    for run in runs:
        rewards = [point["reward"] for point in run["curve"]]
        row = {"seed": run["seed"], "arm": run["arm"]}
        for name, result in (("before", before), ("after", run["after"])):
            low, high = wilson(result["hits"], result["count"])
            row |= {name: result["hits"] / result["count"], f"{name}_low": low, f"{name}_high": high}
        row["held_out"] = run["after"]["count"]
        row["without_number"] = run["after"]["numberless"]
        row["train_first_third"], row["train_last_third"] = (mean(part) for part in thirds(rewards))
        if its := stock.get(run["seed"]):
            # Letter for letter: steps before the first with another completion, and held-out completions.
            same = [mine == other for mine, other in zip(run["completions"], its["completions"], strict=True)]
            row["steps_as_stock"] = [*same, False].index(False)
            texts = run["after"]["texts"], its["after"]["texts"]
            row["held_out_as_stock"] = sum(mine == other for mine, other in zip(*texts, strict=True))
            right = [correct_code(part, answers) for part in texts]
            row["only_it_right"] = sum(mine > other for mine, other in zip(*right, strict=True))
            row["only_stock_right"] = sum(mine < other for mine, other in zip(*right, strict=True))
        row |= {name: round(run[name]) for name in ("seconds", "cpu_seconds", "score_seconds")}
        rows.append({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})
    return rows


def thirds(values: list[float]) -> tuple[list[float], list[float]]:
    third = -(-len(values) // 3)
    return values[:third], values[-third:]


def after(rows: list[dict], arm: str) -> dict[int, float]:
    return {row["seed"]: row["after"] for row in rows if row["arm"] == arm}


def verdict(rows: list[dict]) -> list[str]:
    """The bar in numbers: exact within stock's spread over the seeds, seed by seed, and within 5 % on the mean."""
    stock, exact = after(rows, "stock"), after(rows, "exact")
    if not stock or stock.keys() != exact.keys():
        return ["no verdict: stock and exact were not both run"]
    spread = max(stock.values()) - min(stock.values())
    apart = {seed: exact[seed] - stock[seed] for seed in stock}
    of_stock, of_exact = mean(stock.values()), mean(exact.values())
    difference, allowed = abs(of_exact - of_stock), BAR * of_stock
    worst = max(map(abs, apart.values()))
    return [
        f"exact less stock, by seed: {', '.join(f'{a:+.3f}' for a in apart.values())}; spread of stock over the seeds "
        f"(highest less lowest): {spread:.3f}. Within the spread: {'met' if worst <= spread else 'NOT MET'}.",
        f"Mean of exact {of_exact:.3f}, of stock {of_stock:.3f}: {difference:.3f} apart; {BAR:.0%} of stock is "
        f"{allowed:.3f}. Within it: {'met' if difference <= allowed else 'NOT MET'}.",
    ]


COLUMNS = (
    "arm",
    "after, by seed (95 %)",
    "mean",
    "less stock, by seed",
    "training reward, first and last third",
    "steps as stock",
    "held-out answers as stock",
    "only it right / only stock",
    "seconds",
)


def table(rows: list[dict]) -> list[tuple[str, ...]]:
    """One line an arm, under `COLUMNS`."""
    stock = after(rows, "stock")
    lines: list[tuple[str, ...]] = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        compared = stock and arm != "stock"
        cells = (
            ", ".join(f"{row['after']:.3f} ({row['after_low']:.2f} to {row['after_high']:.2f})" for row in mine),
            f"{mean(after(rows, arm).values()):.3f}",
            ", ".join(f"{row['after'] - stock[row['seed']]:+.3f}" for row in mine) if compared else "",
            " to ".join(f"{mean(row[f'train_{third}_third'] for row in mine):.2f}" for third in ("first", "last")),
            ", ".join(str(row["steps_as_stock"]) for row in mine) if compared else "",
            ", ".join(str(row["held_out_as_stock"]) for row in mine) if compared else "",
            " / ".join(str(sum(row[f"only_{who}_right"] for row in mine)) for who in ("it", "stock"))
            if compared
            else "",
            f"{mean(row['seconds'] for row in mine):.0f} ({mean(row['cpu_seconds'] for row in mine):.0f})",
        )
        lines.append((arm, *cells))
    return lines


def draw(rows: list[dict], runs: list[dict], blind: float, path: Path, window: int = 5) -> None:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    left.axhspan(rows[0]["before_low"], rows[0]["before_high"], color="gray", alpha=0.25)
    left.axhline(rows[0]["before"], color="gray", label="before (band: 95 %)")
    left.axhline(blind, color="black", linestyle=":", label="best blind policy")
    for number, arm in enumerate(arms):
        mine = [row for row in rows if row["arm"] == arm]
        x = [number + 0.2 * (seeds.index(row["seed"]) - (len(seeds) - 1) / 2) for row in mine]
        y = [row["after"] for row in mine]
        bars = [[row["after"] - row["after_low"] for row in mine], [row["after_high"] - row["after"] for row in mine]]
        left.errorbar(x, y, yerr=bars, fmt="o", capsize=2, color=f"C{number}")
        curves = [[point["reward"] for point in run["curve"]] for run in runs if run["arm"] == arm]
        means = [mean(values) for values in zip(*curves, strict=True)]
        smooth = [mean(means[max(0, i + 1 - window) : i + 1]) for i in range(len(means))]
        width, alpha = (6, 0.4) if arm == "stock" else (1.5, 1)  # to be seen below a curve that is the same
        right.plot(range(1, len(smooth) + 1), smooth, color=f"C{number}", label=arm, linewidth=width, alpha=alpha)
    left.set(xticks=range(len(arms)), xticklabels=arms, ylim=(0, 1), ylabel="held-out reward, a point a seed")
    right.set(ylim=(0, 1), xlabel="optimizer step", ylabel=f"training reward, seeds averaged, over {window} steps")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=130)


def report(before: dict, runs: list[dict], held_out: list[dict], settings: str, results: Path, docs: Path) -> None:
    """Writes the CSV files, the figure, and the table of the page; prints the table."""
    rows = summary(before, runs, [row["answer"] for row in held_out])
    blind = max(blind_scores(held_out).values())
    numbers = before["count"] - before["numberless"]
    minutes = {
        seed: sum(row["seconds"] + row["score_seconds"] for row in rows if row["seed"] == seed) / 60
        for seed in sorted({row["seed"] for row in rows})
    }
    lines = [
        f"{settings}; {processor()}",
        f"Before: {rows[0]['before']:.3f} ({rows[0]['before_low']:.2f} to {rows[0]['before_high']:.2f}); {numbers} of "
        f"{before['count']} answers hold a number, and of these {before['hits'] / max(numbers, 1):.3f} are right. The "
        f"best policy that does not read the name: {blind:.3f}.",
        *verdict(rows),
        f"Minutes a seed, scoring included: {', '.join(f'{value:.0f}' for value in minutes.values())}.",
    ]
    write(results / "compare_grpo.csv", rows, lines)
    points = [{"seed": run["seed"], "arm": run["arm"]} | point for run in runs for point in run["curve"]]
    write(results / "compare_grpo_curves.csv", points, lines[:1])
    draw(rows, runs, blind, docs / "learning.png")

    page = docs / "learning.md"
    begin, end = MARKS
    head, rest = page.read_text().split(begin)
    cells = [COLUMNS, ("---",) * len(COLUMNS), *table(rows)]
    written = "".join(f"| {' | '.join(line)} |\n" for line in cells) + "".join(f"\n{line}\n" for line in lines)
    page.write_text(f"{head}{begin}\n{written}{end}{rest.split(end)[1]}")

    shown = Table(*COLUMNS, title="held-out reward")
    for line in table(rows):
        shown.add_row(*line)
    console = Console(width=None if sys.stdout.isatty() else 119)
    console.print(shown, *lines, sep="\n", highlight=False)
