"""What users see of growth while it runs: log lines and hooks.

Lines go to `logging.getLogger("simic")` at level INFO, and to the terminal if `verbose`. Hooks are functions of one
`GrowthEvent`, called at the end of a step, when the decision is recorded and model, optimizer and scheduler agree: if
one raises, so does the step, and training can go on.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import distributed
from torch.utils.hooks import RemovableHandle

from simic.control.governor import Verdict
from simic.growth.notices import warn_user
from simic.lifecycle.stages import Stage
from simic.scheduler.decision import Decision, StageChange
from simic.scheduler.log import GrowthLog

LOGGER = logging.getLogger("simic")


@dataclass(frozen=True, kw_only=True)
class GrowthEvent:
    """A seed that was germinated, fossilized or pruned; what a hook gets.

    >>> hook = lambda event: print(event.kind, event.slot, event.blueprint, event.change.contribution)
    >>> growth = GrowthScheduler(model, optimizer, evaluate=validate, on_fossilize=hook)
    """

    kind: str
    """germinate, fossilize or prune."""
    change: StageChange
    decision: Decision

    @property
    def slot(self) -> str:
        """The name of its slot."""
        return self.change.slot

    @property
    def blueprint(self) -> str:
        """The name of its blueprint."""
        return self.change.blueprint


Hook = Callable[[GrowthEvent], Any]
_KINDS: dict[str, Callable[[StageChange], bool]] = {
    "germinate": lambda change: change.old == Stage.DORMANT,
    "fossilize": lambda change: change.new == Stage.FOSSILIZED,
    "prune": lambda change: change.new == Stage.PRUNED,
}


class Announcer:
    """Logs decisions and calls hooks."""

    def __init__(self, hooks: Mapping[str, Hook | None], *, verbose: bool = False) -> None:
        self.verbose = verbose
        self.log: GrowthLog | None = None
        """Set when the scheduler is complete."""
        self._hooks: dict[str, OrderedDict[int, Hook]] = {kind: OrderedDict() for kind in _KINDS}
        for kind, hook in hooks.items():
            if hook is not None:
                self.register(kind, hook)

    def register(self, kind: str, hook: Hook) -> RemovableHandle:
        """Call a function at every event of this kind; `remove()` of what is returned ends it."""
        if kind not in self._hooks:
            raise ValueError(f"a hook belongs to one of {', '.join(self._hooks)}, got {kind!r}")
        if not callable(hook):
            raise TypeError(f"on_{kind} must be a function of one GrowthEvent, got {hook!r}")
        handle = RemovableHandle(self._hooks[kind])
        self._hooks[kind][handle.id] = hook
        return handle

    def tell(self, text: str) -> None:
        """Log a line, and print it if `verbose`; of several processes only the first does."""
        if distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0:
            return
        LOGGER.info(text)
        if self.verbose:
            print(text)

    def tell_decision(self, decision: Decision) -> None:
        """One line per stage change; at level DEBUG one per decision."""
        if self.log is not None:
            self.log.record(decision)
        LOGGER.debug("%s, %d calls of evaluate", decision, decision.evaluations)
        if decision.verdict != Verdict.OK:
            self.tell(str(decision))
        for change in decision.changes:
            self.tell(f"host epoch {decision.host_epoch}: {change}; {decision.parameters:,} parameters in all")

    def go_back(self, index: int) -> None:
        """The decision with this number comes next, because a saved state was loaded."""
        if self.log is not None:
            self.log.go_back(index)

    def report_rollback(self, decision: Decision, *, still_broken: bool) -> None:
        """Warn that the governor restored the last good state, or raise if that is broken too."""
        values = f"val_loss {decision.val_loss:.4g}, val_accuracy {decision.val_accuracy:.4g}"
        if decision.metric not in ("val_loss", "val_accuracy"):
            values += f", {decision.metric} {decision.value:.4g}"
        if still_broken:
            raise ValueError(
                f"the network was {decision.verdict} ({values}), and its last good weights, which are restored, are "
                "too: the fault lies in the validation data or in evaluate"
            )
        pruned = ", ".join(change.slot for change in decision.changes)
        warn_user(
            f"host epoch {decision.host_epoch}: the network was {decision.verdict} ({values}); its last good weights "
            f"and optimizer state are restored{f', the seeds in {pruned} pruned' if pruned else ''}; training goes on"
        )

    def call_hooks(self, decision: Decision) -> None:
        """Call the hooks of everything that happened in a decision."""
        for change in decision.changes:
            for kind, applies in _KINDS.items():
                if applies(change):
                    event = GrowthEvent(kind=kind, change=change, decision=decision)
                    for hook in list(self._hooks[kind].values()):
                        hook(event)
