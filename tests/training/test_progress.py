"""What a user sees: a line per update, or a bar; anomalies in words; nothing if quiet."""

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from simic.telemetry.events import Anomaly
from simic.training.progress import Progress, describe, show_update

FIGURES = {"score": 61.234, "growth": 0.5, "entropy": 2.834, "kl": 0.01234}
SPIKE = Anomaly(update=2, name="kl_spike", value=0.5123, threshold=0.12, where="kl")


def console(out: io.StringIO, terminal: bool) -> Console:
    return Console(file=out, force_terminal=terminal, width=200, soft_wrap=True, highlight=False, color_system=None)


def show(terminal: bool, *, quiet: bool = False) -> str:
    out = io.StringIO()
    with Progress(quiet=quiet, console=console(out, terminal)) as progress:
        progress.describe("rollout")
        progress.describe("rollout 1/4")
        show_update(progress, 1, 30, FIGURES, 123.4, [])
        progress.describe("rollout 3/4")
        show_update(progress, 2, 30, FIGURES, 123.4, [SPIKE])
    return out.getvalue()


def test_a_plain_line_per_update():
    line = "score 61.23  growth 0.50  entropy 2.83  kl 0.0123  123 decisions/s"
    assert show(terminal=False).splitlines() == [
        f"update 1/30  {line}",
        f"update 2/30  {line}  [kl_spike in kl: 0.512 (limit 0.12)]",
    ]


def test_a_bar_in_a_terminal_names_phase_time_and_anomalies():
    said = show(terminal=True)
    for part in ("rollout 3/4", "2/30", "score 61.23", "update 2: kl_spike in kl: 0.512 (limit 0.12)", "\x1b[?25h"):
        assert part in said, part


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_prints_nothing(terminal):
    assert show(terminal, quiet=True) == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_markup_and_control_characters_of_names_are_shown_as_they_are(terminal):
    out = io.StringIO()
    with Progress(console=console(out, terminal)) as progress:
        progress.describe("[red]label[/red]\x07")
        progress.bar(1, 2)
        progress.print("[bold]path[/bold]\x07")
    assert "[bold]path[/bold]" in out.getvalue()
    assert ("[red]label[/red]" in out.getvalue()) == terminal
    assert "\x07" not in out.getvalue()


def test_an_anomaly_in_a_few_words():
    anomaly = Anomaly(update=0, name="gradient_drift", value=1234567.0, threshold=20.0, where="op")
    assert describe(anomaly) == "gradient_drift in op: 1.23e+06 (limit 20)"


def test_a_run_goes_on_when_nobody_watches_any_more():
    code = """
from simic.training.progress import Progress, say, show_update
import sys
with Progress() as progress:
    for update in range(3):
        show_update(progress, update, 3, dict(score=0, growth=0, entropy=0, kl=0), 1.0, [])
say("done")
print("went on", file=sys.stderr)
"""
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"went on\n")
