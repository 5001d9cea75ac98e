"""The terminal's picture of a run: every section at 80 x 24, letters instead of colours, no text of strangers raw."""

import time
from typing import Any

import pytest
from rich.cells import cell_len

from simic.dashboard.terminal_screen import Picture, draw, duration, number, sparkline

STAGES = ["dormant", "germinated", "training", "training", "blending", "holding", "fossilized"]


def host(env: int, **changes: Any) -> dict[str, Any]:
    slot = {
        "name": "block1",
        "stage": STAGES,
        "alpha": [0.0] * 7,
        "contribution": [None, None, None, 0.5, 1.25, None, None],
        "blueprint": ["", *["mlp"] * 6],
        "parameters": 40,
    }
    own = {"id": f"g0-e{env}", "group": 0, "env": env, "task": "digits", "score": 70.0 + env, "metric": 0.7}
    own |= {"host_parameters": 1200, "parameters": 1500, "rolled_back": False, "slots": [slot]}
    return own | {"decisions": [], "segments": []} | changes


def view(**changes: Any) -> dict[str, Any]:
    now = {
        **{"name": "night", "status": "running", "reason": "", "task": "mixed", "algorithm": "ppo", "preset": "quick"},
        **{"update": 12, "updates": 30, "started": 0.0, "last_event": time.time(), "eta_seconds": 754.0},
        **{"decisions_per_second": 123.4, "score": 71.25, "gain": 1.5, "rules": {"heuristic": 70.5}},
        **{"phases": {"rollout": 9.0, "update": 1.0}, "memory_mb": {"learner": 512.4}, "faults": 0, "damaged_lines": 0},
        "workers": {"count": 4, "nodes": 1, "in_flight": 4, "lost": 0},
        "lights": [
            {"name": "kl", "label": "KL divergence", "value": 0.0123, "state": "ok"},
            {"name": "value", "label": "explained variance", "value": -2.0, "state": "bad"},
            {"name": "gradient", "label": "gradient", "value": None, "state": "unknown"},
        ],
    }
    entries = [
        {"index": 0, "update": 11, "severity": "info", "host": "g0-e1", "text": "block1: mlp germinated"},
        {"index": 1, "update": 12, "severity": "warning", "host": None, "text": "kl_spike"},
    ]
    return {
        **{"cursor": "a:1:1", "reset": True, "now": now | changes.pop("now", {})},
        "learning": {"rows": [{"update": u, "metrics": {"score": float(u)}} for u in range(12)]},
        "growth": {"update": 11, "hosts": [host(0), host(1)]},
        "story": {"entries": entries, "total": 2},
    } | changes


def picture(**changes: Any) -> Picture:
    result = Picture()
    result.add(view(**changes))
    return result


def lines(shown: Picture, width: int = 80, height: int | None = 24, **options: Any) -> list[str]:
    return [line.plain for line in draw(shown, width, height, **options)]


def test_a_small_terminal_has_every_section():
    drawn = lines(picture(), keys="q quit")
    assert drawn[0] == "night  running  ppo mixed quick  score ▁▂▂▃▄▄▅▅▆▇▇█"
    assert drawn[1].startswith("update 12 of 30  ━━━━━━━━━━━━──────────────────  12 min 34 s left  last event 0")
    assert drawn[2] == "score 71.25  gain 1.5  heuristic 70.5"
    assert drawn[3] == "123.4 decisions/s  rollout 90% update 10%  4 workers  512 MB memory"
    assert drawn[4] == "x explained variance -2   + KL divergence 0.0123    ? gradient -"
    assert drawn[5] == "Update 11  g germinated t training b blending h holding F fossilized"
    assert drawn[6] == "g0-e0  digits  score 70  1,200 -> 1,500 parameters"
    assert drawn[7] == "  block1  .gttbhF  mlp +1.25"
    assert drawn[11:13] == ["    11 g0-e1 block1: mlp germinated", "!   12 kl_spike"]
    assert drawn[-1] == "q quit"


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (30, 8), (10, 3), (1, 1)])
def test_the_screen_has_exactly_the_size_of_the_terminal(size):
    width, height = size
    shown = picture(growth={"update": 11, "hosts": [host(env, task="数字" * 40) for env in range(40)]})
    for keys in ("", "q quit"):
        drawn = lines(shown, width, height, keys=keys)
        assert len(drawn) == height
        assert max(map(cell_len, drawn)) <= width


