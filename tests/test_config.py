"""Settings: presets are valid, files are strict, every refusal names the remedy."""

import json
import re
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from simic.commands.flags import parse_command
from simic.commands.train import TrainCommand
from simic.config import (
    DEFAULT_PRESET,
    PRESETS,
    RESUMABLE,
    VERSION,
    RunConfig,
    read_config,
    read_run_config,
    to_dict,
    upgrade,
    with_defaults,
)
from simic.plugins import load_plugins
from simic.ppo.schedule import Schedule
from simic.rewards.schemes import RewardConfig
from simic.settings import Setting, is_table, nest, override, plain_type, settings_of, to_tables
from simic.telemetry.anomalies import Thresholds

BASE = PRESETS[DEFAULT_PRESET].config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_survive_a_file(name, tmp_path):
    _, config = PRESETS[name]
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    assert override(RunConfig(), read_config(tmp_path / "config.json")) == config
    assert config.discounted_reward.gamma == config.ppo.gamma


# Every setting, by flag and by file.

NEEDS = {
    **{name: ["--algorithm", name, "--episodes", "random"] for name in ("iql", "imitation")},
    **{"algorithm": ["--episodes", "random"], "episodes": ["--algorithm", "iql"]},
    **{name: ["--backend", "ray"] for name in ("address", "gpus_per_worker")},
    "lookahead": ["--algorithm", "imitation", "--episodes", "lookahead", "--lookahead.follow", "policy"],
}
"""Flags without which settings of a section would be refused."""
SHARES = ("ppo.gamma", "ppo.gae_lambda", "ppo.entropy_floor", "imitation.held_out", "iql.expectile", "iql.target_rate")
SHARES += ("thresholds.ratio_low", "thresholds.ratio_share", "thresholds.entropy", "thresholds.decay")
SHARES += ("thresholds.explained_variance", "governor.learned_share")
SPECIAL = {
    "address": "10.0.0.1:6379",
    **dict.fromkeys(SHARES, 0.25),
    "governor.collapsed_share": 0.95,
    "task": "digits",
    "algorithm": "iql",
    "data_dir": "x",
    "episodes": ("random",),
    "plugins": ("json",),
    "ppo.anneal_updates": 99,
    "lookahead.pooling": 0.25,
    "lookahead.rules": ("heuristic",),
    "lookahead.policy": "plan",
    "reward.scheme": "loss",
    "policy.network": "factored",  # the only one without plugins
}
"""Values of settings that would not be valid if they were one larger."""


def another_value(setting: Setting) -> Any:
    """A valid value that is not the one of the quick preset."""
    value: Any = BASE
    for name in setting.name.split("."):
        value = getattr(value, name)
    kind = plain_type(setting.type)
    if setting.name in SPECIAL:
        return SPECIAL[setting.name]
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != value)
    if is_table(kind):
        return {"intervention" if setting.name == "reward.weights" else "op": 2.0}
    return not value if kind is bool else kind((value or 0) + 1)


@pytest.mark.parametrize("setting", settings_of(RunConfig), ids=lambda setting: setting.name)
def test_every_setting_has_a_help_text_a_flag_and_a_place_in_files(tmp_path, setting):
    assert setting.help.endswith(".")
    load_plugins(["json"])
    value = another_value(setting)
    flag = "--plugin" if setting.name == "plugins" else f"--{setting.name.replace('_', '-')}"
    if value is True or value is False:
        texts = [flag if value else f"--no-{flag[2:]}"]
    elif isinstance(value, dict):
        texts = [part for key, entry in value.items() for part in (f"{flag}.{key}", str(entry))]
    else:
        texts = [flag, *(value if isinstance(value, tuple) else [str(value)])]
    others = NEEDS.get(setting.name.partition(".")[0], [])
    (by_flag,) = parse_command(TrainCommand, [*others, *texts], prog="simic train").resolve()[0].values()
    write(tmp_path / "a.json", json.dumps({"version": VERSION, **nest({setting.name: value})}))
    arguments = [*others, "--config", str(tmp_path / "a.json")]
    (by_file,) = parse_command(TrainCommand, arguments, prog="simic train").resolve()[0].values()
    found = by_flag
    for name in setting.name.split("."):
        found = getattr(found, name)
    assert found == value
    assert by_file == by_flag


