"""What one GPU holds at the peaks of scoring, training and generation, told before a run and without its weights.

The policy's own model runs one microbatch of the largest size with shapes alone (`memory_trace`): weights, casts,
activations, recomputation, output head and gradients are then those of the run. Beside it stands what only sizes tell:
optimizer state, reference, generator and its key-value cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from headrace.config import LoraConfig, OptimizerConfig, PolicyConfig, RecipeConfig
from headrace.config_policy import ParallelConfig
from headrace.models.automodel.lora import add_adapter, target_layers
from headrace.models.automodel.masters import hold_in_half, product_weights, train_in_half
from headrace.models.automodel.optimizer_8bit import state_bytes
from headrace.models.automodel.quantized_base import quantized_bytes
from headrace.models.automodel.scoring import Scoring, TokenScorer, model_head, takes_fused_head, trunk
from headrace.models.automodel.setup import COMPUTE_DTYPES, build_skeleton, enable_activation_checkpointing
from headrace.models.generation.weights import cast_parameters
from headrace.models.memory_trace import PLANNED, FusedHead, LiveBytes
from headrace.models.sampling import filter_logits, gather_logprobs, sample_at

STAGES = ("scoring", "training", "generation")
PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "reference",
    "generator",
    "KV cache",
    "activations and logits",
    "workspaces",
)
_CHUNKS_AT_ONCE = 4
_WORKSPACES = 2 * 32 * 2**20
"""What cuBLAS takes on a GPU of the Hopper family, for the forward's thread and for the backward's."""


@dataclass
class MemoryPlan:
    """Bytes of one GPU by stage and part."""

    parts: dict[str, dict[str, int]] = field(default_factory=lambda: {stage: {} for stage in STAGES})
    notes: list[str] = field(default_factory=list)

    def total(self, stage: str, *, without: tuple[str, ...] = ()) -> int:
        return sum(size for part, size in self.parts[stage].items() if part not in without)

    @property
    def peak(self) -> int:
        return max(self.total(stage) for stage in STAGES)


def plan_memory(recipe: RecipeConfig, tokenizer: Any = None) -> MemoryPlan:
    """Return what a GPU holds that runs a worker of the policy and, where they share one, the generator."""
    cfg, plan = recipe.policy, MemoryPlan()
    policy, generator = _policy(cfg, tokenizer), _generator(recipe, tokenizer)
    ranks = cfg.workers if cfg.workers > 1 else 1
    trained = [p for p in policy.parameters() if p.requires_grad]
    offloads = cfg.parallel.cpu_offload
    below = [] if cfg.lora.base == "plain" or cfg.lora.rank is None else _below(policy)
    saved = sum(w.nbytes - quantized_bytes(w, cfg.lora.base) for w in below)
    kept = 0
    if generator is not None and cfg.lora.rank is not None:
        # The generator keeps the matrices below an adapter.
        kept = sum(m.weight.nbytes for _, m in target_layers(generator, cfg.lora))
    resident = {
        "weights": _bytes(policy) // ranks - saved,
        "optimizer": 0 if offloads else _moments(cfg, trained, ranks),
        "reference": _reference(recipe, policy) // ranks,
        "generator": 0 if generator is None else _bytes(generator) + kept,
        "workspaces": _WORKSPACES,
    }
    gradients = sum(4 * p.numel() for p in trained) // ranks
    if ranks > 1:
        gathered, own_gradients = _gathered(policy, cfg)
        resident["weights"] = gathered + (0 if offloads else resident["weights"])
        gradients = own_gradients + (0 if offloads else gradients)
        plan.notes.append(
            f"of {ranks} workers: an estimate; weights are gathered as policy.parallel.gathered_gib says"
        )
    # One matrix at a time is whole, and a copy of it on the way.
    made = 2 * max((w.nbytes for w in below), default=0)
    scored, learned = (size + made for size in activations(cfg, recipe, policy))
    plan.parts["scoring"] = {**resident, "activations and logits": scored}
    plan.parts["training"] = {**resident, "gradients": gradients, "activations and logits": learned}
    cache, beside = (0, 0) if generator is None else _decoding(recipe, generator)
    plan.parts["generation"] = {**resident, "KV cache": cache, "activations and logits": beside}
    if recipe.generation.backend != "hf":
        plan.notes.append(
            f"generation.backend={recipe.generation.backend} takes its own share of the GPU beside these "
            "(generation.vllm.args.gpu_memory_utilization)"
        )
    return plan


def _policy(cfg: PolicyConfig, tokenizer: Any) -> Any:
    """Return the policy's model on the meta device, its weights in the dtypes that a worker holds."""
    changes = {"attn_implementation": "eager", "experts_implementation": None}
    plain = cfg.model_copy(update={"model": cfg.model.model_copy(update=changes), "device": "cpu"})
    model = build_skeleton(plain, tokenizer=tokenizer)
    if cfg.activation_checkpointing:
        enable_activation_checkpointing(model)
    half = cfg.precision == "bfloat16"
    if cfg.lora.rank is not None:
        add_adapter(model, cfg.lora, seed=0)
        if half:
            hold_in_half(model)
    elif (cfg.parallel.cpu_offload and cfg.workers == 1 and half) or cfg.optimizer.stochastic_rounding:
        train_in_half(model)
    return model


