"""Ensembles as files: one controller from several, wherever a controller may be named."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.facts import random_facts
from helpers.tiny_comparison import make_settings, make_task
from torch import nn

from simic import Facts, GrowableModel, GrowthScheduler, LearnedController
from simic.cli import main
from simic.control.ensemble import save_ensemble
from simic.control.learned import make_network
from simic.control.legality import legal_masks, replace_illegal
from simic.control.registry import make_controller, names_controller
from simic.evaluation.candidates import Candidate, evaluate_episodes, inputs_of
from simic.policy.agent_state import MAX_MEMBERS
from simic.policy.config import PolicyConfig
from simic.policy.ensemble import Ensemble
from simic.ppo.agent import PPOAgent
from simic.ppo.config import PPOConfig
from simic.storage.bundle import BundleError, load_bundle, save_bundle


def saved(path: Path, hidden_size: int = 16) -> Path:
    PPOAgent(make_network(PolicyConfig(hidden_size=hidden_size, encoding_size=16)), PPOConfig()).save(path)
    return path


def some_facts(decisions: int = 12) -> list[Facts]:
    return [random_facts(np.random.default_rng(decision), decision) for decision in range(decisions)]


@pytest.fixture
def files(tmp_path) -> list[Path]:
    """Two agents of different sizes."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for rng_seed, (path, hidden) in enumerate(zip(paths, (16, 8), strict=True)):
        torch.manual_seed(rng_seed)
        saved(path, hidden)
    return paths


def test_the_file_of_an_ensemble_is_a_controller_s(files, tmp_path, capsys):
    out = tmp_path / "both"
    main(["ensemble", *map(str, files), "--out", str(out)])
    assert capsys.readouterr().out == f"{out} holds 2 policies\n"
    assert names_controller(str(out))
    controller = make_controller(str(out))
    assert isinstance(controller, LearnedController)
    assert isinstance(controller.network, Ensemble)
    for path, member in zip(files, controller.network.networks, strict=True):
        alone = LearnedController.load(path).network.state_dict()
        assert all(torch.equal(value, alone[name]) for name, value in member.state_dict().items())
    assert set(load_bundle(out)["members"][0]) == {
        "format",
        "version",
        "about",
        "network",
        "value_scale",
        "return_scale",
    }
    main(["inspect", str(out)])
    told = capsys.readouterr().out
    assert '"hidden_size": 16' in told
    assert '"hidden_size": 8' in told


@pytest.mark.parametrize("greedy", [True, False])
def test_it_acts_legally_and_goes_on_from_a_saved_state(files, tmp_path, greedy):
    save_ensemble(files, tmp_path / "both")
    load = lambda: LearnedController.load(tmp_path / "both", greedy=greedy, rng_seed=1)  # noqa: E731
    controller, lives = load(), some_facts()
    for facts in lives[:6]:
        actions = controller.act(facts)
        assert not replace_illegal(actions, legal_masks(facts))[1].any()
    resumed = load()
    resumed.load_state_dict(controller.state_dict())
    for facts in lives[6:]:
        np.testing.assert_array_equal(resumed.act(facts), controller.act(facts))


def test_copies_of_one_policy_decide_as_that_policy(files, tmp_path):
    (tmp_path / "copy").write_bytes(files[0].read_bytes())
    save_ensemble([files[0], tmp_path / "copy"], tmp_path / "both")
    alone, both = LearnedController.load(files[0]), LearnedController.load(tmp_path / "both")
    for facts in some_facts():
        np.testing.assert_array_equal(both.act(facts), alone.act(facts))


