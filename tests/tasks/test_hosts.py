"""Hosts: named segments, a constant number of features at every slot, weights from torch's global rng."""

import pytest
import torch
from torch import nn

from simic.tasks.hosts import conv_host, mlp_host, slot_names

HOSTS = pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: mlp_host(64, 7, 3, 10), (64,)),
        (lambda: conv_host(2, 7, 2, 10, 1), (2, 40)),
        (lambda: conv_host(2, 7, 2, 10, 2), (2, 8, 8)),
    ],
    ids=["mlp", "conv1d", "conv2d"],
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


def test_blocks_halve_the_resolution():
    host, x = conv_host(1, 4, 2, 10, 2), torch.randn(1, 1, 8, 8)
    sizes = []
    for name in slot_names(3):
        x = host.get_submodule(name)(x)
        sizes.append(tuple(x.shape[2:]))
    assert sizes == [(8, 8), (4, 4), (2, 2)]


def count(host: nn.Module) -> int:
    return sum(parameter.numel() for parameter in host.parameters())


def test_parameter_counts_by_hand():
    # Linear 64*8+8 and 8*8+8, a norm of 16 after each, head 8*10+10.
    assert count(mlp_host(64, 8, 2, 10)) == 520 + 16 + 72 + 16 + 90
    # 3x3 convolutions without bias 9*6 and 36*9, a norm of 12 after each, head 6*10+10.
    assert count(conv_host(1, 6, 1, 10, 2)) == 54 + 12 + 324 + 12 + 70


@pytest.mark.parametrize("make", [lambda: mlp_host(4, 3, 1, 2), lambda: conv_host(1, 3, 0, 2, 1)])
def test_the_smallest_host_is_a_stem_and_a_head(make):
    assert [name for name, _ in make().named_children()] == ["stem", "head"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mlp_host(0, 8, 3, 10), "in_features must be above zero, got 0"),
        (lambda: mlp_host(64, -1, 3, 10), "width must be above zero, got -1"),
        (lambda: mlp_host(64, 8, 0, 10), "depth must be above zero, got 0"),
        (lambda: conv_host(1, 0, 2, 10, 2), "width must be above zero, got 0"),
        (lambda: conv_host(1, 8, -1, 10, 2), "num_blocks must not be negative, got -1"),
        (lambda: conv_host(1, 8, 2, 10, 3), r"dims must be 1 \(Conv1d\) or 2 \(Conv2d\), got 3"),
        (lambda: slot_names(0), "num_slots must be above zero, got 0"),
    ],
)
def test_bad_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
