"""Controllers that are broken, foreign or odd: every command that loads one refuses it in one line that names it."""

import copy
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

from simic import GrowableModel, GrowthScheduler, LearnedController
from simic.cli import main
from simic.control.learned import load_controller, make_network
from simic.gymnasium.flat_network import RecurrentActorCritic
from simic.policy.config import PolicyConfig
from simic.ppo.agent import PPOAgent
from simic.ppo.config import PPOConfig
from simic.storage.bundle import BundleError, save_bundle
from simic.storage.checkpoint import save_checkpoint

State = dict[str, Any]


def make_state() -> State:
    """What `save_controller` writes of a small agent."""
    agent = PPOAgent(make_network(PolicyConfig(hidden_size=16, encoding_size=16)), PPOConfig())
    return copy.deepcopy({k: v for k, v in agent.state_dict().items() if k not in ("optimizer", "generator", "counts")})


def set_one(part: str, name: str, value: float) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[part][name].view(-1)[0] = value

    return change


def settings(**changes: Any) -> Callable[[State], None]:
    return lambda state: state["about"]["policy"].update(changes)


def about(**changes: Any) -> Callable[[State], None]:
    return lambda state: state["about"].update(changes)


def replaced(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[State], None]:
    def apply(state: State) -> None:
        state["network"][name] = change(state["network"][name])

    return apply


DAMAGES: dict[str, tuple[Callable[[State], object], str]] = {
    "nan weight": (set_one("network", "op.weight", math.nan), "op.weight has values that are not finite"),
    "inf weight": (set_one("network", "core.cell.weight_hh_l0", math.inf), "values that are not finite"),
    "nan statistics": (set_one("network", "normalize.slots.mean", math.nan), "slots.mean has values that are not"),
    "negative variance": (set_one("network", "normalize.base.variance", -1.0), "base.variance is negative"),
    "negative count": (set_one("network", "normalize.base.count", -1.0), "base.count is negative"),
    "nan value scale": (set_one("value_scale", "mean", math.nan), "value_scale's mean has values that are not finite"),
    "negative return scale": (set_one("return_scale", "moments.variance", -1.0), "moments.variance is negative"),
    "half precision": (replaced("op.weight", torch.Tensor.half), "op.weight is of type float16, not float32"),
    "double precision": (replaced("op.bias", torch.Tensor.double), "op.bias is of type float64, not float32"),
    "integers": (replaced("op.bias", torch.Tensor.long), "op.bias is of type int64"),
    "transposed": (replaced("skip.weight", lambda w: w.T.contiguous()), r"skip.weight has shape (64, 16), this one's"),
    "zero-length": (replaced("op.bias", lambda w: w[:0]), "op.bias has shape (0,), this one's (6,)"),
    "no tensor": (replaced("op.bias", lambda w: [1.0]), "op.bias has shape none: it is list"),
    "missing weight": (lambda s: s["network"].pop("op.bias"), "op.bias has shape missing"),
    "foreign weight": (lambda s: s["network"].update({"x\x1b[2J\ny": torch.ones(1)}), r"x\x1b[2J\ny has shape (1,)"),
    "nothing as weight": (
        lambda s: s["network"].update(new=None),
        "new has shape none: it is NoneType, this one's miss",
    ),
    "missing scale": (lambda s: s.pop("value_scale"), "lacks the table 'value_scale'"),
    "newer format": (lambda s: s.update(version=4), "has format version 4, this simic reads 3; use a newer simic"),
    "odd version": (lambda s: s.update(version="one"), "has format version 'one'"),
    "unknown setting": (settings(depth=3), "settings that this simic does not know: ['depth']"),
    "missing setting": (lambda s: s["about"]["policy"].pop("core"), "lacks the settings core"),
    "other core": (settings(core="rnn"), "core must be 'lstm' or 'gru', got 'rnn'"),
    "odd setting": (settings(hidden_size="16"), "hidden_size must be int, got '16'"),
    "fraction": (settings(encoding_size=16.0), "encoding_size must be int, got 16.0"),
    "no size": (settings(hidden_size=0), "hidden_size must be at least 1, got 0"),
    "other size": (settings(hidden_size=32), "has shape"),
    "huge size": (settings(hidden_size=10**30), "the file holds"),
    "large size": (settings(hidden_size=60_000), "need more than 3600000256 weights, the file holds"),
    "other features": (lambda s: s["about"]["sizes"].update(slots=3), "'slots': 3"),
    "other heads": (about(heads=["op"]), "its heads are ['op']"),
    "other network": (about(network="Other"), "holds no growth controller: its network is 'Other'"),
    "endless name": (about(network="x" * 10**6), "its network is 'xxx"),
    "odd gamma": (about(gamma=math.nan), "gamma must be a number from 0 to 1, got nan"),
    "tensor as sizes": (about(sizes=torch.ones(2)), "the agent's description is not JSON"),
    "tensor as version": (lambda s: s.update(version=torch.ones(2)), "has format version tensor([1., 1.])"),
    "unknown fact": (about(secret=1), "'secret'], not network, heads, sizes, policy, gamma"),
    "no facts": (lambda s: s.update(about=None), "lacks the table 'about'"),
    "other format": (lambda s: s.update(format="simic-episodes"), "its format is 'simic-episodes', not 'simic-agent'"),
}


def damaged(name: str) -> tuple[State, str]:
    state = make_state()
    change, message = DAMAGES[name]
    change(state)
    return state, message


