"""Agents on disk: going on from a file is going on, in another process too; what does not fit is refused whole."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.rollouts import flat_agent, growth_agent, play
from safetensors import safe_open

import simic
from simic.policy.network import compile_network
from simic.ppo.agent import PPOAgent
from simic.storage.bundle import BundleError, load_bundle, save_bundle

SETTINGS = {
    "learning_rate_schedule": "kl",
    "recompute_advantages": True,
    "ppo_epochs": 2,
    "num_minibatches": 2,
    "critic_weight_decay": 0.1,
}
GO_ON = """
import sys
import torch
torch.set_num_threads(1)
from helpers.rollouts import {make}, play
agent = {make}(rng_seed=5, **{settings})
agent.load(sys.argv[1])
for seed in (2, 3):
    agent.update(play(agent, 10, 4, seed=seed)[0])
agent.save(sys.argv[2])
"""


def tensors_of(state, where="") -> dict[str, torch.Tensor]:
    """Every leaf of a state by its path; what is no tensor becomes one."""
    if isinstance(state, dict):
        items = state.items()
    elif isinstance(state, list | tuple):
        items = enumerate(state)
    else:
        return {where: state if isinstance(state, torch.Tensor) else torch.tensor(hash(state))}
    return {path: leaf for key, value in items for path, leaf in tensors_of(value, f"{where}/{key}").items()}


def assert_equal_states(one, other):
    ours, theirs = tensors_of(one), tensors_of(other)
    assert ours.keys() == theirs.keys()
    different = [path for path, value in ours.items() if not torch.equal(value, theirs[path])]
    assert not different


@pytest.mark.slow
@pytest.mark.parametrize("make", [flat_agent, growth_agent])
def test_resume_in_a_fresh_process_is_exact(make, tmp_path):
    """2 + 2 updates with a file and a process between them, against 4: every tensor, and every action after them."""
    whole = make(rng_seed=5, **SETTINGS)
    for seed in range(4):
        whole.update(play(whole, 10, 4, seed=seed)[0])
        if seed == 1:
            whole.save(tmp_path / "half")
    program = GO_ON.format(make=make.__name__, settings=SETTINGS)
    path = os.pathsep.join([str(Path(simic.__file__).parents[1]), str(Path(__file__).parents[1])])
    arguments = [sys.executable, "-c", program, str(tmp_path / "half"), str(tmp_path / "end")]
    subprocess.run(arguments, check=True, env=os.environ | {"PYTHONPATH": path})
    resumed = make(rng_seed=0, **SETTINGS)
    resumed.load(tmp_path / "end")
    assert_equal_states(resumed.state_dict(), whole.state_dict())
    assert resumed.learning_rate == whole.learning_rate != whole.config.learning_rate
    assert (resumed.rng_seed, resumed.update_count, resumed.gradient_steps) == (5, 4, whole.gradient_steps)
    ours, theirs = (play(agent, 10, 4, seed=9)[0] for agent in (resumed, whole))
    assert (ours.action == theirs.action).all()
    assert resumed.update(ours) == whole.update(theirs)


def test_everything_that_matters_is_in_the_state():
    """Normalisers, scales with the returns under way, Adam's moments, the generator and the counts."""
    agent = flat_agent()
    agent.update(play(agent, 6, 3)[0])
    paths = tensors_of(agent.state_dict())
    for part in ("/network/normalize.base.mean", "/return_scale/_running", "/value_scale/mean", "/generator"):
        assert part in paths
    assert any(path.endswith("exp_avg_sq") for path in paths)
    assert paths["/return_scale/_running"].shape == (3,)


def test_draws_go_on_where_the_saved_agent_stood():
    giver, taker = flat_agent(), flat_agent(rng_seed=1)
    play(giver, 6, 3)  # its generator is somewhere in the middle
    taker.load_state_dict(giver.state_dict())
    one, other = (play(agent, 20, 3)[0].action for agent in (giver, taker))
    assert torch.equal(one, other)


