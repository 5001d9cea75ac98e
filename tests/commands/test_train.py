"""simic train: where settings come from, plugins, and runs side by side."""

import json
import re
import sys
from dataclasses import replace

import pytest

from simic.cli import main
from simic.commands.flags import parse_command
from simic.commands.train import TrainCommand, comparison
from simic.config import DEFAULT_PRESET, PRESETS, RunConfig, to_dict
from simic.lifecycle.stages import LifecycleConfig
from simic.settings import override
from simic.telemetry.events import RunStarted
from simic.telemetry.reader import read_events

BASE = PRESETS[DEFAULT_PRESET].config


def write(path, text):
    path.write_text(text)
    return path


# Where settings come from: preset, file, --fast-dev-run, flags; later ones win.


def resolve(*flags: str) -> tuple[RunConfig, list[str]]:
    configs, sources = parse_command(TrainCommand, flags, prog="simic train").resolve()
    return configs[""], sources


def test_later_sources_win(tmp_path):
    path = write(tmp_path / "c.json", json.dumps({"updates": 100, "num_groups": 9, "rng_seed": 4}))
    assert resolve()[0] == BASE
    flags = ["--preset", "standard", "--config", str(path), "--fast-dev-run", "--num-groups", "3", "--level", "debug"]
    config, sources = resolve(*flags)
    assert config.updates == 2  # --fast-dev-run over the file
    assert config.num_groups == 3  # a flag over all
    assert config.rng_seed == 4  # the file over the preset
    assert config.level == "debug"
    assert config.keep == PRESETS["standard"].config.keep
    assert sources == ["preset standard", f"file {path}", "--fast-dev-run", "flags --num-groups --level"]
    assert resolve("--config", str(path))[0].updates == 100


def test_short_flags_reach_their_settings():
    config, sources = resolve(
        *("--gamma", "0.5", "--horizon", "9", "--incubation", "shadow", "--reward", "sparse", "--learning-rate", "0.1"),
        *("--entropy-coefficient", "0.3", "--record", "--episodes", "random", "--algorithm", "imitation"),
    )
    assert config.ppo.gamma == config.discounted_reward.gamma == 0.5
    assert (config.episode.horizon, config.lifecycle.incubation, config.reward.scheme) == (9, "shadow", "sparse")
    assert (config.imitation.learning_rate, config.imitation.entropy_coefficient) == (0.1, 0.3)
    assert config.ppo.learning_rate == BASE.ppo.learning_rate
    assert sources[1] == (
        "flags --horizon --incubation --reward --gamma --algorithm --episodes --record --learning-rate "
        "--entropy-coefficient"
    )
    ppo = resolve("--learning-rate", "0.1", "--entropy-coefficient", "0.3")[0].ppo
    assert (ppo.learning_rate, ppo.entropy_coefficient) == (0.1, 0.3)
    with pytest.raises(ValueError, match=r"^--learning-rate and --ppo.learning-rate are the same setting"):
        resolve("--learning-rate", "0.1", "--ppo.learning-rate", "0.2")


def test_a_run_that_is_resumed_by_its_path_keeps_its_settings(tmp_path):
    saved = override(BASE, {"group_size": 5, "rng_seed": 8})
    write(tmp_path / "config.json", json.dumps(to_dict(saved)))
    assert resolve("--resume", str(tmp_path), "--updates", "99") == (
        override(saved, {"updates": 99}),
        [f"run {tmp_path}", "flags --updates"],
    )
    assert resolve("--resume", "auto", "--out", str(tmp_path)) == (saved, [f"run {tmp_path}"])
    given = resolve("--resume", "auto", "--out", str(tmp_path), "--preset", "standard")[1]
    assert given == ["preset standard"]  # what does not agree with the run is refused later
    assert resolve("--resume", "auto", "--out", str(tmp_path / "new"))[1] == ["preset quick"]


