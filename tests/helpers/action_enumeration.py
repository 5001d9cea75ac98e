"""A small growth problem whose legal actions can be enumerated: random logits and masks, and what they mean."""

import itertools
import math

import numpy as np

from simic.lifecycle.actions import HEAD_VALUES, HEADS, HEADS_USED_BY, Op

SLOTS, BLUEPRINTS = 3, 4
SIZES = {head: len(values) for head, values in HEAD_VALUES.items()} | {"slot": SLOTS, "blueprint": BLUEPRINTS}
WIDTH = max(SIZES.values())
# The order of rows that the tree promises: the first head, the others under each op, blueprints in each slot.
ROWS: list[tuple[str, int | None]] = [("op", None)]
ROWS += [(h, op) for h in HEADS[1:] if h != "blueprint" for op in Op if h in HEADS_USED_BY[op]]
ROWS += [("blueprint", slot) for slot in range(SLOTS)]


def random_problem(rng, scale=2.0) -> tuple[np.ndarray, np.ndarray]:
    """Logits (R, W) and masks in which every legal op has a legal slot, and every slot a blueprint."""
    logits = scale * rng.standard_normal((len(ROWS), WIDTH))
    mask = np.zeros((len(ROWS), WIDTH), dtype=bool)
    for row, (head, _) in enumerate(ROWS):
        mask[row, : SIZES[head]] = rng.random(SIZES[head]) < 0.7
        mask[row, rng.integers(SIZES[head])] = True
    mask[0, Op.WAIT] = True
    return logits, mask


def enumerate_actions(logits, mask) -> dict[tuple[int, ...], dict[str, float]]:
    """Log-probability of each head of every legal action, by the definition, in float64."""
    table = {}
    for name, row, legal in zip(ROWS, logits, mask, strict=True):
        weight = np.where(legal, np.exp(row), 0.0)
        table[name] = weight / weight.sum()
    found = {}
    for op in Op:
        heads = [head for head in HEADS if head in HEADS_USED_BY[op] and head != "op"]
        for choices in itertools.product(*(range(SIZES[head]) for head in heads)):
            chosen = dict(zip(heads, choices, strict=True))
            probs = {"op": table["op", None][op]}
            for head, choice in chosen.items():
                probs[head] = table[head, chosen["slot"] if head == "blueprint" else op][choice]
            if all(p > 0 for p in probs.values()):
                action = tuple(int(op) if head == "op" else chosen.get(head, 0) for head in HEADS)
                found[action] = {head: math.log(p) for head, p in probs.items()}
    return found
