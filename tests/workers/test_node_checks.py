"""What a machine tells about itself, and which machines can work together."""

import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import simic
from simic.workers import node_probe
from simic.workers.node_checks import differing_bits, missing_on
from simic.workers.node_probe import probe

OWN = {
    **{"simic": "1.0", "torch": "2.13.0", "code": "abc", "machine": "x86_64", "instructions": "avx2"},
    **{"torch_build": "abc cpu", "numpy": "2.4", "python": "3.11.7"},
}


def test_a_machine_tells_what_it_has_without_loading_torch():
    facts = probe()
    assert (facts["simic"], facts["torch"]) == (simic.__version__, torch.__version__)
    assert facts["numpy"] == numpy.__version__
    assert str(facts["torch_build"]).startswith(str(torch.version.git_version)[:12])
    code = "import sys; from simic.workers.node_probe import probe; probe(); print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


def test_a_machine_without_simic_still_answers(tmp_path):
    source = Path(node_probe.__file__).read_text() + "\nimport json; print(json.dumps(probe()))"
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", source], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    facts = json.loads(answer.stdout)
    assert (facts["simic"], facts["code"], facts["torch"], facts["torch_build"]) == (None, None, None, None)
    assert facts["python"] == probe()["python"]


def test_the_code_of_simic_counts_not_only_its_version(tmp_path):
    package = tmp_path / "simic"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "1.0"\n')
    source = Path(node_probe.__file__).read_text() + "\nimport json; print(json.dumps(probe()))"
    found = []
    for text in ("a = 1", "a = 2"):
        (package / "part.py").write_text(text)
        line = [sys.executable, "-S", "-c", source]
        answer = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
        found.append(json.loads(answer.stdout))
    assert [facts["simic"] for facts in found] == ["1.0", "1.0"]
    assert found[0]["code"] != found[1]["code"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"simic": None}, "node n has no simic, the driver has 1.0: install simic 1.0 there"),
        ({"simic": "0.9"}, "node n has simic 0.9, the driver has 1.0: install simic 1.0 there"),
        ({"torch": "2.10.0"}, "node n has torch 2.10.0, the driver has 2.13.0: install torch 2.13.0 there"),
        ({"code": "def"}, "node n has other source code of simic 1.0: install the same commit on every node"),
        ({"torch": "2.13.0+cu128", "instructions": "avx512f", "python": "3.12.1"}, None),
    ],
)
def test_versions_must_be_equal(other, message):
    assert missing_on("n", OWN | other, OWN) == message


def test_machines_of_another_kind_are_worth_a_warning():
    assert differing_bits({"a": OWN, "b": OWN}, OWN) is None
    warning = differing_bits({"a": OWN, "b": OWN | {"instructions": "avx512f"}}, OWN)
    assert warning is not None
    assert "bits may differ" in warning
    assert "node b has vector instructions avx512f, the driver avx2" in warning
    assert "node a" not in warning
