"""Crops and flips move pixels and invent none; what a user's function returns is checked."""

from dataclasses import replace

import pytest
import torch

from simic import CropAndFlip
from simic.tasks.augmentation import augmented
from simic.tasks.registry import make_task


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


IMAGES = torch.arange(1.0, 1 + 200 * 2 * 5 * 6).view(200, 2, 5, 6)


def test_every_image_is_a_window_of_its_padded_self():
    out = CropAndFlip(padding=2)(IMAGES, generator())
    seen = set()
    for image, own in zip(IMAGES, out, strict=True):
        padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
        windows = {
            (row, column, flip): padded[:, row : row + 5, column : column + 6].flip([2] if flip else [])
            for row in range(5) for column in range(5) for flip in (False, True)
        }  # fmt: skip
        found = [place for place, window in windows.items() if torch.equal(window, own)]
        assert len(found) == 1
        seen |= set(found)
    assert len(seen) > 40  # of 50 places, 200 times


def test_without_padding_and_flip_nothing_changes():
    assert torch.equal(CropAndFlip(padding=0, flip=False)(IMAGES, generator()), IMAGES)


def test_it_is_determined_by_the_generator_alone():
    crop = CropAndFlip()
    torch.manual_seed(1)
    first = crop(IMAGES, generator(3))
    torch.manual_seed(2)
    assert torch.equal(first, crop(IMAGES, generator(3)))
    assert not torch.equal(first, crop(IMAGES, generator(4)))


def test_mistakes_are_answered_with_the_rule():
    with pytest.raises(ValueError, match="padding must not be negative, got -1"):
        CropAndFlip(padding=-1)
    with pytest.raises(ValueError, match=r"images \(B, C, H, W\), got inputs \(4, 3\)"):
        CropAndFlip()(torch.zeros(4, 3), generator())
    wrong_ones = [(lambda x, g: x[:1], r"\(1, 3\)"), (lambda x, g: x.double(), "float64"), (lambda x, g: None, "None")]
    for wrong, words in wrong_ones:
        with pytest.raises(ValueError, match=f"augment must return inputs like those it gets.*{words}"):
            augmented(wrong, torch.zeros(2, 3), generator())
    with pytest.raises(ValueError, match="augment must be a function"):
        replace(make_task("digits-cnn"), augment=4)
