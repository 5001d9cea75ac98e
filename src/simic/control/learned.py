"""LearnedController: a trained network chooses the actions. Also the network's inputs, and loading it from files.

Shapes: N hosts, S slots, B blueprints, R rows and W choices of the action tree (see `policy.action_tree`).
"""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from simic import pretrained
from simic.control.facts import Facts
from simic.control.features import BLUEPRINT_FEATURES
from simic.control.legality import Masks, legal_masks
from simic.control.observation import Observation, ObservationSpec, observe
from simic.growth.isolation import preserved_rng
from simic.lifecycle.actions import HEAD_VALUES, HEADS, Op
from simic.policy.acting import choose
from simic.policy.agent_state import (
    ENSEMBLE_FORMAT,
    FORMAT,
    check_ensemble,
    check_format,
    check_scales,
    check_tensors,
    naming,
    read_policy_config,
    shown,
)
from simic.policy.config import PolicyConfig
from simic.policy.ensemble import Ensemble
from simic.policy.network import GROWTH_TREE, ActorCritic, FactoredRecurrentActorCritic
from simic.policy.registry import POLICIES
from simic.storage.bundle import BundleError, load_bundle
from simic.storage.checkpoint import is_checkpoint, load_checkpoint
from simic.storage.run_directory import RunDirectory

MAX_BYTES = 2**28
"""Size of a controller's file; the one that ships has 1.3 million bytes."""


def make_network(config: PolicyConfig | None = None) -> ActorCritic:
    """An untrained network of the config's policy for the observations of `control.observation`."""
    spec, config = ObservationSpec(), config or PolicyConfig()
    with POLICIES.running(config.network):
        network = POLICIES[config.network](spec.base, spec.slot, spec.blueprint, config)
    if not isinstance(network, ActorCritic) or network.tree.heads != GROWTH_TREE.heads:
        raise ValueError(f"policy network {config.network} must be a simic.ActorCritic with the heads of GROWTH_TREE")
    return network


def network_input(observation: Observation) -> dict[str, np.ndarray]:
    """The inputs of a network (N, ...); blueprints, which hosts share, are repeated for each host."""
    num_hosts = len(observation.base)
    blueprints = np.broadcast_to(observation.blueprints, (num_hosts, *observation.blueprints.shape))
    return {"base": observation.base, "slots": observation.slots, "blueprints": blueprints}


def known_blueprints(network: ActorCritic, facts: Facts) -> Facts:
    """The facts without the blueprints that a network has learned nothing about: they count as fitting nowhere.

    A controller saved before seeds could grow beside a submodule has zeros as its weights for that feature (see
    `policy.upgrade`), so it would take such a seed for one behind, of the same size. Training changes the weights. In
    slots where nothing can grow behind, it may use those beside: it has no other choice there.
    """
    if isinstance(network, Ensemble):  # the mixture needs a probability of every member
        for member in network.networks:
            facts = known_blueprints(member, facts)
        return facts
    if not isinstance(network, FactoredRecurrentActorCritic):
        return facts
    weights = network.get_parameter("encode_blueprint.0.weight")  # (outputs, features)
    if bool(weights[:, BLUEPRINT_FEATURES.names.index("reads_input")].any()):
        return facts
    parameters, beside = facts.blueprint_parameters, facts.reads_input
    behind_fits = (parameters[:, ~beside] >= 0).any(1, keepdims=True)  # (S, 1)
    return replace(facts, blueprint_parameters=np.where(beside & behind_fits, -1, parameters))


