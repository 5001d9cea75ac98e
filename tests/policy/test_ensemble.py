"""Mixtures of policies against enumeration: every legal action of a small growth problem under every member."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from helpers.action_enumeration import ROWS, SLOTS, WIDTH, enumerate_actions, random_problem

from simic.control.learned import make_network
from simic.gymnasium.flat_network import RecurrentActorCritic
from simic.lifecycle.actions import HEADS, Op
from simic.policy.action_tree import ActionTree, TreeDistribution
from simic.policy.config import PolicyConfig
from simic.policy.ensemble import Ensemble, mix_rows
from simic.policy.network import GROWTH_TREE


def test_the_example_of_the_header():
    used = np.array([[True, False], [True, True]])
    tree = ActionTree(("op", "slot"), used)
    members = torch.tensor([[[0.9, 0.1], [0.5, 0.5]], [[0.1, 0.9], [0.5, 0.5]]])
    members[:, 1] = torch.tensor([[1.0, 1e-30], [0.2, 0.8]])
    torch.testing.assert_close(mix_rows(tree, members.log()).exp(), torch.tensor([[0.5, 0.5], [0.28, 0.72]]))


def test_heads_that_are_independent_are_averaged():
    tree = ActionTree.independent((2, 3))
    probs = torch.rand(4, 2, 3).softmax(-1)
    probs[:, 0] = torch.tensor([[0.2, 0.8, 1e-30], [0.5, 0.5, 1e-30], [0.9, 0.1, 1e-30], [0.4, 0.6, 1e-30]])
    torch.testing.assert_close(mix_rows(tree, probs.log()), probs.mean(0).log())


@pytest.mark.parametrize("rng_seed", range(5))
def test_every_row_is_the_conditional_distribution_of_the_mixture(rng_seed):
    rng = np.random.default_rng(rng_seed)
    mask = random_problem(rng)[1]
    members = [random_problem(rng)[0] for _ in range(3)]
    joint = defaultdict[tuple[int, ...], float](float)
    for logits in members:
        for action, log_probs in enumerate_actions(logits, mask).items():
            joint[action] += np.exp(sum(log_probs.values())) / len(members)
    legal = torch.from_numpy(mask)
    each = [TreeDistribution(GROWTH_TREE, torch.tensor(own).float(), legal).rows.log_probs for own in members]
    mixed = TreeDistribution(GROWTH_TREE, mix_rows(GROWTH_TREE, torch.stack(each)), legal).rows.probs.double().numpy()
    for row, (head, condition) in enumerate(ROWS):
        column, expected = HEADS.index(head), np.zeros(WIDTH)
        for action, probability in joint.items():
            read = (action[0] == Op.GERMINATE and action[1] == condition) if head == "blueprint" else True
            if read and (head in ("op", "blueprint") or action[0] == condition):
                expected[action[column]] += probability
        if expected.sum() > 0:
            np.testing.assert_allclose(mixed[row], expected / expected.sum(), atol=2e-6)


def make_ensemble() -> Ensemble:
    torch.manual_seed(3)
    configs = (PolicyConfig(hidden_size=8, encoding_size=4), PolicyConfig(hidden_size=6, encoding_size=4, core="gru"))
    return Ensemble([make_network(config) for config in configs])


def observation(network: Ensemble, num_envs: int = 2) -> dict[str, torch.Tensor]:
    shapes = {"base": (), "slots": (SLOTS,), "blueprints": (SLOTS, 4)}
    return {part: torch.randn(1, num_envs, *shapes[part], size) for part, size in network.sizes.items()}


def test_every_member_keeps_its_own_state():
    network = make_ensemble()
    assert network.state_size == 8 + 8 + 6
    seen, state = observation(network), torch.randn(2, network.state_size)
    both = network(seen, state)
    first, second = (own(seen, part) for own, part in zip(network.networks, state.split([16, 6], -1), strict=True))
    assert torch.equal(both.state, torch.cat([first.state, second.state], -1))
    assert torch.equal(both.logits, torch.stack([first.logits, second.logits], 2))
    assert both.value.isnan().all()


def test_policies_that_do_not_fit_together_are_refused():
    first = make_network(PolicyConfig(hidden_size=8, encoding_size=4))
    with pytest.raises(ValueError, match="at least 2 policies, got 1"):
        Ensemble([first])
    with pytest.raises(ValueError, match=r"the same heads: policy 0 has .*'op'.* policy 1 .*action_0.*; leave one out"):
        Ensemble([first, RecurrentActorCritic(4, [2])])
    flat = RecurrentActorCritic(4, [2])
    with pytest.raises(ValueError, match="the same choices"):
        Ensemble([flat, RecurrentActorCritic(4, [3])])
    with pytest.raises(ValueError, match=r"the same features: policy 0 has \{'base': 4\}, policy 1 \{'base': 5\}"):
        Ensemble([flat, RecurrentActorCritic(5, [2])])
    with pytest.raises(ValueError, match="policy 1 is an ensemble itself"):
        Ensemble([first, make_ensemble()])