def write_growth(path: Path) -> None:
    """The checkpoint of a model that grows, which is another kind of file of ours."""
    model = GrowableModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), ["0"], example_input=torch.zeros(1, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    GrowthScheduler(model, optimizer, evaluate=lambda: {"val_loss": 1.0}).save(path)


def write_tree(path: Path, document: str) -> None:
    """A bundle whose checksum fits a tree that `save_bundle` would never write."""
    digest = hashlib.sha256(document.encode()).hexdigest()
    path.write_bytes(save({}, {"format": "simic-bundle", "version": "1", "tree": document, "sha256": digest}))


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "growth": (write_growth, "not a saved agent"),
    "cartpole": (lambda path: PPOAgent(RecurrentActorCritic(4, [2])).save(path), "'RecurrentActorCritic'"),
    "list": (lambda path: save_bundle(path, [1]), "its format is 'list'"),
    "text": (lambda path: path.write_text("hello"), "is not a readable safetensors file"),
    "empty": (lambda path: path.write_bytes(b""), "is not a readable safetensors file"),
    "deep": (lambda path: write_tree(path, "[" * 10**5 + "]" * 10**5), "nests values more than 64 deep"),
    "no JSON": (lambda path: write_tree(path, "{"), "holds no simic state"),
    "no such tensor": (lambda path: write_tree(path, '{"$tensor": "7"}'), "holds no simic state (KeyError"),
    "odd tree": (lambda path: write_tree(path, '{"$tuple": 7}'), "holds no simic state (TypeError"),
}
COMMANDS = {
    "evaluate": "evaluate --controllers {} --tasks spirals-mlp --rng-seeds 2 --horizon 1 --workers 0 --out {}/out",
    "grow": "grow --controller {} --task spirals-mlp --host-epochs 1 --quiet",
    "init": "train --fast-dev-run --init {} --out {}/run --quiet",
    "episodes": "train --fast-dev-run --algorithm imitation --episodes {} --out {}/run --quiet",
    "inspect": "inspect {}",
}


def refusal(command: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says of the file; it must be one line on stderr and exit code 2."""
    words = [word.format(path) if "{}/" not in word else word.format(path.parent) for word in command.split()]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(words)
    said = capsys.readouterr().err
    assert stopped.value.code == 2, said
    assert said.count("\n") == 1, said
    assert said.startswith("simic: ")
    assert str(path) in said
    assert "\x1b" not in said
    assert len(said) < 600
    return said


@pytest.mark.parametrize(
    "command", [name if name == "inspect" else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS]
)
def test_every_command_refuses_every_damage(command, tmp_path, capsys):
    path = tmp_path / "odd.safetensors"
    for name in DAMAGES:
        state, message = damaged(name)
        save_bundle(path, state)
        if (command, name) == ("episodes", "other format"):
            message = "holds no whole episodes"  # it is what it says it is: recorded episodes, but without any
            state.pop("network")
            save_bundle(path, state)
        assert message in refusal(COMMANDS[command], path, capsys), name
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", FILES)
def test_every_command_refuses_other_kinds_of_files(kind, command, tmp_path, capsys):
    path = tmp_path / "odd.safetensors"
    FILES[kind][0](path)
    said = refusal(COMMANDS[command], path, capsys)
    assert FILES[kind][1] in said or (command == "episodes" and "holds no episodes" in said)


@pytest.mark.parametrize("name", ["nan weight", "huge size", "newer format", "no facts"])
def test_a_checkpoint_with_such_an_agent_is_refused_too(name, tmp_path, capsys):
    state, message = damaged(name)
    path = save_checkpoint(tmp_path / "run" / "checkpoints", 1, {"agent": state})
    for command in ("evaluate", "inspect"):
        assert message in refusal(COMMANDS[command], path, capsys)
    for tree in ({"other": 1}, [1]):
        path = save_checkpoint(tmp_path / "other" / "checkpoints", 1, tree)
        assert "not a saved agent" in refusal(COMMANDS["evaluate"], path, capsys)


@pytest.mark.parametrize("name", ["nan weight", "huge size", "unknown setting"])
def test_python_callers_are_told_the_same(name, tmp_path):
    state, message = damaged(name)
    save_bundle(tmp_path / "odd", state)
    model = GrowableModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), ["0"], example_input=torch.zeros(1, 4))
    for load in (
        lambda path: LearnedController.load(path),
        lambda path: GrowthScheduler(model, torch.optim.AdamW(model.parameters()), controller=str(path)),
    ):
        with pytest.raises(BundleError) as error:
            load(tmp_path / "odd")
        assert message in str(error.value)
        assert str(tmp_path / "odd") in str(error.value)


def test_a_sound_controller_is_loaded_and_draws_nothing_from_torch(tmp_path, capsys):
    state = make_state()
    save_bundle(tmp_path / "sound", state)
    before = torch.get_rng_state()
    found = load_controller(tmp_path / "sound")
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(found.network.state_dict()[name], value) for name, value in state["network"].items())
    state["network"]["normalize.base.mean"] = state["network"][
        "normalize.base.mean"
    ].float()  # learned on another device
    save_bundle(tmp_path / "sound", state)
    main(["inspect", str(tmp_path / "sound")])
    assert "parameters: " in capsys.readouterr().out


def test_an_agent_goes_on_only_from_a_sound_state(tmp_path):
    agent = PPOAgent(make_network(PolicyConfig(hidden_size=16, encoding_size=16)), PPOConfig())
    state, before = copy.deepcopy(agent.state_dict()), copy.deepcopy(agent.plain.state_dict())
    state["network"]["op.bias"] += 1.0
    state["value_scale"]["variance"] -= 9.0
    save_bundle(tmp_path / "agent", state)
    with pytest.raises(BundleError, match="agent: the saved value_scale's variance is negative"):
        agent.load(tmp_path / "agent")
    assert all(torch.equal(agent.plain.state_dict()[name], value) for name, value in before.items())
