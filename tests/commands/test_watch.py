"""simic watch as a user starts and stops it."""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
from helpers.reports import write_run

from simic.cli import main


@pytest.fixture
def taken():
    """A port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


def test_mistakes_are_explained(tmp_path, capsys, monkeypatch, taken):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for args, code, said in (
        ([], 4, "there is no directory runs; `simic train` makes it"),
        (["nowhere"], 4, "there is no directory nowhere; `simic watch` without it looks in runs/"),
        (["file"], 2, "file is a file; name the directory of a run"),
        ([".", "--host", "0.0.0.0", "--no-token"], 2, "--no-token is for this machine alone"),
        ([".", "--port", "x"], 2, "--port must be int, got 'x'"),
        ([".", "--port", "-1"], 2, "--port must be from 0"),
        ([".", "--port", taken], 4, "another simic watch, uses it: choose another --port"),
        ([".", "--poort", "1"], 2, "simic watch has no flag --poort; did you mean port"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["watch", *args])
        assert stopped.value.code == code
        assert said in capsys.readouterr().err


def test_a_missing_package_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "simic.dashboard.web_server", raising=False)
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path)])
    assert "simic watch needs uvicorn; install it with: pip install 'simic-rl[watch]'" in capsys.readouterr().err


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit):
        main(["watch", "--help"])
    text = capsys.readouterr().out
    assert "usage: simic watch [PATH] [FLAGS]" in text
    for flag in ("--host", "--port", "--no-token", "--open", "--terminal"):
        assert flag in text


class Started(NamedTuple):
    """`simic watch` in a process of its own."""

    process: subprocess.Popen[str]
    port: int
    token: str

    @contextmanager
    def ask(self, path: str, cookie: str = "") -> Iterator[http.client.HTTPResponse]:
        """The answer to a request, whose body is not read yet."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            client.request("GET", path, headers={"Cookie": cookie})
            with client.getresponse() as answer:
                yield answer
        finally:
            client.close()


@contextmanager
def started(*args: str, **environment: str) -> Iterator[Started]:
    command = [sys.executable, "-m", "simic.cli", "watch", *args, "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, env=os.environ | environment, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+)/\S*\?token=(\S+)", process.stdout.readline())
            assert found
            yield Started(process, int(found[1]), found[2])
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_soon_with_a_stream_open(tmp_path, number):
    write_run(tmp_path / "run")
    with started(str(tmp_path)) as watch:
        with watch.ask(f"/?token={watch.token}") as answer:
            cookie = answer.headers["set-cookie"].partition(";")[0]
        with watch.ask("/api/run/run/stream", cookie) as stream:
            assert stream.read(5) == b"retry"
            start = time.monotonic()
            watch.process.send_signal(number)
            assert watch.process.wait(10) == 128 + number
            assert time.monotonic() - start < 3, "it takes less than a second, but other tests may run"
        assert watch.process.stderr is not None
        assert watch.process.stderr.read() == ""


def test_a_browser_is_started_with_a_token_for_one_use(tmp_path):
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(f'#!/bin/sh\necho "$1" > {seen}.new && mv {seen}.new {seen}\n')
    browser.chmod(0o700)
    run = write_run(tmp_path / "run")
    with started(str(run), "--open", BROWSER=f"{browser} %s") as watch:
        deadline = time.monotonic() + 10
        while not seen.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        path = seen.read_text().strip().partition(str(watch.port))[2]
        assert path.startswith("/run/run/now?token=")
        assert watch.token not in path
        for status in (303, 403):
            with watch.ask(path) as answer:
                assert answer.status == status
