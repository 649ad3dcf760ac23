"""From a recipe to what a rank trains and scores with.

One process loads the model as it is. Of several, rank 0 alone holds the model whole, on its host; the others build
a skeleton without weights. All split the skeleton, and rank 0 sends the weights, one after the other. What has to be
seen of the whole model is seen on rank 0.
"""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.config import PolicyConfig
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.collectives import from_first_rank
from headrace.distributed.topology import RankLayout, Topology
from headrace.errors import ConfigError
from headrace.models.automodel.attention import (
    PACKED_ATTENTION,
    check_isolation,
    choose_attention,
)
from headrace.models.automodel.data import Packing
from headrace.models.automodel.dispatch import checkpoint_contexts
from headrace.models.automodel.experts import GROUPED_EXPERTS
from headrace.models.automodel.lora import add_adapter
from headrace.models.automodel.masters import Masters, hold_in_half, train_in_half
from headrace.models.automodel.probes import check_causal
from headrace.models.automodel.quantized_base import quantize_base
from headrace.models.automodel.replay import install_replay
from headrace.models.automodel.replica import Replica
from headrace.models.automodel.scoring import Scoring, TokenScorer
from headrace.models.automodel.setup import (
    COMPUTE_DTYPES,
    build_skeleton,
    compile_layers,
    enable_activation_checkpointing,
    load_model,
)
from headrace.models.automodel.sharding import ShardedModel, shard_model
from headrace.models.automodel.tensor_parallel import is_family
from headrace.models.router_replay import RouterReplay
from headrace.models.tokenizers import unknown_ids, vocabulary_of

_HOST = torch.device("cpu")
_TOKENS = 16
# Largest and mean change of a logprob: rounding of the summation order, and of bfloat16 (nats).
_LARGEST_FLOAT32, _MEAN_BFLOAT16 = 1e-3, 0.5


@dataclass(frozen=True)
class BuiltModels:
    """A policy, its frozen reference if wanted, and the handle of the policy's router replay if that is on."""

    policy: TokenScorer
    reference: TokenScorer | None
    replay: RouterReplay | None
    masters: Masters | None = None
    """The policy's float32 weights in host memory, where its model computes with copies."""


@dataclass(frozen=True)
class _WholeFacts:
    """What rank 0 has seen of the whole model: `scores` (1, 16) are of a fixed row, where a plan has to be proven."""

    has_head: bool
    scores: torch.Tensor | None
    generation_config: Any


