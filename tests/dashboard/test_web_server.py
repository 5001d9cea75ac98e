"""The answers of `simic watch`, its streams, and how it stops."""

import json
import shutil
import socket
import time

import pytest
from helpers.reports import make_results, write_run
from helpers.watching import read_all, watching

from simic.dashboard import live, web, web_server
from simic.dashboard.web import KINDS, STATIC
from simic.dashboard.web_server import bind, page_address, resolve, serve
from simic.telemetry.events import Update, to_json

BUSY_SECONDS = 3.0
"""What takes less than a second may take so long while other tests run."""


def add_update(run, number):
    with (run / "events.jsonl").open("a") as file:
        file.write(to_json(Update(update=number, metrics={"score": float(number)})) + "\n")


def updates(view):
    return [row["update"] for row in view["learning"]["rows"]]


def test_a_directory_without_runs_fills_up(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "LIST_SECONDS", 0.0)
    with watching(tmp_path) as served:
        found = served.get("/api/runs").json
        assert (found["runs"], found["evaluations"]) == ([], [])
        assert served.get("/api/run/new/view").status == 404
        write_run(tmp_path / "new")
        assert [run["id"] for run in served.get("/api/runs").json["runs"]] == ["new"]
        assert updates(served.get("/api/run/new/view").json) == [0, 1, 2, 3]
        assert served.get("/run/new/growth?update=2").body == served.get("/").body
        shutil.rmtree(tmp_path / "new")
        assert served.get("/api/runs").json["runs"] == []
        assert served.get("/api/run/new/view").status == 404


def test_an_evaluation_is_listed_and_shown(tmp_path):
    (tmp_path / "first").mkdir()
    results = make_results({"wait": "wait", "heuristic": "heuristic"})
    (tmp_path / "first" / "results.json").write_text(json.dumps(results))
    with watching(tmp_path) as served:
        (entry,) = served.get("/api/runs").json["evaluations"]
        assert (entry["id"], entry["controllers"]) == ("first", ["heuristic", "wait"])
        assert served.get("/evaluation/first").status == 200
        assert served.get("/api/evaluation/first").json["rng_seeds"] == 4
        (tmp_path / "first" / "results.json").write_text("{")
        damaged = served.get("/api/evaluation/first")
        assert damaged.status == 500
        assert "run simic evaluate again" in damaged.json["error"]


def test_one_run_may_be_watched_alone(tmp_path):
    run = write_run(tmp_path / "one & only")
    with watching(run) as served:
        assert [entry["id"] for entry in served.get("/api/runs").json["runs"]] == ["one & only"]
        assert updates(served.get("/api/run/one%20%26%20only/view").json) == [0, 1, 2, 3]
    assert page_address(run, resolve("127.0.0.1"), 80, "t") == "http://127.0.0.1:80/run/one%20%26%20only/now?token=t"


def test_a_view_since_a_position_holds_what_is_new(tmp_path):
    run = write_run(tmp_path / "run")
    with watching(tmp_path) as served:
        first = served.get("/api/run/run/view").json
        add_update(run, 4)
        second = served.get(f"/api/run/run/view?since={first['cursor']}").json
        assert (first["reset"], updates(first)) == (True, [0, 1, 2, 3])
        assert (second["reset"], updates(second)) == (False, [4])


def test_a_stream_sends_each_change_soon_and_a_return_catches_up(tmp_path):
    run = write_run(tmp_path / "run")
    with watching(tmp_path) as served:
        with served.stream("run") as messages:
            cursor, view = next(messages)
            assert cursor == view["cursor"]
            assert view["reset"]
            start = time.monotonic()
            add_update(run, 4)
            cursor, view = next(messages)
            assert time.monotonic() - start < BUSY_SECONDS
            assert (view["reset"], updates(view)) == (False, [4])
        add_update(run, 5)
        for number, query, headers in ((0, "", {"Last_Event_ID": cursor}), (1, f"?since={cursor}", {})):
            with served.stream("run", query, **headers) as messages:
                _, view = next(messages)
                assert (view["reset"], updates(view)) == (False, [5]), number
        # The header is newer than the address, which a browser repeats when it connects again.
        with served.stream("run", "?since=g0:0:0", Last_Event_ID=cursor) as messages:
            assert updates(next(messages)[1]) == [5]


