"""A procedural data set of one-dimensional "digits": ten short curves, distorted and noisy.

Modelled on MNIST-1D (Greydanus & Kobak 2020, "Scaling down deep learning"), with other templates. A convolution
detects the curve at any position; a linear model cannot.

Shapes: N samples of 40 points; a template has 12 points.
"""

import numpy as np
from numpy.typing import NDArray

NUM_POINTS = 40
"""Length of a sample."""
PADDING = (36, 60)
"""Minimum and maximum number of empty points added to a template; more make the curve narrower."""
AMPLITUDE_SPREAD = 0.4
"""Curves are scaled by a factor within 1 +- this."""
SHEAR = 0.75
"""Maximum height of the linear ramp that is added."""
MAX_TRANSLATION = 48
"""Maximum cyclic shift, in points before resampling."""
CORRELATED_NOISE = 0.15
"""Standard deviation of the noise that is correlated between neighbouring points."""
SMOOTHING_WIDTH = 2.0
"""Standard deviation of the Gaussian smoothing kernel, in points."""
WHITE_NOISE = 0.02
"""Standard deviation of the independent noise."""

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
    """Curves (N, 40) and their classes (N,), balanced and determined by the arguments."""
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
    # A template is padded with zeros and starts at 1; positions beyond its end are clipped to the last zeros.
    framed = np.pad(TEMPLATES, ((0, 0), (1, 2)))
    position = (np.arange(NUM_POINTS) / NUM_POINTS * length - shift + 1) % length
    position = position.clip(max=template_length + 1)
    left = position.astype(np.int64)
    weight = position - left
    rows = labels[:, None]
    return (1 - weight) * framed[rows, left] + weight * framed[rows, left + 1]


def _smoothing_matrix() -> NDArray[np.float64]:
    """Gaussian kernels (40, 40), one per column, normalised to preserve the variance of white noise."""
    distance = np.subtract.outer(np.arange(NUM_POINTS), np.arange(NUM_POINTS))
    weights = np.exp(-0.5 * (distance / SMOOTHING_WIDTH) ** 2)
    return weights / np.linalg.norm(weights, axis=0)