def test_evaluation_and_scheduler_take_it(files, tmp_path):
    save_ensemble(files, tmp_path / "both")
    weights = inputs_of(Candidate(label="both", kind="learned", description="", path=tmp_path / "both"))
    given = LearnedController.load(tmp_path / "both").network.state_dict()
    assert all(torch.equal(value, given[name]) for name, value in weights.network().state_dict().items())
    settings = make_settings()
    trainings = settings.trainings(make_task())
    controller = LearnedController(weights.network())
    episodes = evaluate_episodes(trainings, controller.act, settings.rng_seeds, trainings.hosts.host_parameters)[1]
    assert all(np.isfinite(episode["score"]) for episode in episodes)
    model = GrowableModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), ["0"], example_input=torch.zeros(1, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    growth, resumed = (
        GrowthScheduler(model, optimizer, controller=str(tmp_path / "both"), evaluate=lambda: {"val_loss": 1.0})
        for _ in range(2)
    )
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    growth.step()
    resumed.load_state_dict(growth.state_dict())
    state = resumed.state_dict()["controller_state"]["state"]
    assert state.shape == (1, 2 * 16 + 2 * 8)
    assert torch.equal(state, growth.state_dict()["controller_state"]["state"])
    single = LearnedController.load(files[0])
    with pytest.raises(ValueError, match="state of 48 numbers per host, this one has 32: load the controller"):
        single.load_state_dict(growth.state_dict()["controller_state"])


def test_members_of_an_ensemble_are_taken_one_by_one(files, tmp_path):
    save_ensemble(files, tmp_path / "both")
    torch.manual_seed(9)
    saved(tmp_path / "c")
    save_ensemble([tmp_path / "both", tmp_path / "c"], tmp_path / "three")
    network = LearnedController.load(tmp_path / "three").network
    assert isinstance(network, Ensemble)
    assert [member.config.hidden_size for member in network.networks] == [16, 8, 16]


def test_what_is_no_ensemble_is_refused(files, tmp_path):
    with pytest.raises(ValueError, match="2 to 64 policies, got 1: name more controllers"):
        save_ensemble(files[:1], tmp_path / "one")
    with pytest.raises(ValueError, match="a is named twice; leave one out"):
        save_ensemble([files[0], tmp_path / ".." / tmp_path.name / "a"], tmp_path / "twice")
    with pytest.raises(FileNotFoundError, match=r"there is no controller .*nowhere"):
        save_ensemble([files[0], tmp_path / "nowhere"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds neither a controller nor a checkpoint"):
        save_ensemble([files[0], tmp_path / "empty"], tmp_path / "out")
    state = load_bundle(files[1])
    state["about"]["heads"] = ["op"]
    save_bundle(files[1], state)
    with pytest.raises(BundleError, match=r"b: its heads are \['op'\]"):
        save_ensemble(files, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_ensembles_are_refused_by_name(files, tmp_path):
    save_ensemble(files, out := tmp_path / "both")
    sound = load_bundle(out)
    member = sound["members"][0]
    for change, message in (
        ({"version": 2}, "both: the ensemble has format version 2, this simic reads 1; use a newer simic"),
        ({"version": True}, "format version True"),
        ({"members": "ab"}, "both: an ensemble must be a list of 2 to 64 policies, got str"),
        ({"members": [member]}, "got 1 policies"),
        ({"members": [member] * (MAX_MEMBERS + 1)}, "got 65 policies"),
        ({"members": [member, sound]}, "both: the ensemble holds another ensemble"),
        ({"members": [member, 3]}, "both: policy 1: not a saved agent: its format is 'int'"),
        ({"members": [member, member | {"network": {}}]}, "both: policy 1: "),
    ):
        save_bundle(out, sound | change)
        with pytest.raises(BundleError) as error:
            LearnedController.load(out)
        assert message in str(error.value)


def test_an_ensemble_is_not_trained_further(files, tmp_path, capsys):
    save_ensemble(files, tmp_path / "both")
    with pytest.raises(SystemExit):
        main(["train", "--init", str(tmp_path / "both"), "--out", str(tmp_path / "run"), "--fast-dev-run"])
    assert "it holds an ensemble, whose policies are trained one by one" in capsys.readouterr().err
