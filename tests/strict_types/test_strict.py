"""py.typed is honoured: a strict type checker finds nothing unknown in what a user writes with an installed simic."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import simic

pytestmark = pytest.mark.slow
SAMPLE = Path(__file__).with_name("sample.py")


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of an environment with a copy of simic, and with the packages of this one.

    Of a package that is installed, a type checker only believes what is annotated; in a repository it would infer.
    """
    environment = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = (environment / "lib").glob("python3*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    shutil.copytree(Path(simic.__file__).parent, site / "simic", ignore=shutil.ignore_patterns("__pycache__"))
    return environment / "bin" / "python"


def check(python: Path, directory: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Check a file on its own, outside the repository and its settings."""
    (directory / "sample.py").write_text(text)
    command = [sys.executable, "-m", "pyright", "--pythonpath", python, "sample.py"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_a_users_sample_is_clean_under_strict_checks(python, tmp_path):
    done = check(python, tmp_path, SAMPLE.read_text())
    assert done.returncode == 0, done.stdout + done.stderr


def test_mistakes_of_a_user_are_found(python, tmp_path):
    done = check(python, tmp_path, SAMPLE.read_text().replace("horizon=40", 'horizon="40"'))
    assert '"Literal[\'40\']" is not assignable to "int"' in done.stdout, done.stdout + done.stderr