def _below(policy: Any) -> list[torch.Tensor]:
    """Return the matrices below an adapter."""
    return [
        m.base_layer.weight for m in policy.modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")
    ]


def _moments(cfg: PolicyConfig, trained: Sequence[torch.Tensor], ranks: int) -> int:
    if cfg.optimizer.kind == "adamw_8bit":
        return sum(state_bytes(p, ranks) for p in trained)
    return sum(8 * p.numel() for p in trained) // ranks


def _tensors(model: Any) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _bytes(model: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(model))


def _reference(recipe: RecipeConfig, policy: Any) -> int:
    if not recipe.needs_reference or recipe.policy.lora.rank is not None:
        return 0
    half = {id(p) for p in product_weights(policy)} if recipe.policy.precision == "bfloat16" else set()
    return sum(p.numel() * (2 if id(p) in half else 4) for p in policy.parameters())


def _generator(recipe: RecipeConfig, tokenizer: Any) -> Any:
    """Return the generator's model, on the meta device; None where it is none of transformers', or elsewhere."""
    if recipe.generation.backend != "hf" or recipe.cluster.rollout == "actor":
        return None
    plain = {
        "lora": LoraConfig(),
        "activation_checkpointing": False,
        "parallel": ParallelConfig(),
        "optimizer": OptimizerConfig(),
    }
    model = _policy(recipe.policy.model_copy(update=plain), tokenizer)
    cast_parameters(model, COMPUTE_DTYPES[recipe.generation.precision])
    return model.requires_grad_(False)


def _gathered(policy: Any, cfg: PolicyConfig) -> tuple[int, int]:
    """Return the bytes of whole weights and of whole gradients while a sharded model runs: all of a small one's.

    Of a larger one (`policy.parallel.gathered_gib`) weights of two layers and of all that is outside of layers.
    """

    def own(weight: torch.Tensor) -> int:
        # Of experts that data ranks share out, a rank has its own.
        return weight.numel() // (cfg.parallel.expert_over_data if weight.dim() == 3 else 1)

    size = COMPUTE_DTYPES[cfg.precision].itemsize
    layers: list[int] = []
    inside: set[int] = set()
    for name, module in policy.named_modules():
        if name.rpartition(".")[2].isdigit() and name.count("layers.") == 1:
            layers.append(size * sum(map(own, module.parameters())))
            inside |= {id(p) for p in module.parameters()}
    outside = sum(p.numel() for p in policy.parameters() if id(p) not in inside)
    is_small = cfg.parallel.keeps_gathered(sum(layers) + size * outside)
    if not is_small:
        return 2 * max(layers, default=0) + 4 * outside, 0
    return sum(layers) + 4 * outside, 4 * sum(own(p) for p in policy.parameters() if p.requires_grad)


# One microbatch.


