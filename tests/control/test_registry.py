"""Controllers by name: built-ins, users' own, plans and saved ones."""

import numpy as np
import pytest
from helpers.facts import make_facts

import simic
from simic.control.learned import make_network
from simic.control.registry import CONTROLLERS, make_controller, names_controller
from simic.policy.config import PolicyConfig
from simic.ppo.agent import PPOAgent


def test_every_built_in_can_be_made_and_decides():
    for name, entry in CONTROLLERS.items():
        assert entry.description, name
        assert np.asarray(make_controller(name, 3).act(make_facts(decision=0))).shape == (1, 8)


@pytest.mark.usefixtures("own_names")
def test_a_controller_of_ones_own_gets_the_rng_seed_if_it_takes_one():
    seen = []

    @simic.controller("seeded")
    class Seeded(simic.WaitController):
        """Waits, and knows its rng seed."""

        def __init__(self, rng_seed: int) -> None:
            seen.append(rng_seed)

    @simic.controller("plain", description="of one's own")
    def plain() -> simic.WaitController:
        return simic.WaitController()

    assert isinstance(make_controller("seeded", 7), Seeded)
    assert seen == [7]
    assert isinstance(make_controller("plain", 7), simic.WaitController)
    assert CONTROLLERS["seeded"].description == "Waits, and knows its rng seed."
    assert CONTROLLERS["plain"].description == "of one's own"


def test_names_and_files_are_told_apart(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    assert names_controller("wait")
    assert names_controller(str(tmp_path / "plan.json"))
    assert not names_controller(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="'nobody'"):
        make_controller("nobody")


def test_a_run_stands_for_its_controller(tmp_path):
    """As in `simic evaluate`; a run that is not done has none yet."""
    with pytest.raises(ValueError, match="holds neither a controller nor a checkpoint"):
        make_controller(str(tmp_path))
    PPOAgent(make_network(PolicyConfig(hidden_size=8, encoding_size=8))).save(tmp_path / "controller.safetensors")
    assert isinstance(make_controller(str(tmp_path)), simic.LearnedController)
