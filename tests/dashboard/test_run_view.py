"""Views of runs that grow, are cut at any byte, rewound, resumed or damaged."""

import json
import math
import os

import pytest
from helpers.recorded import finished, lines, process_events, started, update_events, write_recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from simic.dashboard import run_view
from simic.dashboard.run_view import Cursor, RunWatcher
from simic.telemetry import tail
from simic.telemetry.events import EpisodeTrace, PhaseTimings, Unknown, Update, to_json

FILES = ("events.jsonl", "process.jsonl")


def fresh(path):
    """The whole view of a new watcher."""
    watcher = RunWatcher(path)
    watcher.refresh()
    return watcher.view()


def told(view):
    """A view without what tells readings apart."""
    return {name: value for name, value in view.items() if name != "cursor"}


def append(path, *events):
    with open(path, "ab") as file:
        file.writelines(lines(events))


def test_the_view_of_a_recorded_run(tmp_path):
    view = fresh(write_recorded(tmp_path / "run"))
    json.dumps(view, allow_nan=False)
    now = view["now"]
    assert view["reset"]
    assert (now["name"], now["kind"], now["task"], now["preset"]) == ("run", "training", "mlp", "quick")
    assert (now["status"], now["update"], now["updates"], now["score"], now["gain"]) == ("done", 3, 9, 72.0, 1.5)
    assert (now["started"], now["last_event"], now["eta_seconds"]) == (100.0, 200.0, None)
    assert now["phases"] == {"rollout": 3.0, "update": 1.0}
    assert (now["decisions_per_second"], now["memory_mb"], now["faults"]) == (9.0, {"learner": 64.0}, 3)
    assert now["config"]["ppo.target_kl"] == 0.05
    assert [row["update"] for row in view["learning"]["rows"]] == [0, 1, 2]
    row = view["learning"]["rows"][2]
    assert row["metrics"]["score"] == 72.0
    assert row["spread"]["score"] == [72.0] * 3
    assert row["seeds"] == {"mlp": {"germinated": 1, "fossilized": 0, "pruned": 0}}
    assert row["anomalies"] == [{"name": "kl_spike", "where": "op", "value": 0.5, "threshold": 0.2}]


def test_the_hosts_of_the_newest_update_and_of_an_earlier_one(tmp_path):
    watcher = RunWatcher(write_recorded(tmp_path / "run"))
    watcher.refresh()
    growth = watcher.view()["growth"]
    (host,) = growth["hosts"]
    assert (growth["update"], host["id"], host["score"]) == (2, "g0-e0", 72.0)
    assert host["segments"] == [{"name": "stem", "parameters": 60}, {"name": "head", "parameters": 40}]
    (slot,) = host["slots"]
    assert (slot["name"], slot["parameters"], slot["stage"][1], slot["contribution"]) == (
        "stem",
        50,
        "training",
        [None, None, 0.25],
    )
    first, second = host["decisions"]
    assert (first["op"], first["slot"], first["legal_ops"]) == ("germinate", "stem", ["wait", "germinate"])
    assert (first["probabilities"], second["probabilities"]) == ({"op": 0.5, "slot": 1.0}, {"op": 0.75})
    assert (second["action"], second["slot"], second["reward_terms"], second["val_loss"]) == (
        "wait",
        None,
        {"score": 0.0},
        0.8,
    )
    assert watcher.hosts(0)["hosts"][0]["score"] == 70.0
    assert watcher.hosts(77) == {"update": 77, "hosts": []}


def test_the_story_is_in_order(tmp_path):
    story = fresh(write_recorded(tmp_path / "run", updates=2))["story"]
    kinds = [entry["kind"] for entry in story["entries"]]
    one = ["episode", "lifecycle", "gaming", "rollback", "update", "anomaly", "plateau"]
    assert kinds == [
        "run_started",
        "worker_fault",
        *one,
        "checkpoint",
        "worker_fault",
        *one,
        "checkpoint",
        "run_finished",
    ]
    assert story["total"] == len(kinds)
    indices = [entry["index"] for entry in story["entries"]]
    assert indices == sorted(set(indices))
    germinated = story["entries"][3]
    assert (germinated["text"], germinated["host"], germinated["slot"], germinated["decision"], germinated["time"]) == (
        "stem: mlp germinated (training)",
        "g0-e0",
        "stem",
        0,
        130.0,  # when its update ended
    )


def test_what_a_later_process_resumed_comes_after_what_it_took_back(tmp_path):
    run = write_recorded(tmp_path / "run", updates=1, end=False)
    append(run / "process.jsonl", *process_events(1), *process_events(2), started(1))
    append(run / "events.jsonl", *update_events(1))
    kinds = [(entry["kind"], entry["update"]) for entry in fresh(run)["story"]["entries"]]
    assert kinds.index(("run_started", 1)) > kinds.index(("checkpoint", 3))
    assert kinds.index(("run_started", 1)) < kinds.index(("episode", 1))


