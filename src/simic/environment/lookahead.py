"""Look-ahead search: copies of a host play candidate actions to the end, and the best one is taken.

It knows the future, so it is no controller but an upper bound for controllers, and a teacher. Two stacks of hosts of
one task are used: the trunk, whose episodes are kept, and the branches, whose rows become copies of the trunk's hosts:

    decision        3      4      5    ...   24
    trunk           o------o------o              goes on with the best of the candidates
                    |
    branches        +-wait--------------------o  91.2 points   the rule's own action
                    +-germinate stem mlp------o  92.0          kept, if the lead is above the margin
                    +-germinate stem norm-----o  90.7

Shapes: N hosts of the trunk, C candidates of all of them, R rows of branches, H heads of an action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from simic.control.baselines import Controller
from simic.control.facts import Facts
from simic.control.finish import for_hosts
from simic.control.legality import Masks
from simic.control.plan import decisions_to_fossil, germinate_rows
from simic.control.registry import make_controller
from simic.environment.host_trainings import HostTrainings
from simic.environment.lookahead_config import LookaheadConfig
from simic.lifecycle.actions import HEAD_USED, HEADS, TEMPOS, Column, Op

STREAM = 7
"""Separates the draws of candidates from other random streams of the same rng seed."""


class Candidates(NamedTuple):
    """Actions to try; those of a host stand side by side, its rule's own action first."""

    host: np.ndarray  # (C,)
    action: np.ndarray  # (C, H)
    rule: np.ndarray  # (C,) index of the rule that goes on from there


class Lookahead:
    """Decides for the hosts of `trunk` by playing candidates in copies of them; `decide` is for `episodes.play`.

    `rules` go on from a candidate: the first one at the start, then the one that won last. With a `policy` the trunk
    follows that, and what the search would have done is only noted in `labels`.
    """

    def __init__(
        self,
        trunk: HostTrainings,
        make_branches: Callable[[int], HostTrainings],
        rules: Sequence[Controller],
        config: LookaheadConfig | None = None,
        *,
        policy: Controller | None = None,
        rng_seed: int = 0,
    ) -> None:
        """`make_branches` builds trainings with so many hosts, of the same task and settings as the trunk."""
        self.config, self.trunk, self._rules, self._policy = config or LookaheadConfig(), trunk, list(rules), policy
        self._branches = make_branches(self.config.rows)
        self._rng_seed = rng_seed
        self._rule_of = np.zeros(trunk.num_hosts, dtype=np.int64)
        self.host_epochs = 0
        """Host epochs that branches and trunk have trained so far."""
        self.labels: list[np.ndarray] = []
        """The actions (N, H) that the search chose at each decision."""

    @property
    def host_trainings(self) -> float:
        """Whole host trainings spent for each host of the trunk, its own included."""
        return self.host_epochs / (self.trunk.num_hosts * self.trunk.length.host_epochs)

    def decide(self, facts: Facts, masks: Masks) -> np.ndarray:
        """The action of every host (N, H)."""
        own = np.stack([np.asarray(rule.act(facts)) for rule in self._rules])  # (rules, N, H)
        chosen = own[self._rule_of, np.arange(facts.num_hosts)]
        if int(facts.decision[0]) % self.config.every == 0:
            candidates = self._candidates(facts, masks, own)
            if candidates.host.size:
                best = choose_best(candidates, self._play(candidates), self.config.margin, self.config.pooling)
                chosen[candidates.host[best]] = candidates.action[best]
                self._rule_of[candidates.host[best]] = candidates.rule[best]
        self.host_epochs += facts.num_hosts
        self.labels.append(chosen * HEAD_USED[chosen[:, Column.OP]])
        return chosen if self._policy is None else np.asarray(self._policy.act(facts))

    def _candidates(self, facts: Facts, masks: Masks, own: np.ndarray) -> Candidates:
        """What is tried in hosts that have a choice: what each rule would do, seeds to plant, seeds to prune."""
        tempo = TEMPOS[0]
        left = decisions_left(self.trunk, facts)
        # A host takes one action per decision, so every other live seed may delay the new one.
        in_time = left >= decisions_to_fossil(facts.lifecycle, tempo) + facts.slots.live.sum(1)
        places = np.argwhere(masks.blueprint)  # (slot, blueprint)
        rng = np.random.default_rng([STREAM, self._rng_seed, int(facts.decision[0])])
        places = places[rng.permutation(len(places))]  # in the same order for all hosts, so that they can be compared
        hosts, actions, rules = [], [], []
        for host in range(facts.num_hosts):
            current = self._rule_of[host]
            fits = places[masks.slot[host, Op.GERMINATE, places[:, 0]] & in_time[host]][: self.config.candidates]
            prunes = np.flatnonzero(masks.slot[host, Op.PRUNE])
            rows = [
                *germinate_rows(fits[:, 0], fits[:, 1], "linear-add", tempo),
                *(_prune_row(int(slot)) for slot in prunes),
            ]
            others = [rule for rule in range(len(own)) if rule != current]
            if rows:
                hosts += [host] * (1 + len(others) + len(rows))
                actions += [own[current, host], *(own[rule, host] for rule in others), *rows]
                rules += [current, *others, *[current] * len(rows)]
        action = np.array(actions, dtype=np.int64).reshape(-1, len(HEADS))
        return Candidates(np.array(hosts, dtype=np.int64), action, np.array(rules, dtype=np.int64))

    def _play(self, candidates: Candidates) -> np.ndarray:
        """Scores on validation data (C,) of the candidates, in as many rounds as the rows of the branches require."""
        size = self._branches.num_hosts
        rounds = [slice(start, start + size) for start in range(0, len(candidates.host), size)]
        return np.concatenate([self._play_rows(Candidates(*(part[own] for part in candidates))) for own in rounds])

    def _play_rows(self, candidates: Candidates) -> np.ndarray:
        branches, number = self._branches, len(candidates.host)
        # Rows that are left over repeat the last candidate.
        rows = np.minimum(np.arange(branches.num_hosts), number - 1)
        host, action, rule_of = (values[rows] for values in candidates)
        branches.copy_hosts(host, np.arange(branches.num_hosts), self.trunk)
        rules = [for_hosts(rule, host) for rule in self._rules]
        value, alive = np.full(len(rows), -np.inf), np.ones(len(rows), dtype=bool)
        facts, depth = branches.facts(), self.config.depth
        steps = decisions_left(branches, facts)[0]
        for step in range(steps if depth is None else min(depth, steps)):
            if step:
                action = np.stack([np.asarray(rule.act(facts)) for rule in rules])[rule_of, np.arange(len(rows))]
            outcome = branches.step(action * alive[:, None])
            facts = outcome.facts
            self.host_epochs += len(rows)
            value[alive] = branches.score(exported=outcome.ended)[alive]
            alive &= ~outcome.ended
        return value[:number]