def test_a_stream_without_news_says_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(web, "KEEP_ALIVE_SECONDS", 0.05)
    write_run(tmp_path / "run")
    with watching(tmp_path) as served, served.connect("/api/run/run/stream") as client:
        received = b""
        while received.count(b"\n: still here\n\n") < 3:
            received += client.recv(65536)
        assert received.count(b"\ndata: ") == 1


def test_a_rewound_run_is_sent_anew(tmp_path):
    run = write_run(tmp_path / "run")
    with watching(tmp_path) as served, served.stream("run") as messages:
        next(messages)
        lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
        (run / "events.jsonl").write_bytes(b"".join(lines[:2]))
        _, view = next(messages)
        assert (view["reset"], updates(view)) == (True, [0, 1])


def test_all_who_watch_a_run_share_one_reader(tmp_path):
    run = write_run(tmp_path / "run")
    with watching(tmp_path) as served, served.stream("run") as first, served.stream("run") as second:
        assert next(first) == next(second)
        (shared,) = served.directory._live.values()
        assert shared.viewers == 2
        add_update(run, 4)
        assert next(first) == next(second)
        assert len(shared._views) == 1, "the view was made more than once"


def test_a_run_that_nobody_watches_is_not_read(tmp_path):
    write_run(tmp_path / "run")
    with watching(tmp_path) as served:
        with served.stream("run") as messages:
            next(messages)
            (shared,) = served.directory._live.values()
            assert shared._follower is not None
        deadline = time.monotonic() + 3
        while shared._follower is not None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert shared._follower is None
        assert (shared.viewers, served.directory.streams) == (0, 0)


def test_only_so_many_idle_runs_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "MAX_IDLE", 2)
    for name in "abcde":
        write_run(tmp_path / name)
    with watching(tmp_path) as served, served.stream("a") as messages:
        next(messages)
        for name in "bcde":
            assert served.get(f"/api/run/{name}/view").status == 200
        assert list(served.directory._live) == ["a", "c", "d", "e"]
        assert [len(live._views) for live in served.directory._live.values()] == [1, 0, 0, 1]


def test_streams_have_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(web, "MAX_STREAMS", 2)
    write_run(tmp_path / "run")
    with watching(tmp_path) as served:
        with served.stream("run") as first, served.stream("run") as second:
            assert next(first) == next(second)
            full = served.get("/api/run/run/stream")
            assert (full.status, full.headers["retry-after"]) == (503, "5")
            assert "2 pages" in full.json["error"]
            assert served.get("/api/run/run/view").status == 200
        time.sleep(0.2)
        with served.stream("run") as third:
            next(third)


def test_who_does_not_read_its_stream_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(web_server, "STALL_SECONDS", 0.5)
    run = write_run(tmp_path / "run")
    metrics = {f"{'m' * 100}{i}": i / 7 for i in range(100)}
    with (run / "events.jsonl").open("a") as file:
        file.writelines(to_json(Update(update=i, metrics=metrics)) + "\n" for i in range(4, 800))
    with watching(tmp_path) as served, served.connect("/api/run/run/stream", receive_bytes=4096):
        deadline = time.monotonic() + 20
        while not served.directory.streams and time.monotonic() < deadline:
            time.sleep(0.01)
        while served.directory.streams and time.monotonic() < deadline:
            assert served.get("/static/index.html").status == 200
            time.sleep(0.1)
        assert served.directory.streams == 0
        assert not served.server.server_state.connections


