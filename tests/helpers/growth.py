"""Grown models in tests."""

from simic.growth.model import GrowableModel
from simic.growth.seed import Seed


def seed_of(model: GrowableModel, slot: str) -> Seed:
    """The seed in a slot that must have one."""
    seed = model.seed(slot)
    assert seed is not None
    return seed