def row_masks(masks: Masks) -> np.ndarray:
    """Legal choices as rows of the action tree (N, R, W); a row without any keeps its first, so softmax is defined."""
    num_hosts, _, num_slots = masks.slot.shape
    num_blueprints = masks.blueprint.shape[1]
    rows = np.zeros((num_hosts, GROWTH_TREE.num_rows + num_slots, max(_WIDEST, num_slots, num_blueprints)), dtype=bool)
    rows[:, : GROWTH_TREE.num_rows, : _PLAIN_ROWS.shape[1]] = _PLAIN_ROWS
    rows[:, 0, : len(Op)] = masks.op
    rows[:, _SLOT_ROWS, :num_slots] = masks.slot[:, _SLOT_OPS]
    if masks.style is not None:
        rows[:, _STYLE_ROWS, : masks.style.shape[2]] = masks.style[:, _STYLE_OPS]
    rows[:, GROWTH_TREE.num_rows :, :num_blueprints] = masks.blueprint
    rows[..., 0] |= ~rows.any(-1)
    return rows


_WIDEST = max(len(values) for values in HEAD_VALUES.values())
_SLOT_ROWS, _STYLE_ROWS = (
    [row for row, head in enumerate(GROWTH_TREE.row_head) if HEADS[head] == wanted] for wanted in ("slot", "style")
)
_SLOT_OPS = [GROWTH_TREE.row_choice[row] for row in _SLOT_ROWS]
_STYLE_OPS = [GROWTH_TREE.row_choice[row] for row in _STYLE_ROWS]
_PLAIN_ROWS = np.array(  # all choices of the heads that are the same in every task
    [[i < len(HEAD_VALUES.get(HEADS[head], ())) for i in range(_WIDEST)] for head in GROWTH_TREE.row_head]
)