def choose_best(candidates: Candidates, value: np.ndarray, margin: float, pooling: float) -> np.ndarray:
    """The best candidate of each host that has some, as indices; the first of a host unless another leads by `margin`.

    The lead over the first is blended, with the weight `pooling`, with the mean lead of the same action in all hosts
    that tried it: single scores are noisy, and what helps a host of a task often helps the others.
    """
    first = np.flatnonzero(np.diff(candidates.host, prepend=-1) != 0)
    lead = value - np.repeat(value[first], np.diff(first, append=len(value)))
    keys = np.concatenate([candidates.action, candidates.rule[:, None]], axis=1)
    _, same = np.unique(keys, axis=0, return_inverse=True)
    same = same.reshape(-1)
    mean = (np.bincount(same, lead) / np.bincount(same))[same]
    lead = (1 - pooling) * lead + pooling * mean
    lead[first] = 0.0
    best = [start + int(part.argmax()) for start, part in zip(first, np.split(lead, first[1:]), strict=True)]
    return np.where(lead[best] > margin, best, first)


def decisions_left(trainings: HostTrainings, facts: Facts) -> np.ndarray:
    """Decisions until the true end of the episodes (N,), which controllers may not be told."""
    return trainings.length.host_epochs - facts.decision


def _prune_row(slot: int) -> np.ndarray:
    row = np.zeros(len(HEADS), dtype=np.int64)
    row[Column.OP], row[Column.SLOT] = Op.PRUNE, slot
    return row


def make_lookahead(
    trunk: HostTrainings,
    make_branches: Callable[[int], HostTrainings],
    config: LookaheadConfig,
    *,
    rng_seed: int = 0,
) -> Lookahead:
    """The search with the rules and the policy that its settings name."""
    rules = [make_controller(name, rng_seed) for name in config.rules]
    policy = make_controller(config.policy, rng_seed) if config.follow == "policy" else None
    return Lookahead(trunk, make_branches, rules, config, policy=policy, rng_seed=rng_seed)
