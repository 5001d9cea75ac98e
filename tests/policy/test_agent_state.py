"""Checks of a saved agent, part by part. Whole files and commands: tests/test_controller_files.py."""

import copy
from dataclasses import asdict

import pytest
import torch
from helpers.rollouts import flat_agent

from simic.policy.agent_state import (
    LEARNING,
    check_agent_state,
    check_can_learn,
    check_format,
    check_scales,
    check_tensors,
    naming,
    read_policy_config,
    shown,
)
from simic.policy.config import PolicyConfig
from simic.storage.bundle import BundleError


@pytest.fixture(scope="module")
def agent():
    return flat_agent()


def test_the_state_of_an_agent_passes_all_checks(agent):
    state = agent.state_dict()
    check_format(state)
    check_agent_state(state, agent.about())
    check_can_learn(state)
    check_tensors(state["network"], agent.plain.state_dict())
    check_scales(state)


@pytest.mark.parametrize("name", LEARNING)
def test_a_state_without_a_part_of_learning_cannot_continue(agent, name):
    state = {key: part for key, part in agent.state_dict().items() if key != name}
    check_format(state)
    with pytest.raises(BundleError, match=f"without {name} cannot continue training"):
        check_can_learn(state)


def test_a_difference_names_both_values(agent):
    with pytest.raises(BundleError, match=r"gamma = 0.99, this one 0.5"):
        check_agent_state(agent.state_dict(), agent.about() | {"gamma": 0.5})


def test_moments_may_be_of_single_precision_and_weights_must_be(agent):
    """Devices without float64 save their statistics as float32."""
    own = agent.plain.state_dict()
    saved = copy.deepcopy(own)
    saved["normalize.base.mean"] = saved["normalize.base.mean"].float()
    check_tensors(saved, own)
    saved["critic.0.weight"] = saved["critic.0.weight"].double()
    with pytest.raises(BundleError, match=r"network's critic.0.weight is of type float64, not float32"):
        check_tensors(saved, own)


def test_sizes_are_checked_before_a_network_is_allocated():
    settings = asdict(PolicyConfig(hidden_size=10, encoding_size=20))
    assert read_policy_config(settings, 500) == PolicyConfig(hidden_size=10, encoding_size=20)
    with pytest.raises(BundleError, match="need more than 500 weights, the file holds 499"):
        read_policy_config(settings, 499)


def test_a_running_return_has_one_axis(agent):
    state = copy.deepcopy(agent.state_dict())
    state["return_scale"]["_running"] = torch.zeros(2, 2)
    with pytest.raises(BundleError, match=r"_running has shape \(2, 2\), not one axis"):
        check_scales(state)


def test_messages_name_the_file_and_stay_short():
    with pytest.raises(BundleError, match=r"^here: broken$"), naming("here"):
        raise BundleError("broken")
    assert shown("x" * 1000) == "'" + "x" * 119 + "..."
    assert shown("a\nb", plain=True) == r"a\nb"
