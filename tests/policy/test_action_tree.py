"""The joint distribution of all heads against enumeration: every legal action of a small growth problem, one by one."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers.action_enumeration import ROWS, SLOTS, WIDTH, enumerate_actions, random_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from simic.lifecycle.actions import HEADS, HEADS_USED_BY, Op
from simic.policy.action_tree import ActionTree, TreeDistribution
from simic.policy.network import GROWTH_TREE


def tree_of(logits, mask) -> TreeDistribution:
    return TreeDistribution(GROWTH_TREE, torch.tensor(logits, dtype=torch.float32), torch.from_numpy(mask))


@given(seed=st.integers(0, 10**6))
@settings(max_examples=12, deadline=None)
def test_log_probability_and_entropy_of_every_legal_action(seed):
    logits, mask = random_problem(np.random.default_rng(seed))
    actions, policy = enumerate_actions(logits, mask), tree_of(logits, mask)
    joint = np.array([sum(heads.values()) for heads in actions.values()])
    assert np.exp(joint).sum() == pytest.approx(1.0)
    many = TreeDistribution(
        GROWTH_TREE,
        policy.rows.log_probs.expand(len(actions), *logits.shape),
        policy.rows.mask.expand(len(actions), *mask.shape),
    )
    tensor = torch.tensor(list(actions))
    np.testing.assert_allclose(many.log_prob(tensor), joint, atol=2e-5)
    by_head = [[heads.get(head, 0.0) for head in HEADS] for heads in actions.values()]
    np.testing.assert_allclose(many.head_log_prob(tensor), by_head, atol=1e-5)
    assert policy.entropy().item() == pytest.approx(-(np.exp(joint) * joint).sum(), abs=1e-4)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=8, deadline=None)
def test_samples_and_mode_are_among_the_legal_actions(seed):
    """Sampled, the mode, and the heads that do not matter are 0: all in the enumeration."""
    logits, mask = random_problem(np.random.default_rng(seed))
    legal = enumerate_actions(logits, mask)
    policy = TreeDistribution(
        GROWTH_TREE,
        torch.tensor(logits, dtype=torch.float32).expand(500, *logits.shape),
        torch.from_numpy(mask).expand(500, *mask.shape),
    )
    sampled = policy.sample(torch.Generator().manual_seed(seed))
    assert {tuple(action) for action in sampled.tolist()} <= legal.keys()
    mode = tuple(policy.mode()[0].tolist())
    assert mode in legal
    best = max(range(len(Op)), key=lambda op: logits[0, op] if mask[0, op] else -np.inf)
    under = {a: sum(p.values()) for a, p in legal.items() if a[0] == best}
    assert mode[0] == best
    # Slots and blueprints are chosen one after the other: given the slot, nothing under it is likelier.
    assert under[mode] == pytest.approx(max(p for a, p in under.items() if a[1] == mode[1]), abs=1e-5)


def test_sampling_frequencies_of_whole_actions():
    """20,000 draws of a small tree: every action that should come often comes as often as it should."""
    logits, mask = random_problem(np.random.default_rng(5), scale=1.5)
    draws, legal = 20_000, enumerate_actions(logits, mask)
    policy = TreeDistribution(
        GROWTH_TREE,
        torch.tensor(logits, dtype=torch.float32).expand(draws, *logits.shape),
        torch.from_numpy(mask).expand(draws, *mask.shape),
    )
    unique, counts = np.unique(policy.sample(torch.Generator().manual_seed(0)).numpy(), axis=0, return_counts=True)
    seen = {tuple(row): count for row, count in zip(unique.tolist(), counts.tolist(), strict=True)}
    often = {action: math.exp(sum(p.values())) for action, p in legal.items()}
    often = {action: p for action, p in often.items() if p * draws > 100}
    assert len(often) > 10
    for action, p in often.items():
        assert abs(seen.get(action, 0) - draws * p) < 5 * math.sqrt(draws * p * (1 - p)), action


def test_which_heads_matter_is_the_one_table():
    policy = tree_of(*random_problem(np.random.default_rng(0)))
    for op in Op:
        action = torch.tensor([op] + [0] * (len(HEADS) - 1))
        policy_ = TreeDistribution(GROWTH_TREE, policy.rows.log_probs, policy.rows.mask)
        matters = policy_.head_used(action).tolist()
        assert [head for head, does in zip(HEADS, matters, strict=True) if does] == list(HEADS_USED_BY[op])


def test_head_entropy_is_of_the_rows_that_the_action_came_from():
    """Uniform logits over two legal choices: 1 where the head matters, and unavailable where one is left."""
    mask = np.zeros((len(ROWS), WIDTH), dtype=bool)
    mask[:, :2] = True
    mask[ROWS.index(("style", Op.GERMINATE)), 1] = False  # no choice of style under germinate
    mask[ROWS.index(("blueprint", 2)), 1] = False  # and none of blueprint in slot 2
    policy = tree_of(np.zeros(mask.shape), mask)
    heads = dict.fromkeys(HEADS, 0)

    def entropy_of(**chosen):
        entropy, available = policy.head_entropy(torch.tensor(list((heads | chosen).values())))
        assert (entropy[~available] == 0).all()
        assert torch.allclose(entropy[available], torch.ones(()))
        return {head for head, is_so in zip(HEADS, available.tolist(), strict=True) if is_so}

    assert entropy_of(op=Op.WAIT) == {"op"}
    assert entropy_of(op=Op.GERMINATE, slot=1) == {"op", "slot", "blueprint", "tempo", "alpha_target"}
    assert entropy_of(op=Op.GERMINATE, slot=2) == {"op", "slot", "tempo", "alpha_target"}
    assert entropy_of(op=Op.SET_ALPHA_TARGET) == set(HEADS_USED_BY[Op.SET_ALPHA_TARGET])


def test_the_likeliest_choice_of_each_head_given_those_before_it():
    logits, mask = random_problem(np.random.default_rng(3))
    row = {name: np.where(legal, row, -np.inf).argmax() for name, row, legal in zip(ROWS, logits, mask, strict=True)}
    policy = tree_of(logits, mask)
    for slot in range(SLOTS):
        action = torch.tensor([Op.GERMINATE, slot, *[0] * (len(HEADS) - 2)])
        found = dict(zip(HEADS, policy.head_mode(action).tolist(), strict=True))
        assert found["op"] == row["op", None]
        assert found["blueprint"] == row["blueprint", slot]
        assert found["tempo"] == row["tempo", Op.GERMINATE]


def test_a_pointer_that_means_nothing_does_no_harm():
    """The slot index of an op without slots may be anything: nothing is read out of range."""
    logits, mask = random_problem(np.random.default_rng(1))
    policy = tree_of(logits, mask)
    clean, dirty = torch.zeros(len(HEADS), dtype=torch.int64), torch.zeros(len(HEADS), dtype=torch.int64)
    dirty[1] = WIDTH - 1
    assert (policy.head_log_prob(dirty) == policy.head_log_prob(clean)).all()
    assert (policy.head_entropy(dirty)[0] == policy.head_entropy(clean)[0]).all()


def test_row_names_tell_the_head():
    assert GROWTH_TREE.row_names(len(ROWS)) == [head for head, _ in ROWS]
    assert [GROWTH_TREE.heads[head] for head in GROWTH_TREE.row_head] == [head for head, _ in ROWS[:-SLOTS]]
    assert [*GROWTH_TREE.row_choice[1:]] == [op for _, op in ROWS[1:-SLOTS]]


@pytest.mark.parametrize("sizes", [[3], [2, 4], [3, 2, 2]])
def test_independent_heads_multiply(sizes):
    """Discrete and MultiDiscrete: the joint is the product, the entropy the sum, one row per head."""
    rng = np.random.default_rng(0)
    tree = ActionTree.independent(sizes)
    assert tree.heads == tuple(f"action_{i}" for i in range(len(sizes)))
    assert tree.num_rows == len(sizes)
    logits = rng.standard_normal((len(sizes), max(sizes)))
    mask = np.arange(max(sizes)) < np.array(sizes)[:, None]
    policy = TreeDistribution(tree, torch.tensor(logits, dtype=torch.float32), torch.from_numpy(mask))
    probs = [np.exp(row[:n]) / np.exp(row[:n]).sum() for row, n in zip(logits, sizes, strict=True)]
    for action in itertools.product(*map(range, sizes)):
        expected = sum(math.log(p[choice]) for p, choice in zip(probs, action, strict=True))
        assert policy.log_prob(torch.tensor(action)).item() == pytest.approx(expected, abs=1e-5)
        assert policy.head_used(torch.tensor(action)).all()
    assert policy.entropy().item() == pytest.approx(sum(-(p * np.log(p)).sum() for p in probs), abs=1e-5)


def test_masks_of_another_shape_are_refused():
    logits, mask = random_problem(np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"mask.*shape"):
        tree_of(logits, mask[:, :1])
    with pytest.raises(ValueError, match=r"mask.*shape"):
        tree_of(logits[None].repeat(3, 0), mask[None])


def test_a_table_that_does_not_fit_its_heads_is_refused():
    with pytest.raises(ValueError, match="a column for each of the heads op, slot"):
        ActionTree(("op", "slot"), np.ones((2, 3), dtype=bool))
    with pytest.raises(ValueError, match="the first head is always used"):
        ActionTree(("op", "slot"), np.array([[True, False], [False, True]]))


@given(seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_reading_only_the_rows_of_actions_gives_what_the_whole_tree_gives(seed):
    rng, steps, envs = np.random.default_rng(seed), 2, 3
    problems = [random_problem(rng) for _ in range(steps * envs)]
    logits, mask = (
        torch.from_numpy(np.stack(part)).unflatten(0, (steps, envs)) for part in zip(*problems, strict=True)
    )
    policy = TreeDistribution(GROWTH_TREE, logits, mask)
    action = policy.sample(torch.Generator().manual_seed(seed))
    reading = GROWTH_TREE.reading(action, mask)
    log_prob, entropy = reading.evaluate(logits)
    assert torch.allclose(log_prob, policy.head_log_prob(action), atol=1e-5)
    assert torch.allclose(entropy, policy.head_entropy(action)[0], atol=1e-5)
    chosen = torch.tensor([2, 0])
    part = reading.environments(chosen).evaluate(logits[:, chosen])[0]
    assert torch.equal(part, log_prob[:, chosen])
