# SPDX-License-Identifier: Apache-2.0
"""Curves as SVG text. Runs of one method share a colour: their mean, and the band from the lowest to the highest."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from logra.report.runs import Run

COLOURS = {"logra": "#0b6e4f", "adamw": "#c8553d", "lora": "#3d5a98", "sgd": "#8a6d1d"}
PHASES = {"rollout": "#3d5a98", "reward": "#8a6d1d", "learning": "#0b6e4f", "evaluation": "#b7b7b7"}
GIB = 2**30


@dataclass(frozen=True)
class Curve:
    """One quantity over updates.

    Attributes:
        title: what it is, with its unit.
        points: of a run, (update, value) in order.
        marks: whether single points are drawn.
        budget: what the quantity should stay below, drawn dashed, on a logarithmic scale.
    """

    title: str
    points: Callable[[Run], list[tuple[int, float]]]
    marks: bool = False
    budget: Callable[[Run], list[tuple[int, float]]] | None = None


def of_updates(*names: str) -> Callable[[Run], list[tuple[int, float]]]:
    """A number of the update lines, by nested names; lines without it are left out."""

    def points(run: Run) -> list[tuple[int, float]]:
        found = []
        for line in run.updates:
            value: Any = line
            for name in names:
                value = value.get(name) if isinstance(value, dict) else None
            if isinstance(value, (int, float)):
                found.append((line["update"], float(value)))
        return found

    return points


def _scores(run: Run) -> list[tuple[int, float]]:
    scored = [(line["update"], line["evaluation"]["pass@1"]) for line in run.evaluations]
    return [(update, score) for update, score in scored if score is not None]


CURVES = (
    Curve("pass@1 on held-out problems", _scores, marks=True),
    Curve("reward of training samples", of_updates("reward")),
    Curve("realised KL of a step, nats", of_updates("realised_kl"), budget=of_updates("kl_budget_effective")),
    Curve("alpha: what proposed steps were multiplied by", of_updates("alpha")),
    Curve("KL from the model at start, nats", of_updates("reference_kl")),
    Curve("entropy, nats", of_updates("entropy")),
    Curve("length, tokens", of_updates("length")),
    Curve("share cut by the token limit", of_updates("truncated")),
    Curve("95th percentile of the log-prob gap, nats", of_updates("logprob_gap_p95")),
    Curve("norm of gradients or sketches", of_updates("grad_norm")),
)


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of each method, in the order they were given."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
    return groups


def mean_and_band(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float, float, float]]:
    """(update, mean, lowest, highest) at every update that all curves have."""
    shared = set.intersection(*(({update for update, _ in curve}) for curve in curves))
    values = [dict(curve) for curve in curves]
    rows = []
    for update in sorted(shared):
        here = [each[update] for each in values]
        rows.append((update, sum(here) / len(here), min(here), max(here)))
    return rows


def draw_curve(curve: Curve, runs: Sequence[Run]) -> str | None:
    """The SVG of a curve, or None if no run has it."""
    groups = {
        method: [points for run in group if (points := curve.points(run))] for method, group in by_method(runs).items()
    }
    groups = {method: curves for method, curves in groups.items() if curves}
    if not groups:
        return None
    figure, axes = _figure(curve.title)
    for method, curves in groups.items():
        rows = mean_and_band(curves)
        colour = COLOURS.get(method, "#444444")
        updates = [row[0] for row in rows]
        label = method if len(curves) == 1 else f"{method}, mean of {len(curves)}"
        axes.plot(updates, [row[1] for row in rows], color=colour, label=label, marker="o" if curve.marks else "", ms=4)
        if len(curves) > 1:
            axes.fill_between(updates, [r[2] for r in rows], [r[3] for r in rows], color=colour, alpha=0.18, lw=0)
    if curve.marks:
        axes.set_ylim(0, 1)
    if curve.budget is not None:
        limits = [points for run in runs if (points := curve.budget(run))]
        for points in limits[:1]:
            axes.plot(*zip(*points, strict=True), color="#888888", ls="--", lw=1, label="budget")
        axes.set_yscale("log")
    if curve.budget is not None or len(groups) > 1 or any(len(curves) > 1 for curves in groups.values()):
        axes.legend(frameon=False, fontsize=9)
    return _svg(figure)


def draw_calibration(runs: Sequence[Run]) -> str | None:
    """Predicted against realised KL of the steps that were taken; on the line they agree."""
    pairs = {
        method: [
            (line["predicted_kl_of_step"], line["realised_kl"])
            for run in group
            for line in run.updates
            if line.get("predicted_kl_of_step") and line.get("realised_kl")
        ]
        for method, group in by_method(runs).items()
    }
    pairs = {method: points for method, points in pairs.items() if points}
    if not pairs:
        return None
    figure, axes = _figure("KL of a step: predicted and realised, nats", "predicted")
    for method, points in pairs.items():
        colour = COLOURS.get(method, "#444444")
        axes.scatter(*zip(*points, strict=True), s=12, alpha=0.6, color=colour, label=method, lw=0)
    ends = [value for points in pairs.values() for point in points for value in point]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color="#888888", ls="--", lw=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylabel("realised", fontsize=9)
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure)


def draw_seconds(runs: Sequence[Run]) -> str | None:
    """Mean seconds of an update by phase, a bar for each method."""
    rows: dict[str, dict[str, float]] = {}
    for method, group in by_method(runs).items():
        lines = [line for run in group for line in run.updates]
        phases = {phase for line in lines for phase in line["seconds"]}
        rows[method] = {p: sum(line["seconds"].get(p, 0.0) for line in lines) / len(lines) for p in phases}
    rows = {method: phases for method, phases in rows.items() if phases}
    if not rows:
        return None
    figure, axes = _figure("seconds of an update, by phase", "")
    left = dict.fromkeys(rows, 0.0)
    for phase, colour in PHASES.items():
        widths = [rows[method].get(phase, 0.0) for method in rows]
        if any(widths):
            axes.barh(list(rows), widths, left=list(left.values()), color=colour, label=phase, height=0.6)
            left = {method: left[method] + width for method, width in zip(rows, widths, strict=True)}
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure)


def draw_memory(runs: Sequence[Run]) -> str | None:
    """Highest peak and mean of the average memory by phase, a bar for each method and phase, in GiB."""
    names, peaks, averages, colours = [], [], [], []
    for method, group in by_method(runs).items():
        lines = [line for run in group for line in (*run.updates, *run.evaluations)]
        for phase, colour in PHASES.items():
            here = [line["memory"][phase] for line in lines if phase in line.get("memory", {})]
            if here and phase != "reward":
                names.append(f"{method}: {phase}" if len(by_method(runs)) > 1 else phase)
                peaks.append(max(each["peak_bytes"] for each in here) / GIB)
                averages.append(sum(each["average_bytes"] for each in here) / len(here) / GIB)
                colours.append(colour)
    if not names:
        return None
    figure, axes = _figure("memory, GiB: peak (pale) and average", "")
    axes.barh(names, peaks, color=colours, alpha=0.35, height=0.6)
    axes.barh(names, averages, color=colours, height=0.6)
    axes.invert_yaxis()
    return _svg(figure)


def _figure(title: str, below: str = "update") -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(below, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25, lw=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "logra", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    drawn = text.getvalue()
    return drawn[drawn.index("<svg") :]
