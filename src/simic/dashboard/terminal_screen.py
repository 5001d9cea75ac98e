"""The view of a run as lines of text for a terminal of any size: pure, from what `RunWatcher.view` gives.

Nothing is told by colour alone: stages are letters, lights have marks, so that NO_COLOR and colour blindness cost
nothing. A screen of 80 x 24 has all sections; larger ones show more hosts and more of the story.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from simic.storage.printable import printable

STAGES = {
    "dormant": (".", "bright_black"),
    "germinated": ("g", "green"),
    "training": ("t", "cyan"),
    "blending": ("b", "blue"),
    "holding": ("h", "magenta"),
    "fossilized": ("F", "bold yellow"),
    "pruned": ("x", "red"),
    "embargoed": ("-", "bright_black"),
    "resetting": ("-", "bright_black"),
}
"""Letter and style of each stage."""
LIGHTS = {
    "bad": ("x", "bold red"),
    "warn": ("!", "bold yellow"),
    "ok": ("+", "green"),
    "unknown": ("?", "bright_black"),
}
"""Mark and style of each state of a light, the most urgent first."""
SEVERITIES = {"error": ("x", "bold red"), "warning": ("!", "yellow"), "notice": ("*", "cyan"), "info": (" ", "")}
STATUSES = {"running": "bold green", "done": "green", "stopped": "yellow", "stale": "yellow"}
"""Styles; others, such as failed, are red."""
SPARKS = ("▁▂▃▄▅▆▇█", "_.-=+*%#")
BARS = ("━─", "#.")
"""With Unicode and without."""
MAX_STORY, MAX_ROWS = 500, 24
"""Entries that are kept, more than any terminal has lines, and updates whose scores are drawn."""
SNAPSHOT_STORY = 40
"""Entries that are shown where there is no terminal to fill."""


@dataclass
class Picture:
    """What is shown: the views that have arrived, put together."""

    now: Mapping[str, Any] = field(default_factory=dict)
    rows: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Of learning, by update."""
    growth: Mapping[str, Any] | None = None
    entries: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """The end of the story, by index."""

    def add(self, view: Mapping[str, Any]) -> None:
        """Take in a view, which holds only what is new or has changed, unless it is a reset."""
        if view["reset"]:
            self.rows, self.entries, self.growth = {}, {}, None
        self.now = view["now"]
        self.rows = _newest(self.rows, {row["update"]: row for row in view["learning"]["rows"]}, MAX_ROWS)
        self.growth = view["growth"] or self.growth
        self.entries = _newest(self.entries, {entry["index"]: entry for entry in view["story"]["entries"]}, MAX_STORY)

    @property
    def hosts(self) -> Sequence[Mapping[str, Any]]:
        """The traced hosts of the newest update that has some."""
        return self.growth["hosts"] if self.growth else ()


def _newest(known: dict[int, Any], new: dict[int, Any], count: int) -> dict[int, Any]:
    return dict(sorted((known | new).items())[-count:])


