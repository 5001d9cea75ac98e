"""Recorded episodes as training data: next steps and returns by hand."""

import pytest
import torch
from helpers.rollouts import flat_agent, recorded

from simic.ppo.demonstrations import has_next_step, monte_carlo_returns, prepare_demonstrations
from simic.ppo.rollout import Rollout

SKETCH = {
    "first": [[1, 1, 1, 0, 1, 1], [0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]],
    "terminated": [[0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [1, 0, 1, 0, 1, 1]],
    "truncated": [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0], [0, 1, 0, 1, 0, 0]],
    "valid": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [1, 1, 0, 1, 1, 1]],
}
"""Environments: a whole episode; one that ends, then one that is cut off; an early end; a piece from the middle; one
that is cut off at once, then one that ends; the same with a step between them that only resets."""


def sketch(**given) -> Rollout:
    flags = {name: torch.tensor(rows).bool() for name, rows in (SKETCH | given).items()}
    said, mask = torch.zeros(3, 6, 1, dtype=torch.int64), torch.ones(3, 6, 1, 3).bool()
    reward = torch.tensor([[1.0], [2.0], [4.0]]).expand(3, 6)
    return recorded({"base": torch.zeros(3, 6, 3)}, said, mask, reward=reward, **flags)


def test_what_follows_by_hand():
    assert has_next_step(sketch()).int().tolist() == [[1, 0, 1, 1, 0, 0], [1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]]
    # A terminal is an end also if nobody marked the beginning after it; where a cut one goes on in the record, it does.
    assert has_next_step(sketch(first=[[0] * 6] * 3)).int().tolist() == [
        [1, 0, 1, 1, 1, 0],
        [1, 1, 0, 1, 1, 0],
        [0] * 6,
    ]


def test_returns_by_hand():
    """Discount 1/2; a return is known where the end of its episode is on record."""
    returns, known = monte_carlo_returns(sketch(), gamma=0.5)
    expected = torch.tensor([[3.0, 1, 2, 3, 1, 1], [4, 4, 2, 4, 4, 2], [4, 4, 4, 4, 4, 4]])
    assert torch.equal(returns, expected)
    assert known.int().tolist() == [[1, 1, 1, 0, 0, 0], [1, 0, 1, 0, 1, 0], [1, 0, 0, 0, 1, 1]]


def test_nothing_to_learn_from_is_refused():
    with pytest.raises(ValueError, match="at least one rollout"):
        prepare_demonstrations(flat_agent(), [])
