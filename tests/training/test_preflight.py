"""Checks before a run: what the machine lacks is said in one line, with the remedy."""

from dataclasses import replace

import pytest

from simic.config import PRESETS, RunConfig
from simic.environment.lookahead_config import LookaheadConfig
from simic.stacked.config import HostsConfig
from simic.training.preflight import check_run

COMPILED = replace(PRESETS["quick"].config, hosts=HostsConfig(compile=True))


def test_compiling_hosts_needs_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match=r"hosts\.compile needs a C\+\+ compiler, but there is no g\+\+ or clang\+\+"):
        check_run(COMPILED)
    check_run(PRESETS["quick"].config)


def test_the_compiler_may_be_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "mine"))
    with pytest.raises(ValueError, match=r"there is no .*mine"):
        check_run(COMPILED)
    (tmp_path / "mine").write_text("")
    (tmp_path / "mine").chmod(0o755)
    check_run(COMPILED)


def test_a_precision_must_exist():
    with pytest.raises(ValueError, match="precision must be one of float32, bfloat16, float16, got 'half'"):
        HostsConfig(precision="half")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("source", "rules", "message"),
    [
        ("lookahed", ("finish",), "--episodes: 'lookahed' is neither .*; did you mean lookahead"),
        ("lookahead", ("finnish",), "--lookahead: 'finnish' is neither .*; did you mean finish"),
    ],
)
def test_a_search_is_checked_before_torch_is_loaded(source, rules, message):
    config = RunConfig(algorithm="imitation", episodes=(source,), lookahead=LookaheadConfig(rules=rules))
    with pytest.raises(ValueError, match=message):
        check_run(config)