def test_a_head_request_has_no_body(tmp_path):
    write_run(tmp_path / "run")
    with watching(tmp_path) as served:
        for path in ("/", "/api/runs", "/api/run/run/view", "/api/run/run/stream", "/api/run/none/view"):
            answer = served.get(path, method="HEAD")
            assert answer.body == b"", path
            assert answer.status == (404 if "none" in path else 200)
        with served.connect("/api/run/run/stream", method="HEAD") as client:
            client.sendall(b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b"HTTP/1.1 401" in read_all(client), "the stream was not over"


def test_every_file_of_the_page_is_served_with_its_type(tmp_path):
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert STATIC / "index.html" in files
    with watching(tmp_path) as served:
        for path in files:
            answer = served.get(f"/static/{path.relative_to(STATIC).as_posix()}")
            assert (answer.status, answer.body) == (200, path.read_bytes()), path
            assert answer.headers["content-type"] == KINDS[path.suffix], path


def test_files_of_the_page_are_asked_for_again_only_when_they_changed(tmp_path):
    with watching(tmp_path) as served:
        first = served.get("/static/index.html")
        assert first.headers["content-type"] == "text/html; charset=utf-8"
        again = served.get("/static/index.html", If_None_Match=first.headers["etag"])
        assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize(
    "query", ["hosts", "hosts?update=x", "hosts?update=-1", "events?before=1e9", "events?limit=" + "9" * 16]
)
def test_bad_queries_are_explained(tmp_path, query):
    write_run(tmp_path / "run")
    with watching(tmp_path) as served:
        answer = served.get(f"/api/run/run/{query}")
        assert answer.status == 400
        assert "error" in answer.json


def test_the_story_is_given_in_pages(tmp_path):
    write_run(tmp_path / "run")
    with watching(tmp_path) as served:
        found = served.get("/api/run/run/events?kind=lifecycle&limit=2").json
        assert len(found["entries"]) == 2
        assert {entry["kind"] for entry in found["entries"]} == {"lifecycle"}
        assert served.get("/api/run/run/hosts?update=1").json == {"update": 1, "hosts": []}


def test_the_server_stops_soon_whoever_watches(tmp_path):
    write_run(tmp_path / "run")
    with watching(tmp_path) as served:
        sleepers = [served.connect("/api/run/run/stream") for _ in range(5)]
        silent = socket.create_connection(("127.0.0.1", served.port))
        with served.stream("run") as messages:
            next(messages)
            assert served.stop() < BUSY_SECONDS
            assert list(messages) == []
        assert read_all(sleepers[0]).endswith(b"\r\n0\r\n\r\n"), "the stream was cut off, not ended"
        for client in (*sleepers, silent):
            client.close()


def test_without_a_token_this_machine_alone_is_served(tmp_path):
    with watching(tmp_path, token=None) as served:
        assert served.get("/api/runs", cookie=False).status == 200
        assert served.get("/api/runs", cookie=False, Host="evil.example").status == 403
    with pytest.raises(ValueError, match=r"--no-token is for this machine alone, and 0\.0\.0\.0 can be reached"):
        serve(tmp_path, host="0.0.0.0", port=0, use_token=False, open_browser=False)


def test_places_to_listen_are_checked():
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port}: .*another simic watch, uses it: choose another --port"):
            bind("127.0.0.1", port)
    with pytest.raises(ValueError, match="--port must be from 0"):
        bind("127.0.0.1", 70000)
    with pytest.raises(OSError, match="this machine has no such address"):
        bind("192.0.2.1", 0)
    with pytest.raises(ValueError, match="--host must be a name or address of this machine, got 'no such host'"):
        resolve("no such host")


def test_a_stream_tells_what_no_event_tells(tmp_path):
    """The comparison at the end of a run is a file of its own."""
    run = write_run(tmp_path / "run")
    with watching(tmp_path) as served, served.stream("run") as messages:
        assert next(messages)[1]["now"]["rules"] == {}
        (run / "comparison").mkdir()
        (run / "comparison" / "results.json").write_text(json.dumps(make_results({"wait": "wait"})))
        _, view = next(messages)
        assert list(view["now"]["rules"]) == ["wait"]
        assert (view["reset"], updates(view)) == (False, [])


def test_a_directory_whose_name_is_no_text_is_left_out(tmp_path):
    write_run(tmp_path / "run")
    write_run(tmp_path / b"\xff\xfe".decode(errors="surrogateescape"))
    with watching(tmp_path) as served:
        assert [run["id"] for run in served.get("/api/runs").json["runs"]] == ["run"]


def test_a_file_that_cannot_be_read_for_a_while_is_tried_again(tmp_path):
    run = write_run(tmp_path / "run")
    with watching(tmp_path) as served, served.stream("run") as messages:
        next(messages)
        (run / "events.jsonl").unlink()
        (run / "events.jsonl").mkdir()
        time.sleep(0.6)
        assert served.get("/api/runs").status == 200
        (run / "events.jsonl").rmdir()
        add_update(run, 7)
        assert updates(next(messages)[1]) == [7]