class LearnedController:
    """Chooses actions by a trained network and keeps the recurrent state of every host.

    Args:
        network: The policy; `LearnedController.load(path)` and `.pretrained()` make it from files.
        greedy: Take the most probable action; otherwise sample one.
        rng_seed: Of the samples.

    Example:
        >>> pretrained = simic.LearnedController.pretrained()
        >>> growth = GrowthScheduler(model, optimizer, pretrained, evaluate=validate, horizon=20)
    """

    def __init__(self, network: ActorCritic, *, greedy: bool = True, rng_seed: int = 0) -> None:
        self.network, self.greedy = network.eval(), greedy
        self._generator = torch.Generator().manual_seed(rng_seed)
        self._state: torch.Tensor | None = None
        self._decision = np.zeros(0, dtype=np.int64)  # (N,) the last one

    @classmethod
    def load(cls, path: str | Path, *, greedy: bool = True, rng_seed: int = 0) -> LearnedController:
        """Load a trained controller.

        Args:
            path: A run directory, or a file of `simic train`, `simic ensemble`, `TrainingResult.save` or a checkpoint.
            greedy, rng_seed: As in the constructor.

        Returns:
            The controller, which has seen no host yet.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is damaged, or not a controller.
        """
        return cls(load_network(path), greedy=greedy, rng_seed=rng_seed)

    @classmethod
    def pretrained(cls, *, greedy: bool = True, rng_seed: int = 0) -> LearnedController:
        """The controller that ships with simic.

        Args:
            greedy, rng_seed: As in the constructor.

        Returns:
            The controller, which has seen no host yet.
        """
        return cls(load_pretrained(), greedy=greedy, rng_seed=rng_seed)

    def act(self, facts: Facts) -> np.ndarray:
        """One action per host (N, H); the state of a host is reset at its first decision."""
        facts = known_blueprints(self.network, facts)
        masks = legal_masks(facts)
        if self._state is None or len(self._state) != facts.num_hosts:
            self._state, self._decision = self.network.initial_state(facts.num_hosts), np.zeros(0, np.int64)
        if not np.array_equal(facts.decision, self._decision):
            self._before, self._decision = self._state, facts.decision.copy()
        # Asked again at the same decision, it goes on from the state before that: no time has passed. Not in place: the
        # old tensor may be part of a checkpoint.
        state = self._before.masked_fill(torch.from_numpy(facts.decision == 0).unsqueeze(-1), 0.0)
        seen = network_input(observe(facts, masks))
        choice = choose(self.network, seen, row_masks(masks), state, greedy=self.greedy, generator=self._generator)
        self._state = choice.state
        return choice.action.numpy()

    def for_hosts(self, hosts: np.ndarray) -> LearnedController:
        """A controller with the same network that remembers of host i what this one remembers of `hosts[i]`."""
        copied = LearnedController(self.network, greedy=self.greedy)
        copied._generator.set_state(self._generator.get_state())
        if self._state is not None:
            rows = torch.from_numpy(hosts).to(self._state.device)
            copied._state, copied._before = self._state[rows], self._before[rows]
            copied._decision = self._decision[hosts]
        return copied

    def state_dict(self) -> dict[str, Any]:
        """The recurrent states, and the state of the random generator."""
        return {"state": self._state, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        own, saved = self.network.state_size, state["state"]
        if saved is not None and saved.shape[-1] != own:
            raise ValueError(
                f"the saved controller has a recurrent state of {saved.shape[-1]} numbers per host, this one has "
                f"{own}: load the controller that the state was saved with"
            )
        self._state, self._decision = state["state"], np.zeros(0, np.int64)
        self._generator.set_state(state["generator"])


class SavedController(NamedTuple):
    """A trained controller from a file."""

    state: dict[str, Any]
    """The saved state, checked; see `PPOAgent.state_dict`, and `ENSEMBLE_FORMAT` for several."""
    network: ActorCritic


def controller_file(path: str | Path) -> Path:
    """The file of a controller or checkpoint, or that of a finished run."""
    path = Path(path)
    controller = RunDirectory(path).controller
    if controller.is_file():
        return controller
    if not path.exists():
        raise FileNotFoundError(f"there is no controller {path}")
    if path.is_dir() and not is_checkpoint(path):
        raise ValueError(f"{path} holds neither a controller nor a checkpoint; name a finished run or a checkpoint")
    return path


def load_controller(path: str | Path) -> SavedController:
    """The controller in a run, a checkpoint, or a file of an agent, a controller or an ensemble; else refused."""
    path = controller_file(path)
    state = load_checkpoint(path).agent if is_checkpoint(path) else load_bundle(path, max_bytes=MAX_BYTES)
    return SavedController(state, network_of(state, path))


def load_network(path: str | Path) -> ActorCritic:
    """The network of `load_controller`."""
    return load_controller(path).network


def load_pretrained() -> ActorCritic:
    """The network that ships with simic."""
    pretrained.check_controller()
    with resources.as_file(pretrained.CONTROLLER) as path:
        return load_network(path)


def holds_controller(path: str | Path) -> bool:
    """Whether `path` is the file of a saved agent or of a checkpoint."""
    if is_checkpoint(path):
        return True
    if not Path(path).is_file():
        return False
    saved = load_bundle(path, max_bytes=MAX_BYTES)
    return isinstance(saved, dict) and (saved.get("format") in (FORMAT, ENSEMBLE_FORMAT) or "network" in saved)


def network_of(state: Any, path: str | Path) -> ActorCritic:
    """The network in an agent's saved state, read from `path`; sizes are checked before anything is built."""
    if isinstance(state, dict) and state.get("format") == ENSEMBLE_FORMAT:
        with naming(path):
            members = check_ensemble(state)
        networks = [network_of(member, f"{path}: policy {index}") for index, member in enumerate(members)]
        return Ensemble(networks)
    with naming(path):
        state = check_format(state)
        about, weights = state["about"], state["network"]
        num_weights = sum(value.numel() for value in weights.values() if isinstance(value, torch.Tensor))
        config = read_policy_config(about["policy"], num_weights)
        with preserved_rng():  # the initial weights are replaced
            network = make_network(config)
        if about["network"] != type(network).__name__:
            raise BundleError(f"it holds no growth controller: its network is {shown(about['network'])}")
        if about["sizes"] != network.sizes:
            features = f"{shown(about['sizes'])} features, this simic shows {network.sizes}"
            raise BundleError(f"it looks at {features}; train it anew")
        if about["heads"] != list(network.tree.heads):
            raise BundleError(f"its heads are {shown(about['heads'])}, not {list(network.tree.heads)}; train it anew")
        check_tensors(weights, network.state_dict())
        check_scales(state)
    network.load_state_dict(weights)
    return network
