"""Recurrent actor-critics: observation and state in; logits of all heads, a value and the next state out.

Shapes: T steps, N environments, S slots, B blueprints, R rows and W choices of the action tree, D encoding, H hidden.
Observations are dicts of tensors (T, N, ...). The state is an argument and a result, never kept in the network. The
value is normalized; the learner knows its scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simic.lifecycle.actions import HEAD_USED, HEAD_VALUES, HEADS, Column, Op
from simic.policy.action_tree import ActionTree, TreeDistribution
from simic.policy.blueprint_tables import TABLES, WHICH
from simic.policy.config import PolicyConfig
from simic.policy.masked_categorical import ILLEGAL
from simic.policy.normalization import Normalizer
from simic.policy.recurrence import Core
from simic.policy.segments import EpisodeSegments

Observation = dict[str, Tensor]
GROWTH_TREE = ActionTree(HEADS, HEAD_USED, pointed=("blueprint", "slot"))
"""The heads of a growth controller: slots under each operation, blueprints under each slot."""
INITIAL_OP_LOGITS = {
    Op.GERMINATE: -1.0,
    Op.SET_ALPHA_TARGET: -3.0,
    Op.PRUNE: -3.0,
    Op.FOSSILIZE: 1.0,
    Op.ADVANCE: 1.0,
}
"""Initial op biases where not 0. An untrained policy completes the seeds it germinates: a seed that is not fossilized
by the end of the episode earns nothing, so a policy that prunes or stalls never observes the benefit of growth."""
PLAIN_HEADS = ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
"""Heads whose choices are the same for every slot and task."""
PLAIN_OPS = [int(op) for op in Op if any(HEAD_USED[op, HEADS.index(head)] for head in PLAIN_HEADS)]
"""Operations that use any of them."""


class Output(NamedTuple):
    """The outputs of a forward pass over T x N steps."""

    logits: Tensor  # (T, N, R, W)
    value: Tensor  # (T, N), normalized by the learner's value scale
    state: Tensor | None  # (N, K) after the last step; see `Core.forward` for split sequences
    contribution: Tensor | None  # (T, N, S) predicted, if the network has that head


class Features(NamedTuple):
    """The encoding of an observation that the heads and the critic read."""

    core: Tensor  # (T, N, H)
    slots: Tensor | None  # (T, N, S, D)
    blueprints: Tensor | None  # (T, N, S, B, D), or the tables (U, S, B, D)
    state: Tensor | None  # (N, K)
    which: Tensor | None = None  # (T, N, U) one-hot, the table of each step


class ActorCritic(nn.Module):
    """The interface that the learner needs of a network. Subclasses set the attributes below and the three methods.

    See `simic.policy_network` for how to register one.

    Example::

        network = simic.train().agent.network  # the trained one
    """

    tree: ActionTree
    config: PolicyConfig
    sizes: dict[str, int]
    """Number of features of each part of the observation."""
    fixed_head_sizes: dict[str, int]
    """Number of choices of each head whose choices do not depend on the task."""
    normalize: nn.ModuleDict
    """A Normalizer for each part of the observation."""
    core: Core
    critic: nn.Sequential

    @property
    def reads_tables(self) -> bool:
        """Whether observations may have tables in the place of blueprints; see `policy.blueprint_tables`."""
        return False

    @property
    def state_size(self) -> int:
        """Size of the recurrent state, K."""
        return self.core.state_size

    def initial_state(self, num_envs: int) -> Tensor:
        """The state at the start of an episode (N, K)."""
        return torch.zeros(num_envs, self.state_size, device=next(self.parameters()).device)

    def normalizer(self, part: str) -> Normalizer:
        """The normalizer of a part of the observation."""
        normalizer = self.normalize[part]
        assert isinstance(normalizer, Normalizer)
        return normalizer

    @torch.no_grad()
    def update_normalizers(self, observation: Observation, valid: Tensor) -> None:
        """Update the normalizers from the valid steps (T, N) of a rollout, without padded slots and blueprints."""
        for part in self.sizes:
            if part == "blueprints" and TABLES in observation:
                times = observation[WHICH][valid].sum(0).view(-1, 1)  # (U, 1)
                rows = observation[TABLES].flatten(1, -2)  # (U, S * B, F)
                self.normalizer(part).update(rows.flatten(0, 1), (times * is_present(rows)).flatten())
                continue
            rows = observation[part][valid].flatten(0, -2)
            self.normalizer(part).update(rows if part == "base" else rows[is_present(rows)])

    def distribution(self, logits: Tensor, mask: Tensor) -> TreeDistribution:
        """The policy of these logits over the legal choices of all rows (..., R, W)."""
        return TreeDistribution(self.tree, logits, mask)

    def head_parameters(self) -> dict[str, list[nn.Parameter]]:
        """The parameters that only one head uses, by head."""
        raise NotImplementedError

    def features(self, observation: Observation, state: Tensor, segments: EpisodeSegments | None = None) -> Features:
        """Encode the observation and run the recurrent core."""
        raise NotImplementedError

    def decide(self, features: Features) -> Output:
        """Logits, value and predictions from the features."""
        raise NotImplementedError

    def forward(self, observation: Observation, state: Tensor, segments: EpisodeSegments | None = None) -> Output:
        """T steps of N environments in one call; `segments` splits sequences where episodes begin."""
        return self.decide(self.features(observation, state, segments))


class FactoredRecurrentActorCritic(ActorCritic):
    """For growth: all slots and blueprints share weights and are selected by pointer attention over their features.

    No weight depends on the number of slots or blueprints. All-zero features mark padding: this is how observations of
    hosts with fewer slots are padded.
    """

    _plain_index: Tensor

    def __init__(self, base_size: int, slot_size: int, blueprint_size: int, config: PolicyConfig | None = None) -> None:
        super().__init__()
        config = config or PolicyConfig()
        self.config, self.tree = config, GROWTH_TREE
        self.sizes = {"base": base_size, "slots": slot_size, "blueprints": blueprint_size}
        self.fixed_head_sizes = {head: len(values) for head, values in HEAD_VALUES.items()}
        self.normalize = make_normalizers(self.sizes, config)
        size, hidden = config.encoding_size, config.hidden_size
        self.encode_base = nn.Sequential(orthogonal(base_size, size), nn.SiLU())
        self.encode_blueprint = nn.Sequential(orthogonal(blueprint_size, size), nn.SiLU())
        self.encode_slot = nn.Sequential(orthogonal(slot_size + size, size), nn.SiLU())
        self.attend = orthogonal(size, size)
        self.join = nn.LayerNorm(4 * size)
        self.core = Core(4 * size, hidden, config.core)
        self.skip = orthogonal(4 * size, hidden)
        self.settle = nn.LayerNorm(hidden)
        self.op = orthogonal(hidden, len(Op), gain=0.01)
        with torch.no_grad():
            for op, logit in INITIAL_OP_LOGITS.items():
                self.op.bias[op] = logit
        self.op_embedding = nn.Parameter(torch.randn(len(Op), size) / sqrt(size))
        self.slot = _Pointer(hidden, size)
        self.blueprint = _Pointer(hidden, size)
        self.blueprint_slot = orthogonal(size, size, bias=False)
        self.plain_context = orthogonal(hidden, size)
        self.plain = nn.ModuleDict({head: orthogonal(size, len(HEAD_VALUES[head]), gain=0.01) for head in PLAIN_HEADS})
        self.critic = make_critic(hidden)
        self.contribution = nn.Sequential(orthogonal(hidden + size, size), nn.SiLU(), orthogonal(size, 1, gain=0.01))
        self._slot_ops = [int(op) for op in Op if HEAD_USED[op, Column.SLOT]]
        self.register_buffer("_plain_index", _plain_index(), persistent=False)

    @property
    def reads_tables(self) -> bool:
        """True unless a subclass encodes or decides in its own way."""
        own, here = type(self), FactoredRecurrentActorCritic
        return own.features is here.features and own.decide is here.decide

    def head_parameters(self) -> dict[str, list[nn.Parameter]]:
        """The layers that only one head uses; the op embedding and `plain_context` are shared."""
        modules: dict[str, list[nn.Module]] = {
            "op": [self.op],
            "slot": [self.slot],
            "blueprint": [self.blueprint, self.blueprint_slot],
        }
        modules |= {head: [layer] for head, layer in self.plain.items()}
        return {head: [p for module in modules[head] for p in module.parameters()] for head in HEADS}

    def features(self, observation: Observation, state: Tensor, segments: EpisodeSegments | None = None) -> Features:
        """Encode blueprints, each slot with the mean of its blueprints, and the host; pool over slots; run the core."""
        slots, which = observation["slots"], observation.get(WHICH)
        offers = observation["blueprints"] if which is None else observation[TABLES]
        slot_present, offer_present = is_present(slots).unsqueeze(-1), is_present(offers).unsqueeze(-1)
        base = self.encode_base(self.normalizer("base")(observation["base"]))
        blueprints = self.encode_blueprint(self.normalizer("blueprints")(offers)) * offer_present  # (T, N, S, B, D)
        mean_offer = blueprints.sum(-2) / offer_present.sum(-2).clamp(min=1)  # (T, N, S, D)
        encoded = self._encode_slots(self.normalizer("slots")(slots), mean_offer, which) * slot_present
        x = self.join(torch.cat([base, *self._pool(base, encoded, slot_present)], -1))
        out, state_after = self.core(x, state, segments)
        return Features(self.settle(out + self.skip(x)), encoded, blueprints, state_after, which)

    def decide(self, features: Features) -> Output:
        """Logits of the operation, of slots and plain heads under each operation, of blueprints in each slot."""
        core, slots, blueprints = features.core, features.slots, features.blueprints
        assert slots is not None
        assert blueprints is not None
        width = max(len(Op), slots.shape[-2], blueprints.shape[-2], max(len(HEAD_VALUES[head]) for head in PLAIN_HEADS))
        context = self.op_embedding[self._slot_ops]  # (5, D)
        slot_rows = self.slot(core.unsqueeze(-2), context, slots)  # (T, N, 5, S)
        germinate = self.op_embedding[Op.GERMINATE] + self.blueprint_slot(slots)  # (T, N, S, D)
        blueprint_rows = self.blueprint(core.unsqueeze(-2), germinate, blueprints, features.which)  # (T, N, S, B)
        rows = [self.op(core).unsqueeze(-2), slot_rows, self._plain_rows(core), blueprint_rows]
        value = self.critic(core).squeeze(-1)
        logits = torch.cat([pad_rows(part, width) for part in rows], -2)
        return Output(logits, value, features.state, self._predict(core, slots))

    def _encode_slots(self, slots: Tensor, mean_offer: Tensor, which: Tensor | None) -> Tensor:
        """Encode each slot with its mean blueprint (T, N, S, D); `which` is the table of each step, with tables."""
        first, activation = self.encode_slot
        assert isinstance(first, nn.Linear)
        offered = F.linear(mean_offer, first.weight[:, slots.shape[-1] :])
        if which is not None:
            offered = (which @ offered.flatten(1)).unflatten(-1, offered.shape[1:])
        return activation(F.linear(slots, first.weight[:, : slots.shape[-1]], first.bias) + offered)

    def _pool(self, base: Tensor, slots: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, maximum and attention average over the present slots (T, N, D) each."""
        mean = slots.sum(-2) / present.sum(-2).clamp(min=1)
        highest = torch.where(present, slots, ILLEGAL).amax(-2) * present.any(-2)
        # For so few slots a product and a sum are faster than many tiny matrix products.
        match = (slots * self.attend(base).unsqueeze(-2)).sum(-1, keepdim=True) / sqrt(slots.shape[-1])  # (T, N, S, 1)
        weight = torch.where(present, match, ILLEGAL).softmax(-2)
        return mean, highest, (weight * slots).sum(-2)

    def _plain_rows(self, core: Tensor) -> Tensor:
        """A row for each plain head under each operation that uses it (T, N, rows, W)."""
        context = F.silu(self.plain_context(core).unsqueeze(-2) + self.op_embedding[PLAIN_OPS])  # (T, N, ops, D)
        layers: list[nn.Linear] = [self.plain[head] for head in PLAIN_HEADS]  # pyright: ignore[reportAssignmentType]
        weight, bias = torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])
        return F.linear(context, weight, bias).flatten(-2)[..., self._plain_index]

    def _predict(self, core: Tensor, slots: Tensor) -> Tensor | None:
        """Predicted contribution of each seed (T, N, S)."""
        if not self.config.predict_contributions:
            return None
        if self.config.isolate_prediction:
            core, slots = core.detach(), slots.detach()
        first, activation, last = self.contribution
        assert isinstance(first, nn.Linear)
        of_core, of_slots = first.weight.split([core.shape[-1], slots.shape[-1]], 1)
        hidden = F.linear(core, of_core, first.bias).unsqueeze(-2) + F.linear(slots, of_slots)
        return last(activation(hidden)).squeeze(-1)


