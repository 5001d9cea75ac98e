"""Settings: presets are valid, files are strict, every refusal names the remedy."""

import json
import re
from dataclasses import fields, is_dataclass

import pytest

from simic.cli import TrainCommand
from simic.config import (
    DEFAULT_PRESET,
    MISSING,
    PRESETS,
    RESUMABLE,
    RunConfig,
    differences,
    override,
    read_config,
    read_run_config,
    to_dict,
    with_defaults,
)
from simic.ppo.schedule import Schedule
from simic.registry import nearest
from simic.telemetry.anomalies import Thresholds

BASE = PRESETS[DEFAULT_PRESET][1]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_survive_a_file(name, tmp_path):
    _, config = PRESETS[name]
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    assert override(RunConfig(), read_config(tmp_path / "config.json")) == config
    assert config.reward.gamma == config.ppo.gamma
    assert config.hosts_per_update == config.num_groups * config.group_size


def test_every_setting_has_a_help_string():
    import inspect

    def check(cls: type) -> None:
        source = inspect.getsource(cls)
        for item in fields(cls):
            default = item.default_factory() if callable(item.default_factory) else item.default
            if is_dataclass(default):
                check(type(default))
            else:
                assert re.search(rf'\n    {item.name}: .*\n    """', source), f"{cls.__name__}.{item.name}"

    check(RunConfig)


# Files.


def write(path, text):
    path.write_text(text)
    return path


