"""The leaderboard: hand-worked means and intervals, verdicts, and Markdown that labels cannot break."""

from typing import Any

import pytest
from rich.console import Console

from simic import api
from simic.cli import main
from simic.evaluation.leaderboard import leaderboard, paired_interval, print_sets, set_rows
from simic.tasks.registry import TASKS

SCORES = {
    ("one", "heuristic"): (80.0, 82.0),
    ("one", "a|b"): (70.0, 72.0),
    ("two", "heuristic"): (50.0, 60.0),
    ("two", "a|b"): (52.0, 62.0),
}


def make_results(scores: dict[tuple[str, str], tuple[float, ...]] = SCORES) -> dict[str, Any]:
    episodes = [
        {"controller": label, "task": task, "rng_seed": seed, "score": value, "metric": value + 1}
        | {"parameters": 1000 * (seed + 1), "flops": 2e9}
        for (task, label), values in scores.items()
        for seed, value in enumerate(values)
    ]
    kinds = {"heuristic": "heuristic", "a|b": "learned"}
    return {
        "command": "simic evaluate --suite real",
        "settings": {"suite": "real"},
        "tasks": ["one", "two"],
        "rng_seeds": [0, 1],
        "controllers": {label: {"kind": kinds[label]} for _, label in scores},
        "notes": ["something is left out"],
        "episodes": episodes,
    }


def test_an_interval_by_hand():
    # differences 1, 2, 3: mean 2, deviation 1, t of 2 degrees of freedom 4.3027
    mean, low, high = paired_interval([11, 12, 13], [10, 10, 10])
    assert mean == 2
    assert (low, high) == pytest.approx((2 - 4.30265 / 3**0.5, 2 + 4.30265 / 3**0.5), abs=1e-4)
    with pytest.raises(ValueError, match="at least 2 pairs, got 1"):
        paired_interval([1], [2])


def test_rows_are_means_and_verdicts():
    rows = set_rows(make_results())
    first, second = rows["one"]
    assert (first.label, first.score, first.metric, first.parameters, first.score_difference) == (
        *("heuristic", 81.0, 82.0, 1500.0),
        None,
    )
    assert second.score_difference == (-10, -10, -10)
    assert second.below
    assert not second.above
    assert rows["two"][0].label == "a|b"
    assert rows["two"][0].above


def test_pairs_are_those_of_one_rng_seed():
    results = make_results(SCORES | {("one", "heuristic"): (80.0, 60.0), ("one", "a|b"): (79.0, 59.0)})
    results["episodes"].sort(key=lambda own: own["rng_seed"] if own["controller"] == "heuristic" else -own["rng_seed"])
    row = next(row for row in set_rows(results)["one"] if row.label == "a|b")
    assert row.score_difference == (-1, -1, -1)


def test_the_leaderboard_as_markdown():
    lines = leaderboard(make_results()).splitlines()
    assert "simic evaluate --suite real" in lines
    assert "| score | one | two | mean | above / below heuristic |" in lines
    assert "| heuristic | 81.00 | 55.00 | 68.00 |  |" in lines
    assert r"| a\|b | 71.00 | 57.00 | 64.00 | 1 / 1 |" in lines
    assert r"| a\|b | one | -10.00 (-10.00, -10.00) | -10.00 (-10.00, -10.00) | yes |" in lines
    assert r"| a\|b | two | +2.00 (+2.00, +2.00) | +2.00 (+2.00, +2.00) | no |" in lines
    assert "| heuristic | 81.00 | 82.00 | 1,500 | 2.0 |  |" in lines
    assert lines[-1] == "something is left out"


def test_a_table_of_every_set_is_printed():
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        print_sets(make_results(), console)
    text = captured.get()
    assert "…" not in text
    assert text.index("one") < text.index("two")
    assert text.count("below") == 1


@pytest.fixture
def tiny_sets(tiny_comparison_task, monkeypatch) -> None:
    """The files of the suite are not looked for; every set is the tiny task."""
    monkeypatch.setattr(TASKS, "_entries", {n: e._replace(find_files=None, own_loop=False) for n, e in TASKS.items()})


def test_a_suite_from_the_command_line(tiny_sets, tmp_path, grower, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["evaluate", "--suite=real", f"--controllers=ours={grower}", "--tasks=dna-mlp,letter-mlp"]
    words += ["--rng-seeds=2", "--workers=0", "--out=out"]
    main(words)
    printed = capsys.readouterr().out
    assert "minus heuristic" in printed
    text = (tmp_path / "out" / "leaderboard.md").read_text()
    assert "| static_wide(ours) |" in text
    assert "| ours | letter-mlp |" in text
    (tmp_path / "out" / "leaderboard.md").unlink()
    monkeypatch.setattr(api.ComparisonRun, "_play", _play_nothing(api.ComparisonRun._play))  # pyright: ignore[reportPrivateUsage]
    main(words)
    assert (tmp_path / "out" / "leaderboard.md").read_text() == text


def _play_nothing(play: Any) -> Any:
    """The same, of a run that must find all of its units done."""

    def check(run: Any, pool: Any, candidates: Any) -> None:
        for task in run.config.named_tasks:
            assert all(run.parts.get(run._key(own, task)) for own in candidates)
        play(run, pool, candidates)

    return check