class _Pointer(nn.Module):
    """Scores keys by scaled dot-product attention; the query is computed from the core and a context."""

    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.read, self.query, self.key = orthogonal(hidden_size, size), orthogonal(size, size), orthogonal(size, size)
        nn.init.orthogonal_(self.query.weight, 0.01)

    def forward(self, core: Tensor, context: Tensor, keys: Tensor, which: Tensor | None = None) -> Tensor:
        """Scores (..., Q, K) of keys (..., K, D), or (..., Q, K, D) if each query has its own.

        With `which` (..., U), one-hot, the queries of a step have the keys (Q, K, D) of one of U tables.
        """
        query = self.query(F.silu(self.read(core) + context))  # (..., Q, D)
        return self._scores(query, self.key(keys), which) / sqrt(keys.shape[-1])

    @staticmethod
    def _scores(query: Tensor, keys: Tensor, which: Tensor | None) -> Tensor:
        if which is not None:
            # Against all tables, in one matrix product for each query: cheaper than a copy of its table for each step.
            every = query.flatten(0, -3).transpose(0, 1) @ keys.permute(1, 3, 0, 2).flatten(2)  # (Q, steps, U * K)
            own = (every.unflatten(-1, keys.shape[::2]) * which.flatten(0, -2).unsqueeze(-1)).sum(-2)  # (Q, steps, K)
            return own.transpose(0, 1).unflatten(0, which.shape[:-1])
        if keys.dim() > query.dim():
            return (keys @ query.unsqueeze(-1)).squeeze(-1)
        return query @ keys.transpose(-1, -2)


