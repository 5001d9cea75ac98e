"""The interface of controllers, and controllers that ignore measurements: wait, act at random, play a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from simic.control.facts import Facts
from simic.control.legality import legal_masks
from simic.lifecycle.actions import HEAD_VALUES, HEADS, Action, Column, Op
from simic.lifecycle.stages import IllegalActionError


class Controller(Protocol):
    """Chooses actions: called once per decision with the facts of N hosts, returns one action per host (N, H).

    Beside one model it may also return an `Action`. A controller with a memory is also `Stateful`.
    """

    def act(self, facts: Facts) -> np.ndarray | Action:
        """One row of head indices for every host; see `simic.lifecycle.actions`."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A controller whose memory is saved in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """The memory, as JSON values and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        ...


def check_controller(controller: Any) -> None:
    """Raise unless this is a controller object, with both or none of the state methods."""
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
    """The action of one host as a row (H,), from an array (1, H), an `Action` or a list of one `Action`."""
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
    """Never grows anything.

    >>> growth = GrowthScheduler(model, optimizer, simic.WaitController())
    """

    def act(self, facts: Facts) -> np.ndarray:
        """Wait, for every host (N, H)."""
        return np.zeros((facts.num_hosts, len(HEADS)), dtype=np.int64)


class RandomController:
    """Draws a legal operation, a legal slot and blueprint, then the other heads, each uniformly.

    Args:
        rng_seed: Of the draws.

    Example:
        >>> growth = GrowthScheduler(model, optimizer, simic.RandomController(rng_seed=1), evaluate=validate)
    """

    def __init__(self, rng_seed: int = 0) -> None:
        self._rng = np.random.default_rng(rng_seed)

    def act(self, facts: Facts) -> np.ndarray:
        """A random legal action for every host (N, H)."""
        masks, hosts = legal_masks(facts), np.arange(facts.num_hosts)
        actions = np.zeros((facts.num_hosts, len(HEADS)), dtype=np.int64)
        actions[:, Column.OP] = self._draw(masks.op)
        actions[:, Column.SLOT] = self._draw(masks.slot[hosts, actions[:, Column.OP]])
        actions[:, Column.BLUEPRINT] = self._draw(masks.blueprint[actions[:, Column.SLOT]])
        for column, head in enumerate(HEADS):
            if column > Column.BLUEPRINT:
                actions[:, column] = self._rng.integers(len(HEAD_VALUES[head]), size=facts.num_hosts)
        if masks.style is not None:
            actions[:, Column.STYLE] = self._draw(masks.style[hosts, actions[:, Column.OP]])
        actions[actions[:, Column.OP] == Op.WAIT] = 0
        return actions

    def _draw(self, mask: np.ndarray) -> np.ndarray:
        return np.where(mask, self._rng.random(mask.shape), -1.0).argmax(-1)

    def state_dict(self) -> dict[str, Any]:
        """The state of the random generator."""
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the random generator."""
        self._rng.bit_generator.state = state["rng"]


class ScriptedController:
    """Plays a script on every host: the action at position t at decision t, and waits afterwards.

    Args:
        script: A list of actions, or a mapping {decision: action} that waits in between. An illegal action raises
            `IllegalActionError` when it is due.

    Example:
        >>> script = simic.ScriptedController({0: simic.Action("germinate", 0, "mlp_small")})
        >>> growth = GrowthScheduler(model, optimizer, script, evaluate=validate)
    """

    def __init__(self, script: Sequence[Action] | Mapping[int, Action]) -> None:
        self.script = dict(script) if isinstance(script, Mapping) else dict(enumerate(script))
        for decision, action in self.script.items():
            if not isinstance(action, Action):
                raise TypeError(
                    f'a script is made of actions such as Action("wait"), got {action!r} for decision {decision}'
                )

    def act(self, facts: Facts) -> np.ndarray:
        """The action that is due, for every host (N, H)."""
        due = [self.script.get(int(decision), Action()) for decision in facts.decision]
        return np.stack([action.encode(facts.slot_names, facts.blueprint_names) for action in due])