def test_only_what_is_new_is_sent(tmp_path):
    run = write_recorded(tmp_path / "run", updates=1, end=False)
    watcher = RunWatcher(run)
    assert watcher.refresh()
    first = watcher.view()
    assert not watcher.refresh()
    same = watcher.view(first["cursor"])
    assert (same["reset"], same["learning"]["rows"], same["growth"], same["story"]["entries"]) == (False, [], None, [])
    append(run / "events.jsonl", *update_events(1))
    assert watcher.refresh()
    news = watcher.view(first["cursor"])
    assert [row["update"] for row in news["learning"]["rows"]] == [1]
    assert news["growth"]["update"] == 1
    assert {entry["update"] for entry in news["story"]["entries"]} == {1}
    assert news["story"]["entries"][0]["time"] is None
    append(run / "process.jsonl", *process_events(1))
    watcher.refresh()
    later = watcher.view(news["cursor"])  # the entries come again, now with their time
    assert later["learning"]["rows"] == []
    again = {entry["index"]: entry["time"] for entry in later["story"]["entries"]}
    assert all(again[entry["index"]] == 131.0 for entry in news["story"]["entries"])


@pytest.mark.parametrize(
    "cursor", ["", "x", "a:b:c", "::", "x:1:1", "x:-1:2", "x:1", "g" * 10**4, "x:9999999999999999999:1"]
)
def test_an_unknown_cursor_gives_the_whole_view(tmp_path, cursor):
    watcher = RunWatcher(write_recorded(tmp_path / "run"))
    watcher.refresh()
    assert told(watcher.view(cursor)) == told(watcher.view())
    assert Cursor.parse(str(watcher.cursor)) == watcher.cursor


UPDATES = 4
EVENTS = [event for update in range(UPDATES) for event in update_events(update)]
PROCESS = [started(), *(event for update in range(UPDATES) for event in process_events(update)), finished(UPDATES)]
DAMAGE = [b"\xff\n", b"{}\n", b'{"kind":"trace","update":1}\n', b"\n", to_json(Unknown("later", {})).encode() + b"\n"]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_cut_into_refreshes_gives_the_view_of_one_fold(tmp_path_factory, data):
    events, process = lines(EVENTS), lines(PROCESS)
    for damage in data.draw(st.lists(st.sampled_from(DAMAGE), max_size=3)):
        events.insert(data.draw(st.integers(0, len(events))), damage)
    whole = {"events.jsonl": b"".join(events), "process.jsonl": b"".join(process)}
    run = tmp_path_factory.mktemp("run")
    watcher, known = RunWatcher(run), None
    for _ in range(data.draw(st.integers(0, 6))):
        name = data.draw(st.sampled_from(FILES))
        size = data.draw(st.integers(0, len(whole[name])))  # smaller than before: the file is rewound
        (run / name).write_bytes(whole[name][:size])
        watcher.refresh(data.draw(st.sampled_from([None, 0.0])))
        known = data.draw(st.sampled_from([known, watcher.view()["cursor"]]))
    for name, content in whole.items():
        (run / name).write_bytes(content)
    while watcher.refresh():
        pass
    assert told(watcher.view()) == told(fresh(run))
    watcher.view(known)


@settings(deadline=None, max_examples=60)
@given(done=st.integers(1, 4), back=st.integers(0, 3), cut=st.integers(0, 400), seen=st.booleans())
def test_a_run_resumed_at_any_update_gives_the_view_of_one_fold(tmp_path_factory, done, back, cut, seen):
    back = min(back, done)
    run = tmp_path_factory.mktemp("run")
    (run / "events.jsonl").write_bytes(b"".join(lines(EVENTS[: 8 * done]))[: -cut or None])
    append(run / "process.jsonl", *PROCESS[: 1 + 3 * done])
    watcher = RunWatcher(run)
    watcher.refresh()
    (run / "events.jsonl").write_bytes(b"".join(lines(EVENTS[: 8 * back])))
    if seen:
        watcher.refresh()
    append(run / "process.jsonl", started(back))
    # By now the file is longer than it was, and no update is in it twice.
    append(run / "events.jsonl", *EVENTS[8 * back :])
    append(run / "process.jsonl", *(event for update in range(back, UPDATES) for event in process_events(update)))
    watcher.refresh()
    assert told(watcher.view()) == told(fresh(run))
    assert [row["update"] for row in watcher.view()["learning"]["rows"]] == list(range(UPDATES))


def test_reading_in_slices(tmp_path, monkeypatch):
    monkeypatch.setattr(tail, "BLOCK", 500)
    watcher = RunWatcher(write_recorded(tmp_path / "run", updates=6))
    rounds = 0
    while watcher.refresh(-1.0):
        rounds += 1
    assert rounds > 5
    assert not watcher.more
    assert told(watcher.view()) == told(fresh(tmp_path / "run"))


