"""Hosts: named segments, a constant number of features at every slot, weights from torch's global rng."""

from typing import Any

import pytest
import torch
from torch import nn

from simic.tasks.hosts import (
    TransformerBlock,
    conv_host,
    mlp_host,
    plain_mlp_host,
    resnet_host,
    slot_names,
    transformer_host,
)

HOSTS = pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: mlp_host(64, 7, 3, 10), (64,)),
        (lambda: plain_mlp_host(64, 7, 3, 10), (64,)),
        (lambda: conv_host(2, 7, 2, 10, 1), (2, 40)),
        (lambda: conv_host(2, 7, 2, 10, 2), (2, 8, 8)),
    ],
    ids=["mlp", "plain-mlp", "conv1d", "conv2d"],
)


@HOSTS
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_every_slot_has_width_features(make, shape, batch):
    host, x = make(), torch.randn(batch, *shape)
    for name in slot_names(3):
        x = host.get_submodule(name)(x)
        assert x.shape[:2] == (batch, 7)
    assert host.get_submodule("head")(x).shape == (batch, 10)


@HOSTS
def test_segments_are_the_slots_and_a_head(make, shape):
    assert [name for name, _ in make().named_children()] == ["stem", "block1", "block2", "head"]


@HOSTS
def test_a_sample_does_not_see_its_neighbours(make, shape):
    host, x = make(), torch.randn(4, *shape)
    torch.testing.assert_close(host(x)[1:2], host(x[1:2]))


