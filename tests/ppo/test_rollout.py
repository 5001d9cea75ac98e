"""Rollouts: what does not fit is refused with its place, and joining pads without changing anything."""

from dataclasses import replace

import pytest
import torch
from helpers.rollouts import flat_agent, growth_agent, play

from simic.lifecycle.actions import HEADS
from simic.policy.network import GROWTH_TREE
from simic.ppo.rollout import Rollout, join


@pytest.fixture(scope="module")
def agent():
    return growth_agent()


@pytest.fixture(scope="module")
def rollout(agent) -> Rollout:
    return play(agent, steps=6, envs=3)[0]


def with_observation(rollout, part, values) -> Rollout:
    return replace(rollout, observation=rollout.observation | {part: values})


def test_a_rollout_of_the_agent_itself_is_fine(agent, rollout):
    rollout.check(agent.plain)
    assert rollout.shape == (6, 3)


def test_a_mask_for_another_number_of_slots(agent, rollout):
    rows = GROWTH_TREE.num_rows
    with pytest.raises(ValueError, match=f"must have {rows + 3} rows .* of 3 slots.*, got {rows + 2}"):
        replace(rollout, mask=rollout.mask[:, :, :-1]).check(agent.plain)
    with pytest.raises(ValueError, match=f"must have {rows + 3} rows .* of 3 slots.*, got {rows + 2}"):
        agent.act(
            {k: v[0].numpy() for k, v in rollout.observation.items()}, rollout.mask[0, :, :-1].numpy(), rollout.state
        )


def test_an_empty_mask_is_found_in_its_environment(agent, rollout):
    mask = rollout.mask.clone()
    mask[4, 1, GROWTH_TREE.row_head.index(HEADS.index("tempo"))] = False
    with pytest.raises(ValueError, match="environment 1 at step 4 has no legal choice for head tempo"):
        replace(rollout, mask=mask).check(agent.plain)
    mask = rollout.mask.clone()
    mask[5, 2, -1] = False
    with pytest.raises(ValueError, match=r"environment 2 at step 5 .*head blueprint"):
        replace(rollout, mask=mask).check(agent.plain)
    with pytest.raises(ValueError, match="environment 2 has no legal choice for head blueprint"):
        agent.act({k: v[5].numpy() for k, v in rollout.observation.items()}, mask[5].numpy(), rollout.state)


@pytest.mark.parametrize("part", ["base", "slots", "blueprints"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_observation_that_is_not_finite_is_found_in_its_place(agent, rollout, part, bad):
    values = rollout.observation[part].clone()
    values[3, 2].view(-1)[-1] = bad
    with pytest.raises(ValueError, match=f"'{part}' is not finite at step 3, environment 2"):
        with_observation(rollout, part, values).check(agent.plain)
    seen = {k: v[3].numpy() for k, v in rollout.observation.items()} | {part: values[3].numpy()}
    with pytest.raises(ValueError, match=f"'{part}' of environment 2 is not finite"):
        agent.act(seen, rollout.mask[3].numpy(), rollout.state)


@pytest.mark.parametrize("name", ["reward", "next_value"])
def test_a_reward_that_is_not_finite_is_found_before_it_spoils_a_scale(agent, rollout, name):
    """Running scales and the critic's units would never recover from it."""
    values = getattr(rollout, name).clone()
    values[2, 1] = float("nan")
    before = {key: value.clone() for key, value in agent.plain.state_dict().items()}
    with pytest.raises(ValueError, match=f"{name} is not finite at step 2, environment 1"):
        agent.update(replace(rollout, **{name: values}))
    assert all((value == before[key]).all() for key, value in agent.plain.state_dict().items())
    assert agent.return_scale.moments.count == 0


def test_another_number_of_features_names_both(agent, rollout):
    size = agent.plain.sizes["slots"]
    with pytest.raises(
        ValueError, match=rf"'slots' must have shape \(6, 3, '...', {size}\).*got \(6, 3, 3, {size - 1}\)"
    ):
        with_observation(rollout, "slots", rollout.observation["slots"][..., :-1]).check(agent.plain)
    seen = {k: v[0].numpy() for k, v in rollout.observation.items()}
    with pytest.raises(ValueError, match=f"'slots' must have {size} features"):
        agent.act(seen | {"slots": seen["slots"][..., :-1]}, rollout.mask[0].numpy(), rollout.state)


def test_a_missing_part_names_it(agent, rollout):
    parts = {part: values for part, values in rollout.observation.items() if part != "blueprints"}
    with pytest.raises(ValueError, match=r"the rollout lacks \['blueprints'\]"):
        replace(rollout, observation=parts).check(agent.plain)


def test_actions_and_states_of_another_size_name_both(agent, rollout):
    with pytest.raises(ValueError, match=r"actions must have shape \(6, 3, 8\).*got \(6, 3, 7\)"):
        replace(rollout, action=rollout.action[..., :-1]).check(agent.plain)
    size = agent.plain.state_size
    with pytest.raises(ValueError, match=rf"state must have shape \(3, {size}\).*got \(3, {size - 1}\)"):
        replace(rollout, state=rollout.state[:, :-1]).check(agent.plain)


def test_environments_are_taken_whole(rollout):
    part = rollout.environments(torch.tensor([2, 0]))
    assert (part.reward == rollout.reward[:, [2, 0]]).all()
    assert (part.observation["slots"] == rollout.observation["slots"][:, [2, 0]]).all()
    assert (part.state == rollout.state[[2, 0]]).all()
    assert part.contribution is not None
    assert part.contribution.shape == (6, 2, 3)


def test_joining_one_rollout_is_that_rollout(rollout):
    assert join([rollout]) is rollout


def test_joined_rollouts_are_side_by_side_and_padding_is_not_valid(agent):
    short, long = play(agent, 3, 2, slots=2)[0], play(agent, 5, 1, slots=4)[0]
    both = join([short, long])
    both.check(agent.plain)
    assert both.shape == (5, 3)
    assert both.valid.T.tolist() == [[True] * 3 + [False] * 2] * 2 + [[True] * 5]
    assert (both.reward[:3, :2] == short.reward).all()
    assert (both.action[:, 2:] == long.action).all()
    assert (both.observation["slots"][:3, :2, :2] == short.observation["slots"]).all()
    assert not both.observation["slots"][:, :2, 2:].any()
    assert not both.observation["blueprints"][:, :2, 2:].any()
    rows = short.mask.shape[2]
    assert (both.mask[:3, :2, :rows, : short.mask.shape[3]] == short.mask).all()
    assert not both.mask[:3, :2, :rows, short.mask.shape[3] :].any()
    assert both.contribution is not None
    assert both.contribution[:, :2, 2:].isnan().all()
    assert not both.first[3:, :2].any()
    assert not both.truncated[3:, :2].any()


def test_to_moves_everything(rollout):
    moved = rollout.to(torch.device("cpu"))
    assert (moved.reward == rollout.reward).all()
    assert moved.observation.keys() == rollout.observation.keys()


def test_a_flat_rollout_needs_one_row_per_head():
    agent = flat_agent()
    rollout = play(agent, 4, 2)[0]
    rollout.check(agent.plain)
    with pytest.raises(ValueError, match=r"must have 2 rows.*got 1"):
        replace(rollout, mask=rollout.mask[:, :, :1]).check(agent.plain)
