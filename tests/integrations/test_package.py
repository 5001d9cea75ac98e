"""The wheel and the sdist: what is in them, and that they work without the repository.

The packages that simic needs are those of the tests: a path file of the new environment names their directory, so that
nothing is downloaded. An editable simic is not found there, because path files are read in an environment's own
directory only.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import simic

pytest.importorskip("build", reason="pip install 'simic-rl[integrations]'")
pytest.importorskip("hatchling", reason="pip install 'simic-rl[integrations]'")
pytestmark = pytest.mark.integrations
ROOT = Path(__file__).parents[2]
NAME = f"simic_rl-{simic.__version__}"
USE = """
import pathlib, sys, torch, simic
from torch import nn
assert sys.prefix in simic.__file__, simic.__file__
assert simic.__version__ == sys.argv[1]
assert (pathlib.Path(simic.__file__).parent / "py.typed").is_file()
network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model = simic.GrowableModel(network, "auto", example_input=torch.zeros(1, 4))
optimizer = torch.optim.AdamW(model.parameters())
growth = simic.GrowthScheduler(model, optimizer, "pretrained", evaluate=lambda: {"val_loss": 1.0}, horizon=4)
for _ in range(4):
    model(torch.zeros(3, 4)).sum().backward()
    optimizer.step()
    growth.step()
print("decisions", len(growth.decisions))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside the repository and of its variables; returns what it printed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A directory with the sdist, and the wheel that was built from it."""
    directory = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT, cwd=directory)
    return directory


def sources() -> set[str]:
    """The files of the package, as in the repository."""
    package = ROOT / "src"
    files = {file for file in (package / "simic").rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    return {file.relative_to(package).as_posix() for file in files}


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    about = {name for name in names if name.startswith(f"{NAME}.dist-info/")}
    assert names - about == sources()
    assert {Path(name).name for name in about} == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "LICENSE"}
    for needed in (
        "py.typed",
        "pretrained/controller.safetensors",
        "dashboard/static/app.js",
        "dashboard/templates/run.html",
    ):
        assert f"simic/{needed}" in names, needed


def test_the_sdist_holds_what_the_wheel_is_made_of(built):
    with tarfile.open(built / f"{NAME}.tar.gz") as sdist:
        names = {name.removeprefix(f"{NAME}/") for name in sdist.getnames()}
    assert {f"src/{name}" for name in sources()} <= names
    others = {name for name in names if not name.startswith("src/")}
    assert others == {
        *("pyproject.toml", "README.md", "LICENSE", "PKG-INFO", "CHANGELOG.md", "CITATION.cff", "constraints.txt"),
        ".gitignore",
    }


@pytest.mark.parametrize("kind", ["py3-none-any.whl", "tar.gz"])
def test_it_works_where_it_is_installed(kind, built, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    (site,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    python, file = tmp_path / "venv" / "bin" / "python", next(built.glob(f"*{kind}"))
    run(
        python,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--ignore-installed",
        file,
        cwd=tmp_path,
    )
    command = tmp_path / "venv" / "bin" / "simic"
    assert run(command, "--version", cwd=tmp_path).strip() == simic.__version__
    assert "decisions 4" in run(python, "-c", USE, simic.__version__, cwd=tmp_path)
    said = run(
        command, "grow", "--task", "spirals-mlp", "--controller", "pretrained", "--host-epochs", "3", cwd=tmp_path
    )
    assert "after growth  (exported)" in said
    assert "What to do next" in run(command, "demo", "--host-epochs", "1", cwd=tmp_path)
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()


def test_it_says_which_pythons_it_supports(built):
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        metadata = wheel.read(f"{NAME}.dist-info/METADATA").decode()
    assert "Requires-Python: >=3.11" in metadata
    for version in ("3.11", "3.12", "3.13"):
        assert f"Classifier: Programming Language :: Python :: {version}" in metadata
