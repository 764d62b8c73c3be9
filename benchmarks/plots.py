"""The figures of the scripts: what was measured, the arithmetic limit drawn in, the conditions under it."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def save(figure, path: Path, conditions: Sequence[str]) -> None:
    under = "\n".join(textwrap.fill(line, 130) for line in conditions)
    figure.supxlabel(under, fontsize=7, ha="left", x=0.01)
    figure.savefig(path.with_suffix(".png"), dpi=120)
    pyplot.close(figure)


def bars(
    path: Path, conditions: Sequence[str], seconds: Mapping[str, float], limit: Mapping[str, float], label: str
) -> None:
    """Seconds by case, and beside each bar the limit of it."""
    figure, axes = pyplot.subplots(figsize=(8, 0.35 * len(seconds) + 1.8), layout="constrained")
    axes.barh(list(seconds), list(seconds.values()), color="C0", height=0.6)
    axes.plot(list(limit.values()), list(limit), "k|", markersize=16, label=label)
    for i, (case, value) in enumerate(seconds.items()):
        axes.text(max(value, limit.get(case, 0)), i, f"  {value:.2f}", va="center", fontsize=8)
    axes.set_xlabel("seconds of a step")
    axes.margins(x=0.1)
    axes.invert_yaxis()
    if limit:
        axes.legend()
    save(figure, path, conditions)


def curves(
    path: Path,
    conditions: Sequence[str],
    x: tuple[str, Sequence[float]],
    panels: Mapping[str, Mapping[str, Sequence[float | None]]],
    logarithmic: bool = True,
) -> None:
    """A panel for each of `panels` (its y axis -> curve -> values over x); what is not ours is dashed."""
    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=(5 * len(panels), 4), layout="constrained", squeeze=False
    )
    for axes, (name, lines) in zip(all_axes[0], panels.items(), strict=True):
        for line, values in lines.items():
            known = [(a, b) for a, b in zip(x[1], values, strict=True) if b is not None]
            axes.plot(*zip(*known, strict=True), "o-" if line.startswith("ours") else "k--", label=line)
        if logarithmic:
            axes.set_xscale("log", base=2)
        axes.set(xticks=x[1], xticklabels=[f"{v:,g}" for v in x[1]], xlabel=x[0], ylabel=name)
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
        axes.grid(alpha=0.3)
        axes.legend()
    save(figure, path, conditions)
