"""The growth of one model as a figure: the metric that counts, the stages of every slot, and the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from simic.lifecycle.stages import STAGE_COLOURS, Stage
from simic.scheduler.decision import Decision

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABELS = 40  # slots that are still readable as labels of an axis


class Bar(NamedTuple):
    """A time in which a slot was in one stage, in host epochs."""

    slot: str
    stage: Stage
    start: int
    end: int


def stage_bars(decisions: Sequence[Decision], present: Mapping[str, Stage]) -> list[Bar]:
    """When each slot held a seed in which stage; `present` are the stages after the last decision.

    A stage that is older than the first decision known, as after loading a file without decisions, starts with it.
    """
    if not decisions:
        return []
    first, last = max(decisions[0].host_epoch - 1, 0), decisions[-1].host_epoch
    changes = [(decision.host_epoch, change) for decision in decisions for change in decision.changes]
    bars = []
    for slot, stage in present.items():
        own = [(epoch, change) for epoch, change in changes if change.slot == slot]
        times = [first, *(epoch for epoch, _ in own), last]
        stages = [own[0][1].old, *(change.new for _, change in own)] if own else [stage]
        bars += [Bar(slot, held, *span) for held, span in zip(stages, pairwise(times), strict=True)]
    return [bar for bar in bars if bar.stage in STAGE_COLOURS and bar.end > bar.start]


def plot_growth(decisions: Sequence[Decision], present: Mapping[str, Stage]) -> Figure:
    """The metric over host epochs, stage bars of every slot that held a seed, and the parameters of the network."""
    if not decisions:
        raise ValueError("there is nothing to plot: call step() at least once")
    try:
        from matplotlib import pyplot
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ImportError("plot() needs matplotlib: pip install 'simic-rl[report]'") from None
    bars = stage_bars(decisions, present)
    slots = [slot for slot in present if any(bar.slot == slot for bar in bars)]
    height = min(max(0.25 * len(slots), 0.6), 6.0)
    figure, axes = pyplot.subplots(
        3, sharex=True, figsize=(7, 4.2 + height), height_ratios=[2.2, height, 1.2], layout="constrained"
    )
    epochs = [decision.host_epoch for decision in decisions]
    axes[0].plot(epochs, [decision.value for decision in decisions], marker=".", color="#1A80C4")
    axes[0].set_ylabel(decisions[-1].metric)
    _draw_bars(axes[1], bars, slots)
    axes[2].step(epochs, [decision.parameters for decision in decisions], where="post", color="#8A8A8A")
    axes[2].set_ylabel("parameters")
    axes[2].set_ylim(bottom=0)
    axes[2].set_xlabel("host epoch")
    axes[2].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _draw_bars(axes: Axes, bars: Sequence[Bar], slots: Sequence[str]) -> None:
    for stage, colour in STAGE_COLOURS.items():
        own = [bar for bar in bars if bar.stage == stage]
        if own:
            starts, lengths = [bar.start for bar in own], [bar.end - bar.start for bar in own]
            axes.barh([slots.index(bar.slot) for bar in own], lengths, left=starts, color=colour, label=str(stage))
    axes.set_ylabel("slots")
    labelled = slots if len(slots) <= _LABELS else []
    axes.set_yticks(range(len(labelled)), labelled, parse_math=False)
    axes.invert_yaxis()
    if bars:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
