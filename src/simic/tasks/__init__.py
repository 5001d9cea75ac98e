"""What hosts learn: data sets, host networks, the tasks that pair them, and families that tasks are drawn from."""

from typing import Literal, get_args

TaskName = Literal[
    "digits-cnn",
    "digits-mlp",
    "mnist1d-cnn",
    "mnist1d-shuffled",
    "spirals-mlp",
    "teacher-mlp",
    "fashion-cnn",
    "cifar10-cnn",
    "chars-transformer",
]
DEFAULT_TASK: TaskName = "digits-cnn"
FamilyName = Literal["mlp", "cnn", "mixed", "subsets", "digits"]
DEFAULT_FAMILY: FamilyName = "mlp"
Split = Literal["train", "validation", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)
"""Parts of a family."""