def test_damage_is_counted_and_the_rest_is_shown(tmp_path):
    run = write_recorded(tmp_path / "run")
    with open(run / "events.jsonl", "ab") as file:
        file.write(b"\xff\xfe\n{}\n" + b"x" * (tail.MAX_LINE_BYTES + 5) + b"\n" + b'{"kind":"upd')
    view = fresh(run)
    assert view["now"]["damaged_lines"] == 3
    assert len(view["learning"]["rows"]) == 3


def test_a_damaged_trace_is_left_out(tmp_path):
    run = write_recorded(tmp_path / "run", updates=1)
    text = (run / "events.jsonl").read_text().replace('"score":70.0,"seed', '"score":"x","seed')
    (run / "events.jsonl").write_text(text)
    assert fresh(run)["growth"] is None


def test_pages_of_older_entries(tmp_path, monkeypatch):
    monkeypatch.setattr(run_view, "BOOKMARK", 5)
    watcher = RunWatcher(write_recorded(tmp_path / "run", updates=6))
    watcher.refresh()
    every = watcher.view()["story"]["entries"]
    found, before = [], math.inf
    while page := watcher.events(before=None if before == math.inf else int(before), limit=7)["entries"]:
        found = page + found
        before = page[0]["index"]
    assert found == every
    forward, after = [], -1
    while page := watcher.events(after=after, limit=4)["entries"]:
        forward += page
        after = page[-1]["index"]
    assert forward == every
    anomalies = [entry for entry in every if entry["kind"] == "anomaly"]
    assert watcher.events(kind="anomaly", limit=2)["entries"] == anomalies[-2:]
    assert watcher.events(after=-1, kind="checkpoint", limit=1)["entries"][0]["text"] == "checkpoint update_1"
    assert watcher.events(host="g0-e0", severity="warning")["entries"] == [e for e in every if e["kind"] == "rollback"]
    assert watcher.events(host="g9-e9")["entries"] == []
    assert watcher.events(before=0)["entries"] == []


def test_names_of_strangers_are_one_line_of_visible_characters(tmp_path):
    name = "<script>\x1b[2J\u202e" + "x" * 500
    view = fresh(write_recorded(tmp_path / "run", slot=name))
    texts = json.dumps(view, ensure_ascii=False)
    assert "\x1b" not in texts
    assert "\u202e" not in texts
    assert "<script>" in texts  # shown as text; a page escapes it
    assert len(view["growth"]["hosts"][0]["slots"][0]["name"]) < 300


def test_a_missing_run_is_empty(tmp_path):
    watcher = RunWatcher(tmp_path / "none")
    watcher.refresh()
    view = watcher.view()
    assert (view["now"]["status"], view["learning"]["rows"], view["growth"]) == ("stale", [], None)
    write_recorded(tmp_path / "none")
    assert watcher.refresh()
    assert watcher.view()["now"]["status"] == "done"


def test_a_killed_run_is_stale_and_a_held_one_runs(tmp_path):
    from simic.storage.run_directory import RunDirectory

    run = write_recorded(tmp_path / "run", end=False)
    watcher = RunWatcher(run)
    with RunDirectory(run).lock_log():
        watcher.refresh()
        now = watcher.view()["now"]
        assert now["status"] == "running"
        assert now["eta_seconds"] == 6 * 4.0  # six updates are left, four seconds each
    assert watcher.refresh()  # nothing was written, but the lock is free
    assert watcher.view()["now"]["status"] == "stale"


def test_more_traces_than_are_kept_can_be_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(run_view, "MAX_TRACED", 2)
    watcher = RunWatcher(write_recorded(tmp_path / "run", updates=4))
    watcher.refresh()
    assert [bool(watcher.hosts(update)["hosts"]) for update in range(4)] == [False, False, True, True]
    assert os.path.getsize(tmp_path / "run" / "events.jsonl") > 0
    assert isinstance(next(iter(watcher.state.traces)), EpisodeTrace)
    assert isinstance(EVENTS[5], Update)


@pytest.mark.parametrize(
    ("config", "told", "shown"),
    [
        ({"workers": None}, {"count": 4, "nodes": 3}, {"count": 4, "nodes": 3, "lost": 0}),
        ({"workers": 2}, {}, {"count": 2, "nodes": 1, "lost": 0}),  # before the first update, and of older runs
        ({"workers": None}, {}, None),
    ],
)
def test_the_workers_of_a_cluster_are_shown(tmp_path, config, told, shown):
    append(tmp_path / "process.jsonl", started(**config), PhaseTimings(update=0, seconds={"a": 1.0}, workers=told))
    assert fresh(tmp_path)["now"]["workers"] == shown
