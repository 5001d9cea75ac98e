"""Controllers that do not look: wait for ever, act at random, follow a schedule. And the interface they all share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from simic.control.facts import Facts
from simic.control.legality import legal_masks
from simic.lifecycle.actions import HEAD_VALUES, HEADS, Action, Op
from simic.lifecycle.stages import IllegalActionError


class Controller(Protocol):
    """Who decides: called once per decision with the facts, answers one action row per host (N, H).

    Beside one model it may also answer an `Action`.

    One that remembers something from decision to decision is `Remembering` too.
    """

    def act(self, facts: Facts) -> np.ndarray | Action:
        """One row of head indices for every host; see `simic.lifecycle.actions`."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A controller with a memory, which goes into checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """What the controller remembers, as JSON values and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what `state_dict` said."""
        ...


def check_controller(controller: Any) -> None:
    """Raise unless this can be asked what to do, and saved if it remembers."""
    if isinstance(controller, type):
        raise TypeError(
            f"controller must be an object, got the class {controller.__name__}; write {controller.__name__}(...)"
        )
    if not callable(getattr(controller, "act", None)):
        raise TypeError(f"controller must be a name or an object with a method act(facts), got {controller!r}")
    if hasattr(controller, "state_dict") != hasattr(controller, "load_state_dict"):
        raise TypeError(
            f"a {type(controller).__name__} has only one of state_dict and load_state_dict; write both, or none if it "
            "remembers nothing"
        )


def encode_answer(answer: Any, slot_names: Sequence[str], blueprint_names: Sequence[str]) -> np.ndarray:
    """What a controller answered for one host, as a row (H,): an array (1, H), an `Action`, or a list of one."""
    if isinstance(answer, (list, tuple)) and len(answer) == 1 and isinstance(answer[0], Action):
        answer = answer[0]
    if isinstance(answer, Action):
        return answer.encode(slot_names, blueprint_names)
    try:
        actions = np.asarray(answer)
        numeric = np.issubdtype(actions.dtype, np.integer)
    except (TypeError, ValueError):  # a ragged list
        actions, numeric = np.zeros(()), False
    if not numeric or actions.shape != (1, len(HEADS)):
        got = f"shape {actions.shape}" if numeric else repr(answer)
        raise IllegalActionError(
            f'a controller must return an Action such as Action("wait"), or integers of shape {(1, len(HEADS))}, '
            f"got {got}"
        )
    return actions[0]


class WaitController:
    """Never grows anything."""

    def act(self, facts: Facts) -> np.ndarray:
        """Wait, for every host."""
        return np.zeros((facts.num_hosts, len(HEADS)), dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Nothing is remembered."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to remember."""


class RandomController:
    """Draws a legal operation, then a legal slot and blueprint, then the other heads, each uniformly."""

    def __init__(self, rng_seed: int = 0) -> None:
        self._rng = np.random.default_rng(rng_seed)

    def act(self, facts: Facts) -> np.ndarray:
        """A random legal action for every host."""
        masks = legal_masks(facts)
        hosts = np.arange(facts.num_hosts)
        actions = np.zeros((facts.num_hosts, len(HEADS)), dtype=np.int64)
        actions[:, 0] = self._draw(masks.op)
        actions[:, 1] = self._draw(masks.slot[hosts, actions[:, 0]])
        actions[:, 2] = self._draw(masks.blueprint[actions[:, 1]])
        for position, head in enumerate(HEADS[3:], start=3):
            actions[:, position] = self._rng.integers(len(HEAD_VALUES[head]), size=facts.num_hosts)
        actions[actions[:, 0] == Op.WAIT] = 0
        return actions

    def _draw(self, mask: np.ndarray) -> np.ndarray:
        return np.where(mask, self._rng.random(mask.shape), -1.0).argmax(-1)

    def state_dict(self) -> dict[str, Any]:
        """Where the random stream stands."""
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._rng.bit_generator.state = state["rng"]


class ScriptedController:
    """Plays a fixed list: the action at position t is taken at decision t, afterwards it waits.

    A mapping {decision: action} waits in between. Every host gets the same; an illegal action raises when it is due.
    """

    def __init__(self, schedule: Sequence[Action] | Mapping[int, Action]) -> None:
        self.schedule = dict(schedule) if isinstance(schedule, Mapping) else dict(enumerate(schedule))
        for decision, action in self.schedule.items():
            if not isinstance(action, Action):
                raise TypeError(
                    f'a schedule is made of actions such as Action("wait"), got {action!r} for decision {decision}'
                )

    def act(self, facts: Facts) -> np.ndarray:
        """The action that is due, for every host."""
        wait = Action()
        rows = [
            self.schedule.get(int(decision), wait).encode(facts.slot_names, facts.blueprint_names)
            for decision in facts.decision
        ]
        return np.stack(rows)

    def state_dict(self) -> dict[str, Any]:
        """Nothing is remembered: time is in the facts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to remember."""