def test_without_a_height_all_hosts_are_shown():
    drawn = lines(picture(growth={"update": 11, "hosts": [host(env) for env in range(40)]}), height=None)
    assert sum(line.startswith("g0-e") for line in drawn) == 40
    assert drawn[-1] == "!   12 kl_spike"


def test_the_selected_host_comes_first():
    drawn = lines(picture(), selected=1)
    assert drawn[6].startswith("g0-e1")
    assert not any(line.startswith("g0-e0") for line in drawn)


def test_a_long_episode_is_sampled_from_its_first_state_to_its_last():
    slot = host(0)["slots"][0] | {"stage": ["dormant"] + ["training"] * 998 + ["fossilized"]}
    row = lines(picture(growth={"update": 1, "hosts": [host(0, slots=[slot])]}))[7]
    assert row == f"  block1  .{'t' * 42}F  mlp +1.25"


def test_later_views_add_rows_and_a_reset_starts_anew():
    shown = picture()
    rows = [{"update": 11, "metrics": {"score": 1.0}}, {"update": 12, "metrics": {"score": 5.0}}]
    again = view()["story"]["entries"][1] | {"text": "kl_spike, known better"}
    entry = {"index": 2, "update": 12, "severity": "info", "host": None, "text": "new"}
    story = {"entries": [again, entry], "total": 3}
    shown.add(view(reset=False, learning={"rows": rows}, growth=None, story=story))
    assert [row["metrics"]["score"] for row in shown.rows.values()] == [*range(11), 1.0, 5.0]
    texts = [item["text"] for item in shown.entries.values()]
    assert texts == ["block1: mlp germinated", "kl_spike, known better", "new"]
    assert len(shown.hosts) == 2
    shown.add(view(growth=None))
    assert len(shown.rows) == 12
    assert not shown.hosts


def test_a_seed_that_is_gone_is_in_parentheses_without_a_contribution():
    slot = host(0)["slots"][0] | {
        "stage": ["blending", "pruned"],
        "blueprint": ["mlp", ""],
        "contribution": [1.0, None],
    }
    assert lines(picture(growth={"update": 1, "hosts": [host(0, slots=[slot])]}))[7] == "  block1  bx  (mlp)"


def test_a_run_without_figures_is_shown_too():
    drawn = lines(picture(now=dict.fromkeys(view()["now"]), learning={"rows": []}, growth=None))
    assert drawn[:4] == ["-  -  ", "update 0", "score -  gain -", "- decisions/s"]


def test_a_users_own_training_has_decisions_and_its_own_metrics():
    rows = [{"update": 0, "metrics": {"val_loss": 0.9, "parameters": 1500.0}}]
    own = {"kind": "growth", "score": None, "gain": None, "rules": {}, "update": 1, "updates": 12}
    shown = picture(now=own, learning={"rows": rows}, growth={"update": 0, "hosts": [host(0, score=None)]})
    drawn = lines(shown)
    assert drawn[1].startswith("decision 1 of 12 ")
    assert drawn[2] == "val_loss 0.9  parameters 1,500"
    assert drawn[5].startswith("Decision 0 ")
    assert drawn[6] == "g0-e0  digits  1,200 -> 1,500 parameters"


def test_names_of_strangers_cannot_control_the_terminal():
    shown = picture(now={"name": "\x1b[2J", "task": "[red]x[/red]", "rules": {"\x07": 1.0}})
    assert "\x1b" not in "".join(lines(shown))
    assert lines(shown)[0].startswith(r"\x1b[2J  running  ppo [red]x[/red]")


def test_a_terminal_without_unicode_gets_ascii():
    assert "".join(lines(picture(), unicode=False)).isascii()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min 01 s"), (3600, "1 h 00 min"), (90000, "1 d 1 h")],
)
def test_durations_have_two_units(seconds, text):
    assert duration(seconds) == text


def test_numbers_and_sparklines_by_hand():
    assert [number(value) for value in (None, 0.01234567, 12345.6, -2)] == ["-", "0.01235", "12,346", "-2"]
    assert sparkline([0.0, None, 7.0]) == "▁ █"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([1.0]) == ""