def test_several_values_are_several_configs():
    flags = ["--reward", "score,loss", "--ppo.clip-range", "0.1,0.2", "--updates", "3"]
    configs, _ = parse_command(TrainCommand, flags, prog="simic train").resolve()
    assert list(configs) == ["score-0.1", "score-0.2", "loss-0.1", "loss-0.2"]
    for label, config in configs.items():
        assert label == f"{config.reward.scheme}-{config.ppo.clip_range}"
        assert config.updates == 3
    for flags, message in (
        (["--updates", "3,4"], "--updates must be int, got '3,4'"),  # it determines the hosts
        (["--reward", "loss,los"], "--reward has no choice 'los'; did you mean loss?"),
        (["--reward", "loss,loss"], "--reward must be different values, separated by commas, got loss,loss"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            parse_command(TrainCommand, flags, prog="simic train").resolve()


def test_a_file_and_flags_complete_each_other(tmp_path):
    path = write(tmp_path / "a.toml", 'algorithm = "iql"\n[iql]\nsteps = 9\n')
    config, _ = resolve("--config", str(path), "--episodes", "random", "--learning-rate", "0.5")
    assert (config.iql.steps, config.iql.learning_rate, config.episodes) == (9, 0.5, ("random",))


def exit_code(*args: str) -> int:
    try:
        main(list(args))
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


TINY = ["--updates", "1", "--num-groups", "1", "--group-size", "2", "--horizon", "2", "--workers", "0"]


def test_runs_side_by_side_end_with_their_paired_comparison(tmp_path, capsys):
    out = tmp_path / "both"
    flags = [*TINY, "--reward", "score,loss", "--task", "spirals-mlp", "--compare", "2", "--out", str(out)]
    assert exit_code("train", *flags) == 0
    for scheme in ("score", "loss"):
        config = json.loads((out / scheme / "config.json").read_text())
        assert (config["reward"]["scheme"], config["rng_seed"]) == (scheme, 0)
        assert (out / scheme / "controller.safetensors").is_file()
    first, second = (next(iter(read_events(out / scheme, [RunStarted]))) for scheme in ("score", "loss"))
    assert first.data_hashes == second.data_hashes  # the same hosts
    results = json.loads((out / "comparison" / "results.json").read_text())
    assert list(results["controllers"]) == ["wait", "random", "heuristic", "score", "loss"]
    difference = results["summary"]["paired"]["loss"]["score"]["score"]
    assert difference["low"] <= difference["mean"] <= difference["high"]
    assert "minus score" in capsys.readouterr().out
    assert exit_code("train", *flags) == 2
    assert "already contains a run" in capsys.readouterr().err
    assert exit_code("train", *flags, "--resume", "auto", "--updates", "2") == 0


def test_one_config_can_be_printed(capsys):
    assert exit_code("train", "--reward", "score,loss", "--print-config") == 2
    assert "give each setting one value" in capsys.readouterr().err


PLUGIN = """
import simic

@simic.reward("mine")
def mine():
    return {"score": 1.0}

@simic.task("my-task")
def my_task():
    from simic.tasks.registry import make_task
    return make_task("spirals-mlp")
"""


def test_a_plugin_is_named_to_train_and_to_resume(tmp_path, capsys, monkeypatch, own_names):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("simic.plugins._loaded", [])
    write(tmp_path / "my_plugin.py", PLUGIN)
    flags = [*TINY, "--task", "my-task", "--reward", "mine", "--compare", "0"]
    assert exit_code("train", *flags) == 2
    assert "--reward has no choice 'mine'; did you mean" in capsys.readouterr().err
    assert exit_code("train", "--plugin", "my_plugin", *flags, "--out", "run") == 0
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["plugins"], saved["task"], saved["reward"]["scheme"]) == (["my_plugin"], "my-task", "mine")
    monkeypatch.setattr("simic.plugins._loaded", [])  # as in another process
    capsys.readouterr()
    assert exit_code("train", "--resume", "run", "--updates", "2") == 2
    assert "plugins that are not loaded: add --plugin my_plugin" in capsys.readouterr().err
    assert exit_code("train", "--plugin", "my_plugin", "--resume", "run", "--updates", "2") == 0


def test_the_comparison_lets_a_slot_hold_as_many_seeds_as_training_did():
    config = replace(BASE, lifecycle=LifecycleConfig(seeds_per_slot=2, incubation="shadow"))
    compared = comparison(config, [])
    assert compared.lifecycle == config.lifecycle
    assert "--seeds-per-slot 2" in compared.command
