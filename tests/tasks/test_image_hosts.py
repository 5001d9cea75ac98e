"""Hosts for images: what each segment halves or doubles."""

import pytest
import torch

from simic.tasks.image_hosts import patch_conv_host, resnet_host


def shapes_of(host: torch.nn.Sequential) -> list[tuple[int, ...]]:
    """The shape behind every segment, of an image of 28x28."""
    x, shapes = torch.zeros(2, 1, 28, 28), []
    for segment in host:
        x = segment(x)
        shapes.append(tuple(x.shape[1:]))
    return shapes


def test_a_patch_conv_host_halves_after_its_patches():
    assert shapes_of(patch_conv_host(1, 6, 2, 10)) == [(6, 7, 7), (6, 4, 4), (6, 2, 2), (10,)]


def test_a_resnet_doubles_its_width_where_it_halves():
    host = resnet_host(1, 4, 3, 10)
    assert shapes_of(host) == [(4, 7, 7), (4, 7, 7), (8, 4, 4), (16, 2, 2), (10,)]
    assert list(dict(host.named_children())) == ["stem", "block1", "block2", "block3", "head"]
    assert sum(isinstance(module, torch.nn.BatchNorm2d) for module in host.modules()) == 1 + 3 * 2 + 2


def test_a_residual_block_passes_its_input_on():
    block = resnet_host(1, 4, 1, 10).get_submodule("block1").eval()
    x = torch.rand(2, 4, 7, 7)
    torch.nn.init.zeros_(block.get_submodule("norm2").weight)  # pyright: ignore[reportArgumentType]
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("make", [patch_conv_host, resnet_host])
@pytest.mark.parametrize("wrong", [(0, 4, 1, 10), (1, 0, 1, 10), (1, 4, 0, 10), (1, 4, 1, 0)])
def test_sizes_must_be_positive(make, wrong):
    with pytest.raises(ValueError, match="must be above zero, got 0"):
        make(*wrong)
