"""Recurrent actor-critics: observation and state in, logits of all heads, a value and the next state out.

Shapes: T steps, N environments, S slots, B blueprints, R rows and W choices of the action tree, D encoding, H hidden.
Observations are dicts of tensors (T, N, ...). State is an argument and a result, never kept. `value` is normalised: the
learner knows its scale. What both networks share is their core and critic; they differ in what they look at and in how
they point at actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simic.lifecycle.actions import HEAD_USED, HEAD_VALUES, HEADS, Op
from simic.policy.config import PolicyConfig
from simic.policy.masked import ILLEGAL
from simic.policy.moments import Normalizer
from simic.policy.recurrence import Core, EpisodeSegments
from simic.policy.tree import ActionTree

Observation = dict[str, Tensor]
OPS = len(Op)
GROWTH_TREE = ActionTree(HEADS, HEAD_USED, pointed=("blueprint", "slot"))
"""The heads of a growth controller: slots under each operation, blueprints under each slot."""
INCLINATION = {
    Op.GERMINATE: -1.0,
    Op.SET_ALPHA_TARGET: -3.0,
    Op.PRUNE: -3.0,
    Op.FOSSILIZE: 1.0,
    Op.ADVANCE: 1.0,
}
"""Logits at birth, where not 0: it begins by seeing seeds through. Who prunes or dawdles never learns what growth pays,
because a seed that is not a fossil at the end of the episode was for nothing."""
PLAIN_HEADS = ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
"""Heads whose choices are the same in every task."""


class Output(NamedTuple):
    """What a network says of T x N steps."""

    logits: Tensor  # (T, N, R, W)
    value: Tensor  # (T, N), in units of the learner's value scale
    state: Tensor | None  # (N, K) after the last step
    contribution: Tensor | None  # (T, N, S) predicted, if the network has such a head


class Features(NamedTuple):
    """What a network makes of an observation, before it decides."""

    core: Tensor  # (T, N, H)
    slots: Tensor | None  # (T, N, S, D)
    blueprints: Tensor | None  # (T, N, S, B, D)
    state: Tensor | None  # (N, K)


class ActorCritic(nn.Module):
    """What the learner asks of a network: the action tree, its observation sizes, and who belongs to which head."""

    tree: ActionTree
    config: PolicyConfig
    sizes: dict[str, int]
    """Features of each part of an observation."""
    normalize: nn.ModuleDict
    """A Normalizer for each part."""
    core: Core
    critic: nn.Sequential

    @property
    def state_size(self) -> int:
        """Numbers of a state."""
        return self.core.state_size

    def initial_state(self, num_envs: int) -> Tensor:
        """The state at the start of an episode (N, K)."""
        return torch.zeros(num_envs, self.state_size, device=next(self.parameters()).device)

    def normal(self, part: str) -> Normalizer:
        """The normaliser of a part of the observation."""
        normalizer = self.normalize[part]
        assert isinstance(normalizer, Normalizer)
        return normalizer

    @torch.no_grad()
    def update_normalizers(self, observation: Observation, valid: Tensor) -> None:
        """Let the normalisers take in the valid steps (T, N) of a rollout; slots that are not there do not count."""
        for part in self.sizes:
            rows = observation[part][valid].flatten(0, -2)
            there = is_there(rows) if part != "base" else torch.ones(len(rows), dtype=torch.bool, device=rows.device)
            self.normal(part).update(rows[there])

    def head_parameters(self) -> dict[str, list[nn.Parameter]]:
        """The parameters that serve one head only, by head."""
        raise NotImplementedError

    def features(self, observation: Observation, state: Tensor, pieces: EpisodeSegments | None = None) -> Features:
        """Encode and remember."""
        raise NotImplementedError

    def decide(self, features: Features) -> Output:
        """What follows from features."""
        raise NotImplementedError

    def forward(self, observation: Observation, state: Tensor, pieces: EpisodeSegments | None = None) -> Output:
        """T steps of N environments in one call; `pieces` cuts sequences where episodes begin."""
        return self.decide(self.features(observation, state, pieces))


class RecurrentActorCritic(ActorCritic):
    """For any environment with a vector observation (`base`) and Discrete or MultiDiscrete actions."""

    def __init__(self, observation_size: int, head_sizes: Sequence[int], config: PolicyConfig | None = None) -> None:
        super().__init__()
        config = config or PolicyConfig()
        self.config, self.tree = config, ActionTree.independent(head_sizes)
        self.head_sizes, self.sizes = tuple(head_sizes), {"base": observation_size}
        self.normalize = _normalizers(self.sizes, config)
        self.encoder = nn.Sequential(orthogonal(observation_size, config.encoding_size), nn.Tanh())
        self.core = Core(config.encoding_size, config.hidden_size, config.core)
        self.actors = nn.ModuleList(orthogonal(config.hidden_size, size, gain=0.01) for size in head_sizes)
        self.critic = critic(config.hidden_size)

    def head_parameters(self) -> dict[str, list[nn.Parameter]]:
        """Each head is one layer."""
        return {name: list(actor.parameters()) for name, actor in zip(self.tree.heads, self.actors, strict=True)}

    def features(self, observation: Observation, state: Tensor, pieces: EpisodeSegments | None = None) -> Features:
        """Encode and remember."""
        x = self.encoder(self.normal("base")(observation["base"]))
        out, state_after = self.core(x, state, pieces)
        return Features(out, None, None, state_after)

    def decide(self, features: Features) -> Output:
        """One row of logits per head."""
        width = max(self.head_sizes)
        rows = [_padded(actor(features.core), width) for actor in self.actors]
        return Output(torch.stack(rows, -2), self.critic(features.core).squeeze(-1), features.state, None)


class FactoredRecurrentActorCritic(ActorCritic):
    """For growth: every slot and blueprint goes through the same weights, and is pointed at by what it looks like.

    Nothing is sized by the number of slots or blueprints. A slot or blueprint whose features are all zero is not there:
    that is how observations of hosts with fewer slots are padded.
    """

    _plain_index: Tensor

    def __init__(self, base_size: int, slot_size: int, blueprint_size: int, config: PolicyConfig | None = None) -> None:
        super().__init__()
        config = config or PolicyConfig()
        self.config, self.tree = config, GROWTH_TREE
        self.sizes = {"base": base_size, "slots": slot_size, "blueprints": blueprint_size}
        self.normalize = _normalizers(self.sizes, config)
        size, hidden = config.encoding_size, config.hidden_size
        self.encode_base = nn.Sequential(orthogonal(base_size, size), nn.SiLU())
        self.encode_blueprint = nn.Sequential(orthogonal(blueprint_size, size), nn.SiLU())
        self.encode_slot = nn.Sequential(orthogonal(slot_size + size, size), nn.SiLU())
        self.attend = orthogonal(size, size)
        self.join = nn.LayerNorm(4 * size)
        self.core = Core(4 * size, hidden, config.core)
        self.skip = orthogonal(4 * size, hidden)
        self.settle = nn.LayerNorm(hidden)
        self.op = orthogonal(hidden, OPS, gain=0.01)
        with torch.no_grad():
            for op, logit in INCLINATION.items():
                self.op.bias[op] = logit
        self.op_embedding = nn.Parameter(torch.randn(OPS, size) / sqrt(size))
        self.slot = _Pointer(hidden, size)
        self.blueprint = _Pointer(hidden, size)
        self.blueprint_slot = orthogonal(size, size, bias=False)
        self.plain_context = orthogonal(hidden, size)
        self.plain = nn.ModuleDict({head: orthogonal(size, len(HEAD_VALUES[head]), gain=0.01) for head in PLAIN_HEADS})
        self.critic = critic(hidden)
        self.contribution = nn.Sequential(orthogonal(hidden + size, size), nn.SiLU(), orthogonal(size, 1, gain=0.01))
        self._slot_ops = [int(op) for op in Op if HEAD_USED[op, HEADS.index("slot")]]
        self.register_buffer("_plain_index", _plain_index(), persistent=False)

    def head_parameters(self) -> dict[str, list[nn.Parameter]]:
        """The layers that only one head uses; the op embedding and the context of plain heads are shared."""
        modules: dict[str, list[nn.Module]] = {
            "op": [self.op],
            "slot": [self.slot],
            "blueprint": [self.blueprint, self.blueprint_slot],
        }
        modules |= {head: [layer] for head, layer in self.plain.items()}
        return {head: [p for module in modules[head] for p in module.parameters()] for head in HEADS}

    def features(self, observation: Observation, state: Tensor, pieces: EpisodeSegments | None = None) -> Features:
        """Encode the host, its slots and what may grow there; pool over slots; remember."""
        slots, offers = observation["slots"], observation["blueprints"]
        slot_there, offer_there = is_there(slots).unsqueeze(-1), is_there(offers).unsqueeze(-1)
        base = self.encode_base(self.normal("base")(observation["base"]))
        blueprints = self.encode_blueprint(self.normal("blueprints")(offers)) * offer_there  # (T, N, S, B, D)
        offered = torch.cat([self.normal("slots")(slots), blueprints.sum(-2) / offer_there.sum(-2).clamp(min=1)], -1)
        encoded = self.encode_slot(offered) * slot_there  # (T, N, S, D)
        x = self.join(torch.cat([base, *self._pool(base, encoded, slot_there)], -1))
        out, state_after = self.core(x, state, pieces)
        return Features(self.settle(out + self.skip(x)), encoded, blueprints, state_after)

    def decide(self, features: Features) -> Output:
        """Point at an operation, at a slot under each, at a blueprint in each slot; and all plain heads under each."""
        core, slots, blueprints = features.core, features.slots, features.blueprints
        assert slots is not None
        assert blueprints is not None
        width = max(OPS, slots.shape[-2], blueprints.shape[-2], max(len(HEAD_VALUES[head]) for head in PLAIN_HEADS))
        context = self.op_embedding[self._slot_ops]  # (5, D)
        slot_rows = self.slot(core.unsqueeze(-2), context, slots)  # (T, N, 5, S)
        germinate = self.op_embedding[Op.GERMINATE] + self.blueprint_slot(slots)  # (T, N, S, D)
        blueprint_rows = self.blueprint(core.unsqueeze(-2), germinate, blueprints)  # (T, N, S, B)
        rows = [
            _padded(self.op(core).unsqueeze(-2), width),
            _padded(slot_rows, width),
            _padded(self._plain_rows(core), width),
            _padded(blueprint_rows, width),
        ]
        value = self.critic(core).squeeze(-1)
        return Output(torch.cat(rows, -2), value, features.state, self._predict(core, slots))

    def _pool(self, base: Tensor, slots: Tensor, there: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, maximum and an attended mixture of the slots that are there (T, N, D) each."""
        mean = slots.sum(-2) / there.sum(-2).clamp(min=1)
        highest = torch.where(there, slots, ILLEGAL).amax(-2) * there.any(-2)
        match = (slots @ self.attend(base).unsqueeze(-1)) / sqrt(slots.shape[-1])  # (T, N, S, 1)
        weight = torch.where(there, match, ILLEGAL).softmax(-2)
        return mean, highest, (weight * slots).sum(-2)

    def _plain_rows(self, core: Tensor) -> Tensor:
        """A row for each plain head under each operation where it matters (T, N, rows, W)."""
        context = F.silu(self.plain_context(core).unsqueeze(-2) + self.op_embedding)  # (T, N, ops, D)
        layers: list[nn.Linear] = [self.plain[head] for head in PLAIN_HEADS]  # pyright: ignore[reportAssignmentType]
        weight, bias = torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])
        return F.linear(context, weight, bias).flatten(-2)[..., self._plain_index]

    def _predict(self, core: Tensor, slots: Tensor) -> Tensor | None:
        if not self.config.predict_contributions:
            return None
        seen = torch.cat([core.unsqueeze(-2).expand(*slots.shape[:-1], core.shape[-1]), slots], -1)
        return self.contribution(seen.detach() if self.config.isolate_prediction else seen).squeeze(-1)


