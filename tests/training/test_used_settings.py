"""Every flag of `simic train`, and every setting of a file, is read by an algorithm or refused."""

import json
from dataclasses import fields
from typing import Any

import pytest

from simic.cli import FLAGS, TrainCommand
from simic.config import RunConfig, differences, to_dict
from simic.storage.bundle import save_bundle
from simic.training.episode_files import FORMAT
from simic.training.used_settings import names_player, reads, used_settings

OTHER: dict[str, Any] = {
    **{"task": "digits", "data_dir": "x", "algorithm": None, "episodes": None, "rng_seed": 7, "updates": 3},
    **{"num_groups": 3, "group_size": 5, "workers": 1, "device": "cuda", "level": "debug", "record": True},
    **{"tensorboard": True, "wandb": True, "checkpoint_every": 9, "compare": 0, "horizon": 9, "incubation": "shadow"},
    **{"reward": "sparse", "gamma": 0.5, "learning_rate": 0.1, "entropy_coefficient": 0.3},
}
"""A value of every flag that is not the quick preset's; algorithm and episodes make the cases."""
PLAYS = {"task", "data_dir", "updates", "num_groups", "group_size", "workers", "record", "horizon", "incubation"}
PLAYS |= {"reward"}
REFUSED = {
    "ppo": set(),
    "imitation": set(),
    "iql": {"entropy_coefficient"},
    "imitation of records": PLAYS,
    "iql of records": PLAYS | {"entropy_coefficient"},
}


@pytest.fixture
def chosen(tmp_path) -> dict[str, dict[str, Any]]:
    """Flags that choose each case; without a comparison, which trains hosts in any case."""
    (tmp_path / "episodes").mkdir()
    save_bundle(tmp_path / "episodes/update_000000.safetensors", {"format": FORMAT, "version": 1, "groups": []})
    cases: dict[str, dict[str, Any]] = {"ppo": {}}
    for name in ("imitation", "iql"):
        cases[name] = {"algorithm": name, "episodes": ("random",)}
        cases[f"{name} of records"] = {"algorithm": name, "episodes": (str(tmp_path),)}
    return {name: {"compare": 0, **flags} for name, flags in cases.items()}


def test_the_table_has_every_flag():
    assert set(OTHER) == set(FLAGS)


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("flag", sorted(set(FLAGS) - {"algorithm", "episodes", "compare"}))
def test_a_flag_changes_what_is_read_or_is_refused(chosen, case, flag):
    before = TrainCommand(**chosen[case]).resolve()[0]
    command = TrainCommand(**chosen[case], **{flag: OTHER[flag]})
    if flag in REFUSED[case]:
        with pytest.raises(
            ValueError, match=rf"^flags: algorithm {before.algorithm}.* ignores --{flag.replace('_', '-')};"
        ):
            command.resolve()
        return
    changed = [name for name, _, _ in differences(to_dict(before), to_dict(command.resolve()[0]))]
    assert any(reads(before, name) for name in changed)


def test_the_comparison_reads_what_hosts_need(chosen):
    flags = chosen["iql of records"] | {"compare": 2}
    for flag in ("task", "horizon", "incubation", "workers"):
        TrainCommand(**flags, **{flag: OTHER[flag]}).resolve()
    with pytest.raises(ValueError, match="iql from episodes on record ignores --updates; leave it out"):
        TrainCommand(**flags, updates=3).resolve()


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_are_not_read_are_not_printed(chosen, case):
    config = TrainCommand(**chosen[case]).resolve()[0]
    names = [name for name, _, _ in differences(to_dict(RunConfig()), {})]
    ignored = [name for name in names if not reads(config, name)]
    printed = [name for name, _, _ in differences(used_settings(config), {})]
    assert set(printed) == set(names) - set(ignored)


@pytest.mark.parametrize(
    ("case", "settings", "refused"),
    [
        ("imitation", {"ppo": {"clip_range": 0.3}}, "ppo.clip_range"),
        ("imitation", {"ppo": {"clip_range": 0.2}}, ""),  # what it would be anyway
        ("imitation", {"iql": {"steps": 9}}, "iql.steps"),
        ("imitation", {"imitation": {"passes": 9}}, ""),
        ("iql", {"twins": False, "thresholds": {"warm_up": 9}}, "thresholds.warm_up, twins"),
        ("iql", {"ppo": {"scale_rewards": False}}, ""),
        ("ppo", {"iql": {"steps": 9}}, "iql.steps"),
        ("iql of records", {"num_tasks": 3}, "num_tasks"),
    ],
)
def test_a_file_that_chooses_what_is_ignored_is_refused(chosen, tmp_path, case, settings, refused):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(settings))
    command = TrainCommand(**chosen[case], config=path)
    if not refused:
        command.resolve()
        return
    with pytest.raises(ValueError, match=rf"--config .*c.json: algorithm .* ignores {refused}; leave it out"):
        command.resolve()


def test_who_plays_and_what_is_on_record(tmp_path, chosen):
    assert names_player("heuristic")
    assert not names_player(str(tmp_path))
    assert not names_player(str(tmp_path / "episodes/update_000000.safetensors"))
    save_bundle(tmp_path / "controller.safetensors", {"format": "simic-agent"})
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "short").write_text("abc")
    for name in ("controller.safetensors", "plan.json", "short"):
        assert names_player(str(tmp_path / name))
    assert not names_player(str(tmp_path / "nowhere"))


def test_other_flags_are_told_elsewhere():
    """These choose where settings come from, and where a run goes; `--resume` is refused by imitation and IQL."""
    rest = {item.name for item in fields(TrainCommand)} - set(FLAGS)
    assert rest == {"preset", "config", "out", "resume", "init", "fast_dev_run", "print_config", "quiet", "profile"}
