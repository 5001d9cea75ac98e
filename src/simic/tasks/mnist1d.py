"""A procedural data set of one-dimensional "digits": ten short curves, distorted, in noise.

In the spirit of MNIST-1D (Greydanus & Kobak 2020, "Scaling down deep learning"), with templates of our own.
A convolution finds the curve wherever it lies; a linear model cannot.

Shapes: N samples of 40 points; a template has 12 points.
"""

import numpy as np
from numpy.typing import NDArray

NUM_POINTS = 40
"""Length of a sample."""
PADDING = (36, 60)
"""Least and most empty points added to a template: the more, the narrower the curve in its sample."""
AMPLITUDE_SPREAD = 0.4
"""Curves are scaled by 1 plus or minus at most this."""
SHEAR = 0.75
"""Greatest height of the ramp added from end to end."""
MAX_TRANSLATION = 48
"""Greatest shift, in points before resampling; what leaves at one end enters at the other."""
CORRELATED_NOISE = 0.15
"""Standard deviation of the noise shared by neighbouring points."""
SMOOTHING_WIDTH = 2.0
"""Standard deviation, in points, of the Gaussian that spreads it over neighbours."""
WHITE_NOISE = 0.02
"""Standard deviation of the noise independent at every point."""

TEMPLATES = np.array(
    [
        [1, 3, 5, 6, 7, 7, 7, 7, 6, 5, 3, 1],  # dome
        [-1, -3, -5, -6, -7, -7, -7, -7, -6, -5, -3, -1],  # bowl
        [1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 0],  # climb, then a cliff
        [9, 8, 7, 6, 6, 5, 4, 3, 3, 2, 1, 0],  # cliff, then a descent
        [3, 7, 8, 7, 3, 0, 0, 3, 7, 8, 7, 3],  # two humps
        [3, 6, 7, 6, 3, 0, -3, -6, -7, -6, -3, 0],  # one wave, crest first
        [-3, -6, -7, -6, -3, 0, 3, 6, 7, 6, 3, 0],  # one wave, trough first
        [9, 9, 9, 9, 9, 4, 4, 4, 4, 4, 4, 4],  # high step, low step
        [-4, -4, -4, -4, -4, -4, -4, -9, -9, -9, -9, -9],  # shallow step, deep step
        [6, 8, 2, -4, -6, -2, 4, 7, 3, -4, -7, -3],  # two waves
    ]
) / np.float64(8)
"""(10, 12): one curve per class."""


def generate(num_samples: int, *, rng_seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Curves (N, 40) and their classes (N,), fully determined by the arguments; classes are equally frequent."""
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}: ask for one sample or more")
    rng = np.random.default_rng(rng_seed)
    labels = rng.permutation(np.arange(num_samples) % len(TEMPLATES))
    curves = _place(labels, rng)
    curves *= 1 + AMPLITUDE_SPREAD * rng.uniform(-1, 1, (num_samples, 1))
    curves += SHEAR * rng.uniform(-1, 1, (num_samples, 1)) * np.linspace(-0.5, 0.5, NUM_POINTS)
    curves += CORRELATED_NOISE * rng.standard_normal(curves.shape) @ _smoothing_matrix()
    curves += WHITE_NOISE * rng.standard_normal(curves.shape)
    return curves.astype(np.float32), labels.astype(np.int64)


def _place(labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Pad, translate and resample each label's template to (N, 40)."""
    num_samples, template_length = len(labels), TEMPLATES.shape[1]
    length = template_length + rng.integers(*PADDING, size=(num_samples, 1), endpoint=True)
    shift = rng.integers(0, MAX_TRANSLATION, size=(num_samples, 1), endpoint=True)
    # Framed by zeros, a template starts at 1; whatever lies past its end is clipped onto the last zeros.
    framed = np.pad(TEMPLATES, ((0, 0), (1, 2)))
    position = (np.arange(NUM_POINTS) / NUM_POINTS * length - shift + 1) % length
    position = position.clip(max=template_length + 1)
    left = position.astype(np.int64)
    weight = position - left
    rows = labels[:, None]
    return (1 - weight) * framed[rows, left] + weight * framed[rows, left + 1]


def _smoothing_matrix() -> NDArray[np.float64]:
    """(40, 40): each column weighs its neighbours by a Gaussian, and keeps the variance of white noise."""
    distance = np.subtract.outer(np.arange(NUM_POINTS), np.arange(NUM_POINTS))
    weights = np.exp(-0.5 * (distance / SMOOTHING_WIDTH) ** 2)
    return weights / np.linalg.norm(weights, axis=0)
