"""docs/metrics.md explains every number that a run tells, and nothing else."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from helpers import tiny_run

from simic.api import train
from simic.telemetry.anomalies import NAMES, Thresholds
from simic.telemetry.events import PhaseTimings, Update

TEXT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def entries(section: str) -> dict[str, list[str]]:
    """Rows of the table in a section: name, then meaning, unit and healthy range."""
    body = TEXT.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line.startswith("| `")
    ]
    names = [row[0].strip("`") for row in rows]
    assert len(set(names)) == len(names)
    return {name: row[1:] for name, row in zip(names, rows, strict=True)}


def general(name: str) -> str:
    """The entry that a figure of one head, operation or reward term belongs to."""
    return re.sub("/.*", "/*", name)


def test_every_figure_of_an_update_has_an_entry_and_every_entry_a_figure(tmp_path, tiny_task):
    tiny_run.play_run(tmp_path, updates=1)
    (update,), (timings,) = tiny_run.told(tmp_path, Update), tiny_run.told(tmp_path, PhaseTimings)
    assert {general(name) for name in update.metrics} == entries("Episodes").keys() | entries("Learning").keys()
    assert timings.seconds.keys() == entries("Phases").keys()


def test_every_anomaly_has_an_entry_with_its_limit():
    anomalies = entries("Anomalies")
    assert anomalies.keys() == set(NAMES)
    limits = Thresholds()
    for name, limit in {
        "ratio_explosion": 100 * limits.ratio_share,
        "ratio_collapse": 100 * limits.ratio_share,
        "kl_spike": limits.kl_factor,
        "value_collapse": limits.explained_variance,
        "entropy_collapse": limits.entropy,
        "gradient_explosion": limits.gradient_factor,
        "gradient_drift": limits.drift_factor,
        "state_explosion": limits.state_rms,
    }.items():
        assert f" {limit:g}" in anomalies[name][0], name
    learning = entries("Learning")
    assert f" {limits.ratio_high:g}" in learning["ratio_exploded"][0]
    assert f" {limits.ratio_low:g}" in learning["ratio_collapsed"][0]
    assert f"{limits.host_gradient:.0e}".replace("+0", "") in anomalies["host_gradient"][0]


@pytest.mark.parametrize("algorithm", ["imitation", "iql"])
def test_figures_of_lessons_have_entries(tmp_path, tiny_task, monkeypatch, algorithm):
    monkeypatch.setattr("simic.ppo.offline.REPORT_STEPS", 1)
    short = {"imitation": {"passes": 1}, "iql": {"steps": 1}}
    config = tiny_run.make_config(algorithm=algorithm, episodes=["heuristic"], updates=1, **short)
    assert train(config, out=tmp_path).exit_code == 0
    known = entries("Learning from recorded episodes").keys() | entries("Learning").keys()
    assert {general(name) for event in tiny_run.told(tmp_path, Update) for name in event.metrics} <= known


def test_every_entry_has_a_meaning_a_unit_and_a_healthy_range():
    sections = re.findall(r"\n## (.*)\n", TEXT)
    assert len(sections) == 6
    for section in sections:
        for name, cells in entries(section).items():
            assert len(cells) == 3, name
            assert all(cells), name


def test_settings_that_are_named_exist():
    config = tiny_run.make_config()
    known = {item.name for part in (config, config.ppo, config.episode, config.thresholds) for item in fields(part)}
    named = set(re.findall(r"`([a-z_]+)`", TEXT))
    for setting in ("target_kl", "max_gradient_norm", "entropy_floor", "max_skipped_steps", "horizon", "ppo_epochs"):
        assert setting in named & known
