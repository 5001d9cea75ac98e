"""Seeds that game are planted and found; ordinary growth is left alone. One host with two slots per story."""

from itertools import pairwise

import numpy as np
import pytest

from simic.actions import Op
from simic.lifecycle import Stage
from simic.rewards.facts import StepFacts
from simic.rewards.gaming import REASONS, GamingMemory, detect
from simic.slots import Slots

NAN = float("nan")
NO_SEED = (0.0, NAN)


def slots(alpha: float, contribution: float, stage: Stage) -> Slots:
    """The second slot holds a seed; at alpha 0 it is in training."""
    made = Slots.dormant(1, 2)
    made.stage[:, 1] = stage if alpha else Stage.TRAINING
    made.blueprint[:, 1] = 0
    made.alpha[:, 1] = alpha
    made.contribution[:, 1] = contribution
    made.counterfactual[:, 1] = alpha == 0
    return made


def tell(
    quality, seed, *, first=None, final=None, accuracy=True, stage=Stage.HOLDING
) -> tuple[dict[str, list[bool]], GamingMemory]:
    """Flags of the seed after each decision of a story: quality per state, (alpha, contribution) per state."""
    memory = GamingMemory.empty(1, 2)
    found: dict[str, list[bool]] = {reason: [] for reason in REASONS}
    states = list(zip(quality, seed, strict=True))
    one = np.ones(1)
    for number, ((old, seed_old), (new, seed_new)) in enumerate(pairwise(states)):
        figures = {
            # A task without accuracy tells the same story in losses, with a random-guess loss of 4.
            "metric_before": old if accuracy else NAN,
            "metric_after": new if accuracy else NAN,
            "first_metric": (quality[0] if first is None else first) if accuracy else NAN,
            "loss_before": 4 * (1 - old),
            "loss_after": 4 * (1 - new),
            "first_loss": 4 * (1 - (quality[0] if first is None else first)),
        }
        unit = 1.0 if accuracy else 4.0
        facts = StepFacts(
            op=np.full(1, Op.WAIT),
            slot=np.zeros(1, dtype=int),
            slots_before=slots(seed_old[0], unit * seed_old[1], stage),
            slots_after=slots(seed_new[0], unit * seed_new[1], stage),
            parameters_before=1000 * one,
            parameters_after=1000 * one,
            host_parameters=1000 * one,
            seed_parameters_after=np.zeros((1, 2)),
            final=np.array([number == final]),
            rolled_back=np.array([False]),
            decision=np.array([number]),
            horizon=np.array([25]),
            random_guess_loss=4 * one,
            earned=0 * one,
            **{name: np.array([value]) for name, value in figures.items()},
        )
        flags, memory = detect(facts, memory)
        for reason, flag in flags.items():
            assert flag.shape == (1, 2)
            assert not flag[0, 0], "the empty slot is never flagged"
            found[reason].append(bool(flag[0, 1]))
    return found, memory


@pytest.mark.parametrize("accuracy", [True, False])
def test_ordinary_growth_is_not_flagged(accuracy):
    quality = [0.30, 0.40, 0.45, 0.44, 0.52, 0.60, 0.59, 0.65]
    seed = [NO_SEED, NO_SEED, (0.0, 0.1), (0.3, 0.02), (0.7, 0.10), (1.0, 0.14), (1.0, 0.15), (1.0, 0.16)]
    found, _ = tell(quality, seed, accuracy=accuracy)
    assert not any(found["overclaiming"])
    assert not any(found["indispensable"])


@pytest.mark.parametrize("accuracy", [True, False])
def test_a_contribution_far_above_the_whole_gain_is_flagged(accuracy):
    # The host gained 4 points since the episode began: three times that and the margin make 17.
    quality = [0.50, 0.54, 0.54, 0.54]
    found, _ = tell(quality, [NO_SEED, (0.5, 0.04), (1.0, 0.16), (1.0, 0.18)], accuracy=accuracy)
    assert found["overclaiming"] == [False, False, True]


def test_a_host_that_lost_has_gained_nothing():
    found, _ = tell([0.50, 0.40, 0.40], [NO_SEED, (0.5, 0.04), (1.0, 0.06)])
    assert found["overclaiming"] == [False, True]


@pytest.mark.parametrize("accuracy", [True, False])
def test_a_seed_that_makes_itself_indispensable_is_flagged(accuracy):
    # Blended in at 60 %; the host leans on it more and more and falls to 50 %.
    quality = [0.60, 0.61, 0.58, 0.54, 0.50]
    seed = [(0.0, 0.01), (0.3, 0.02), (0.7, 0.10), (1.0, 0.20), (1.0, 0.35)]
    found, _ = tell(quality, seed, first=0.1, accuracy=accuracy)
    assert found["indispensable"] == [False, False, True, True]
    assert not any(found["overclaiming"])  # it gained 40 points before: only the second detector sees this


def test_a_falling_host_does_not_accuse_a_seed_that_contributes_less_and_less():
    quality = [0.60, 0.65, 0.60, 0.52, 0.45]
    found, _ = tell(quality, [(0.0, NAN), (0.7, 0.20), (1.0, 0.18), (1.0, 0.15), (1.0, 0.10)], first=0.1)
    assert not any(found["indispensable"])


def test_the_quality_before_blending_counts_not_that_at_germination():
    # The host fell while the seed trained behind it; since the blend it recovers.
    quality = [0.70, 0.50, 0.50, 0.55, 0.60]
    found, _ = tell(quality, [(0.0, NAN), (0.0, 0.1), (0.5, 0.10), (1.0, 0.15), (1.0, 0.20)], first=0.1)
    assert not any(found["indispensable"])


def test_seeds_that_are_not_blended_in_are_not_judged():
    found, _ = tell([0.5, 0.4, 0.3], [(0.0, 0.2), (0.0, 0.6), (0.0, 0.9)])
    assert not any(found["overclaiming"])
    assert not any(found["indispensable"])


def test_the_blend_itself_may_be_what_made_the_host_worse():
    quality = [0.60, 0.50, 0.50]
    found, _ = tell(quality, [(0.0, NAN), (1.0, 0.10), (1.0, 0.20)], first=0.1)
    assert found["indispensable"] == [True, True]


@pytest.mark.parametrize("stage", [Stage.HOLDING, Stage.FOSSILIZED])
def test_the_last_decision_is_not_judged_and_clears_the_memory(stage):
    quality, seed = [0.6, 0.6, 0.3], [(0.0, NAN), (1.0, 0.1), (1.0, 0.5)]
    found, memory = tell(quality, seed, first=0.2, stage=stage)
    assert found == {"overclaiming": [False, True], "indispensable": [False, True]}
    assert memory.quality_at_blend[0, 1] == 0.6
    assert memory.highest_contribution[0, 1] == 0.5
    found, memory = tell(quality, seed, first=0.2, stage=stage, final=1)
    assert found == {"overclaiming": [False, False], "indispensable": [False, False]}
    assert np.isnan(memory.quality_at_blend).all()
    assert np.isnan(memory.highest_contribution).all()


def test_a_removed_seed_is_forgotten():
    _, memory = tell([0.6, 0.6, 0.6], [(0.0, NAN), (1.0, 0.3), NO_SEED])
    assert np.isnan(memory.quality_at_blend).all()
    assert np.isnan(memory.highest_contribution).all()


def test_every_reason_is_said_in_words():
    assert set(REASONS) == set(tell([0.5, 0.5], [NO_SEED, NO_SEED])[0])
    assert all(len(text) > 20 for text in REASONS.values())
