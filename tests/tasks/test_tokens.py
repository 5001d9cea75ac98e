"""Subword tokens: windows of a text and back, a tokenizer of the training part only, a cache that is checked."""

import os
import sys

import pytest

pytest.importorskip("tokenizers")

from simic.tasks import tokens
from simic.tasks.files import story_files
from simic.tasks.registry import make_task
from simic.tasks.text import generate_text
from simic.tasks.tokens import END_OF_TEXT, load_tokenizer, load_tokens


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "simic" / "tokens"


@pytest.fixture
def stories(tmp_path):
    """60 stories of two lines each, and a word that the last one alone repeats."""
    path = tmp_path / "stories.txt"
    lines = [f"{generate_text(400, rng_seed=number)}\n{END_OF_TEXT}\n" for number in range(60)]
    path.write_text("".join(lines) + "xylophone " * 300, encoding="utf-8")
    return path


def test_windows_are_consecutive_and_targets_are_the_next_tokens(stories):
    data, tokenizer = (
        load_tokens(data_dir=stories, length=16, vocabulary=300),
        load_tokenizer(data_dir=stories, vocabulary=300),
    )
    for x, y in (data.split("validation"), data.split("test")):
        assert x.shape == y.shape
        assert x.shape[1] == 16
        assert y.flatten()[:-1].tolist() == x.flatten()[1:].tolist()
        assert tokenizer.decode(x.flatten().tolist(), skip_special_tokens=False) in stories.read_text()
    assert data.num_classes == tokenizer.get_vocab_size() == 300
    trained_on = {tuple(window) for window in data.train_x.tolist()}
    assert len(trained_on) > 300
    assert load_tokens(data_dir=stories, length=16, vocabulary=300, train_size=50).train_x.shape == (50, 16)


def test_the_tokenizer_is_trained_on_the_training_part_alone(stories):
    tokenizer = load_tokenizer(data_dir=stories)
    assert len(tokenizer.encode(" xylophone").ids) > 3
    assert len(tokenizer.encode(" follows").ids) == 1
    assert len(tokenizer.encode(END_OF_TEXT).ids) == 1
    text = "ein Häuschen — 家\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_same_text_gives_the_same_tokens(stories):
    text = stories.read_text()
    one, other = tokens._encode(text, 500), tokens._encode(text, 500)
    assert one.tokenizer == other.tokenizer
    assert [part.tolist() for part in one.parts] == [part.tolist() for part in other.parts]


def encoded(path, vocabulary=300):
    found = tokens._encoded(path, vocabulary, 1 << 20)
    return found.tokenizer, [part.tolist() for part in found.parts]


def test_the_cache_is_used_by_its_settings(stories, cache_dir, monkeypatch):
    first = encoded(stories)
    assert len(list(cache_dir.iterdir())) == 2
    assert encoded(stories, 301) != first
    assert len(list(cache_dir.iterdir())) == 4
    assert cache_dir.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(tokens, "_encode", lambda text, vocabulary: pytest.fail("it is in the cache"))
    assert encoded(stories) == first


@pytest.mark.parametrize("suffix", [".json", ".tokens"])
@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b"\xff" * 99, "shorter", "changed", "a link"])
def test_a_damaged_cache_is_made_anew(stories, cache_dir, suffix, damage, tmp_path):
    first = encoded(stories)
    (path,) = cache_dir.glob(f"*{suffix}")
    sound, elsewhere = path.read_bytes(), tmp_path / "elsewhere"
    if damage == "a link":
        elsewhere.write_bytes(b"mine")
        path.unlink()
        path.symlink_to(elsewhere)
    elif isinstance(damage, str):
        path.write_bytes(sound[:-4] if damage == "shorter" else sound.replace(sound[100:104], b"2019", 1))
    else:
        path.write_bytes(damage)
    assert encoded(stories) == first
    assert path.read_bytes() == sound
    assert not elsewhere.exists() or elsewhere.read_bytes() == b"mine"


def test_a_place_where_nothing_can_be_cached_costs_time_only(stories, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert encoded(stories) == encoded(stories)
    assert os.environ.get("TOKENIZERS_PARALLELISM") is None


def test_a_text_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("é" * 3_000)
    assert tokens._read_text(path, 101) == "é" * 50
    path.write_bytes(b"\xff" * 300)
    with pytest.raises(ValueError, match="must be UTF-8 text"):
        load_tokens(data_dir=path)


def test_mistakes_are_answered_with_the_remedy(stories, tmp_path):
    for options, words in (
        ({"vocabulary": 256}, r"vocabulary must lie in 257\.\.65536 .*got 256"),
        ({"vocabulary": 1 << 17}, "got 131072"),
        ({"length": 0}, "length must be at least 1 token, got 0"),
        ({"text_bytes": 0}, "text_bytes must be at least 1, got 0"),
        ({"length": 5_000}, "at least 5001 tokens, got .*: use a longer text or a smaller length"),
    ):
        with pytest.raises(ValueError, match=words):
            load_tokens(data_dir=stories, **options)
    with pytest.raises(FileNotFoundError, match=r"tinystories needs a text but .*input\.txt.*--data-dir"):
        load_tokens(data_dir=tmp_path)


def test_a_directory_may_hold_the_text_under_its_published_name(stories, tmp_path):
    named = tmp_path / "TinyStories-train.txt"
    named.write_bytes(stories.read_bytes())
    assert story_files(tmp_path) == [named]
    (tmp_path / "input.txt").write_bytes(stories.read_bytes())
    assert story_files(tmp_path) == [tmp_path / "input.txt"]


def test_without_the_package_the_remedy_is_named(stories, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install 'simic-rl\[text\]'"):
        story_files(stories)


def test_the_task_takes_vocabulary_and_length(stories):
    task = make_task("tinystories", data_dir=stories, vocabulary=300, length=8, width=8, num_slots=2)
    assert task.data.train_x.shape[1] == 8
    assert task.make_host()(task.data.train_x[:3]).shape == (3, 8, 300)
