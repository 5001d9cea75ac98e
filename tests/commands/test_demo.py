"""simic demo: plain lines without a terminal, a live view in one, and a directory that is never overwritten."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from simic.cli import main
from simic.commands.demo import free_directory
from simic.telemetry.events import GrowthDecision, RunFinished
from simic.telemetry.reader import read_events

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
"""What switches a terminal to its second screen and back."""


def ended(run: Path) -> RunFinished:
    """How the run ended."""
    (event,) = [event for event in read_events(run) if isinstance(event, RunFinished)]
    return event


def test_without_a_terminal_it_prints_lines_and_writes_a_run_with_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["demo", "--host-epochs", "4"])
    said = capsys.readouterr().out
    for part in (
        *("as it is, it recognises", "stem: conv_double dormant -> blending", "before growth (host alone)"),
        *("run:    runs/demo", "report: runs/demo/report.html", "simic watch runs ", "What to do next"),
    ):
        assert part in said, part
    assert "\x1b" not in said
    assert ended(Path("runs/demo")).status == "done"
    assert sum(isinstance(event, GrowthDecision) for event in read_events(Path("runs/demo"))) == 4
    page = Path("runs/demo/report.html").read_text()
    assert "Stages of the slots" in page
    assert "growth on mnist1d-cnn" in page


def test_directories_that_are_there_are_left_alone(tmp_path):
    (tmp_path / "demo").touch()
    (tmp_path / "demo-2").mkdir()
    assert free_directory(tmp_path / "demo") == tmp_path / "demo-3"
    assert free_directory(tmp_path / "new" / "demo") == tmp_path / "new" / "demo"


def test_where_nothing_can_be_created_a_temporary_directory_serves(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "runs").touch()  # a file in the place of the directory; root could write to a read-only one
    found = free_directory(tmp_path / "runs" / "demo")
    assert found.name == "demo"
    assert found.parent.parent == tmp_path
    assert found.parent.is_dir()


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--out", "used"], 2, "used holds a run: name another directory, or remove it"),
        (["--out", "file"], 4, "file"),
        (["--host-epochs", "0"], 2, "--host-epochs must be at least 1, got 0"),
        (["--rng-seed", "-1"], 2, "--rng-seed must not be negative, got -1"),
    ],
)
def test_mistakes_are_refused_before_anything_is_trained(args, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "events.jsonl").touch()
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *args])
    assert stopped.value.code == code
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""


def test_without_matplotlib_it_says_how_to_get_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    main(["demo", "--host-epochs", "1", "--out", str(tmp_path / "run")])
    assert f"pip install 'simic-rl[report]' && simic report {tmp_path / 'run'}" in capsys.readouterr().out


@contextmanager
def in_terminal(directory: Path, *args: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The demo in a pseudo-terminal of its own: the process, and the user's end of the terminal."""
    user, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-m", "simic.cli", "demo", *args],
        cwd=directory,
        env=environment,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    try:
        yield process, user
    finally:
        process.kill()
        process.wait()
        os.close(user)


def read_until(user: int, text: bytes | None, seconds: float = 300) -> bytes:
    """What is shown until a text appears; until the end for None."""
    shown, limit = b"", time.monotonic() + seconds
    with suppress(OSError):  # the other end is closed
        while text is None or text not in shown:
            assert time.monotonic() < limit, shown[-2000:]
            part = os.read(user, 4096)
            if not part:
                break
            shown += part
    return shown


@pytest.mark.slow
def test_in_a_terminal_growth_is_shown_live_and_told_afterwards(tmp_path):
    before = os.times().children_user
    with in_terminal(tmp_path) as (process, user):
        shown = read_until(user, None)
        assert process.wait(10) == 0
    view, after = shown[shown.index(ENTER) : shown.index(LEAVE)], shown[shown.index(LEAVE) :]
    assert b"of 30" in view
    assert b"fossilized" in view
    accuracies = [float(part) for part in re.findall(rb"(\d+\.\d\d)%", after)]
    assert accuracies[-1] > accuracies[-2]  # grown, and alone
    assert b"report: runs/demo/report.html" in after
    assert ended(tmp_path / "runs" / "demo").status == "done"
    assert os.times().children_user - before < 60  # of computing: tests may share their cores


@pytest.mark.slow
@pytest.mark.parametrize("how", ["q", "ctrl-c", "sigterm"])
def test_it_can_be_left_at_any_time(how, tmp_path):
    with in_terminal(tmp_path, "--host-epochs", "20") as (process, user):
        shown = read_until(user, b"blending")  # the legend of the view
        if how == "sigterm":
            process.send_signal(signal.SIGTERM)
        elif how == "ctrl-c":
            process.send_signal(signal.SIGINT)
        else:
            os.write(user, b"q")
        shown += read_until(user, None)
        assert process.wait(10) == (143 if how == "sigterm" else 130)
    assert LEAVE in shown
    assert b"Traceback" not in shown
    assert (b"the demo was stopped; runs/demo holds what happened until then" in shown) == (how != "sigterm")
    assert ended(tmp_path / "runs" / "demo").status == "stopped"
