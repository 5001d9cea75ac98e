"""Charts as inline SVG: one way to draw them, labels that do not overlap, and colours that never run out.

Charts are drawn in INK, which becomes the page's text colour, light or dark. The same input gives the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from colorsys import hls_to_rgb
from itertools import count, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#010203"
PALETTE = ("#1A80C4", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8A8A8A", "#7F6BD6", "#A6761D", "#999933")
"""Safe for colour blindness, on white and on black (Okabe and Ito, without black and yellow, and four more)."""
FATES = {"fossilized": "#009E73", "pruned": "#8A8A8A", "live": "#56B4E9"}
RC: dict[Any, Any] = {
    "svg.hashsalt": "simic",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.6,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


class Chart(NamedTuple):
    """A chart as inline SVG, and the line below it."""

    svg: Markup
    caption: str


def draw_chart(
    draw: Callable[[Axes], None], title: str, caption: str = "", *, size: tuple[float, float] = (5, 3.4)
) -> Chart:
    """Let `draw` fill the axes of a figure of `size` inches. `title` is also the text for screen readers."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a report needs matplotlib; install it with: pip install 'simic-rl[report]'") from None
    with rc_context(RC):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.set_title(title)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator")))
    # Ours has the size of matplotlib's in pixels; a page shrinks it, and never enlarges its letters.
    svg = text.getvalue()
    width, height = (round(72 * side) for side in size)
    box = f'viewBox="0 0 {width} {height}" width="{width * 4 // 3}"'
    start = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {box} role="img" '
    drawn = svg[svg.index(">", svg.index("<svg")) : svg.rindex("</svg>") + 6].replace(INK, "currentColor")
    return Chart(Markup(f'{start}aria-label="{escape(title)}"{drawn}'), caption)


def label_ends(
    axes: Axes,
    ends: Sequence[tuple[float, float, str, str]],
) -> None:
    """Label points (x, y, text, colour) in a column right of the axes, each joined to its point by a thin line."""
    axes.margins(x=0.02)
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end[1])
    gap = 1 / max(16, len(ends))
    places = spread([(end[1] - low) / (high - low) for end in ends], gap)
    for (x, y, text, colour), place in zip(ends, places, strict=True):
        axes.annotate(
            text,
            (x, y),
            (1.05, place),
            textcoords="axes fraction",
            va="center",
            color=colour,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0},
        )
    axes.set_ylim(low, high)


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Sorted positions in 0 to 1, moved apart to at least `gap`; those that would overlap move as one centred block."""
    blocks: list[list[float]] = []
    for position in positions:
        blocks.append([position])
        while len(blocks) > 1 and _start(blocks[-1], gap) < _start(blocks[-2], gap) + gap * len(blocks[-2]):
            last = blocks.pop()
            blocks[-1] += last
    places = [_start(block, gap) + gap * i for block in blocks for i in range(len(block))]
    room = [min(place, 1 - gap * above) for above, place in enumerate(reversed(places))][::-1]
    return [max(place, gap * below) for below, place in enumerate(room)]


def _start(block: Sequence[float], gap: float) -> float:
    return sum(block) / len(block) - gap * (len(block) - 1) / 2


def endless_colours() -> Iterator[str]:
    """Colours without end: the palette, then hues between those before them (multiples of the golden ratio)."""
    yield from PALETTE
    for number in count(1):
        hue, lightness = number * 0.618034 % 1, (0.45, 0.6)[number % 2]
        yield "#" + "".join(f"{round(255 * part):02X}" for part in hls_to_rgb(hue, lightness, 0.55))


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name, in order."""
    return dict(zip(names, islice(endless_colours(), len(names)), strict=True))


def lines_height(lines: int) -> float:
    """Height in inches of a chart with a label for each of its lines beside it."""
    return max(3.4, 0.9 + 0.17 * lines)


def rows_height(rows: int) -> float:
    """Height in inches of a chart with so many rows."""
    return max(1.6, 1.0 + 0.26 * rows)
