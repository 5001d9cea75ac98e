"""simic watch as a user starts and stops it."""

import http.client
import re
import signal
import socket
import subprocess
import sys
import time

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_within_a_second_with_a_stream_open(tmp_path, number):
    write_run(tmp_path / "run")
    command = [sys.executable, "-m", "simic.cli", "watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", process.stdout.readline())
        assert found
        client = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=10)
        client.request("GET", f"/?token={found[2]}")
        answer = client.getresponse()
        answer.read()
        cookie = answer.headers["set-cookie"].partition(";")[0]
        client.request("GET", "/api/run/run/stream", headers={"Cookie": cookie})
        with client.getresponse() as stream:
            assert stream.read(5) == b"retry"
            start = time.monotonic()
            process.send_signal(number)
            assert process.wait(10) == 128 + number
            assert time.monotonic() - start < 1
        client.close()
        assert process.stderr.read() == ""
