"""Checks before a run: what the machine lacks is said in one line, with the remedy."""

from dataclasses import replace

import pytest

from simic.config import PRESETS
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
