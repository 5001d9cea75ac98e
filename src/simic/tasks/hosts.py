"""Host networks: Sequentials of named segments, with a slot after every segment but the last.

Every segment before the head outputs `width` features, whatever its resolution; a ResNet doubles them where it halves
that. There is no dropout, so that hosts can be stacked; `stacked.check` refuses others. Weights are drawn from torch's
global rng: seed it first.

Shapes: B samples, C channels. MLP (B, in_features); convolutions (B, C, length) or (B, C, height, width); transformer
tokens (B, L), between segments (B, L, C).
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

CONV_LAYERS = {1: (nn.Conv1d, nn.AdaptiveAvgPool1d), 2: (nn.Conv2d, nn.AdaptiveAvgPool2d)}
"""Spatial dimensions -> convolution and pooling."""
Norm = Literal["sample", "batch"]
"""Each sample normalized by itself (layer norm, group norm with one group), or each channel over the batch."""
RESNET_STAGES = 3
"""Stages of a ResNet for small images; each but the first begins with a block that halves the resolution."""


def slot_names(num_slots: int) -> tuple[str, ...]:
    """Names of the segments that end in a slot: stem, block1, block2, ..."""
    check_positive(num_slots=num_slots)
    return ("stem", *(f"block{i}" for i in range(1, num_slots)))


def mlp_host(in_features: int, width: int, depth: int, num_classes: int, *, norm: Norm = "sample") -> nn.Sequential:
    """`depth` hidden layers (a stem and depth - 1 blocks, each with a slot), then a linear head."""
    check_positive(in_features=in_features, width=width, depth=depth, num_classes=num_classes)
    segments = OrderedDict[str, nn.Module]()
    for name in slot_names(depth):
        fan_in = width if segments else in_features
        # A batch norm removes the bias of the layer before it.
        layer = nn.Linear(fan_in, width, bias=norm != "batch")
        segments[name] = nn.Sequential(layer, norm_layer(norm, width, dims=0), nn.ReLU())
    segments["head"] = nn.Linear(width, num_classes)
    return nn.Sequential(segments)


def plain_mlp_host(in_features: int, width: int, depth: int, num_classes: int) -> nn.Sequential:
    """An MLP without norms and with GELU: in very narrow hosts a norm removes a feature and ReLU units die."""
    check_positive(in_features=in_features, width=width, depth=depth, num_classes=num_classes)
    segments = OrderedDict[str, nn.Module]()
    for name in slot_names(depth):
        segments[name] = nn.Sequential(nn.Linear(width if segments else in_features, width), nn.GELU())
    segments["head"] = nn.Linear(width, num_classes)
    return nn.Sequential(segments)


def conv_host(
    in_channels: int, width: int, num_blocks: int, num_classes: int, dims: int, *, norm: Norm = "sample"
) -> nn.Sequential:
    """A stem at full resolution, blocks that each halve it, then average pooling and a linear head."""
    _check_convolutional(in_channels, width, num_blocks, num_classes, dims)
    conv, pool = CONV_LAYERS[dims]
    segments = OrderedDict[str, nn.Module]()
    for name in slot_names(num_blocks + 1):
        channels, stride = (width, 2) if segments else (in_channels, 1)
        # The bias is part of the norm.
        layer = conv(channels, width, kernel_size=3, stride=stride, padding=1, bias=False)
        segments[name] = nn.Sequential(layer, norm_layer(norm, width, dims), nn.ReLU())
    segments["head"] = nn.Sequential(pool(1), nn.Flatten(), nn.Linear(width, num_classes))
    return nn.Sequential(segments)


def resnet_host(
    in_channels: int, width: int, num_blocks: int, num_classes: int, dims: int, *, norm: Norm = "batch"
) -> nn.Sequential:
    """A ResNet for small images (He et al. 2016): a stem, blocks in up to three stages, average pooling, a linear head.

    The first block of the second and of the third stage halves the resolution and doubles the features. With 9 blocks
    and width 16 this is ResNet-20.
    """
    _check_convolutional(in_channels, width, num_blocks, num_classes, dims)
    conv, pool = CONV_LAYERS[dims]
    stem = conv(in_channels, width, kernel_size=3, padding=1, bias=False)
    segments = OrderedDict[str, nn.Module](stem=nn.Sequential(stem, norm_layer(norm, width, dims), nn.ReLU()))
    channels = width
    for index, name in enumerate(slot_names(num_blocks + 1)[1:]):
        before, channels = channels, width * 2 ** (index * RESNET_STAGES // num_blocks)
        segments[name] = ResidualBlock(before, channels, dims, norm)
    segments["head"] = nn.Sequential(pool(1), nn.Flatten(), nn.Linear(channels, num_classes))
    return nn.Sequential(segments)


def transformer_host(num_tokens: int, length: int, width: int, num_blocks: int) -> nn.Sequential:
    """An embedding stem, blocks of causal attention and an MLP, then a norm and a linear head for the next token."""
    check_positive(num_tokens=num_tokens, length=length, width=width)
    if num_blocks < 0:
        raise ValueError(f"num_blocks must not be negative, got {num_blocks}: 0 gives a stem and a head")
    segments = OrderedDict[str, nn.Module]()
    for name in slot_names(num_blocks + 1):
        segments[name] = TransformerBlock(width) if segments else TokenEmbedding(num_tokens, length, width)
    segments["head"] = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_tokens))
    return nn.Sequential(segments)


def norm_layer(norm: Norm, width: int, dims: int) -> nn.Module:
    """The norm of `width` features or channels with `dims` spatial dimensions."""
    if norm not in get_args(Norm):
        raise ValueError(f"norm must be one of {', '.join(get_args(Norm))}, got {norm!r}")
    if norm == "batch":
        return nn.BatchNorm2d(width) if dims == 2 else nn.BatchNorm1d(width)
    return nn.GroupNorm(1, width) if dims else nn.LayerNorm(width)


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut. More features come with half the resolution, and a 1x1 shortcut."""

    def __init__(self, in_channels: int, width: int, dims: int, norm: Norm) -> None:
        super().__init__()
        conv, _ = CONV_LAYERS[dims]
        same = in_channels == width
        stride = 1 if same else 2
        self.inner = nn.Sequential(
            conv(in_channels, width, kernel_size=3, stride=stride, padding=1, bias=False),
            norm_layer(norm, width, dims),
            nn.ReLU(),
            conv(width, width, kernel_size=3, padding=1, bias=False),
            norm_layer(norm, width, dims),
        )
        shortcut = conv(in_channels, width, kernel_size=1, stride=stride, bias=False)
        self.shortcut = nn.Identity() if same else nn.Sequential(shortcut, norm_layer(norm, width, dims))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x) + self.shortcut(x))


