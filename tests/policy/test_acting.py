"""One decision: what a policy cannot act on is refused, by the name of the part and the environment."""

import numpy as np
import pytest
import torch

from simic.gymnasium.flat_network import RecurrentActorCritic
from simic.policy.acting import choose
from simic.policy.config import PolicyConfig


@pytest.fixture
def network():
    torch.manual_seed(0)
    return RecurrentActorCritic(4, (3, 2), PolicyConfig(hidden_size=8, encoding_size=8))


def decide(network, **changes):
    """A decision for three environments."""
    given = {"base": np.zeros((3, 4))} | changes
    return choose(network, given, np.ones((3, 2, 3), dtype=bool), network.initial_state(3))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_observation_that_is_not_finite_is_refused(network, value):
    """Normalisation would clip infinity to a harmless figure, and NaN would make the choice mean nothing."""
    base = np.zeros((3, 4))
    base[2, 1] = value
    with pytest.raises(ValueError, match="observation 'base' of environment 2 is not finite"):
        decide(network, base=base)


def test_an_observation_of_another_size_is_refused(network):
    with pytest.raises(ValueError, match=r"observation 'base' must have 4 features for this network, got \(3, 5\)"):
        decide(network, base=np.zeros((3, 5)))


def test_a_mask_without_a_legal_choice_is_refused(network):
    mask = np.ones((3, 2, 3), dtype=bool)
    mask[1, 0] = False
    with pytest.raises(ValueError, match="environment 1 has no legal choice for head action_0"):
        choose(network, {"base": np.zeros((3, 4))}, mask, network.initial_state(3))


def test_a_decision_has_an_action_and_a_state_for_every_environment(network):
    choice = decide(network)
    assert choice.action.shape == choice.log_prob.shape == (3, 2)
    assert choice.state.shape == (3, network.state_size)
    assert (choice.action[:, 0] < 3).all()