def test_an_agent_that_took_over_a_state_shares_nothing_with_it():
    giver, taker = flat_agent(), flat_agent(rng_seed=1)
    giver.update(play(giver, 6, 3)[0])
    taker.load_state_dict(giver.state_dict())
    before = copy.deepcopy(giver.state_dict())
    taker.update(play(taker, 6, 3)[0])
    assert_equal_states(giver.state_dict(), before)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: flat_agent({"hidden_size": 9}), r"policy.*'hidden_size': 8.*this one.*'hidden_size': 9"),
        (lambda: flat_agent({"core": "gru"}), r"'core': 'lstm'.*'core': 'gru'"),
        (lambda: flat_agent(gamma=0.5), r"gamma = 0.99, this one 0.5"),
        (lambda: flat_agent(head_sizes=(3, 2, 2)), r"heads = \['action_0', 'action_1'\], this one .*'action_2'"),
        (lambda: flat_agent(head_sizes=(3, 5)), r"actors.1.bias has shape \(2,\), this one.s \(5,\)"),
        (growth_agent, r"network = RecurrentActorCritic, this one FactoredRecurrentActorCritic"),
    ],
)
def test_an_agent_of_another_kind_is_refused_and_nothing_changes(other, message, tmp_path):
    saved, agent = flat_agent(), other()
    saved.update(play(saved, 6, 3)[0])
    saved.save(tmp_path / "agent")
    before = copy.deepcopy(agent.state_dict())
    with pytest.raises(BundleError, match=message):
        agent.load(tmp_path / "agent")
    assert_equal_states(agent.state_dict(), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "something-else"}, "its format is 'something-else', not 'simic-agent'"),
        ({"version": 99}, "format version 99, this simic reads 3"),
    ],
)
def test_another_format_or_version_is_refused(change, message, tmp_path):
    agent = flat_agent()
    save_bundle(tmp_path / "agent", agent.state_dict() | change)
    with pytest.raises(BundleError, match=message):
        agent.load(tmp_path / "agent")
    save_bundle(tmp_path / "list", [1, 2])
    with pytest.raises(BundleError, match="its format is 'list'"):
        agent.load(tmp_path / "list")


@pytest.mark.parametrize("position", [100, -9])
def test_a_damaged_file_is_refused_and_nothing_changes(position, tmp_path):
    agent = flat_agent()
    agent.save(tmp_path / "agent")
    content = bytearray((tmp_path / "agent").read_bytes())
    content[position] ^= 1
    (tmp_path / "agent").write_bytes(content)
    before = copy.deepcopy(agent.state_dict())
    with pytest.raises(BundleError):
        agent.load(tmp_path / "agent")
    (tmp_path / "agent").write_bytes(content[: len(content) // 2])
    with pytest.raises(BundleError):
        agent.load(tmp_path / "agent")
    assert_equal_states(agent.state_dict(), before)


def test_a_file_is_tensors_and_json_only(tmp_path):
    agent = flat_agent()
    agent.update(play(agent, 6, 3)[0])
    agent.save(tmp_path / "agent")
    with safe_open(tmp_path / "agent", framework="pt") as file:
        json.loads(file.metadata()["tree"])
    about = load_bundle(tmp_path / "agent")["about"]
    assert about["gamma"] == 0.99
    assert about["policy"]["hidden_size"] == 8
    assert about["heads"] == ["action_0", "action_1"]
    assert about["sizes"] == {"base": 4}


def test_a_compiled_agent_saves_the_plain_network(tmp_path):
    plain = flat_agent()
    compiled = PPOAgent(compile_network(copy.deepcopy(plain.plain), backend="eager"), plain.config)
    assert compiled.plain is not compiled.network
    compiled.save(tmp_path / "agent")
    plain.load(tmp_path / "agent")
    assert_equal_states(plain.state_dict(), compiled.state_dict())
    assert not any("_orig_mod" in path for path in tensors_of(compiled.state_dict()))


def test_a_controller_is_what_an_agent_decides_by(tmp_path):
    agent, other = growth_agent(rng_seed=5, **SETTINGS), growth_agent(rng_seed=6, **SETTINGS)
    agent.update(play(agent, 10, 4, seed=1)[0])
    agent.save(tmp_path / "agent.safetensors")
    agent.save_controller(tmp_path / "controller.safetensors")
    sizes = [(tmp_path / name).stat().st_size for name in ("agent.safetensors", "controller.safetensors")]
    assert sizes[1] < 0.45 * sizes[0]
    assert_equal_states(load_bundle(tmp_path / "controller.safetensors")["network"], agent.state_dict()["network"])
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(
        BundleError, match="without optimizer, generator, counts cannot continue training: resume a check"
    ):
        other.load(tmp_path / "controller.safetensors")
    assert_equal_states(before, other.state_dict())
