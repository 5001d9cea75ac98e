"""What hosts learn: data sets, host networks, the tasks that pair them, and families that tasks are drawn from."""

from typing import Literal

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
FamilyName = Literal["mlp", "digits"]
DEFAULT_FAMILY: FamilyName = "mlp"
