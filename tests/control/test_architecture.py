"""What a host tells about itself: sizes counted by hand, for networks of simic's own and of others."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from simic import GrowableModel
from simic.control.architecture import architecture_of
from simic.control.facts import LAYER_KINDS
from simic.growth.slot_discovery import find_sites
from simic.tasks.hosts import conv_host, mlp_host, transformer_host


def shares(host: nn.Module) -> dict[str, float]:
    """Parameters of each kind of layer that there is, counted again from the shares."""
    total = sum(parameter.numel() for parameter in host.parameters())
    found = architecture_of(host, []).shares * total
    return {kind: round(float(count)) for kind, count in zip(LAYER_KINDS, found, strict=True) if count}


def test_an_mlp_by_hand():
    host = mlp_host(10, 4, 2, 3)
    found = architecture_of(host, find_sites(host, ["stem", "block1"], torch.zeros(2, 10)))
    assert (found.inputs, found.outputs, found.depth, found.batch_norm) == (10, 3, 3, 0)
    assert shares(host) == {"linear": 44 + 20 + 15, "norm": 8 + 8}
    assert found.features.tolist() == [4, 4]
    assert found.in_features.tolist() == [10, 4]
    assert found.positions.tolist() == [1, 1]


def test_a_convolutional_network_by_hand():
    host = conv_host(2, 4, 1, 5, 2)
    found = architecture_of(host, find_sites(host, ["stem", "block1"], torch.zeros(2, 2, 8, 8)))
    assert (found.inputs, found.outputs, found.depth) == (2, 5, 3)
    assert shares(host) == {"convolution": 2 * 4 * 9 + 4 * 4 * 9, "norm": 8 + 8, "linear": 25}
    assert found.positions.tolist() == [64, 16]


def test_a_transformer_by_hand():
    host = transformer_host(11, 6, 4, 1)
    found = architecture_of(host, find_sites(host, ["stem", "block1"], torch.zeros(2, 6, dtype=torch.long)))
    assert (found.inputs, found.outputs) == (6, 11)  # the table of positions comes first
    attention, mlp, head = 4 * 12 + 12, (4 * 4 + 4) + (4 * 8 + 8) + (8 * 4 + 4), 4 * 11 + 11
    assert shares(host) == {
        "attention": attention,
        "linear": mlp + head,
        "norm": 3 * 8,
        "embedding": 11 * 4 + 6 * 4,
    }
    assert found.positions.tolist() == [6, 6]


def test_layers_of_torch_and_of_users_are_known_by_class_name_and_shape():
    class RMSNorm2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel, self.scale = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))

    parts: OrderedDict[str, nn.Module] = OrderedDict(mix=nn.MultiheadAttention(4, 2), norm=RMSNorm2(), odd=Odd())
    parts |= OrderedDict(batch=nn.BatchNorm1d(4), q_proj=nn.Linear(4, 4), bag=nn.EmbeddingBag(5, 4))
    host = nn.Sequential(parts)
    assert shares(host) == {"attention": 48 + 12 + 20 + 20, "norm": 4 + 8, "linear": 15, "embedding": 20}
    assert architecture_of(host, []).batch_norm == 1


def test_tied_weights_count_once_and_a_host_without_weights_is_empty():
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    assert shares(nn.Sequential(embedding, head)) == {"embedding": 28}
    nothing = architecture_of(nn.Sequential(nn.ReLU()), [])
    assert (nothing.inputs, nothing.outputs, nothing.depth) == (0, 0, 0)
    assert not nothing.shares.any()


@pytest.mark.parametrize("blueprint", ["mlp", "norm"])
def test_seeds_are_no_part_of_the_host(blueprint):
    model = GrowableModel(mlp_host(10, 4, 2, 3), ["stem", "block1"], example_input=torch.zeros(2, 10))
    before = architecture_of(model.host, model.sites, set(model.seeds.parameters()))
    model.plant("stem", blueprint)
    after = architecture_of(model.host, model.sites, set(model.seeds.parameters()))
    assert (after.depth, after.outputs) == (before.depth, before.outputs)
    np.testing.assert_array_equal(after.shares, before.shares)
