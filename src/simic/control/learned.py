"""LearnedController: a trained network decides. And how facts look to such a network.

Shapes: N hosts, S slots, B blueprints, R rows and W choices of the action tree (see `policy.tree`).
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch

from simic import pretrained
from simic.actions import HEAD_VALUES, HEADS, Op
from simic.bundle import BundleError, load_bundle
from simic.control.facts import Facts
from simic.control.legality import Masks, legal_masks
from simic.control.observation import Observation, ObservationSpec, observe
from simic.policy.acting import choose
from simic.policy.network import GROWTH_TREE, FactoredRecurrentActorCritic, PolicyConfig


def make_network(config: PolicyConfig | None = None) -> FactoredRecurrentActorCritic:
    """An untrained network for the observations of `control.observation`."""
    spec = ObservationSpec()
    return FactoredRecurrentActorCritic(spec.base, spec.slot, spec.blueprint, config)


def network_input(observation: Observation) -> dict[str, np.ndarray]:
    """The parts a network looks at (N, ...); blueprints, which hosts share, are repeated for each."""
    num_hosts = len(observation.base)
    blueprints = np.broadcast_to(observation.blueprints, (num_hosts, *observation.blueprints.shape))
    return {"base": observation.base, "slots": observation.slots, "blueprints": blueprints}


def row_masks(masks: Masks) -> np.ndarray:
    """Legal choices as rows of the action tree (N, R, W); a row that nothing leads to keeps its first choice."""
    num_hosts, _, num_slots = masks.slot.shape
    num_blueprints = masks.blueprint.shape[1]
    rows = np.zeros((num_hosts, GROWTH_TREE.num_rows + num_slots, max(_WIDEST, num_slots, num_blueprints)), dtype=bool)
    rows[:, : GROWTH_TREE.num_rows, : _PLAIN_ROWS.shape[1]] = _PLAIN_ROWS
    rows[:, 0, : len(Op)] = masks.op
    rows[:, _SLOT_ROWS, :num_slots] = masks.slot[:, _SLOT_OPS]
    rows[:, GROWTH_TREE.num_rows :, :num_blueprints] = masks.blueprint
    rows[..., 0] |= ~rows.any(-1)
    return rows


_WIDEST = max(len(values) for values in HEAD_VALUES.values())
_SLOT_ROWS = [row for row, head in enumerate(GROWTH_TREE.row_head) if HEADS[head] == "slot"]
_SLOT_OPS = [GROWTH_TREE.row_choice[row] for row in _SLOT_ROWS]
_PLAIN_ROWS = np.array(  # every choice of the heads whose choices are the same in every task
    [[i < len(HEAD_VALUES.get(HEADS[head], ())) for i in range(_WIDEST)] for head in GROWTH_TREE.row_head]
)


class LearnedController:
    """Decides as a trained network says; the state of every host's episode is kept here."""

    def __init__(self, network: FactoredRecurrentActorCritic, *, greedy: bool = True, rng_seed: int = 0) -> None:
        self.network, self.greedy = network.eval(), greedy
        self._generator = torch.Generator().manual_seed(rng_seed)
        self._state: torch.Tensor | None = None

    @classmethod
    def load(cls, path: str | Path, *, greedy: bool = True, rng_seed: int = 0) -> LearnedController:
        """From a file written by `PPOAgent.save`."""
        return cls(load_network(path), greedy=greedy, rng_seed=rng_seed)

    @classmethod
    def pretrained(cls, *, greedy: bool = True, rng_seed: int = 0) -> LearnedController:
        """The one that ships with simic."""
        return cls(load_pretrained(), greedy=greedy, rng_seed=rng_seed)

    def act(self, facts: Facts) -> np.ndarray:
        """One action per host (N, H); a host at its first decision starts from an empty memory."""
        masks = legal_masks(facts)
        if self._state is None or len(self._state) != facts.num_hosts:
            self._state = self.network.initial_state(facts.num_hosts)
        # A new tensor: the old one may be part of somebody's checkpoint.
        self._state = self._state.masked_fill(torch.from_numpy(facts.decision == 0).unsqueeze(-1), 0.0)
        seen = network_input(observe(facts, masks))
        choice = choose(
            self.network, seen, row_masks(masks), self._state, greedy=self.greedy, generator=self._generator
        )
        self._state = choice.state
        return choice.action.numpy()

    def state_dict(self) -> dict[str, Any]:
        """What is remembered of the episodes under way, and where the random stream stands."""
        return {"state": self._state, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._state = state["state"]
        self._generator.set_state(state["generator"])


def load_network(path: str | Path) -> FactoredRecurrentActorCritic:
    """The network of a saved agent; one that is no growth controller, or sees other features, is refused."""
    return network_of(load_bundle(path), path)


def holds_controller(path: str | Path) -> bool:
    """Whether the file at `path`, if there is one, is a saved agent rather than something else of ours."""
    if not Path(path).is_file():
        return False
    saved = load_bundle(path)
    return isinstance(saved, dict) and "network" in saved


def network_of(saved: Any, path: str | Path) -> FactoredRecurrentActorCritic:
    """The network in an agent's saved state, which was found at `path`."""
    about = saved.get("about", {}) if isinstance(saved, dict) else {}
    if about.get("network") != FactoredRecurrentActorCritic.__name__:
        raise BundleError(f"{path} holds no growth controller: its network is {about.get('network')!r}")
    network = make_network(PolicyConfig(**about["policy"]))
    if about["sizes"] != network.sizes:
        raise BundleError(f"{path} looks at {about['sizes']} features, this simic shows {network.sizes}; train it anew")
    network.load_state_dict(saved["network"])
    return network


def load_pretrained() -> FactoredRecurrentActorCritic:
    """The network that ships with simic."""
    pretrained.check_controller()
    with resources.as_file(pretrained.CONTROLLER) as path:
        return load_network(path)
