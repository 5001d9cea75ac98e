"""Mirrors without their packages: ids, and what is said where a package is missing. Real ones: tests/integrations."""

import sys

import pytest

from simic.telemetry.mirrors import MirrorError, mirror_id, tensorboard_mirror, wandb_mirror


def test_an_id_is_made_once_for_each_mirror(tmp_path):
    assert mirror_id(tmp_path, "one", lambda: "a") == "a"
    assert mirror_id(tmp_path, "two", lambda: "b") == "b"
    assert mirror_id(tmp_path, "one", lambda: "c") == "a"


@pytest.mark.parametrize(
    ("make", "module", "message"),
    [
        (
            tensorboard_mirror,
            "torch.utils.tensorboard",
            r"TensorBoard is not installed: .*pip install 'simic-rl\[tensorboard",
        ),
        (wandb_mirror, "wandb", r"Weights & Biases is not installed: .*pip install 'simic-rl\[wandb\]'"),
    ],
)
def test_a_package_that_is_missing_is_told_with_the_remedy(tmp_path, monkeypatch, make, module, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MirrorError, match=message):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []
