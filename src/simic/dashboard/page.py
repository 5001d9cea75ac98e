"""A report as one HTML file: text is escaped, charts are inline SVG, nothing is loaded and no script runs.

The same input gives the same bytes. Charts are drawn in INK, which becomes the page's text colour: light or dark.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from colorsys import hls_to_rgb
from html import escape
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simic.storage.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#010203"
PALETTE = ("#1A80C4", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8A8A8A", "#7F6BD6", "#A6761D", "#999933")
"""Told apart by the colour-blind (Okabe and Ito, without black and yellow, and four more), on white and on black."""
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
STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --soft: #6b7280; --line: #d9dce1; --card: #f5f6f8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --paper: #15171b; --soft: #9aa1ac; --line: #363a42; --card: #1e2126 } }
body { margin: 0 auto; max-width: 66rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; margin: .5rem 0 } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem }
p, li { max-width: 46rem } .note { color: var(--soft); font-size: .9rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child, .text { text-align: left }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)) }
figure { margin: 0 } figcaption { color: var(--soft); font-size: .85rem } svg { width: 100%; height: auto }
svg text { font-family: system-ui, sans-serif !important }
pre { background: var(--card); padding: .7rem; overflow-x: auto; font-size: .85rem; white-space: pre-wrap }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em }
.good { color: #009E73 } .bad { color: #D55E00 }
"""


class Html(str):
    """Text that is HTML already; all other text is escaped."""

    __slots__ = ()


def html(value: Any) -> str:
    """A value as HTML."""
    return value if isinstance(value, Html) else escape(str(value))


def write_page(path: Path, title: str, parts: Iterable[str]) -> None:
    """The whole file; `parts` are HTML."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    start = f'<!doctype html>\n<html lang="en"><head>{head}<title>{html(title)}</title><style>{STYLE}</style></head>\n'
    write_file(path, f"{start}<body>\n<h1>{html(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n")


def section(title: str, *parts: str) -> Html:
    """A heading and what comes below it."""
    return Html(f"<h2>{html(title)}</h2>\n" + "\n".join(html(part) for part in parts))


def paragraph(text: str, kind: str = "") -> Html:
    """A paragraph; `kind` may be note."""
    return Html(f'<p class="{kind}">{html(text)}</p>')


def listing(items: Iterable[str]) -> Html:
    """One bullet per item."""
    return Html("<ul>" + "".join(f"<li>{html(item)}</li>" for item in items) + "</ul>")


def preformatted(text: str) -> Html:
    """A command or settings, as they are."""
    return Html(f"<pre>{html(text)}</pre>")


def folded(title: str, *parts: str) -> Html:
    """What is shown on request."""
    return Html(f"<details><summary>{html(title)}</summary>" + "".join(html(part) for part in parts) + "</details>")


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Html:
    """Rows under a header; wide ones scroll by themselves."""
    top = "".join(f"<th>{html(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{html(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return Html(f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>')


def swatch(name: str, colour: str) -> Html:
    """A name with its colour in the charts."""
    return Html(f'<span class="swatch" style="background:{colour}"></span>{html(name)}')


def charts(*figures: str) -> Html:
    """Charts side by side, or below each other on a phone."""
    return Html('<div class="charts">' + "\n".join(figures) + "</div>")


def chart(draw: Callable[[Axes], None], title: str, caption: str = "", *, size: tuple[float, float] = (5, 3.4)) -> Html:
    """Let `draw` fill the axes; the chart as inline SVG. `title` is also what a screen reader says."""
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
    svg = text.getvalue()
    width, height = (round(72 * side) for side in size)
    start = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 {width} {height}" role="img" '
    drawn = svg[svg.index(">", svg.index("<svg")) : svg.rindex("</svg>") + 6].replace(INK, "currentColor")
    return Html(f'<figure>{start}aria-label="{html(title)}"{drawn}<figcaption>{html(caption)}</figcaption></figure>')


def label_ends(
    axes: Axes,
    ends: Sequence[tuple[float, float, str, str]],
) -> None:
    """Name the points (x, y, text, colour) in a column right of the axes, each tied to its point by a thin line."""
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
    """Sorted positions in 0 to 1, moved as a block where closer than `gap`; each block is centred where it was."""
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
    """Colours that never repeat: the palette, then hues that fall between those before them."""
    yield from PALETTE
    for number in count(1):
        hue, lightness = number * 0.618034 % 1, (0.45, 0.6)[number % 2]
        yield "#" + "".join(f"{round(255 * part):02X}" for part in hls_to_rgb(hue, lightness, 0.55))


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name, by place."""
    return dict(zip(names, islice(endless_colours(), len(names)), strict=True))


def amount(value: float) -> str:
    """A size in at most four digits: 1,004 or 14.3G."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
