"""Every flag of `simic train`, and every setting of a file, is read by an algorithm or refused."""

import json
from dataclasses import fields, replace

import pytest

from simic.commands.flags import parse_command
from simic.commands.train import COMMON, SHORT, TrainCommand
from simic.config import RunConfig, to_dict
from simic.environment.lookahead_config import LookaheadConfig
from simic.settings import differences, settings_of
from simic.storage.bundle import save_bundle
from simic.training.episode_files import FORMAT
from simic.training.used_settings import names_player, reads, used_settings

OTHER = {
    **{"task": "digits", "data-dir": "x", "rng-seed": "7", "updates": "3", "num-groups": "3", "group-size": "5"},
    **{
        "workers": "1",
        "backend": "ray",
        "device": "cuda",
        "level": "debug",
        "record": "",
        "tensorboard": "",
        "wandb": "",
    },
    **{"checkpoint-every": "9", "horizon": "9", "incubation": "shadow", "reward": "sparse", "gamma": "0.5"},
    **{"learning-rate": "0.1", "entropy-coefficient": "0.3"},
}
"""A value of flags that is not the quick preset's; algorithm, episodes and compare make the cases."""
PLAYS = {"task", "data-dir", "updates", "num-groups", "group-size", "workers", "record", "horizon", "incubation"}
PLAYS |= {"reward", "backend"}
REFUSED = {
    "ppo": set(),
    "imitation": set(),
    "iql": {"entropy-coefficient"},
    "imitation of records": PLAYS,
    "iql of records": PLAYS | {"entropy-coefficient"},
}


@pytest.fixture
def chosen(tmp_path) -> dict[str, list[str]]:
    """Flags that choose each case; without a comparison, which trains hosts in any case."""
    (tmp_path / "episodes").mkdir()
    save_bundle(tmp_path / "episodes/update_000000.safetensors", {"format": FORMAT, "version": 1, "groups": []})
    cases = {"ppo": ["--compare", "0"]}
    for name in ("imitation", "iql"):
        for case, source in ((name, "random"), (f"{name} of records", str(tmp_path))):
            cases[case] = ["--compare", "0", "--algorithm", name, "--episodes", source]
    return cases


def resolve(*flags: str) -> RunConfig:
    return parse_command(TrainCommand, flags, prog="simic train").resolve()[0][""]


def given(flag: str) -> list[str]:
    return [f"--{flag}", *([OTHER[flag]] if OTHER[flag] else [])]


def test_the_table_has_every_common_flag():
    assert {*COMMON, *SHORT} - {f"--{flag}" for flag in OTHER} == {
        *("--algorithm", "--episodes", "--compare", "--address")
    }


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("flag", OTHER)
def test_a_flag_changes_what_is_read_or_is_refused(chosen, case, flag):
    before = resolve(*chosen[case])
    if flag in REFUSED[case]:
        with pytest.raises(ValueError, match=rf"^flags: algorithm {before.algorithm}.* ignores --{flag};"):
            resolve(*chosen[case], *given(flag))
        return
    changed = differences(to_dict(before), to_dict(resolve(*chosen[case], *given(flag))))
    assert any(reads(before, name) for name, _, _ in changed)


@pytest.mark.parametrize("flags", [["--address", "auto"], ["--gpus-per-worker", "0.5"]])
def test_what_only_ray_reads_is_refused_without_it(flags):
    with pytest.raises(ValueError, match=f"^flags: {flags[0]} is for backend ray: choose that, or leave it out"):
        resolve(*flags)
    assert reads(resolve("--backend", "ray", *flags), flags[0][2:].replace("-", "_"))


def test_every_setting_of_another_algorithm_is_refused(chosen):
    for setting in settings_of(RunConfig):
        section = setting.name.partition(".")[0]
        if section in ("imitation", "iql"):
            assert reads(resolve(*chosen["ppo"]), setting.name) is False
            assert reads(resolve(*chosen[section]), setting.name)


def test_the_comparison_reads_what_hosts_need(chosen):
    flags = [*chosen["iql of records"], "--compare", "2"]
    for flag in ("task", "horizon", "incubation", "workers"):
        resolve(*flags, *given(flag))
    with pytest.raises(ValueError, match="iql from recorded episodes ignores --updates; leave it out"):
        resolve(*flags, "--updates", "3")


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_are_not_read_are_not_printed(chosen, case):
    config = resolve(*chosen[case])
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
    flags = [*chosen[case], "--config", str(path)]
    if not refused:
        resolve(*flags)
        return
    with pytest.raises(ValueError, match=rf"--config .*c.json: algorithm .* ignores {refused}; leave it out"):
        resolve(*flags)


def test_who_plays_and_what_is_on_record(tmp_path, chosen):
    assert names_player("heuristic")
    assert names_player("lookahead")
    assert not names_player(str(tmp_path))
    assert not names_player(str(tmp_path / "episodes/update_000000.safetensors"))
    save_bundle(tmp_path / "controller.safetensors", {"format": "simic-agent"})
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "short").write_text("abc")
    for name in ("controller.safetensors", "plan.json", "short"):
        assert names_player(str(tmp_path / name))
    assert not names_player(str(tmp_path / "nowhere"))


def test_other_flags_choose_where_settings_come_from_and_where_a_run_goes():
    rest = {item.name for item in fields(TrainCommand)} - {"settings", "learning_rate", "entropy_coefficient"}
    rest -= {"preset", "config", "out", "resume", "init", "plugins", "fast_dev_run", "print_config", "quiet", "profile"}
    assert rest == set()


def test_the_search_is_set_only_where_it_plays():
    search = RunConfig(algorithm="imitation", episodes=("lookahead",))
    assert reads(search, "lookahead.every")
    assert not reads(search, "lookahead.policy")
    assert reads(replace(search, lookahead=LookaheadConfig(follow="policy")), "lookahead.policy")
    assert not reads(replace(search, episodes=("heuristic",)), "lookahead.every")
    assert not reads(RunConfig(), "lookahead.every")
