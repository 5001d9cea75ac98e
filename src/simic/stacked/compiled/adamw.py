"""AdamW and clipping of all rows of a `StackedOptimizer`, in one call."""

from __future__ import annotations

import math
from typing import Any

from simic.compiled.cache import entry
from simic.compiled.vector_math import typed
from simic.stacked.compiled.layers import dot


@entry
def step_adamw(
    rows: Any, mean: Any, square: Any, steps: Any, gradient: Any, starts: Any, owner: Any, entity: Any, rate: Any,
    active: Any, config: Any, norms: Any, totals: Any,
) -> None:  # fmt: skip
    """One step of AdamW in place, after clipping the gradient of every host as a whole.

    Row r is the elements starts[r] to starts[r + 1]; `active` (rows,) says which learn. `config` is beta1, beta2,
    epsilon, weight decay and the largest norm. Norms (entities,) are those before clipping; totals (N,) is scratch.
    """
    zero = typed(rows[0], 0.0)
    norms[:] = zero
    totals[:] = zero
    for r in range(len(owner)):
        own = gradient[starts[r] : starts[r + 1]]
        norms[entity[r]] += dot(own, own) if own.size else zero
    for e in range(norms.size):
        totals[e % totals.size] += norms[e]
        norms[e] = math.sqrt(norms[e])
    beta1, beta2, epsilon, decay, limit = config[0], config[1], config[2], config[3], config[4]
    keep1, new1, keep2, new2 = (
        typed(zero, beta1), typed(zero, 1 - beta1), typed(zero, beta2), typed(zero, 1 - beta2),
    )  # fmt: skip
    for r in range(len(owner)):
        if not active[r]:
            continue
        steps[r] += typed(zero, 1.0)
        norm, own_rate = math.sqrt(totals[owner[r]]), rate[owner[r]]
        # As in torch.nn.utils.clip_grad_norm_; NaN stays NaN.
        clip = typed(zero, 1.0) if norm + 1e-6 <= limit else typed(zero, limit / (norm + 1e-6))
        correction = math.sqrt(1 - beta2 ** steps[r])
        # mean / (sqrt(square) / correction + epsilon), with numerator and denominator times the correction
        scaled = typed(zero, own_rate * correction / (1 - beta1 ** steps[r]))
        keep, small = typed(zero, 1 - own_rate * decay), typed(zero, epsilon * correction)
        begin, stop = starts[r], starts[r + 1]
        w, g, m, v = rows[begin:stop], gradient[begin:stop], mean[begin:stop], square[begin:stop]
        for j in range(w.size):
            clipped = g[j] * clip
            m[j] = keep1 * m[j] + new1 * clipped
            v[j] = keep2 * v[j] + new2 * clipped * clipped
            w[j] = w[j] * keep - scaled * m[j] / (math.sqrt(v[j]) + small)
