"""Text: windows and their targets, the grammar's promises, files and their faults."""

import re

import pytest
import torch

from simic.tasks.text import GENERATED_CHARACTERS, generate_text, load_chars

TEXT = "the quick brown fox jumps over the lazy dog. " * 12  # 540 characters: 16 windows of 32


def text_of(tokens: torch.Tensor, vocabulary: str) -> str:
    return "".join(vocabulary[token] for token in tokens.tolist())


def test_targets_are_inputs_shifted_by_one(tmp_path):
    (tmp_path / "input.txt").write_text(TEXT)
    data, vocabulary, starts = load_chars(data_dir=tmp_path), "".join(sorted(set(TEXT))), []
    assert data.num_classes == len(vocabulary)
    for split, size in (("train", 12), ("validation", 2), ("test", 2)):
        inputs, targets = data.split(split)
        assert inputs.shape == targets.shape == (size, 32)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        for window, target in zip(inputs, targets, strict=True):
            written = text_of(window, vocabulary) + text_of(target[-1:], vocabulary)
            starts.append(next(start for start in range(0, 512, 32) if TEXT[start : start + 33] == written))
    assert len(starts) == 16


def test_the_default_text_is_generated():
    data = load_chars()
    assert [len(data.split(split)[0]) for split in ("train", "validation", "test")] == [2000, 500, 500]
    assert data.num_classes == len(set(generate_text(GENERATED_CHARACTERS, rng_seed=4)))
    assert len(load_chars(train_size=50).train_x) == 50


def test_the_rng_seed_decides_the_text():
    first, again, other = (generate_text(1000, rng_seed=rng_seed) for rng_seed in (3, 3, 4))
    assert len(first) == 1000
    assert first == again != other
    assert generate_text(100, rng_seed=3) == first[:100]


def test_brackets_close_in_the_order_they_opened():
    text, opened = generate_text(50_000, rng_seed=0), []
    for character in text[: text.rindex(". ")]:
        if character in "([{":
            opened.append(")]}"["([{".index(character)])
        elif character in ")]}":
            assert character == opened.pop()
    assert not opened
    assert len(re.findall(r"[(\[{]", text)) > 500


def test_verbs_agree_with_their_subjects():
    text = generate_text(50_000, rng_seed=0)
    singular, plural = (re.findall(rf"(?:\. |and |but )the \w*[^s]{end} (\w+)", text) for end in ("", "s"))
    assert set(singular) == {"sleeps", "sees", "grows", "follows", "that"}
    assert set(plural) == {"sleep", "see", "grow", "follow", "that"}


def test_a_path_may_name_the_text_itself(tmp_path):
    for name in ("input.txt", "other.txt"):
        (tmp_path / name).write_text(TEXT)
    assert torch.equal(load_chars(data_dir=tmp_path).train_x, load_chars(data_dir=tmp_path / "other.txt").train_x)


def test_faults_of_a_text_are_named_with_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"{re.escape(str(tmp_path))}/input.txt does not exist: name a text"):
        load_chars(data_dir=tmp_path)
    path = tmp_path / "input.txt"
    path.write_bytes(b"\xff\xfe" * 200)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} must be UTF-8 text"):
        load_chars(data_dir=tmp_path)
    path.write_text("x" * 192)
    with pytest.raises(ValueError, match="a text needs at least 193 characters for its three splits, got 192"):
        load_chars(data_dir=tmp_path)
    with pytest.raises(ValueError, match="num_characters must be at least 1, got 0"):
        generate_text(0, rng_seed=0)
