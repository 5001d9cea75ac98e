"""Family bottlenecks: labels say what they should, and the host alone is linear behind its flawed stem."""

import numpy as np
import pytest
import torch

from simic.tasks.bottlenecks import Flawed, FlawedStem, flawed_host


def draw(need, num_classes=2, frequency=3.0):
    problem = Flawed(needs=(need,), frequency=frequency)
    (x, y), traits = problem.generate(np.random.default_rng(0), num_samples=400, shape=(6,), num_classes=num_classes)
    assert traits == {"problem": f"flawed-{need}", "frequency": frequency}
    return x, y


def test_width_is_the_length_of_the_squeezed_inputs():
    x, y = draw("width")
    lengths = np.linalg.norm(x[:, :4], axis=1)
    assert lengths[y == 1].min() > lengths[y == 0].max()
    assert y.sum() == 200


def test_depth_is_whether_both_waves_have_one_sign():
    x, y = draw("depth")
    first, second = np.sin(3 * x[:, 4]), np.sin(3 * x[:, 5])
    assert np.array_equal(y == 1, (first > 0) == (second > 0))
    assert 150 < y.sum() < 250


def test_both_takes_four_classes():
    _, width = draw("width")
    _, depth = draw("depth")
    _, both = draw("both", num_classes=4)
    assert np.array_equal(both, 2 * width + depth)


def test_nothing_is_a_plane_of_the_squeezed_inputs():
    x, y = draw("nothing")
    x4 = np.column_stack([x[:, :4], np.zeros((400, 2))])
    plane = np.linalg.lstsq(x4[:, :4], 2.0 * y - 1, rcond=None)[0]
    assert ((x4[:, :4] @ plane > 0) == (y == 1)).mean() > 0.97
    assert 120 < y.sum() < 280


def test_the_stem_squeezes_and_makes_waves():
    stem = FlawedStem(6, frequency=3.0)
    x = torch.randn(5, 6)
    out = stem(x)
    assert out.shape == (5, 4)
    torch.testing.assert_close(out[:, :2], stem.narrow(x[:, :4]))
    torch.testing.assert_close(out[:, 2:], torch.sin(3 * x[:, 4:]))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_behind_the_stem_the_host_is_linear(depth):
    host = flawed_host(6, 5, depth, 3, frequency=3.0)
    names = [name for name, _ in host.named_children()]
    assert len(names) == depth + 1
    rest = host[1:]
    one, other = torch.randn(2, 7, 4).unbind()
    torch.testing.assert_close(rest(one) + rest(other), 2 * rest((one + other) / 2), atol=1e-5, rtol=1e-5)
