"""Comparing controllers on fresh hosts; `simic.evaluate` is the way in."""
