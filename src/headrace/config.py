"""The recipe: frozen pydantic models, one per section.

`headrace.utils.recipe.load_recipe` reads a YAML file (with inheritance and dotted overrides) into `RecipeConfig`
and turns every mistake into a ConfigError of one line. Rules that tie several sections together stand in
`RecipeConfig.check_sections`; rules that need the model (its length limit, its vocabulary) stand with the
code that loads it.
"""

import string
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headrace.utils.algorithm_presets import with_preset

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
# YAML has lists only; they become tuples.
Pair = Annotated[tuple[float, float], Field(strict=False)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Integers = Annotated[tuple[int, ...], Field(strict=False)]
ValidationMetric = Literal[
    "validation/accuracy", "validation/sampled_accuracy", "validation/reward", "validation/sampled_reward"
]


class Section(BaseModel):
    """Base of every section: immutable, no value of another type, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class ObservabilityConfig(Section):
    """What the store reports about its operations."""

    enabled: bool | None = None
    """Count operations, rows and bytes by column. None: in a run, yes; for a client built by hand, no."""


class DataPlaneConfig(Section):
    """The store that carries rollouts to trainers."""

    enabled: bool = True
    impl: Literal["local", "transfer_queue"] = "local"
    backend: Literal["simple", "mooncake_cpu"] = "simple"
    storage_capacity: PositiveInt = 1_048_576
    """Samples that the store holds at most, over all partitions."""
    num_storage_units: PositiveInt = 1
    """Processes that hold the bulk of a transfer_queue store."""
    store_name: str = "headrace"
    """Which store of a Ray cluster, or of this process; runs that share one need a name each, while they run."""
    ray_address: str | None = None
    """Ray cluster of a transfer_queue store; None: RAY_ADDRESS, or a local one."""
    timeout_s: PositiveFloat = 120.0
    """Longest time that one operation may take before it fails with a TransportError."""
    startup_timeout_s: PositiveFloat = 180.0
    """Longest time that starting the store, or attaching to it, may take."""
    claim_meta_poll_interval_s: PositiveFloat = 0.05
    global_segment_size: PositiveInt = 2 * 1024**3
    """Bytes that one storage unit holds (mooncake_cpu)."""
    local_buffer_size: PositiveInt = 512 * 1024**2
    """Bytes of the transfer buffer of each process that connects (mooncake_cpu)."""
    mooncake_master_port: PositiveInt | None = None
    """Port of the Mooncake master; None: a free one."""
    observability: ObservabilityConfig = ObservabilityConfig()


class SequencePackingConfig(Section):
    """Several sequences in one row, without attention between them."""

    enabled: bool = False
    algorithm: Literal["first_fit_decreasing", "modified_first_fit_decreasing", "concatenative"] = (
        "modified_first_fit_decreasing"
    )
    train_mb_tokens: PositiveInt = 4096
    logprob_mb_tokens: PositiveInt = 8192
    microbatch_order: Literal["planned", "longest_first"] = "planned"


class DynamicBatchingConfig(Section):
    """Microbatches of similar lengths, as many rows each as a token budget allows."""

    enabled: bool = False
    train_mb_tokens: PositiveInt = 4096
    logprob_mb_tokens: PositiveInt = 8192
    sequence_length_round: PositiveInt = 1


class OptimizerConfig(Section):
    """AdamW."""

    lr: PositiveFloat = 1e-6
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    eps: Annotated[float, Field(ge=1e-20)] = 1e-8  # less divides by what float32 rounds to 0
    weight_decay: NonNegativeFloat = 0.01


class SchedulerConfig(Section):
    """Learning-rate schedule: linear warm-up, then constant, linear or cosine decay over `decay_steps`."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | None = None
    min_lr_ratio: Fraction = 0.0

    @model_validator(mode="after")
    def _decay_needs_length(self) -> Self:
        if self.kind != "constant" and self.decay_steps is None:
            raise ValueError(f"kind={self.kind} needs decay_steps (optimizer steps after warm-up)")
        return self


class TokenizerConfig(Section):
    """Where the tokenizer comes from; None: the model's own directory."""

    path: str | None = None
    builder: Literal["characters"] | None = None
    """Build a tokenizer in place of loading one: `characters` has one token per character."""
    characters: str = string.ascii_letters


class ModelConfig(Section):
    """Which weights: a Hugging Face directory, a GGUF file in a Python package, or fresh ones from `config`."""

    path: str | None = None
    gguf_package: str | None = None
    """Importable package that ships a .gguf file; converted once to safetensors in `cache_dir`."""
    config: dict[str, Any] | None = None
    """A transformers config with `model_type`; the weights are drawn from the run's seed."""
    cache_dir: str = "~/.cache/headrace"
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    experts_implementation: Literal["eager", "grouped_mm", "batched_mm"] | None = None

    @model_validator(mode="after")
    def _exactly_one_source(self) -> Self:
        given = [k for k in ("path", "gguf_package", "config") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(
                f"set exactly one of path, gguf_package and config; got {', '.join(given) or 'none of them'}"
            )
        return self


class ParallelConfig(Section):
    """How one replica of the policy is spread over workers; the data-parallel size is what is left.

    `policy.workers` = data x context x tensor.
    """

    tensor: PositiveInt = 1
    context: PositiveInt = 1
    expert: PositiveInt = 1
    """Ranks that share the experts of a mixture-of-experts model: as many as `tensor`, which 1 follows."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel ranks along tokens as well."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory between uses."""
    launcher: Literal["auto", "spawn", "ray"] = "auto"
    """How several workers are started; auto: Ray with the transfer_queue data plane, else plain processes."""

    @model_validator(mode="after")
    def _axes_fit(self) -> Self:
        if self.expert not in (1, self.tensor):
            raise ValueError(
                f"expert={self.expert} is neither 1 nor tensor={self.tensor}: the ranks that share a model's experts "
                f"are its tensor ranks; set tensor={self.expert}, or expert=1 (which follows tensor)"
            )
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError(
                "sequence_parallel splits tokens between tensor ranks and tensor=1; raise tensor, or switch it off"
            )
        return self


class RouterReplayConfig(Section):
    """The experts that the rollout used, used again by the logprob and train forwards of an MoE model."""

    enabled: bool = False
    max_missing_share: Fraction = 0.0
    """Share of a sample's (token, layer) rows that may lack a record and be routed by the trainer itself. The last
    token of a sample never has one and does not count: nothing is scored from it."""
    on_excess: Literal["refuse", "mask"] = "refuse"
    """Beyond that share: stop the run, or leave the sample out of the loss."""
    min_exact_share: Fraction = 0.8
    """Least share of recorded (token, layer) choices that the trainer's own routers make too, with the weights of the
    rollout: in scoring, or, without it, in the training forwards before the first update. In any one layer, half of it.
    Below it the capture is taken to be wrong, and the run stops before weights change; 0 never stops."""
    trace: bool = False
    """Write the routes of every step, recorded and used, into the run directory; see `headrace trace-check`."""


class PolicyConfig(Section):
    """The trained model, and how its batches are cut."""

    model: ModelConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    precision: Literal["float32", "bfloat16"] = "float32"
    """Compute precision. Weights and optimizer state are always float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: PositiveInt = 1
    parallel: ParallelConfig = ParallelConfig()
    max_total_sequence_length: PositiveInt = 1024
    make_sequence_length_divisible_by: PositiveInt = 1
    train_global_batch_size: PositiveInt = 256
    train_micro_batch_size: PositiveInt = 8
    logprob_batch_size: PositiveInt = 32
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    activation_checkpointing: bool = False
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose [tokens, vocabulary] float32 scores are in memory at once.

    On CUDA with Triton, a head that is a plain matrix, without top-k and top-p, takes four times as many: it keeps one
    copy of the scores, in the compute dtype, where the plain path keeps several in float32.
    """
    max_grad_norm: PositiveFloat | None = 1.0
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    router_replay: RouterReplayConfig = RouterReplayConfig()

    @property
    def has_fixed_microbatches(self) -> bool:
        """Whether microbatches have a fixed number of rows: neither packing nor dynamic batching is on."""
        return not (self.sequence_packing.enabled or self.dynamic_batching.enabled)

    @property
    def replicas(self) -> int:
        """Data-parallel size: copies of the model, each on context x tensor workers."""
        return self.workers // (self.parallel.context * self.parallel.tensor)

    @model_validator(mode="after")
    def _batches_fit(self) -> Self:
        if self.sequence_packing.enabled and self.dynamic_batching.enabled:
            raise ValueError(
                "sequence_packing.enabled and dynamic_batching.enabled exclude each other; switch one off"
            )
        replica = self.parallel.context * self.parallel.tensor
        if self.workers % replica:
            raise ValueError(
                f"workers={self.workers} do not make whole replicas of parallel.context={self.parallel.context} x "
                f"parallel.tensor={self.parallel.tensor}; make workers a multiple of {replica}"
            )
        if self.parallel.cpu_offload and self.workers == 1:
            raise ValueError(
                "parallel.cpu_offload works on sharded weights and workers=1 holds them whole; raise workers, or "
                "switch it off"
            )
        if self.train_global_batch_size % self.replicas:
            raise ValueError(
                f"train_global_batch_size={self.train_global_batch_size} is not divisible by workers={self.workers} "
                f"({self.replicas} data-parallel replicas); change one of them"
            )
        per_rank = self.train_global_batch_size // self.replicas
        if self.has_fixed_microbatches and per_rank % self.train_micro_batch_size:
            raise ValueError(
                f"train_micro_batch_size={self.train_micro_batch_size} does not divide the {per_rank} rows "
                "that each replica gets of train_global_batch_size; change one of them, or switch on "
                "sequence_packing or dynamic_batching"
            )
        for name in ("sequence_packing", "dynamic_batching"):
            section = getattr(self, name)
            for key in ("train_mb_tokens", "logprob_mb_tokens"):
                if section.enabled and getattr(section, key) < self.max_total_sequence_length:
                    raise ValueError(
                        f"{name}.{key}={getattr(section, key)} is less than max_total_sequence_length="
                        f"{self.max_total_sequence_length}, so the longest row fits no microbatch; raise "
                        f"{name}.{key}"
                    )
        return self


class GenerationConfig(Section):
    """How answers are sampled. The trainer scores tokens under the same temperature, top-p and top-k; a KL to the
    reference policy is of both policies without top-p and top-k, and samples that these cut estimate it with a bias."""

    backend: Literal["hf"] = "hf"
    precision: Literal["float32", "bfloat16"] = "float32"
    max_new_tokens: PositiveInt = 256
    """Tokens of a turn at most; `policy.max_total_sequence_length` bounds all turns and the prompt together."""
    batch_size: PositiveInt = 256
    """Sequences that decode together."""
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: PositiveInt | None = None
    stop_strings: Strings = ()
    stop_token_ids: Integers = ()

    @property
    def filters(self) -> bool:
        """Whether top-p or top-k may leave tokens out."""
        return self.top_k is not None or self.top_p != 1


class AdvantageConfig(Section):
    """How rewards become advantages."""

    estimator: Literal["grpo", "rloo", "reinforce_plus_plus"] = "grpo"
    normalize_std: bool = True
    """Divide by the standard deviation of the group (grpo), or of all tokens of the batch (reinforce_plus_plus)."""
    leave_one_out: bool = False
    """Take each sample out of its own baseline (grpo)."""
    minus_baseline: bool = False
    """Measure rewards from their group's mean before the batch normalises them (reinforce_plus_plus)."""
    epsilon: PositiveFloat = 1e-6

    @model_validator(mode="after")
    def _baselines_fit(self) -> Self:
        batch = self.estimator == "reinforce_plus_plus"
        key = "leave_one_out" if batch else "minus_baseline"
        if getattr(self, key):
            raise ValueError(f"{key}=true has no effect with estimator={self.estimator}; switch it off")
        return self


class RewardConfig(Section):
    """What happens to rewards before advantages."""

    scale: float = 1.0
    offset: float = 0.0
    clip: Pair | None = None
    overlong_filtering: bool = False
    """Mask samples that were cut at the length limit out of the loss."""
    overlong_penalty: NonNegativeFloat = 0.0
    """DAPO soft penalty: rises linearly to this over the last `overlong_buffer_tokens` tokens that
    `generation.max_new_tokens` allows a turn. The longest turn of a sample counts; one that was cut pays all of it.
    """
    overlong_buffer_tokens: NonNegativeInt = 0
    kl_coefficient: NonNegativeFloat = 0.0
    """KL to the reference policy, summed over a response's tokens, taken from its reward; with reinforce_plus_plus, a
    token's advantage pays for itself and the later ones."""
    kl_kind: Literal["k1", "k2", "k3"] = "k1"
    """Estimator per token. A reward's gradient is that of KL(policy || reference) for k1 alone."""

    @model_validator(mode="after")
    def _penalty_needs_buffer(self) -> Self:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip={list(self.clip)}: the lower bound is above the upper; swap them")
        if self.overlong_penalty and not self.overlong_buffer_tokens:
            raise ValueError("overlong_penalty needs overlong_buffer_tokens > 0")
        return self


class DynamicSamplingConfig(Section):
    """DAPO: drop groups of equal rewards (scaled and clipped, before KL and penalty) and refill with new prompts."""

    enabled: bool = False
    max_refills: PositiveInt = 10
    """Rollout rounds per step at most, each of as many prompts as the share of useful groups so far asks for and a
    batch has; then the step trains on the groups it has."""


class LossConfig(Section):
    """The policy-gradient loss."""

    kind: Literal["clipped_pg", "cispo"] = "clipped_pg"
    ratio_level: Literal["token", "sequence"] = "token"
    """`sequence`: GSPO's length-normalised sequence ratio, for `clipped_pg` with `sequence_mean`."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """`constant`: a sample is the sum over its tokens divided by `constant_tokens`, whatever its length (Dr. GRPO)."""
    constant_tokens: PositiveInt | None = None
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    kl_coefficient: NonNegativeFloat = 0.0
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator per token. In expectation over the policy's samples, the gradient of k2 is that of
    KL(policy || reference), and that of k3, as in GRPO, is the one of KL(reference || policy)."""
    kl_gradient: Literal["value", "score_function"] = "value"
    """`score_function`: weigh k1 or k3 with the live ratio, so that the gradient is that of KL(policy || reference)."""
    importance_correction: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
    """Correction for the gap between the generator's and the trainer's probabilities."""
    importance_low: NonNegativeFloat = 0.5
    importance_high: PositiveFloat = 2.0
    max_sequence_logprob_error: PositiveFloat | None = None
    """Mask samples whose mean exp|train - generation logprob| exceeds this."""
    on_non_finite: Literal["stop", "skip_step"] = "stop"
    """A loss or gradient that is not finite never updates; it ends the run, or is counted (train/nonfinite_updates)."""
    force_on_policy_ratio: bool = False
    """Take the ratio as exactly 1 with a live gradient, so that no prev-logprobs are computed."""

    @model_validator(mode="after")
    def _terms_fit(self) -> Self:
        if self.kind == "cispo" and self.dual_clip is not None:
            raise ValueError(
                f"dual_clip={self.dual_clip} has no effect with kind=cispo, which clips weights and not the "
                "objective; remove it or set kind=clipped_pg"
            )
        if self.ratio_level == "sequence" and (self.kind == "cispo" or self.aggregation != "sequence_mean"):
            raise ValueError(
                "ratio_level=sequence is defined for kind=clipped_pg with aggregation=sequence_mean (GSPO), and not "
                f"for kind={self.kind} with aggregation={self.aggregation}; set these two, or ratio_level=token"
            )
        if (self.aggregation == "constant") != (self.constant_tokens is not None):
            raise ValueError(
                f"aggregation={self.aggregation} with constant_tokens={self.constant_tokens}: the one takes the other; "
                "set both (Dr. GRPO divides by generation.max_new_tokens), or neither"
            )
        if self.kl_coefficient and (self.kl_kind, self.kl_gradient) == ("k1", "value"):
            raise ValueError(
                f"kl_kind=k1 with kl_coefficient={self.kl_coefficient}: as a loss, k1 has an expected gradient of 0; "
                "set kl_gradient=score_function, or kl_kind=k2 or k3, or use grpo.reward.kl_coefficient"
            )
        if (self.kl_kind, self.kl_gradient) == ("k2", "score_function"):
            raise ValueError(
                "kl_kind=k2 with kl_gradient=score_function: k2 has the KL's gradient by itself; set kl_gradient=value"
            )
        bounded = self.importance_correction in ("icepop", "sequence_mask")
        if bounded and self.importance_low > self.importance_high:
            raise ValueError(
                f"importance_low={self.importance_low} is more than importance_high={self.importance_high}, so "
                f"{self.importance_correction} masks everything; swap them"
            )
        return self


class GRPOConfig(Section):
    """The loop."""

    num_prompts_per_step: PositiveInt = 32
    num_generations_per_prompt: PositiveInt = 8
    max_num_steps: PositiveInt = 100
    max_rollout_turns: PositiveInt = 1
    advantage: AdvantageConfig = AdvantageConfig()
    reward: RewardConfig = RewardConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()

    @model_validator(mode="after")
    def _groups_have_peers(self) -> Self:
        alone = self.advantage.estimator == "reinforce_plus_plus" and not self.advantage.minus_baseline
        needs_peers = not alone or self.dynamic_sampling.enabled
        if needs_peers and self.num_generations_per_prompt < 2:
            raise ValueError(
                f"num_generations_per_prompt=1 leaves advantage.estimator={self.advantage.estimator} without "
                "peers to compare with; set it to 2 or more, or use reinforce_plus_plus without minus_baseline and "
                "without dynamic_sampling"
            )
        return self


class ReasoningGymConfig(Section):
    """A reasoning-gym task by name."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    config: dict[str, Any] = {}
    prompt_from: str = "question"
    """`question`, or `metadata.KEY` for an entry of the task's metadata."""
    lowercase: bool = False
    """Put questions and answers in lower case, so that a model of few characters is enough."""
    exact: bool = False
    """Reward 1 only for exactly the right answer, ended by end-of-text; otherwise the task's own score."""


class MathConfig(Section):
    """Math problems from a file, answers compared as text, and with math-verify where the texts differ."""

    kind: Literal["math"] = "math"
    path: str
    question_key: str = "question"
    answer_key: str = "answer"


class DatasetConfig(Section):
    """Questions and answers from JSONL or a saved Hugging Face dataset, compared as text."""

    kind: Literal["dataset"] = "dataset"
    path: str
    question_key: str = "question"
    answer_key: str = "answer"
    match: Literal["exact", "contains", "last_number"] = "exact"


EnvironmentConfig = Annotated[ReasoningGymConfig | MathConfig | DatasetConfig, Field(discriminator="kind")]


class DataConfig(Section):
    """Which prompts, and how they are written."""

    train_size: PositiveInt | None = None
    """Prompts generated for training, or kept of a file at most; None: 2,048 of a generated task, all of a file."""
    validation_size: PositiveInt = 256
    """Prompts held out; no training prompt equals one of them."""
    system_prompt: str | None = None
    shuffle: bool = True
    overlong_prompts: Literal["refuse", "skip"] = "refuse"
    """A prompt that fills `policy.max_total_sequence_length`: end the run before it starts, or leave the prompt out of
    its split, with a warning that counts them."""


class WarmStartConfig(Section):
    """Supervised steps on the right answers before GRPO, so that rewards are not all zero."""

    enabled: bool = False
    steps: PositiveInt = 400
    batch_size: PositiveInt = 128
    lr: PositiveFloat = 1e-3
    warmup_steps: NonNegativeInt = 20
    copy_fraction: Fraction = 0.0
    """Share of targets that repeat the prompt's text in place of the right answer."""


class ValidationConfig(Section):
    """Greedy and sampled accuracy on held-out prompts."""

    period: NonNegativeInt = 10
    """Steps between validations; 0: only before the first and after the last step."""
    at_start: bool = True
    at_end: bool = True
    batch_size: PositiveInt = 256
    max_samples: PositiveInt | None = None
    sampled: bool = True


class CheckpointingConfig(Section):
    """Checkpoints in the run directory."""

    enabled: bool = True
    save_period: PositiveInt = 50
    keep_top_k: PositiveInt | None = 2
    metric: ValidationMetric | None = None
    """What the best checkpoint is best at. None: accuracy, or reward where the environment gives no verdicts."""
    higher_is_better: bool = True
    save_optimizer: bool = True


class LoggingConfig(Section):
    """What a run writes beside metrics.jsonl."""

    tensorboard: bool = True
    samples_per_step: NonNegativeInt = 8
    progress: Literal["auto", "on", "off"] = "auto"

    @field_validator("progress", mode="before")
    @classmethod
    def _yaml_reads_on_and_off_as_booleans(cls, value: object) -> object:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


class ClusterConfig(Section):
    """The Ray cluster's part that a run takes: policy workers and, on a node of its choice, the rollout actor."""

    num_nodes: PositiveInt = 1
    gpus_per_node: NonNegativeInt = 0
    rollout: Literal["auto", "driver", "actor"] = "auto"
    """Where answers are generated; auto: in an actor of its own where the policy's workers are actors."""
    rollout_gpus: Literal[0, 1] | None = None
    """GPUs of the rollout actor, beside those of the workers; None: 1 where the workers have GPUs."""
    startup_timeout_s: PositiveFloat = 180.0
    """Longest wait for room on the Ray cluster: for the workers, then for the rollout actor."""
    autoscales: bool = False
    """The Ray cluster adds nodes by itself: wait for what it lacks, where that is otherwise an error at once."""


class RecipeConfig(Section):
    """A whole run."""

    algorithm: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus"] | None = (
        None
    )
    """A published algorithm: sets its keys of `loss` and `grpo` (docs/algorithms.md), refuses keys that contradict it.
    None: these sections as they are."""
    seed: NonNegativeInt = 0
    run_dir: str
    overwrite: bool = False
    """Empty a run directory that holds another run; otherwise it is resumed if it has a checkpoint."""
    resume: bool = True
    allow_changes: bool = False
    """Go on from a checkpoint although its prompts, split, seed or model are not those of this recipe."""
    cpu_threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """Threads that torch uses on a CPU; None: one per core. Small models are faster with 1."""
    policy: PolicyConfig
    generation: GenerationConfig = GenerationConfig()
    data_plane: DataPlaneConfig = DataPlaneConfig()
    grpo: GRPOConfig = GRPOConfig()
    loss: LossConfig = LossConfig()
    env: EnvironmentConfig
    data: DataConfig = DataConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    logging: LoggingConfig = LoggingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def samples_per_step(self) -> int:
        """Samples of one step: prompts times generations."""
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt

    @property
    def has_token_kl(self) -> bool:
        """Whether the reward's KL is taken token by token, so that a sample's advantages differ."""
        return self.grpo.reward.kl_coefficient > 0 and self.grpo.advantage.estimator == "reinforce_plus_plus"

    @property
    def needs_reference(self) -> bool:
        """Whether any term uses the reference policy's logprobs."""
        return self.loss.kl_coefficient > 0 or self.grpo.reward.kl_coefficient > 0

    @model_validator(mode="before")
    @classmethod
    def _set_algorithm(cls, values: Any) -> Any:
        return with_preset(values, max_new_tokens=GenerationConfig().max_new_tokens)

    @model_validator(mode="after")
    def check_sections(self) -> Self:
        """Refuse combinations of sections that cannot work together."""
        if self.samples_per_step % self.policy.train_global_batch_size:
            raise ValueError(
                f"policy.train_global_batch_size={self.policy.train_global_batch_size} does not divide the "
                f"{self.samples_per_step} samples of a step (grpo.num_prompts_per_step="
                f"{self.grpo.num_prompts_per_step} x grpo.num_generations_per_prompt="
                f"{self.grpo.num_generations_per_prompt}); change one of the three"
            )
        shared = self.policy.workers > 1 or self.policy.parallel.launcher == "ray"
        if self.data_plane.enabled and self.data_plane.impl == "local" and shared:
            raise ValueError(
                f"data_plane.impl=local lives in one process, and policy.workers={self.policy.workers} with "
                f"policy.parallel.launcher={self.policy.parallel.launcher} run in others; set "
                "data_plane.impl=transfer_queue, or data_plane.enabled=false"
            )
        for key in ("gpus_per_node", "rollout_gpus"):
            if self.policy.device == "cpu" and (gpus := getattr(self.cluster, key)):
                raise ValueError(
                    f"cluster.{key}={gpus} with policy.device=cpu, which uses no GPU; set cluster.{key}=0, or "
                    "policy.device=auto"
                )
        if self.generation.max_new_tokens >= self.policy.max_total_sequence_length:
            raise ValueError(
                f"generation.max_new_tokens={self.generation.max_new_tokens} leaves no room for a prompt in "
                f"policy.max_total_sequence_length={self.policy.max_total_sequence_length}; lower the first "
                "or raise the second"
            )
        if self.loss.force_on_policy_ratio and self.samples_per_step != self.policy.train_global_batch_size:
            raise ValueError(
                "loss.force_on_policy_ratio holds for one update per rollout only; set "
                f"policy.train_global_batch_size={self.samples_per_step} (the samples of a step), or switch "
                "it off"
            )
        buffer = self.grpo.reward.overlong_buffer_tokens
        if buffer > self.generation.max_new_tokens:
            raise ValueError(
                f"grpo.reward.overlong_buffer_tokens={buffer} is more than generation.max_new_tokens="
                f"{self.generation.max_new_tokens}; lower the first or raise the second"
            )
        # With dynamic sampling, a new round's rows stand beside those that are held.
        held = self.samples_per_step * (2 if self.grpo.dynamic_sampling.enabled else 1)
        if self.data_plane.enabled and self.data_plane.storage_capacity < held:
            raise ValueError(
                f"data_plane.storage_capacity={self.data_plane.storage_capacity} cannot hold the {held} samples "
                "of a step; raise it"
            )
        if "/sampled_" in (metric := self.checkpointing.metric or "") and not self.validation.sampled:
            raise ValueError(
                f"checkpointing.metric={metric} is not measured with validation.sampled=false; switch it on, or choose "
                f"{metric.replace('sampled_', '')}"
            )
        mbs = self.policy.train_micro_batch_size * self.policy.replicas
        fixed = self.policy.has_fixed_microbatches
        if self.warm_start.enabled and fixed and self.warm_start.batch_size % mbs:
            raise ValueError(
                f"warm_start.batch_size={self.warm_start.batch_size} is not divisible by {mbs} "
                "(policy.train_micro_batch_size x data-parallel replicas); change one of them"
            )
        return self
