"""Property: whatever a model has lived through, each earlier moment can be restored exactly.

Restored are output, weights, topology and optimizer; the next training step is then the one that once followed.
"""

import copy
import io

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from simic import GrowableModel, LifecycleConfig
from simic.lifecycle.actions import HEADS, Op
from simic.lifecycle.slots import legal_ops
from simic.lifecycle.stages import Incubation
from simic.scheduler.parameter_groups import ParameterGroups

X = torch.linspace(-1, 1, 24).view(8, 3)
Y = torch.arange(8) % 2


class Life:
    """A model in training, and what it did right after each moment that was kept."""

    def __init__(self, incubation: Incubation) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 4), nn.Linear(4, 2)]
        rules = LifecycleConfig(incubation=incubation, embargo_decisions=1)
        self.model = GrowableModel(nn.Sequential(*layers), ["0", "2", "4"], example_input=X, lifecycle=rules)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.groups = ParameterGroups(self.model, self.optimizer, [])
        self.moments: list[tuple[bytes, dict, dict, dict]] = []

    def act(self, numbers: list[int]) -> None:
        """A legal action chosen by the numbers, then a decision of time."""
        model = self.model
        legal = legal_ops(model.slot_state, model.lifecycle)[0]
        legal[Op.WAIT] &= not legal[1:].any()  # otherwise most that happens is nothing
        op, slot = np.argwhere(legal)[numbers[0] % legal.sum()]
        fitting = np.flatnonzero(model.blueprint_table()[slot] > 0)
        row = [op, slot, fitting[numbers[1] % len(fitting)], *(n % 3 for n in numbers[2 : len(HEADS) - 1])]
        model.execute(np.array(row))
        model.tick()
        self.groups.sync()

    def train(self) -> None:
        torch.manual_seed(1)
        self.optimizer.zero_grad()
        self.model.train().loss(lambda: nn.functional.cross_entropy(self.model(X), Y)).backward()
        self.optimizer.step()

    def observe(self) -> dict[str, object]:
        with torch.no_grad():
            output = self.model.eval()(X)
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        return {"output": output, "life": repr(self.model.slot_state), "weights": weights, "optimizer": optimizer}

    def keep(self) -> None:
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        now = self.observe()
        self.train()
        self.moments.append((file.getvalue(), now, self.observe(), {"germinations": self.model.germinations}))

    def go_back(self, number: int) -> None:
        saved, then, followed, counts = self.moments[number % len(self.moments)]
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        assert_same(self.observe(), then)
        assert {"germinations": self.model.germinations} == counts
        self.train()
        assert_same(self.observe(), followed)


def assert_same(a: object, b: object) -> None:
    if isinstance(a, dict):
        assert isinstance(b, dict)
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert isinstance(b, list)
        assert len(a) == len(b)
        for mine, theirs in zip(a, b, strict=True):
            assert_same(mine, theirs)
    elif isinstance(a, Tensor):
        assert isinstance(b, Tensor)
        assert torch.equal(a, b)
    else:
        assert a == b


numbers = st.integers(0, 10**6)
actions = st.tuples(st.just("act"), st.lists(numbers, min_size=len(HEADS), max_size=len(HEADS)))
happenings = st.one_of(
    actions,
    actions,
    actions,
    st.tuples(st.just("keep"), st.none()),
    st.tuples(st.just("go_back"), numbers),
    st.tuples(st.just("train"), st.none()),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sampled_from(["direct", "shadow"]), st.lists(happenings, min_size=8, max_size=20))
def test_any_earlier_moment_can_be_restored(incubation, happenings):
    slot_state = Life(incubation)
    slot_state.keep()
    for name, detail in [*happenings, ("go_back", 0)]:
        getattr(slot_state, name)(*([] if detail is None else [detail]))