@HOSTS
def test_weights_come_from_the_global_rng(make, shape):
    x = torch.randn(2, *shape)
    torch.manual_seed(0)
    first = make()(x)
    torch.manual_seed(0)
    again, other = make()(x), make()(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@HOSTS
def test_hosts_stack_with_vmap(make, shape):
    hosts, x = [make() for _ in range(3)], torch.randn(3, 4, *shape)
    parameters, buffers = torch.func.stack_module_state(list[nn.Module](hosts))

    def logits(parameters, x):
        return torch.func.functional_call(hosts[0], (parameters, buffers), (x,))

    stacked = torch.vmap(logits)(parameters, x)
    torch.testing.assert_close(stacked, torch.stack([host(own) for host, own in zip(hosts, x, strict=True)]))


TOKENS = torch.arange(20).reshape(2, 10) * 7 % 11


def test_a_transformer_has_width_features_at_every_slot():
    host, x = transformer_host(11, 10, 8, 2), TOKENS
    assert [name for name, _ in host.named_children()] == ["stem", "block1", "block2", "head"]
    for name in slot_names(3):
        x = host.get_submodule(name)(x)
        assert x.shape == (2, 10, 8)
    assert host.get_submodule("head")(x).shape == (2, 10, 11)


@pytest.mark.parametrize("position", range(10))
def test_a_later_token_does_not_change_earlier_logits(position):
    host, changed = transformer_host(11, 10, 8, 2), TOKENS.clone()
    changed[:, position] = (changed[:, position] + 1) % 11
    same = (host(TOKENS) == host(changed)).all(-1)
    assert same[:, :position].all()
    assert not same[:, position:].any()


def test_a_transformer_knows_the_order_of_the_past():
    host, swapped = transformer_host(11, 10, 8, 1), TOKENS[:, [1, 0, *range(2, 10)]]
    assert not torch.isclose(host(TOKENS)[:, 5:], host(swapped)[:, 5:]).all(-1).any()


def test_attention_agrees_with_torch():
    torch.manual_seed(0)
    block = transformer_host(11, 10, 8, 1).get_submodule("block1")
    assert isinstance(block, TransformerBlock)
    qkv = torch.randn(2, 10, 24)
    q, k, v = (part.reshape(2, 10, 4, 2).transpose(1, 2) for part in qkv.split(8, dim=-1))
    expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(block.attend(qkv), expected.transpose(1, 2).reshape(2, 10, 8))


def test_transformers_stack_with_vmap():
    hosts = [transformer_host(11, 10, 8, 2) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(list[nn.Module](hosts))

    def logits(parameters, x):
        return torch.func.functional_call(hosts[0], (parameters, buffers), (x,))

    stacked = torch.vmap(logits, in_dims=(0, None))(parameters, TOKENS)
    torch.testing.assert_close(stacked, torch.stack([host(TOKENS) for host in hosts]))


def test_blocks_halve_the_resolution():
    host, x = conv_host(1, 4, 2, 10, 2), torch.randn(1, 1, 8, 8)
    sizes = []
    for name in slot_names(3):
        x = host.get_submodule(name)(x)
        sizes.append(tuple(x.shape[2:]))
    assert sizes == [(8, 8), (4, 4), (2, 2)]


@pytest.mark.parametrize(
    ("blocks", "widths", "sizes"),
    [
        (0, [4], [8]),
        (1, [4, 4], [8, 8]),
        (2, [4, 4, 8], [8, 8, 4]),
        (3, [4, 4, 8, 16], [8, 8, 4, 2]),
        (9, [4] * 4 + [8] * 3 + [16] * 3, [8] * 4 + [4] * 3 + [2] * 3),
    ],
)
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("norm", ["batch", "sample"])
def test_a_resnet_doubles_its_features_where_it_halves_the_resolution(blocks, widths, sizes, dims, norm):
    host, x = resnet_host(1, 4, blocks, 10, dims, norm=norm), torch.randn(3, 1, *[8] * dims)
    for name, width, size in zip(slot_names(blocks + 1), widths, sizes, strict=True):
        x = host.get_submodule(name)(x)
        assert x.shape == (3, width, *[size] * dims)
    assert host.get_submodule("head")(x).shape == (3, 10)


def test_a_residual_block_adds_its_input():
    block = resnet_host(1, 4, 1, 10, 2).get_submodule("block1")
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    x = torch.randn(3, 4, 8, 8)
    assert torch.equal(block(x), x.relu())


def test_norms_are_of_the_sample_or_of_the_batch():
    for make in (lambda norm: mlp_host(5, 4, 2, 3, norm=norm), lambda norm: conv_host(2, 4, 1, 3, 2, norm=norm)):
        kinds = [{type(part) for part in make(norm).modules()} for norm in ("sample", "batch")]
        assert not kinds[0] & {nn.BatchNorm1d, nn.BatchNorm2d}
        assert kinds[1] & {nn.BatchNorm1d, nn.BatchNorm2d}
        assert not kinds[1] & {nn.LayerNorm, nn.GroupNorm}
    wrong: Any = "layer"
    with pytest.raises(ValueError, match="norm must be one of sample, batch, got 'layer'"):
        mlp_host(5, 4, 2, 3, norm=wrong)


def count(host: nn.Module) -> int:
    return sum(parameter.numel() for parameter in host.parameters())


def test_parameter_counts_by_hand():
    # Linear 64*8+8 and 8*8+8, a norm of 16 after each, head 8*10+10.
    assert count(mlp_host(64, 8, 2, 10)) == 520 + 16 + 72 + 16 + 90
    assert count(plain_mlp_host(64, 8, 2, 10)) == 520 + 72 + 90
    # Embedding 11*8 and 10*8; a block's norms 4*8, attention 8*24+24 and 8*8+8, MLP 8*16+16 and 16*8+8; norm, head.
    assert count(transformer_host(11, 10, 8, 1)) == 88 + 80 + 32 + 216 + 72 + 144 + 136 + 16 + 99
    # 3x3 convolutions without bias 9*6 and 36*9, a norm of 12 after each, head 6*10+10.
    assert count(conv_host(1, 6, 1, 10, 2)) == 54 + 12 + 324 + 12 + 70
    # ResNet-20 of He et al. (2016), 0.27 million, with 1x1 convolutions and their norms in two shortcuts.
    assert count(resnet_host(3, 16, 9, 10, 2)) == 269_722 + 16 * 32 + 64 + 32 * 64 + 128


@pytest.mark.parametrize(
    "make", [lambda: mlp_host(4, 3, 1, 2), lambda: conv_host(1, 3, 0, 2, 1), lambda: transformer_host(5, 4, 3, 0)]
)
def test_the_smallest_host_is_a_stem_and_a_head(make):
    assert [name for name, _ in make().named_children()] == ["stem", "head"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mlp_host(0, 8, 3, 10), "in_features must be above zero, got 0"),
        (lambda: mlp_host(64, -1, 3, 10), "width must be above zero, got -1"),
        (lambda: mlp_host(64, 8, 0, 10), "depth must be above zero, got 0"),
        (lambda: plain_mlp_host(64, 8, 3, 0), "num_classes must be above zero, got 0"),
        (lambda: transformer_host(0, 10, 8, 1), "num_tokens must be above zero, got 0"),
        (lambda: transformer_host(11, 10, 8, -1), "num_blocks must not be negative, got -1"),
        (lambda: conv_host(1, 0, 2, 10, 2), "width must be above zero, got 0"),
        (lambda: conv_host(1, 8, -1, 10, 2), "num_blocks must not be negative, got -1"),
        (lambda: conv_host(1, 8, 2, 10, 3), r"dims must be 1 \(Conv1d\) or 2 \(Conv2d\), got 3"),
        (lambda: slot_names(0), "num_slots must be above zero, got 0"),
    ],
)
def test_bad_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