def make_critic(hidden_size: int, size: int = 64) -> nn.Sequential:
    """A value head; its last layer is rescaled when the value scale changes."""
    return nn.Sequential(orthogonal(hidden_size, size), nn.Tanh(), orthogonal(size, 1, gain=1.0))


def orthogonal(inputs: int, outputs: int, *, gain: float = sqrt(2), bias: bool = True) -> nn.Linear:
    """A linear layer with orthogonal weights and zero bias."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.orthogonal_(layer.weight, gain)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def is_present(features: Tensor) -> Tensor:
    """Whether slots or blueprints with features (..., F) are no padding: bool (...)."""
    return (features != 0).any(-1)


class _CompiledNetwork(nn.Module):
    """A network whose segments are laid out outside of the graph."""

    def __init__(self, network: ActorCritic, graph: nn.Module) -> None:
        super().__init__()
        self._orig_mod, self._graph = network, graph

    def forward(self, observation: Observation, state: Tensor, segments: EpisodeSegments | None = None) -> Output:
        _ = segments and segments.rows
        return self._graph(observation, state, segments)


def compile_network(network: ActorCritic, **options: Any) -> nn.Module:
    """The network compiled by `torch.compile` as one graph; `options` are passed on.

    The graph unrolls the time steps, so the first call with long sequences takes long.
    """
    import torch._dynamo  # imported here because it takes seconds

    torch._dynamo.config.allow_rnn = True  # otherwise the graph breaks at the recurrent core
    compiled = torch.compile(network, fullgraph=True, **options)
    assert isinstance(compiled, nn.Module)
    return _CompiledNetwork(network, compiled)


def unwrap(network: nn.Module) -> ActorCritic:
    """The network without the wrapper of `torch.compile`."""
    plain = getattr(network, "_orig_mod", network)
    assert isinstance(plain, ActorCritic)
    return plain


def check_heads(table: Mapping[str, float], heads: Iterable[str], what: str) -> None:
    """Raise unless a table of coefficients has exactly these heads; `what` names it."""
    unknown, missing = sorted(set(table) - set(heads)), sorted(set(heads) - set(table))
    if unknown or missing:
        raise ValueError(
            f"{what} must name exactly the heads {', '.join(heads)}; unknown: {unknown}, missing: {missing}"
        )


def make_normalizers(sizes: Mapping[str, int], config: PolicyConfig) -> nn.ModuleDict:
    """A Normalizer for each part of the observation."""
    return nn.ModuleDict({part: Normalizer(n, enabled=config.normalize_observations) for part, n in sizes.items()})


def pad_rows(rows: Tensor, width: int) -> Tensor:
    """Pad the last axis to `width`."""
    missing = width - rows.shape[-1]
    return F.pad(rows, (0, missing)) if missing else rows


def _plain_index() -> Tensor:
    """Index (rows, W) of each plain row's logits in the flattened (ops x all plain choices); padded with the first."""
    starts, offset = {}, 0
    for head in PLAIN_HEADS:
        starts[head] = offset
        offset += len(HEAD_VALUES[head])
    width = max(len(HEAD_VALUES[head]) for head in PLAIN_HEADS)
    rows = []
    for head, op in zip(GROWTH_TREE.row_head, GROWTH_TREE.row_choice, strict=True):
        if HEADS[head] in PLAIN_HEADS:
            size = len(HEAD_VALUES[HEADS[head]])
            rows.append(
                [PLAIN_OPS.index(op) * offset + starts[HEADS[head]] + (i if i < size else 0) for i in range(width)]
            )
    return torch.tensor(rows)
