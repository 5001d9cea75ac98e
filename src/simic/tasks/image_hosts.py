"""Hosts for images of 28x28 and more: their stem reads patches of 4x4 pixels, which makes them cheap to train.

Shapes: (B, C, height, width). Weights are drawn from torch's global rng: seed it first.
"""

from collections import OrderedDict
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import relu

from simic.tasks.hosts import check_positive, slot_names

PATCH_SIZE = 4
"""Rows and columns of a patch."""


def patch_conv_host(in_channels: int, width: int, num_blocks: int, num_classes: int) -> nn.Sequential:
    """A stem of patches, blocks that each halve the resolution, then average pooling and a linear head."""
    check_positive(in_channels=in_channels, width=width, num_blocks=num_blocks, num_classes=num_classes)
    segments = OrderedDict[str, nn.Module]()
    for name in slot_names(num_blocks + 1):
        halving = partial(nn.Conv2d, width, width, kernel_size=3, stride=2, padding=1, bias=False)
        layer = halving() if segments else _patches(in_channels, width)
        segments[name] = nn.Sequential(layer, nn.GroupNorm(1, width), nn.ReLU())
    segments["head"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))
    return nn.Sequential(segments)


def resnet_host(in_channels: int, width: int, num_blocks: int, num_classes: int) -> nn.Sequential:
    """A ResNet with batch norm: a stem of patches, then residual blocks.

    From the second on a block halves the resolution and doubles the width.
    """
    check_positive(in_channels=in_channels, width=width, num_blocks=num_blocks, num_classes=num_classes)
    stem = nn.Sequential(_patches(in_channels, width), nn.BatchNorm2d(width), nn.ReLU())
    segments, channels = OrderedDict[str, nn.Module](stem=stem), width
    for index, name in enumerate(slot_names(num_blocks + 1)[1:]):
        out_channels = channels if index == 0 else 2 * channels
        segments[name] = ResidualBlock(channels, out_channels)
        channels = out_channels
    segments["head"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
    return nn.Sequential(segments)


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm and a skip connection (He et al. 2016); more channels halve the resolution."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        stride = 1 if out_channels == in_channels else 2
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out_channels), nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Identity()
        if stride > 1:
            project = nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(h + self.shortcut(x))


def _patches(in_channels: int, width: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, width, kernel_size=PATCH_SIZE, stride=PATCH_SIZE, bias=False)
