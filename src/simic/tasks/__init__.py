"""What hosts learn: data sets, host networks, and the tasks that pair them."""

from typing import Literal

TaskName = Literal["digits-cnn", "digits-mlp", "mnist1d-cnn", "mnist1d-shuffled", "fashion-cnn"]
DEFAULT_TASK: TaskName = "digits-cnn"
