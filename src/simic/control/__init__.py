"""Who decides: facts about hosts, the rules of what is legal, controllers, and the scheduler beside an optimizer."""

CONTROLLER_NAMES = ("heuristic", "random", "wait", "autogrow", "plan", "pretrained")
"""Controllers that are known by name; `named.py` makes them."""
