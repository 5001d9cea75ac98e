"""Invalid files are refused in one line that names the file, the place and the remedy; valid ones are read."""

import json
import os
from pathlib import Path

import pytest

from simic.storage.json_files import MAX_DEPTH, JsonError, check_values, parse_json, read_json

ODD = {
    "nan": (b'{"a": {"b": [1, NaN]}}', "a.b.1 must be a finite number, got nan"),
    "infinity": (b'{"a": -Infinity}', "a must be a finite number, got -inf"),
    "overflow": (b'{"a": 1e999}', "a must be a finite number, got inf"),
    "twice": (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' occurs twice in one table"),
    "long name": (b'{"' + b"a" * 500 + b'": NaN}', r"aaa\.\.\. must be a finite number"),
    "escape": (rb'{"\u001b[2J": NaN}', r": \?\[2J must be a finite number"),
    "long number": (b'{"a": 1' + b"0" * 5000 + b"}", "an integer has 5001 digits, more than 40"),
    "deep": (b'{"a": ' * 65 + b"1" + b"}" * 65, "is nested more than 64 deep"),
    "very deep": (b"[" * 200_000 + b"]" * 200_000, "nests values more than 64 deep"),
    "surrogate": (rb'{"a": "\ud800"}', "a has text with half a character"),
    "surrogate key": (rb'{"a": {"\ud800": 1}}', "a has text with half a character"),
    "latin": (b'{"a": "\xe9"}', r"is not UTF-8 text \(byte 7\)"),
    "torn": (b'{"a": [1,', "is not valid JSON: Expecting value: line 1 column 10"),
    "empty": (b"", "is not valid JSON: Expecting value: line 1 column 1"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_odd_is_refused_in_one_line(tmp_path, kind):
    content, expected = ODD[kind]
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(JsonError, match=expected) as caught:
        read_json(path)
    said = str(caught.value)
    assert said.startswith(str(path))
    assert said.endswith("; repair the file or write it again")
    assert "\n" not in said
    assert len(said) < 300


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True, "é"]}, [], 3, "text", -(2**127)])
def test_plain_values_are_read_as_they_are(tmp_path, value):
    path = tmp_path / "plain.json"
    path.write_text(json.dumps(value))
    assert read_json(path) == value


def test_the_deepest_nesting_that_is_read(tmp_path):
    content = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse_json(content, "text") == json.loads(content)


def test_a_byte_order_mark_is_no_fault(tmp_path):
    path = tmp_path / "marked.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(path) == {"a": 1}


def test_size_is_bounded_before_anything_is_parsed(tmp_path):
    path = tmp_path / "large.json"
    path.write_bytes(b" " * 101)
    with pytest.raises(JsonError, match=r"has 101 bytes, 100 are allowed.*; fetch it again"):
        read_json(path, max_bytes=100, remedy="fetch it again")


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null"), tmp_path):
        with pytest.raises(JsonError, match="where simic needs a regular file"):
            read_json(path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing")


def test_values_from_elsewhere_are_checked_alike():
    with pytest.raises(JsonError, match=r"settings.toml: a must be a finite number, got nan"):
        check_values({"a": float("nan")}, "settings.toml")
