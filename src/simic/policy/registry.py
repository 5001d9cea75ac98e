"""Policy networks by name. Nothing here loads torch until a network is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from simic.registry import Registry

if TYPE_CHECKING:
    from simic.policy.config import PolicyConfig
    from simic.policy.network import ActorCritic

BuildNetwork = Callable[[int, int, int, "PolicyConfig"], "ActorCritic"]
Builder = TypeVar("Builder", bound=Callable[..., Any])

POLICIES: Registry[BuildNetwork] = Registry("policy network")


def policy_network(name: str) -> Callable[[Builder], Builder]:
    """Register a subclass of `simic.ActorCritic`, for `--policy.network NAME`.

    Args:
        name: Its name in settings and files.

    Returns:
        A decorator. The class is called with (base_size, slot_size, blueprint_size, config); the sizes are the features
        of a host, a slot and a blueprint, see `simic.control.observation`. The network must have the action tree of the
        built-in one (`GROWTH_TREE`).

    Raises:
        ValueError: The name is taken.

    Example:
        >>> from simic.policy.network import FactoredRecurrentActorCritic
        >>> @simic.policy_network("doc_network")
        ... class DocNetwork(FactoredRecurrentActorCritic):
        ...     pass  # the built-in network under another name
    """

    POLICIES.check_new(name)

    def register(build: Builder) -> Builder:
        POLICIES.add(name, build, build)
        return build

    return register


@policy_network("factored")
def _factored(base_size: int, slot_size: int, blueprint_size: int, config: PolicyConfig) -> ActorCritic:
    from simic.policy.network import FactoredRecurrentActorCritic

    return FactoredRecurrentActorCritic(base_size, slot_size, blueprint_size, config)