def test_json_and_toml_say_the_same(tmp_path):
    one = write(
        tmp_path / "a.json", '{"updates": 7, "task": "digits", "ppo": {"gamma": 0.9}, "reward": {"gamma": 0.9}}'
    )
    other = write(tmp_path / "a.toml", 'updates = 7\ntask = "digits"\nppo.gamma = 0.9\n[reward]\ngamma = 0.9\n')
    config = override(BASE, read_config(one))
    assert config == override(BASE, read_config(other))
    assert (config.updates, config.task, config.ppo.gamma, config.reward.gamma) == (7, "digits", 0.9, 0.9)
    assert config.ppo.learning_rate == BASE.ppo.learning_rate  # what is not named stays


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"udpates": 3}, "there is no setting 'udpates'; did you mean updates?"),
        ({"ppo": {"lerning_rate": 1.0}}, "there is no setting 'ppo.lerning_rate'; did you mean ppo.learning_rate?"),
        ({"learning_rate": 1.0}, "there is no setting 'learning_rate'; did you mean ppo.learning_rate?"),
        ({"ppo": {"horizon": 9}}, "there is no setting 'ppo.horizon'; did you mean episode.horizon?"),
        ({"governor": {"warm_up": 9}}, "there is no setting 'governor.warm_up'; did you mean thresholds.warm_up?"),
        ({"horizn": 9}, "there is no setting 'horizn'; did you mean episode.horizon?"),
        ({"zzzzzzzz": 1}, "there is no setting 'zzzzzzzz'; valid ones are task, data_dir, algorithm, "),
        ({"ppo": 3}, "ppo must be a table of settings, got 3"),
        ({"updates": "many"}, "updates must be int, got 'many'"),
        ({"updates": 3.5}, "updates must be int, got 3.5"),
        ({"rng_seed": 2**64}, "rng_seed must be a 64-bit number, got one of 20 digits"),
        ({"updates": True}, "updates must be int, got True"),
        ({"record": 1}, "record must be bool, got 1"),
        ({"ppo": {"gamma": "high"}}, "ppo.gamma must be float, got 'high'"),
        ({"ppo": {"gamma": True}}, "ppo.gamma must be float, got True"),
        ({"ppo": {"target_kl": "none"}}, "ppo.target_kl must be float, got 'none'"),
        ({"ppo": {"gamma": None}}, "ppo.gamma must be float, got None"),
        ({"level": "debugg"}, "level has no choice 'debugg'; did you mean debug?"),
        ({"task": "digit-cnn"}, "task has no choice 'digit-cnn'; did you mean digits-cnn?"),
        ({"policy": {"core": "xx"}}, "policy.core has no choice 'xx'; valid ones are lstm, gru"),
        ({"episodes": "heuristic"}, "episodes must be tuple, got 'heuristic'"),
        ({"episodes": [1]}, "episodes must be str, got 1"),
        ({"ppo": {"head_entropy": {"op": "x"}}}, "ppo.head_entropy.op must be float, got 'x'"),
        ({"updates": 0}, "updates must be at least 1, got 0"),
        ({"workers": -1}, "workers must not be negative, got -1"),
        ({"ppo": {"gamma": 1.5}}, "ppo.gamma must be between 0 and 1, got 1.5"),
        ({"ppo": {"learning_rate": float("nan")}}, "ppo.learning_rate must be above 0, got nan"),
        ({"episode": {"horizon": 0}}, "episode.horizon must be at least 1, got 0"),
        ({"algorithm": "iql"}, "algorithm iql learns from recorded episodes: name them with --episodes"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_right(settings, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        override(BASE, settings)


@pytest.mark.parametrize("part", ["ppo", "reward"])
def test_there_is_one_gamma(part):
    with pytest.raises(ValueError, match=r"gamma is .*, the learner's is .*; set both to one value"):
        override(BASE, {part: {"gamma": 0.5}})
    changed = override(BASE, {"ppo": {"gamma": 0.5}, "reward": {"gamma": 0.5}})
    assert changed.ppo.gamma == changed.reward.gamma == 0.5


def test_values_become_what_their_type_wants():
    config = override(
        BASE,
        {"ppo": {"gamma": 1, "target_kl": None, "head_entropy": {"op": 2}}, "episodes": ["a", "b"], "algorithm": "iql"},
    )
    assert (type(config.ppo.gamma), config.ppo.target_kl, config.episodes) == (float, None, ("a", "b"))
    assert config.ppo.head_entropy == {"op": 2.0}
    assert override(BASE, {"lifecycle": {"max_seeds": 2}}).lifecycle.max_seeds == 2


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


def test_a_refused_change_changes_nothing():
    before = to_dict(BASE)
    with pytest.raises(ValueError, match="no setting"):
        override(BASE, {"updates": 3, "nonsense": 1})
    assert to_dict(BASE) == before


def test_nearest():
    assert nearest("b.gamma", ["a.gamma", "a.beta"]) == "did you mean a.gamma?"
    assert nearest("gamm", ["gamma", "beta"]) == "did you mean gamma?"
    assert nearest("xyz", ["gamma", "beta"]) == "valid ones are gamma, beta"


def test_differences_are_told_by_dotted_name():
    one, other = {"a": 1, "b": {"c": 2, "d": [1]}, "e": 5}, {"a": 1, "b": {"c": 3, "d": [1]}, "f": 6}
    assert list(differences(one, other)) == [("b.c", 2, 3), ("e", 5, MISSING), ("f", MISSING, 6)]
    assert list(differences(to_dict(BASE), to_dict(BASE))) == []


def test_what_may_differ_when_resuming_exists():
    assert set(RESUMABLE) <= {name for name, _, _ in differences(to_dict(RunConfig()), {})}


def test_thresholds_are_settings_too():
    config = override(BASE, {"thresholds": {"kl_factor": 9}})
    assert config.thresholds == Thresholds(kl_factor=9.0)


# Where settings come from: preset, file, --fast-dev-run, flags; later ones win.


def resolve(tmp_path, settings=None, **flags):
    if settings is not None:
        flags["config"] = write(tmp_path / "c.json", json.dumps(settings))
    return TrainCommand(**flags).resolve()


def test_later_sources_win(tmp_path):
    file = {"updates": 100, "num_groups": 9, "rng_seed": 4}
    assert resolve(tmp_path)[0] == BASE
    config, sources = resolve(tmp_path, file, preset="standard", fast_dev_run=True, num_groups=3, level="debug")
    assert config.updates == 2  # --fast-dev-run over the file
    assert config.num_groups == 3  # a flag over all
    assert config.rng_seed == 4  # the file over the preset
    assert config.level == "debug"
    assert config.keep == PRESETS["standard"][1].keep
    path = tmp_path / "c.json"
    assert sources == ["preset standard", f"file {path}", "--fast-dev-run", "flags --num-groups --level"]
    assert resolve(tmp_path, file)[0].updates == 100


def test_flags_reach_their_settings(tmp_path):
    config, _ = resolve(
        tmp_path, gamma=0.5, horizon=9, incubation="shadow", reward="sparse", learning_rate=0.1,
        entropy_coefficient=0.3, record=True, tensorboard=True, wandb=True, episodes=("random",), algorithm="imitation",
    )  # fmt: skip
    assert config.ppo.gamma == config.reward.gamma == 0.5
    assert (config.episode.horizon, config.lifecycle.incubation, config.reward.scheme) == (9, "shadow", "sparse")
    assert (config.imitation.learning_rate, config.imitation.entropy_coefficient) == (0.1, 0.3)
    assert config.ppo.learning_rate == BASE.ppo.learning_rate
    ppo = resolve(tmp_path, learning_rate=0.1, entropy_coefficient=0.3)[0].ppo
    assert (ppo.learning_rate, ppo.entropy_coefficient) == (0.1, 0.3)
    assert (config.record, config.tensorboard, config.wandb) == (True, True, True)
    assert (config.episodes, config.algorithm) == (("random",), "imitation")


def test_a_flag_of_zero_counts(tmp_path):
    config, sources = resolve(tmp_path, workers=0, rng_seed=0)
    assert config.workers == 0
    assert sources[-1] == "flags --rng-seed --workers"


def test_a_run_that_is_resumed_by_its_path_keeps_its_settings(tmp_path):
    saved = override(BASE, {"group_size": 5, "rng_seed": 8})
    write(tmp_path / "config.json", json.dumps(to_dict(saved)))
    config, sources = TrainCommand(resume=str(tmp_path), updates=99).resolve()
    assert config == override(saved, {"updates": 99})
    assert sources == [f"run {tmp_path}", "flags --updates"]
    assert TrainCommand(resume="auto", out=tmp_path).resolve() == (saved, [f"run {tmp_path}"])
    given = TrainCommand(resume="auto", out=tmp_path, preset="standard").resolve()[1]
    assert given == ["preset standard"]  # what does not agree with the run is refused later
    assert TrainCommand(resume="auto", out=tmp_path / "new").resolve()[1] == ["preset quick"]


def test_episodes_are_not_ignored():
    with pytest.raises(ValueError, match="ppo learns by trying, not from --episodes: add --algorithm imitation or iql"):
        override(BASE, {"episodes": ["heuristic"]})


# Schedules.


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("updates", [1, 7, 5000])
def test_the_rate_of_every_update_is_above_zero_however_many_there_are(name, updates):
    """Annealing over a fixed number of updates would train all later ones at learning rate 0."""
    config = override(PRESETS[name][1], {"updates": updates})
    ppo = config.annealed_ppo
    assert ppo.learning_rate_schedule == "linear"
    schedule = Schedule(ppo)
    assert [schedule.progress(0), schedule.progress(updates - 1)] == [0.0, (updates - 1) / updates]
    assert schedule.progress(updates - 1) < 1
    assert schedule.entropy_coefficient(updates) == pytest.approx(0.005)


def test_an_annealing_length_of_one_s_own_is_kept_but_may_not_end_before_the_run():
    config = override(BASE, {"ppo": {"anneal_updates": 100}})
    assert Schedule(config.annealed_ppo).progress(50) == 0.5
    message = r"ppo.anneal_updates \(9\) is less than updates \(16\): the learning rate would be 0 .* set it to null"
    with pytest.raises(ValueError, match=message):
        override(BASE, {"ppo": {"anneal_updates": 9}})
    with pytest.raises(ValueError, match="less than updates"):
        override(config, {"updates": 101})
    # Entropy that has reached its end stays there: nothing is lost.
    assert override(BASE, {"ppo": {"anneal_updates": 9, "learning_rate_schedule": "constant"}}).updates == 16


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