def largest_microbatches(cfg: PolicyConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (rows, tokens of a row) of the largest microbatch of scoring and of training; packed: one row."""
    if cfg.sequence_packing.enabled:
        return (1, cfg.sequence_packing.logprob_mb_tokens), (1, cfg.sequence_packing.train_mb_tokens)
    longest = cfg.max_total_sequence_length
    if cfg.dynamic_batching.enabled:
        rows = [
            max(1, n // longest)
            for n in (cfg.dynamic_batching.logprob_mb_tokens, cfg.dynamic_batching.train_mb_tokens)
        ]
        return (rows[0], longest), (rows[1], longest)
    return (cfg.logprob_batch_size, longest), (cfg.train_micro_batch_size, longest)


def activations(cfg: PolicyConfig, recipe: RecipeConfig, policy: Any) -> tuple[int, int]:
    """Return the bytes beyond weights and gradients at the peaks of scoring and of training a microbatch."""
    scoring, training = largest_microbatches(cfg)
    context = cfg.parallel.context
    whole = Scoring(**recipe.generation.distribution, chunk_tokens=cfg.logprob_chunk_tokens)
    with FakeTensorMode(), LiveBytes() as counter:
        model = _fake(policy)
        for tensor in _tensors(model):
            counter.add(tensor)
        weights = counter.live
        half = cfg.precision == "bfloat16"
        peaks = []
        for shape, learns in ((scoring, False), (training, True), (training, True)):
            counter.peak = counter.live
            _microbatch(model, whole, (shape[0], -(-shape[1] // context)), half=half, learns=learns)
            peaks.append(counter.peak)
        gradients = counter.live - weights
    per_update = cfg.train_global_batch_size // cfg.replicas * cfg.max_total_sequence_length
    several = per_update > training[0] * training[1]
    return peaks[0] - weights, max(0, peaks[2 if several else 1] - weights - gradients)


def _fake(model: Any) -> Any:
    """Return a meta model with fake tensors on a fake CPU for its own, and the implementations of the plan."""

    grad_dtypes = {n: p.grad_dtype for n, p in model.named_parameters() if p.requires_grad}
    trains = {n: p.requires_grad for n, p in model.named_parameters()}
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    model.tie_weights()
    for name, weight in model.named_parameters():
        weight.requires_grad_(trains[name])
        if name in grad_dtypes:
            weight.grad_dtype = grad_dtypes[name]
    model.set_attn_implementation(PLANNED)
    if any(p.dim() == 3 for p in model.parameters()):
        model.set_experts_implementation(PLANNED)
    return model


def _microbatch(model: Any, scoring: Scoring, shape: tuple[int, int], *, half: bool, learns: bool) -> None:
    ids = torch.zeros(shape, dtype=torch.int64)
    with torch.set_grad_enabled(learns):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            hidden = trunk(model)(
                input_ids=ids, position_ids=torch.zeros_like(ids), attention_mask=None, use_cache=False
            ).last_hidden_state
            tokens = torch.zeros(ids.numel(), dtype=torch.int64)
            logprobs = _head(model, scoring, hidden.flatten(0, 1).index_select(0, tokens), tokens)
        del hidden
        if learns:
            logprobs.sum().backward()  # type: ignore[no-untyped-call]


def _head(model: Any, scoring: Scoring, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    head = model_head(model)
    if takes_fused_head(head, scoring):
        half = torch.is_autocast_enabled("cpu")
        rows = hidden.to(torch.bfloat16) if half else hidden
        chunk = _CHUNKS_AT_ONCE * scoring.chunk_tokens
        out: torch.Tensor = FusedHead.apply(rows, head.projection.weight, chunk)  # type: ignore[no-untyped-call]
        return out
    scorer = TokenScorer(model, scoring, "bfloat16", device=torch.device("cpu"), has_head=True)
    return scorer.score_tokens(hidden, targets, with_entropy=True, with_unfiltered=False).logprobs


# Generation.


def _decoding(recipe: RecipeConfig, generator: Any) -> tuple[int, int]:
    """Return the bytes of the key-value cache, and of what the prefill or a decode step makes beside it."""
    cfg, dtype = recipe.generation, COMPUTE_DTYPES[recipe.generation.precision]
    config, longest = generator.config.get_text_config(), recipe.policy.max_total_sequence_length
    rows = min(cfg.batch_size, recipe.samples_per_step)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer = 2 * heads * dim * dtype.itemsize * rows * longest
    # A step joins each layer's cache with its new token: half of a layer is there twice.
    cache = layer * config.num_hidden_layers + layer // 2
    # Samples of one prompt share its prefill.
    prompts = (-(-rows // recipe.grpo.num_generations_per_prompt), longest - cfg.max_new_tokens)
    with FakeTensorMode(), LiveBytes() as counter, torch.no_grad():
        model = _fake(generator)
        counter.live = counter.peak = 0
        ids = torch.zeros(prompts, dtype=torch.int64)
        trunk(model)(input_ids=ids, position_ids=torch.zeros_like(ids), attention_mask=None, use_cache=False)
        logits = torch.empty(rows, config.vocab_size, dtype=dtype)
        scores = filter_logits(logits, **cfg.distribution)
        gather_logprobs(scores, sample_at(scores, torch.empty(rows, dtype=torch.float64)))
        return cache, counter.peak
