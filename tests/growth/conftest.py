"""Blueprints that a test registers are gone when it ends."""

import pytest

from simic.growth import blueprints


@pytest.fixture
def own_blueprints(monkeypatch):
    """Let a test register blueprints of its own."""
    monkeypatch.setattr(blueprints, "BLUEPRINTS", dict(blueprints.BLUEPRINTS))