# Files.


def write(path, text):
    path.write_text(text)
    return path


def test_json_and_toml_say_the_same(tmp_path):
    one = write(
        tmp_path / "a.json", '{"updates": 7, "task": "digits", "ppo": {"gamma": 0.9}, "reward": {"scale": 0.5}}'
    )
    other = write(tmp_path / "a.toml", 'updates = 7\ntask = "digits"\nppo.gamma = 0.9\n[reward]\nscale = 0.5\n')
    config = override(BASE, read_config(one))
    assert config == override(BASE, read_config(other))
    assert (config.updates, config.task, config.ppo.gamma, config.reward.scale) == (7, "digits", 0.9, 0.5)
    assert config.ppo.learning_rate == BASE.ppo.learning_rate  # what is not named stays


def test_there_is_one_gamma():
    changed = override(BASE, {"ppo": {"gamma": 0.5}})
    assert changed.ppo.gamma == changed.discounted_reward.gamma == 0.5
    with pytest.raises(ValueError, match=r"^reward.gamma is not a setting: it follows ppo.gamma"):
        override(BASE, {"reward": {"gamma": 0.5}})
    with pytest.raises(ValueError, match=r"gamma is 0.5, the learner's is 0.99"):
        RunConfig(reward=RewardConfig(gamma=0.5))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"{updates: 3}", "a.json is not valid JSON: "),
        ("a.toml", b"updates 3", "a.toml is not valid TOML: "),
        ("a.json", b"[1, 2]", "a.json must hold a table of settings, got list"),
        ("a.json", b"\xff\xfe{}", "a.json is not UTF-8 text (byte 0)"),
        ("a.toml", b"\xff\xfe{}", "a.toml is not UTF-8 text (byte 0)"),
        ("a.json", b'{"updates": NaN}', "a.json: updates must be a finite number, got nan"),
        ("a.toml", b"updates = nan", "a.toml: updates must be a finite number, got nan"),
        ("a.json", b'{"updates": 1, "updates": 2}', "'updates' occurs twice in one table"),
        ("a.json", b'{"a": ' * 9999, "a.json nests values more than 64 deep"),
        ("a.toml", b"a = " + b"[" * 9999, "a.toml nests values too deeply"),
        ("a.toml", b"a = " + b"[" * 70 + b"]" * 70, "is nested more than 64 deep"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_config(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"there is no config file {path}"):
            read_config(path)


def test_what_may_differ_when_resuming_exists():
    assert set(RESUMABLE) <= {setting.name for setting in settings_of(RunConfig)}


def test_thresholds_are_settings_too():
    config = override(BASE, {"thresholds": {"kl_factor": 9}})
    assert config.thresholds == Thresholds(kl_factor=9.0)


def test_episodes_are_not_ignored():
    with pytest.raises(
        ValueError, match="ppo plays its own episodes: leave out --episodes, or add --algorithm imitation or iql"
    ):
        override(BASE, {"episodes": ["heuristic"]})


# Schedules.


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("updates", [1, 7, 5000])
def test_the_rate_of_every_update_is_above_zero_however_many_there_are(name, updates):
    """Annealing over a fixed number of updates would train all later ones at learning rate 0."""
    config = override(PRESETS[name].config, {"updates": updates})
    ppo = config.annealed_ppo
    assert ppo.learning_rate_schedule == "linear"
    schedule = Schedule(ppo)
    assert [schedule.progress(0), schedule.progress(updates - 1)] == [0.0, (updates - 1) / updates]
    assert schedule.progress(updates - 1) < 1
    assert schedule.entropy_coefficient(updates) == pytest.approx(0.005)


def test_an_annealing_length_of_one_s_own_is_kept_but_may_not_end_before_the_run():
    config = override(BASE, {"ppo": {"anneal_updates": 100}})
    assert Schedule(config.annealed_ppo).progress(50) == 0.5
    message = rf"ppo.anneal_updates \(9\) is less than updates \({BASE.updates}\): the learning rate would be 0 .* null"
    with pytest.raises(ValueError, match=message):
        override(BASE, {"ppo": {"anneal_updates": 9}})
    with pytest.raises(ValueError, match="less than updates"):
        override(config, {"updates": 101})
    # Entropy that has reached its end stays there: nothing is lost.
    assert override(BASE, {"ppo": {"anneal_updates": 9, "learning_rate_schedule": "constant"}}).ppo.anneal_updates == 9


# Settings of an older simic.


def test_settings_that_a_run_lacks_have_their_defaults(tmp_path):
    settings = to_dict(override(BASE, {"rng_seed": 3}))
    del settings["iql"], settings["ppo"]["target_kl"], settings["data_dir"]
    config, missing = read_run_config(write(tmp_path / "config.json", json.dumps(settings)))
    assert {name for name in missing if not name.startswith("iql.")} == {"data_dir", "ppo.target_kl"}
    assert "iql.steps" in missing
    assert (config.rng_seed, config.ppo.target_kl) == (3, RunConfig().ppo.target_kl)
    assert with_defaults(settings) == to_dict(config)
    with pytest.raises(ValueError, match=r"config.json: there is no setting 'rng_sed'; did you mean rng_seed\?"):
        read_run_config(write(tmp_path / "config.json", '{"rng_sed": 3}'))


FILES = Path(__file__).parent / "data" / "files_of_0_1"


def test_a_file_of_0_1_is_upgraded(tmp_path):
    old = json.loads((FILES / "config.json").read_text())
    config, missing = read_run_config(FILES / "config.json")
    assert (config.rng_seed, config.ppo.gamma, config.discounted_reward.gamma) == (5, 1.0, 1.0)
    assert "plugins" in missing
    old |= {"task": "excerpts", "episodes": ["schedule", "heuristic"], "algorithm": "iql"}
    old["reward"]["scheme"] = "thrifty"
    upgraded, _ = read_run_config(write(tmp_path / "config.json", json.dumps(old)))
    assert (upgraded.task, upgraded.reward.scheme) == ("subsets", "score_with_costs")
    assert upgraded.episodes == ("plan", "heuristic")
    assert with_defaults(old) == to_dict(upgraded)
    assert old["task"] == "excerpts"  # what is upgraded is a copy


def test_settings_have_a_version():
    assert to_dict(BASE)["version"] == VERSION
    assert upgrade(to_dict(BASE)) == to_tables(BASE)
    assert upgrade({"version": 2, "task": "excerpts"}) == {"task": "excerpts"}  # of this version, so not renamed
    assert upgrade({"reward": {"gamma": 0.9}}) == {"reward": {}, "ppo": {"gamma": 0.9}}
    for settings, message in (
        ({"version": 3}, "version must be at most 2, got 3: a newer simic wrote these settings"),
        ({"reward": {"gamma": 0.9}, "ppo": {"gamma": 0.8}}, "reward.gamma is 0.9, ppo.gamma is 0.8"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            upgrade(settings)
    assert upgrade({"reward": 3, "episode": [], "task": 4}) == {"reward": 3, "episode": [], "task": 4}


def test_a_file_names_plugins_but_never_loads_them(tmp_path):
    path = write(tmp_path / "config.json", json.dumps({"plugins": ["antigravity"], "reward": {"scheme": "mine"}}))
    with pytest.raises(ValueError, match=r"config.json: .* not loaded: add --plugin antigravity"):
        read_run_config(path)
    assert "antigravity" not in sys.modules
    with pytest.raises(ValueError, match="add --plugin antigravity"):
        RunConfig(plugins=("antigravity",))