class TokenEmbedding(nn.Module):
    """Learned embeddings of tokens and positions, added."""

    def __init__(self, num_tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(num_tokens, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position[: tokens.shape[-1]]


class TransformerBlock(nn.Module):
    """Pre-norm residual block of causal attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = math.gcd(width, 4)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attend(self.qkv(self.attention_norm(x))))
        return x + self.mlp(self.mlp_norm(x))

    def attend(self, qkv: Tensor) -> Tensor:
        """Causal multi-head attention."""
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).movedim(-3, 0).transpose(-3, -2)  # (B, heads, L, head)
        # Not `scaled_dot_product_attention`: vmap has no rule for it on the CPU.
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return (scores.masked_fill(future, -math.inf).softmax(-1) @ v).transpose(-3, -2).flatten(-2)


def scaled_host(make_host: Callable[[], nn.Sequential], scale: float) -> nn.Sequential:
    """A host whose initial weight matrices and kernels are `scale` times as large."""
    host = make_host()
    with torch.no_grad():
        for parameter in host.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return host


def _check_convolutional(in_channels: int, width: int, num_blocks: int, num_classes: int, dims: int) -> None:
    check_positive(in_channels=in_channels, width=width, num_classes=num_classes)
    if num_blocks < 0:
        raise ValueError(f"num_blocks must not be negative, got {num_blocks}: 0 gives a stem and a head")
    if dims not in CONV_LAYERS:
        raise ValueError(f"dims must be 1 (Conv1d) or 2 (Conv2d), got {dims}")


def check_positive(**sizes: float) -> None:
    """Raise unless every named size is above zero."""
    for name, size in sizes.items():
        if size <= 0:
            raise ValueError(f"{name} must be above zero, got {size}: leave it out or pass a positive number")
