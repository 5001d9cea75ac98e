"""The picture of a network that grew, for README: its slots over time, beside test accuracy against parameters.

Run: python docs/images/make_growth.py              # draws growth-*.png from growth.json
     python docs/images/make_growth.py --measure 8  # first trains what growth.json lacks of rng seeds 0 to 7

Measured on the task mnist1d-cnn, 40 host epochs: the host alone, the same host grown by the heuristic, and wider hosts
that never grow. About 25 seconds of computing per rng seed; stopped, it goes on where it was. The timeline is that of
rng seed 0.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

import simic
from simic.lifecycle.stages import STAGE_COLOURS, Stage
from simic.scheduler.plot import stage_bars
from simic.tasks.registry import make_task
from simic.workers.threads import single_thread

HERE = Path(__file__).parent
TASK, HOST_EPOCHS = "mnist1d-cnn", 40
GROWN, WIDTHS = 0, (6, 9, 12)
"""Widths of hosts that never grow, the first of them the host itself; 0 stands for the grown one."""
FILE = HERE / "growth.json"


@dataclass(frozen=True)
class Theme:
    """Colours of a picture; its background is opaque, so that it is readable wherever it is shown."""

    ink: str
    paper: str
    soft: str


THEMES = {"light": Theme("#1f2328", "#ffffff", "#6b7280"), "dark": Theme("#e6edf3", "#0d1117", "#9198a1")}
SHAPES = {"wide": (10.0, 4.1), "narrow": (5.0, 7.6)}
"""Inches: side by side for a desktop, one above the other for a phone."""


def measure(rng_seeds: int) -> None:
    """Train the hosts that growth.json lacks, and write each into it."""
    measured: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"hosts": []}
    known = {(host["width"], host["rng_seed"]) for host in measured["hosts"]}
    for rng_seed in range(rng_seeds):
        for width in (GROWN, *WIDTHS):
            if (width, rng_seed) in known:
                continue
            task = make_task(TASK, width=width or WIDTHS[0])
            controller = "wait" if width else "heuristic"
            with single_thread():
                grown = simic.grow(task, controller, host_epochs=HOST_EPOCHS, rng_seed=rng_seed)
            accuracy = round(grown.test_accuracy, 6)
            host = {"width": width, "rng_seed": rng_seed, "parameters": grown.parameters, "test_accuracy": accuracy}
            measured["hosts"].append(host)
            if width == GROWN and rng_seed == 0:
                reports = grown.model.growth()
                bars = stage_bars(grown.decisions, {report.slot: report.stage for report in reports})
                measured["timeline"] = [[bar.slot, str(bar.stage), bar.start, bar.end] for bar in bars]
                measured["blueprints"] = {report.slot: report.blueprint for report in reports}
            FILE.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


def hosts_of(measured: dict[str, Any], width: int) -> list[tuple[int, float]]:
    """Parameters and test accuracy of the hosts of a width."""
    return [(host["parameters"], host["test_accuracy"]) for host in measured["hosts"] if host["width"] == width]


def known_widths(measured: dict[str, Any]) -> list[int]:
    """Widths of hosts that never grow and were measured at least twice."""
    return [width for width in WIDTHS if len(hosts_of(measured, width)) > 1]


def draw_timeline(axes: Axes, measured: dict[str, Any], theme: Theme) -> None:
    """A bar for each stage of each slot."""
    slots = list(measured["blueprints"])
    for stage, colour in STAGE_COLOURS.items():
        bars = [bar for bar in measured["timeline"] if bar[1] == str(stage)]
        if bars:
            rows, lengths = [slots.index(bar[0]) for bar in bars], [bar[3] - bar[2] for bar in bars]
            axes.barh(rows, lengths, left=[bar[2] for bar in bars], color=colour, height=0.62, label=str(stage))
    for slot, stage, start, _ in measured["timeline"]:
        if stage == str(Stage.FOSSILIZED):
            name = measured["blueprints"][slot]
            axes.text(start + 0.8, slots.index(slot), name, va="center", color="#ffffff", fontsize=11)
    axes.set_yticks(range(len(slots)), slots)
    axes.set_ylim(len(slots) - 0.5, -0.5)
    axes.set_xlim(0, HOST_EPOCHS)
    axes.set_xlabel("host epoch")
    axes.set_title("Seeds in the slots of one host")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False, handlelength=1.2)


def draw_accuracy(axes: Axes, measured: dict[str, Any], theme: Theme) -> None:
    """Mean and standard error of hosts that never grow, by width, and of the grown ones."""
    points = [_summary(hosts_of(measured, width)) for width in known_widths(measured)]
    style: dict[str, Any] = {"marker": "o", "capsize": 3, "linewidth": 1.8, "markersize": 7}
    x, y, errors = zip(*points, strict=True)
    axes.errorbar(
        x, y, errors, color=theme.soft, label="never grows" + (" (host, and wider)" if len(points) > 1 else ""), **style
    )
    for parameters, accuracy in hosts_of(measured, GROWN):
        axes.plot(parameters, 100 * accuracy, ".", color=STAGE_COLOURS[Stage.FOSSILIZED], alpha=0.45, markersize=6)
    grown = _summary(hosts_of(measured, GROWN))
    style |= {"marker": "D", "markersize": 9}
    axes.errorbar(*grown, color=STAGE_COLOURS[Stage.FOSSILIZED], linestyle="none", label="grown", **style)
    start = points[0]
    axes.annotate("", grown[:2], start[:2], arrowprops={"arrowstyle": "->", "color": theme.soft, "linestyle": ":"})
    axes.annotate("host alone", start[:2], (8, -6), textcoords="offset points", fontsize=11)
    axes.set_xscale("log")
    axes.set_xlim(280, 1500)
    axes.set_xticks([300, 500, 1000])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("parameters")
    axes.set_title(f"Test accuracy, % (mean of {len(hosts_of(measured, GROWN))} hosts)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False, handlelength=1.2)


def _summary(hosts: list[tuple[int, float]]) -> tuple[float, float, float]:
    """Mean parameters, mean test accuracy in percent, and its standard error."""
    accuracies = [100 * accuracy for _, accuracy in hosts]
    return mean(size for size, _ in hosts), mean(accuracies), stdev(accuracies) / len(accuracies) ** 0.5


def draw(measured: dict[str, Any], shape: str, theme_name: str) -> None:
    """Write one picture."""
    theme = THEMES[theme_name]
    colours = dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), theme.ink
    )
    settings: dict[Any, Any] = {"font.size": 12, "axes.titlesize": 13, "axes.titlelocation": "left", **colours}
    settings |= {"axes.facecolor": theme.paper, "axes.spines.top": False, "axes.spines.right": False}
    with rc_context(settings):
        figure = Figure(figsize=SHAPES[shape], facecolor=theme.paper, layout="constrained", dpi=160)
        rows = (1, 2) if shape == "wide" else (2, 1)
        left, right = figure.subplots(*rows).flat
        draw_timeline(left, measured, theme)
        draw_accuracy(right, measured, theme)
        figure.savefig(
            HERE / f"growth-{shape}-{theme_name}.png", bbox_inches="tight", pad_inches=0.12, metadata={"Software": None}
        )


def main() -> None:
    """Measure if asked to, draw every picture, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=int, default=0, metavar="N", help="train hosts of N rng seeds, if missing")
    measure(parser.parse_args().measure)
    measured = json.loads(FILE.read_text(encoding="utf-8"))
    for shape in SHAPES:
        for theme_name in THEMES:
            draw(measured, shape, theme_name)
    for width in (GROWN, *known_widths(measured)):
        size, accuracy, error = _summary(hosts_of(measured, width))
        name = f"width {width}" if width else "grown"
        print(f"{name:9s} {size:7,.0f} parameters  {accuracy:.2f} +- {error:.2f} %")


if __name__ == "__main__":
    main()
