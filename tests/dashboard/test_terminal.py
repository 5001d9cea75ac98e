"""A run on the terminal: live in a real pseudo-terminal that is left as it was, or one snapshot without one."""

import io
import os
import pty
import signal
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import tiny_run
from rich.console import Console

from simic.dashboard.terminal import newest_run, watch_in_terminal
from simic.dashboard.terminal_screen import number
from simic.telemetry.events import RunStarted, Update
from simic.telemetry.recorder import Recorder

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
"""What switches a terminal to its second screen and back."""


class Terminal:
    """A pseudo-terminal of 80 x 24 and a user who acts when a text appears."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.master, self.slave = pty.openpty()
        self.input = os.fdopen(os.dup(self.slave), "r")
        self.output = os.fdopen(os.dup(self.slave), "w", encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", self.input)
        self.console = Console(file=self.output, force_terminal=True, width=80, height=24, highlight=False)
        self.before, self._shown, self._plan = (
            termios.tcgetattr(self.slave),
            b"",
            list[tuple[str, Callable[[], None]]](),
        )
        self._user = threading.Thread(target=self._use, daemon=True)
        self._hurry = threading.Timer(30, self.type, [b"q"])  # a test that fails must end

    def when(self, *plan: tuple[str, Callable[[], None]]) -> None:
        """What to do as soon as a text is shown, in this order."""
        self._plan += plan
        self._user.start()
        self._hurry.start()

    def _use(self) -> None:
        seen = 0
        with suppress(OSError):  # the other end is closed
            while part := os.read(self.master, 4096):
                self._shown += part
                while self._plan and (at := self._shown.find(self._plan[0][0].encode(), seen)) >= 0:
                    seen = at
                    self._plan.pop(0)[1]()

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def close(self) -> str:
        """All that was shown."""
        self._hurry.cancel()
        assert termios.tcgetattr(self.slave) == self.before
        for file in (self.input, self.output):
            file.close()
        os.close(self.slave)
        self._user.join(5)
        os.close(self.master)
        assert not self._plan, "this was never shown"
        return self._shown.decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    return Terminal(monkeypatch)


@pytest.fixture
def run(tmp_path: Path, tiny_task) -> Path:
    tiny_run.play_run(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_arrows_choose_the_host_and_q_ends_it(run, terminal):
    terminal.when(
        ("other hosts (1/2)", lambda: terminal.type(b"\x1b[B\x1b[B\x1b[B")),  # there is no third
        ("other hosts (2/2)", lambda: terminal.type(b"\x1b[A")),
        ("other hosts (1/2)", lambda: terminal.type(b"q")),
    )
    assert watch_in_terminal(run, console=terminal.console) == 0
    shown = terminal.close()
    assert shown.index(ENTER) < shown.index("update 2 of 2") < shown.index(LEAVE)


def test_it_ends_by_itself_once_it_is_told_to(run, terminal):
    answers = iter([False, True])
    terminal.when(("update 2 of 2", lambda: None))
    assert watch_in_terminal(run, console=terminal.console, until=lambda: next(answers)) == 0
    assert LEAVE in terminal.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_restore_the_terminal_before_they_end_it(run, terminal, number):
    before = signal.getsignal(number)
    terminal.when(("q quit", lambda: os.kill(os.getpid(), number)))
    if number == signal.SIGINT:
        assert watch_in_terminal(run, console=terminal.console) == 0
    else:
        with pytest.raises(SystemExit) as stop:
            watch_in_terminal(run, console=terminal.console)
        assert stop.value.code == 128 + number
    assert LEAVE in terminal.close()
    assert signal.getsignal(number) == before


def test_what_a_run_writes_meanwhile_appears(tmp_path, terminal):
    with Recorder(tmp_path) as recorder:
        start = {"command": (), "versions": {}, "rng_seeds": {}, "threads": 1, "pid": 1, "host": "here"}
        recorder.record(RunStarted(update=0, config={"updates": 9, "algorithm": "ppo", "task": "mlp"}, **start))

        def write() -> None:
            recorder.record(Update(update=0, metrics={"score": 12.25}))
            recorder.end_update()

        terminal.when(("update 0 of 9", write), ("12.25", lambda: terminal.type(b"q")))
        assert watch_in_terminal(tmp_path, console=terminal.console) == 0
    assert "update 1 of 9" in terminal.close()


def test_without_a_terminal_one_snapshot_is_printed(run):
    text = io.StringIO()
    assert watch_in_terminal(run, console=Console(file=text, width=80)) == 0
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("tiny  done  ppo mlp")
    assert f"score {number(tiny_run.told(run, Update)[-1].metrics['score'])}" in lines[2]
    assert "\x1b" not in text.getvalue()


def test_a_dumb_terminal_gets_a_snapshot_too(run, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    text = io.StringIO()
    assert watch_in_terminal(run, console=Console(file=text, width=80, force_terminal=True)) == 0
    assert ENTER not in text.getvalue()


def test_the_newest_run_of_a_directory_is_shown(tmp_path):
    for seconds, name in ((100.0, "a"), (300.0, "b"), (200.0, "c")):
        (tmp_path / name).mkdir()
        with Recorder(tmp_path / name) as recorder:
            start = {"command": (), "config": {}, "versions": {}, "rng_seeds": {}, "threads": 1, "pid": 1, "host": "h"}
            recorder.record(RunStarted(update=0, time=seconds, **start))
    assert newest_run(tmp_path) == tmp_path / "b"
    assert newest_run(tmp_path / "a") == tmp_path / "a"


def test_a_run_that_only_begins_is_waited_for_and_other_places_are_refused(tmp_path):
    with pytest.raises(ValueError, match="neither a run nor a directory of runs"):
        newest_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no run"):
        newest_run(tmp_path / "none")
    (tmp_path / "lock").touch()
    assert newest_run(tmp_path) == tmp_path
    text = io.StringIO()
    assert watch_in_terminal(tmp_path, console=Console(file=text, width=80)) == 0
    assert "update 0" in text.getvalue()