class _Pointer(nn.Module):
    """Scores of keys by a query from the core in a context."""

    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.read, self.query, self.key = orthogonal(hidden_size, size), orthogonal(size, size), orthogonal(size, size)
        nn.init.orthogonal_(self.query.weight, 0.01)

    def forward(self, core: Tensor, context: Tensor, keys: Tensor) -> Tensor:
        """Scores (..., Q, K) of keys (..., K, D), or (..., Q, K, D) if each query has its own."""
        query = self.query(F.silu(self.read(core) + context)) / sqrt(keys.shape[-1])  # (..., Q, D)
        keys = self.key(keys)
        if keys.dim() > query.dim():
            return (keys @ query.unsqueeze(-1)).squeeze(-1)
        return query @ keys.transpose(-1, -2)


def critic(hidden_size: int, size: int = 64) -> nn.Sequential:
    """The value of a state; its last layer is rescaled as the value scale changes."""
    return nn.Sequential(orthogonal(hidden_size, size), nn.Tanh(), orthogonal(size, 1, gain=1.0))


def orthogonal(inputs: int, outputs: int, *, gain: float = sqrt(2), bias: bool = True) -> nn.Linear:
    """A layer with orthogonal weights and zero bias."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.orthogonal_(layer.weight, gain)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def is_there(features: Tensor) -> Tensor:
    """Whether a slot or blueprint exists, by its features (..., F): bool (...)."""
    return (features != 0).any(-1)


def compile_network(network: ActorCritic, **options: Any) -> nn.Module:
    """The network through `torch.compile`, as one graph; `options` are those of `torch.compile`.

    The graph unrolls the steps of a sequence, so the first call takes long where sequences are.
    """
    import torch._dynamo  # here, because it takes seconds

    torch._dynamo.config.allow_rnn = True  # otherwise torch breaks the graph at the recurrent core
    compiled = torch.compile(network, fullgraph=True, **options)
    assert isinstance(compiled, nn.Module)
    return compiled


def unwrap(network: nn.Module) -> ActorCritic:
    """The plain network behind `torch.compile`."""
    plain = getattr(network, "_orig_mod", network)
    assert isinstance(plain, ActorCritic)
    return plain


def check_heads(table: Mapping[str, float], heads: Iterable[str], what: str) -> None:
    """Raise unless a table of coefficients has exactly these heads."""
    unknown, missing = sorted(set(table) - set(heads)), sorted(set(heads) - set(table))
    if unknown or missing:
        raise ValueError(
            f"{what} must name exactly the heads {', '.join(heads)}; unknown: {unknown}, missing: {missing}"
        )


def _normalizers(sizes: Mapping[str, int], config: PolicyConfig) -> nn.ModuleDict:
    return nn.ModuleDict({part: Normalizer(n, enabled=config.normalize_observations) for part, n in sizes.items()})


def _padded(rows: Tensor, width: int) -> Tensor:
    return F.pad(rows, (0, width - rows.shape[-1]))


def _plain_index() -> Tensor:
    """Where each row of a plain head finds its logits in (ops x all plain choices); short rows repeat their first."""
    starts, offset = {}, 0
    for head in PLAIN_HEADS:
        starts[head] = offset
        offset += len(HEAD_VALUES[head])
    width = max(len(HEAD_VALUES[head]) for head in PLAIN_HEADS)
    rows = []
    for head, op in zip(GROWTH_TREE.row_head, GROWTH_TREE.row_choice, strict=True):
        if HEADS[head] in PLAIN_HEADS:
            size = len(HEAD_VALUES[HEADS[head]])
            rows.append([op * offset + starts[HEADS[head]] + (i if i < size else 0) for i in range(width)])
    return torch.tensor(rows)
