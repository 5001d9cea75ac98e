"""What a user sees: a line per update, or a bar; anomalies in words; nothing but the result if quiet."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from simic.telemetry.events import Anomaly
from simic.training.progress import Progress, describe

FIGURES = {"score": 61.234, "growth": 0.5, "entropy": 2.834, "kl": 0.01234}
SPIKE = Anomaly(update=2, name="kl_spike", value=0.5123, threshold=0.12, where="kl")


def show(terminal: bool, *, quiet: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, soft_wrap=True, highlight=False, color_system=None)
    with Progress(quiet=quiet, console=console) as progress:
        progress.phase("rollout")
        progress.groups(1, 4)
        progress.show(1, 30, FIGURES, 123.4, [])
        progress.groups(3, 4)
        progress.show(2, 30, FIGURES, 123.4, [SPIKE])
        progress.finish("stopped", 2, Path("runs/[x]"), "SIGTERM")
    return out.getvalue()


def test_a_plain_line_per_update():
    line = "score 61.23  growth 0.50  entropy 2.83  kl 0.0123  123 decisions/s"
    assert show(terminal=False).splitlines() == [
        f"update 1/30  {line}",
        f"update 2/30  {line}  [kl_spike in kl: 0.512 (limit 0.12)]",
        "stopped after 2 updates (SIGTERM): runs/[x]",
    ]


def test_a_bar_in_a_terminal_names_phase_time_and_anomalies():
    said = show(terminal=True)
    for part in ("rollout 3/4", "2/30", "score 61.23", "update 2: kl_spike in kl: 0.512 (limit 0.12)", "\x1b[?25h"):
        assert part in said, part
    assert said.rstrip().endswith("stopped after 2 updates (SIGTERM): runs/[x]")


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_prints_only_the_result(terminal):
    assert show(terminal, quiet=True) == "stopped after 2 updates (SIGTERM): runs/[x]\n"


def test_a_run_that_is_done_needs_no_reason():
    out = io.StringIO()
    Progress(console=Console(file=out, width=200)).finish("done", 3, Path("x"), "")
    assert out.getvalue() == "done after 3 updates: x\n"


def test_an_anomaly_in_a_few_words():
    anomaly = Anomaly(update=0, name="gradient_drift", value=1234567.0, threshold=20.0, where="op")
    assert describe(anomaly) == "gradient_drift in op: 1.23e+06 (limit 20)"


def test_a_run_goes_on_when_nobody_watches_any_more():
    code = """
from pathlib import Path
from simic.training.progress import Progress
import sys
with Progress() as progress:
    for update in range(3):
        progress.show(update, 3, dict(score=0, growth=0, entropy=0, kl=0), 1.0, [])
    progress.finish("done", 3, Path("x"), "")
print("went on", file=sys.stderr)
"""
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"went on\n")