class ModelBuilder:
    """Builds the models of one rank; of several, all ranks do so together."""

    def __init__(
        self,
        cfg: PolicyConfig,
        scoring: Scoring,
        *,
        device: torch.device,
        topology: Topology | None,
        tokenizer: Any,
        seed: int,
    ) -> None:
        self._cfg, self._scoring, self._device = cfg, scoring, device
        self._topology, self._tokenizer, self._seed = topology, tokenizer, seed
        self._layout = RankLayout(1) if topology is None else topology.layout

    def build(self, *, with_reference: bool) -> BuiltModels:
        """Return the models, the reference with the weights of the policy; it scores without top-k and top-p.

        Where the policy trains an adapter, the reference is the same model, to be run with the adapter off.

        Raises:
            ConfigError: a model that cannot be loaded, packed, split or replayed as the recipe says; on every rank.
        """
        if self._topology is None:
            model, masters = self._load_whole(self._device), None
            if self._cfg.parallel.cpu_offload:
                masters = Masters(model, half=self._cfg.precision == "bfloat16")
            replay, reference = self._finish(model, with_reference)
            if self._cfg.optimizer.stochastic_rounding:
                train_in_half(model)
            if self._cfg.compile:
                for each in {id(m): m for m in (model, reference) if m is not None}.values():
                    compile_layers(each)
            frozen = None if reference is None else self._scorer(reference, self._scoring.unfiltered())
            return BuiltModels(self._scorer(model, self._scoring), frozen, replay, masters)
        return self._build_split(self._topology, with_reference)

    def _build_split(self, topology: Topology, with_reference: bool) -> BuiltModels:
        whole: list[Any] = []
        facts = from_first_rank(lambda: self._inspect(whole))
        model = self._prepare(build_skeleton(self._cfg, tokenizer=self._tokenizer), _HOST)
        self._adapt(model)
        model.generation_config = facts.generation_config
        replay, reference = self._finish(model, with_reference)
        policy, sharded = self._split(model, self._scoring, topology, facts)
        sharded.take_full_weights(whole.pop().state_dict() if whole else None)
        if self._layout.context > 1 or facts.scores is not None:
            # Attention refuses heads that the context ranks cannot share out.
            scores = _probe_scores(policy, self._device)
            if facts.scores is not None:
                _check_split(model, facts.scores, scores, self._cfg)
        if reference is None:
            return BuiltModels(policy, None, replay)
        if reference is model:
            frozen = self._scorer(model, self._scoring.unfiltered(), has_head=facts.has_head)
            frozen.shard(sharded, policy.replica)
            return BuiltModels(policy, frozen, replay)
        frozen, frozen_sharded = self._split(reference, self._scoring.unfiltered(), topology, facts)
        frozen_sharded.copy_weights_of(sharded)
        return BuiltModels(policy, frozen, replay)

    def _inspect(self, whole: list[Any]) -> _WholeFacts:
        """Load the whole model into `whole`, and return what has to be known of it."""
        model = self._load_whole(_HOST)
        whole.append(model)
        scorer = self._scorer(model, self._scoring)
        # transformers' own plans, and experts of any family, have to be proven.
        splits = self._layout.tensor > 1 or self._cfg.parallel.expert_over_data > 1
        unproven = splits and not is_family(model)
        scores = _probe_scores(scorer, _HOST) if unproven else None
        return _WholeFacts(scorer.has_head, scores, model.generation_config)

    def _split(
        self, model: Any, scoring: Scoring, topology: Topology, facts: _WholeFacts
    ) -> tuple[TokenScorer, ShardedModel]:
        scorer = self._scorer(model, scoring, has_head=facts.has_head)
        sequence = self._cfg.parallel.sequence_parallel
        replica = Replica(topology, sequence) if self._layout.replica_size > 1 else None
        if self._cfg.compile:
            compile_layers(model)
        sharded = shard_model(model, topology, self._cfg, self._device)
        scorer.shard(sharded, replica)
        return scorer, sharded

    def _load_whole(self, device: torch.device) -> Any:
        model = load_model(self._cfg, seed=self._seed, device=device, tokenizer=self._tokenizer)
        self._prepare(model, device)
        check_causal(model)
        if self._is_packed:
            check_isolation(model)
        self._adapt(model)
        return model

    def _adapt(self, model: Any) -> None:
        if self._cfg.lora.rank is not None:
            add_adapter(model, self._cfg.lora, seed=self._seed)
            if self._cfg.precision == "bfloat16":
                hold_in_half(model)
            quantize_base(model, self._cfg.lora)

    def _scorer(self, model: Any, scoring: Scoring, *, has_head: bool | None = None) -> TokenScorer:
        unknown = unknown_ids(self._tokenizer, vocabulary_of(model))
        known = replace(scoring, unknown_ids=None if unknown is None else unknown.to(self._device))
        packing = None
        if self._is_packed:
            ranks = self._layout.replica_size
            multiple = math.lcm(self._cfg.make_sequence_length_divisible_by, ranks)
            packing = Packing(multiple, int(self._tokenizer.pad_token_id), ranks)
        return TokenScorer(
            model, known, self._cfg.precision, packing=packing, device=self._device, has_head=has_head
        )

    def _finish(self, model: Any, with_reference: bool) -> tuple[RouterReplay | None, Any]:
        """Install router replay, if it is on, and return its handle and the frozen model, if one is wanted."""
        replay = install_replay(model) if self._cfg.router_replay.enabled else None
        if not with_reference or self._cfg.lora.rank is not None:
            return replay, model if with_reference else None
        reference = copy.deepcopy(model).requires_grad_(False)
        if self._cfg.precision == "bfloat16":
            hold_in_half(reference)
        return replay, reference

    @property
    def _is_packed(self) -> bool:
        return self._cfg.sequence_packing.enabled or self._layout.replica_size > 1

    def _prepare(self, model: Any, device: torch.device) -> Any:
        """Set the model's implementations, for a forward on `device`, and return it."""
        wanted = self._cfg.model.attn_implementation
        name = choose_attention(device, COMPUTE_DTYPES[self._cfg.precision], self._is_packed, wanted)
        if self._layout.context > 1 and name != PACKED_ATTENTION:
            raise ConfigError(
                f"policy.parallel.context={self._layout.context} with policy.model.attn_implementation={wanted}: "
                "only sdpa can exchange heads between context ranks; set it"
            )
        model.set_attn_implementation(name)
        if model.config._experts_implementation == "grouped_mm":
            model.set_experts_implementation(GROUPED_EXPERTS)
        if self._cfg.activation_checkpointing:
            # With `compile`, torch takes no such contexts, and ranks share no experts.
            shares = self._cfg.parallel.expert_over_data > 1
            enable_activation_checkpointing(model, **({"context_fn": checkpoint_contexts} if shares else {}))
        return model


@torch.no_grad()
def _probe_scores(scorer: TokenScorer, device: torch.device) -> torch.Tensor:
    """Return the logprobs (1, 16) on CPU of a fixed row; ranks of a sharded model call this together."""
    ids = torch.tensor([[0, 1]], device=device).repeat(1, _TOKENS // 2)
    row = BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([_TOKENS])})
    with scorer.gathered():
        return scorer(row).logprobs.cpu()


def _check_split(model: Any, whole: torch.Tensor, split: torch.Tensor, cfg: PolicyConfig) -> None:
    """Compare the scores of the split model with those of the whole one, which are float32."""
    gap = (whole - split).abs()
    exact = cfg.precision == "float32"
    found, limit = (gap.max(), _LARGEST_FLOAT32) if exact else (gap.mean(), _MEAN_BFLOAT16)
    if not float(found) <= limit:
        key, how = "tensor", "split by transformers' own plan"
        if cfg.parallel.expert_over_data > 1:
            key, how = "expert", "with its experts shared out"
        raise ConfigError(
            f"policy.parallel.{key}: {how}, {type(model).__name__} scores tokens otherwise (logprobs change by "
            f"{float(found):.1e}, more than {limit}); set policy.parallel.{key}=1"
        )