def draw(
    picture: Picture, width: int, height: int | None, *, selected: int = 0, keys: str = "", unicode: bool = True
) -> list[Text]:
    """The lines of the screen, none longer than `width`; None for the height means as many as there are."""
    top = [*_head(picture, width, unicode), *_lights(picture, width, 5 if height is None or height >= 24 else 2)]
    foot = [Text(keys, style="dim")] if keys else []
    rest = 10_000 if height is None else max(height - len(top) - len(foot), 0)
    garden = list(_garden(picture, width, selected))
    story = [_entry(entry) for entry in list(picture.entries.values())[-(rest if height else SNAPSHOT_STORY) :]]
    # The garden has the larger share, unless it needs less; what it leaves is the story's.
    room = min(len(garden), max(rest - min(len(story) + 1, rest // 3), 0)) if height else len(garden)
    lines = [*top, *garden[:room]]
    if rest > room + 1 and story:
        lines += [_heading("Story", width, unicode), *story[-(rest - room - 1) :]]
    if height is not None:
        lines = lines[: height - len(foot)]
        lines += [Text("")] * (height - len(foot) - len(lines))
    for line in (lines := lines + foot):
        line.truncate(width, overflow="ellipsis" if unicode else "crop")
    return lines


def _head(picture: Picture, width: int, unicode: bool) -> Iterator[Text]:
    now = picture.now
    status = str(now.get("status") or "-")
    title = Text.assemble(
        (_plain(now.get("name")), "bold"), "  ", (_plain(status), STATUSES.get(status, "bold red")), "  "
    )
    title.append(" ".join(_plain(now[key]) for key in ("algorithm", "task", "preset") if now.get(key)))
    if now.get("reason"):
        title.append(f"  ({_plain(now['reason'])})")
    if line := sparkline([row["metrics"].get("score") for row in picture.rows.values()], unicode):
        title.append("  score ", style="dim").append(line, style="cyan")
    yield title
    yield _progress(now, width, unicode)
    yield _results(picture)
    yield _resources(now)


def _progress(now: Mapping[str, Any], width: int, unicode: bool) -> Text:
    done, total = now.get("update") or 0, now.get("updates")
    line = Text(f"{_step(now)} {done}" + (f" of {total}" if total else ""))
    if total:
        full, empty = BARS[not unicode]
        size = max(min(width - 50, 40), 8)
        filled = min(size * done // total, size)
        line.append("  ").append(full * filled, style="green").append(empty * (size - filled), style="bright_black")
    if now.get("eta_seconds") is not None:
        line.append(f"  {duration(now['eta_seconds'])} left")
    if now.get("last_event"):
        line.append(f"  last event {duration(max(time.time() - now['last_event'], 0))} ago", style="dim")
    return line


def _step(now: Mapping[str, Any]) -> str:
    """What is counted: a user's own training has decisions."""
    return "decision" if now.get("kind") == "growth" else "update"


def _results(picture: Picture) -> Text:
    """Scores, or the last metrics of a user's own training."""
    now, line = picture.now, Text()
    results: dict[str, Any] = {"score": now.get("score"), "gain": now.get("gain")}
    if now.get("kind") == "growth":
        results = dict(picture.rows[max(picture.rows)]["metrics"]) if picture.rows else {}
    for name, value in results.items():
        line.append(f"{_plain(name)} ").append(number(value, 3 if name == "gain" else 4), style="bold").append("  ")
    for name, score in (now.get("rules") or {}).items():
        line.append(f"{_plain(name)} {number(score)}  ")
    line.rstrip()
    return line


def _resources(now: Mapping[str, Any]) -> Text:
    parts = [f"{number(now.get('decisions_per_second'))} decisions/s"]
    phases = {name: seconds for name, seconds in (now.get("phases") or {}).items() if seconds}
    whole = sum(phases.values())
    if whole:
        parts.append(" ".join(f"{_plain(name)} {share / whole:.0%}" for name, share in _largest(phases, 2)))
    for key, text in (("faults", "worker faults"), ("damaged_lines", "damaged lines")):
        if now.get(key):
            parts.append(f"{now[key]} {text}")
    if (workers := now.get("workers")) and workers["count"]:
        parts.append(f"{workers['count']} workers" + (f" ({workers['lost']} lost)" if workers.get("lost") else ""))
    if memory := now.get("memory_mb"):
        parts.append(f"{sum(filter(None, memory.values())):,.0f} MB memory")
    return Text("  ".join(parts))


def _largest(numbers: Mapping[str, float], count: int) -> list[tuple[str, float]]:
    return sorted(numbers.items(), key=lambda item: -item[1])[:count]


def _lights(picture: Picture, width: int, max_lines: int) -> Iterator[Text]:
    """The lights in columns; those that are not ok come first."""
    lights = picture.now.get("lights") or []
    order = list(LIGHTS)
    lights = sorted(lights, key=lambda light: order.index(light["state"]) if light["state"] in order else 0)
    columns = max(width // 26, 1)
    for start in range(0, min(len(lights), columns * max_lines), columns):
        line = Text()
        for light in lights[start : start + columns]:
            mark, style = LIGHTS.get(light["state"], LIGHTS["unknown"])
            value = number(light["value"], 3)
            label = set_cell_size(_plain(light["label"]), max(22 - len(value), 0)).rstrip()
            line.append(f"{mark} ", style=style).append(set_cell_size(f"{label} {value}", 23) + " ")
        line.rstrip()
        yield line


def _garden(picture: Picture, width: int, selected: int) -> Iterator[Text]:
    """Every traced host from the selected one on: a line about it, and a line per slot with a letter per state."""
    if not picture.growth or not picture.hosts:
        return
    update = picture.growth["update"]
    used = {stage for host in picture.hosts for slot in host["slots"] for stage in slot["stage"]}
    heading = Text(f"{_step(picture.now).capitalize()} {update} ", style="bold")
    for stage, (letter, style) in STAGES.items():
        if stage in used and letter.isalpha():
            heading.append(f" {letter}", style=style).append(f" {stage}", style="dim")
    yield heading
    for host in picture.hosts[selected:]:
        grown = f"{host['host_parameters']:,} -> {host['parameters']:,} parameters"
        score = "" if host["score"] is None else f"score {number(host['score'])}  "
        about = f"{score}{grown}{'  rolled back' if host.get('rolled_back') else ''}"
        yield Text.assemble((_plain(host["id"]), "bold"), f"  {_plain(host['task'])}  {about}")
        names = min(max((cell_len(_plain(slot["name"])) for slot in host["slots"]), default=0), 16)
        for slot in host["slots"]:
            yield _slot(slot, names, width)


def _slot(slot: Mapping[str, Any], names: int, width: int) -> Text:
    line = Text(f"  {set_cell_size(_plain(slot['name']), names)}  ")
    for stage in _sampled(slot["stage"], max(width - names - 30, 10)):
        letter, style = STAGES.get(stage, ("?", ""))
        line.append(letter, style=style)
    present = slot["blueprint"][-1] if slot["blueprint"] else ""
    if present:
        contribution = next((value for value in reversed(slot["contribution"]) if value is not None), None)
        line.append(f"  {_plain(present)}" + (f" {contribution:+.3g}" if contribution is not None else ""))
    elif gone := next((name for name in reversed(slot["blueprint"]) if name), ""):
        line.append(f"  ({_plain(gone)})", style="dim")
    return line


def _sampled(values: Sequence[Any], count: int) -> Sequence[Any]:
    """At most so many values, evenly spaced, the last one included."""
    if len(values) <= count:
        return values
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]


def _heading(text: str, width: int, unicode: bool) -> Text:
    return Text(f"{text} ", style="bold").append("-─"[unicode] * max(width - len(text) - 1, 0), style="bright_black")


def _entry(entry: Mapping[str, Any]) -> Text:
    mark, style = SEVERITIES.get(entry["severity"], (" ", ""))
    line = Text(f"{mark} ", style=style)
    line.append(f"{entry['update'] if entry['update'] is not None else '':>4} ", style="dim")
    if entry.get("host"):
        line.append(f"{_plain(entry['host'])} ", style="dim")
    return line.append(_plain(entry["text"]), style=style)


def number(value: float | None, digits: int = 4) -> str:
    """A number as people read it; a dash for what was not measured."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """A duration in its two largest units."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{minutes} min {int(seconds % 60):02d} s" if minutes else f"{seconds:.0f} s"


def sparkline(values: Sequence[float | None], unicode: bool = True) -> str:
    """One character per value, from the lowest to the highest; a space for what was not measured."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    low, high, levels = min(known), max(known), SPARKS[not unicode]
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else levels[round((value - low) * scale)] for value in values)


def _plain(value: object) -> str:
    return printable("-" if value is None else value, 200)
