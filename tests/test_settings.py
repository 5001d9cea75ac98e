"""Settings: changes are checked, every refusal names the remedy, differences have dotted names."""

import re

import pytest

from simic.config import PRESETS, RunConfig, to_dict
from simic.settings import MISSING, differences, flatten, nest, override, settings_of, to_tables

BASE = PRESETS["quick"].config


def test_settings_have_dotted_names_types_and_help_texts():
    settings = {setting.name: setting for setting in settings_of(RunConfig)}
    clip = settings["ppo.clip_range"]
    assert (clip.type, clip.default) == (float, 0.2)
    assert clip.help
    assert "ppo" not in settings
    assert "reward.gamma" not in settings  # it follows ppo.gamma


def test_tables_and_dotted_names_say_the_same():
    assert nest({"a": 1, "b.c": 2, "b.d.e": 3}) == {"a": 1, "b": {"c": 2, "d": {"e": 3}}}
    assert flatten({"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": {}}) == {"a": 1, "b.c": 2, "b.d.e": 3, "f": {}}
    assert nest(flatten(to_tables(BASE))) == to_tables(BASE)


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
        ({"algorithm": "iql"}, "algorithm iql learns from episodes: name some with --episodes"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_right(settings, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        override(BASE, settings)


def test_values_become_what_their_type_wants():
    config = override(
        BASE,
        {"ppo": {"gamma": 1, "target_kl": None, "head_entropy": {"op": 2}}, "episodes": ["a", "b"], "algorithm": "iql"},
    )
    assert (type(config.ppo.gamma), config.ppo.target_kl, config.episodes) == (float, None, ("a", "b"))
    assert config.ppo.head_entropy == {"op": 2.0}
    assert override(BASE, {"lifecycle": {"max_seeds": 2}}).lifecycle.max_seeds == 2


def test_a_refused_change_changes_nothing():
    before = to_dict(BASE)
    with pytest.raises(ValueError, match="no setting"):
        override(BASE, {"updates": 3, "nonsense": 1})
    assert to_dict(BASE) == before


def test_differences_are_told_by_dotted_name():
    one, other = {"a": 1, "b": {"c": 2, "d": [1]}, "e": 5}, {"a": 1, "b": {"c": 3, "d": [1]}, "f": 6}
    assert list(differences(one, other)) == [("b.c", 2, 3), ("e", 5, MISSING), ("f", MISSING, 6)]
    assert list(differences(to_dict(BASE), to_dict(BASE))) == []
