"""The recipe: frozen pydantic models, one per section.

`headrace.utils.recipe.load_recipe` reads a YAML file (with inheritance and dotted overrides) into `RecipeConfig`
and turns every mistake into a ConfigError of one line. Rules that tie several sections together stand in
`RecipeConfig.check_sections`, keys without effect in `utils.idle_keys`; rules that need the model (its length limit,
its vocabulary) stand with the code that loads it.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace.config_policy import (
    DynamicBatchingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    RouterReplayConfig,
    SchedulerConfig,
    SequencePackingConfig,
    TokenizerConfig,
)
from headrace.utils.algorithm_presets import with_preset
from headrace.utils.idle_keys import refuse_idle_keys
from headrace.utils.section import (
    Fraction,
    Integers,
    NonNegativeFloat,
    NonNegativeInt,
    Pair,
    PositiveFloat,
    PositiveInt,
    Section,
    Strings,
)

ValidationMetric = Literal[
    "validation/accuracy", "validation/sampled_accuracy", "validation/reward", "validation/sampled_reward"
]

__all__ = [  # of `config_policy` and `utils.section`, where others look for them here
    "DynamicBatchingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PolicyConfig",
    "RouterReplayConfig",
    "SchedulerConfig",
    "Section",
    "SequencePackingConfig",
    "TokenizerConfig",
]


class ObservabilityConfig(Section):
    """What the store reports about its operations."""

    enabled: bool | None = None
    """Count operations, rows and bytes by column. None: in a run, yes; for a client built by hand, no."""


class DataPlaneConfig(Section):
    """The store that carries rollouts to trainers."""

    enabled: bool | None = None
    """Whether rows go through the store, or through the driver's memory. None: through the store, unless it is `local`
    and the policy's workers are other processes of this machine, which cannot reach it."""
    impl: Literal["local", "transfer_queue"] = "local"
    """`local`: in the driver's process. `transfer_queue`: in Ray actors, which other processes and nodes reach."""
    backend: Literal["simple", "mooncake_cpu"] = "simple"
    """Where a transfer_queue store keeps its bytes: in storage units of TransferQueue, or in Mooncake."""
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
    """Seconds between two looks of a claim that waits for rows (transfer_queue). A run by recipe claims nothing."""
    global_segment_size: PositiveInt = 2 * 1024**3
    """Bytes that one storage unit holds (mooncake_cpu)."""
    local_buffer_size: PositiveInt = 512 * 1024**2
    """Bytes of the transfer buffer of each process that connects (mooncake_cpu)."""
    mooncake_master_port: PositiveInt | None = None
    """Port of the Mooncake master; None: a free one."""
    observability: ObservabilityConfig = ObservabilityConfig()


class GenerationConfig(Section):
    """How answers are sampled. The trainer scores tokens under the same temperature, top-p and top-k; a KL to the
    reference policy is of both policies without top-p and top-k, and samples that these cut estimate it with a bias."""

    backend: Literal["hf"] = "hf"
    """What generates: `hf` is transformers, in the rollout's process."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the generator's weights and products."""
    max_new_tokens: PositiveInt = 256
    """Tokens of a turn at most; `policy.max_total_sequence_length` bounds all turns and the prompt together."""
    batch_size: PositiveInt = 256
    """Sequences that decode together."""
    temperature: PositiveFloat = 1.0
    """The logits are divided by this before a token is drawn."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that together have this probability; 1: from all."""
    top_k: PositiveInt | None = None
    """Draw from this many likeliest tokens; None: from all."""
    stop_strings: Strings = ()
    """An answer ends when one of these appears in its text; it stays part of the answer."""
    stop_token_ids: Integers = ()
    """Token ids that end an answer, beside the model's own end-of-text."""

    @property
    def filters(self) -> bool:
        return self.top_k is not None or self.top_p != 1


class AdvantageConfig(Section):
    """How rewards become advantages."""

    estimator: Literal["grpo", "rloo", "reinforce_plus_plus"] = "grpo"
    """`grpo`: against the mean of the group. `rloo`: against the mean of the others in it, never divided.
    `reinforce_plus_plus`: against the mean of the batch."""
    normalize_std: bool = True
    """Divide by the standard deviation of the group (grpo), or of all tokens of the batch (reinforce_plus_plus)."""
    leave_one_out: bool = False
    """Take each sample out of its own baseline (grpo)."""
    minus_baseline: bool = False
    """Measure rewards from their group's mean before the batch normalises them (reinforce_plus_plus)."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation before it divides."""

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
    """Rewards are multiplied by this first."""
    offset: float = 0.0
    """Added to a reward after `scale`."""
    clip: Pair | None = None
    """[lowest, highest] reward after scale and offset; None: no bounds."""
    overlong_filtering: bool = False
    """Mask samples that were cut at the length limit out of the loss."""
    overlong_penalty: NonNegativeFloat = 0.0
    """DAPO soft penalty: rises linearly to this over the last `overlong_buffer_tokens` tokens that
    `generation.max_new_tokens` allows a turn. The longest turn of a sample counts; one that was cut pays all of it.
    """
    overlong_buffer_tokens: NonNegativeInt = 0
    """Tokens before the limit over which `overlong_penalty` rises."""
    kl_coefficient: NonNegativeFloat = 0.0
    """KL to the reference policy, summed over a response's tokens, taken from its reward; with reinforce_plus_plus, a
    token's advantage pays for itself and the later ones."""
    kl_kind: Literal["k1", "k2", "k3"] = "k1"
    """Estimator per token, d = difference of logprobs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. A reward's gradient
    is that of KL(policy || reference) for k1 alone."""

    @model_validator(mode="after")
    def _penalty_needs_buffer(self) -> Self:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip={list(self.clip)}: the lower bound is above the upper; swap them")
        if self.overlong_penalty and not self.overlong_buffer_tokens:
            raise ValueError(
                f"overlong_penalty={self.overlong_penalty} needs the tokens over which it rises; set "
                "overlong_buffer_tokens above 0 as well"
            )
        return self


class DynamicSamplingConfig(Section):
    """DAPO: drop groups of equal rewards (scaled and clipped, before KL and penalty) and refill with new prompts."""

    enabled: bool = False
    """Drop and refill."""
    max_refills: PositiveInt = 10
    """Rollout rounds per step at most, each of as many prompts as the share of useful groups so far asks for and a
    batch has; then the step trains on the groups it has."""


class LossConfig(Section):
    """The policy-gradient loss."""

    kind: Literal["clipped_pg", "cispo"] = "clipped_pg"
    """`clipped_pg`: PPO's clipped objective. `cispo`: a clipped weight on the logprob; every token keeps a
    gradient."""
    ratio_level: Literal["token", "sequence"] = "token"
    """`sequence`: GSPO's length-normalised sequence ratio, for `clipped_pg` with `sequence_mean`."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """`token_mean`: every token of the batch weighs the same. `sequence_mean`: every sample does. `constant`: a sample
    is the sum over its tokens divided by `constant_tokens`, whatever its length (Dr. GRPO)."""
    constant_tokens: PositiveInt | None = None
    """What `aggregation=constant` divides by; Dr. GRPO takes `generation.max_new_tokens`."""
    clip_low: NonNegativeFloat = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """A token of negative advantage loses this many times its advantage at most (clipped_pg); None: no bound."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL to the reference policy in the loss; 0: no reference policy is kept for it."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator per token, as in `grpo.reward.kl_kind`. In expectation over the policy's samples, the gradient of k2 is
    that of KL(policy || reference), and that of k3, as in GRPO, is the one of KL(reference || policy)."""
    kl_gradient: Literal["value", "score_function"] = "value"
    """`score_function`: weigh k1 or k3 with the live ratio, so that the gradient is that of KL(policy || reference)."""
    importance_correction: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
    """Correction for the gap between the generator's and the trainer's probabilities."""
    importance_low: NonNegativeFloat = 0.5
    """Weights (icepop), or a sample's typical weight (sequence_mask), below this are masked."""
    importance_high: PositiveFloat = 2.0
    """Weights above this are cut to it (tis) or masked (icepop, and sequence_mask by a sample's typical weight)."""
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
    """Prompts of a step."""
    num_generations_per_prompt: PositiveInt = 8
    """Answers to each prompt; one group."""
    max_num_steps: PositiveInt = 100
    """Steps of the run, those before a resume included."""
    max_rollout_turns: PositiveInt = 1
    """Turns of a conversation at most, where the environment goes on after an answer."""
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
    """Makes this section a reasoning-gym task."""
    task: str
    """The task's name in reasoning-gym, for example spell_backward."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings, as reasoning-gym names them."""
    prompt_from: str = "question"
    """`question`, or `metadata.KEY` for an entry of the task's metadata."""
    lowercase: bool = False
    """Put questions and answers in lower case, so that a model of few characters is enough."""
    exact: bool = False
    """Reward 1 only for exactly the right answer, ended by end-of-text; otherwise the task's own score."""


class MathConfig(Section):
    """Math problems from a file, answers compared as text, and with math-verify where the texts differ."""

    kind: Literal["math"] = "math"
    """Makes this section math problems."""
    path: str
    """A JSONL file, or a Hugging Face dataset saved to disk."""
    question_key: str = "question"
    """Field of a row that holds the question."""
    answer_key: str = "answer"
    """Field of a row that holds the right answer."""


class DatasetConfig(Section):
    """Questions and answers from JSONL or a saved Hugging Face dataset, compared as text."""

    kind: Literal["dataset"] = "dataset"
    """Makes this section questions with answers in plain text."""
    path: str
    """A JSONL file, or a Hugging Face dataset saved to disk."""
    question_key: str = "question"
    """Field of a row that holds the question."""
    answer_key: str = "answer"
    """Field of a row that holds the right answer."""
    match: Literal["exact", "contains", "last_number"] = "exact"
    """An answer is right if it equals the right one but for outer whitespace (`exact`), if it holds it (`contains`), or
    if the last numbers of both are equal (`last_number`)."""


EnvironmentConfig = Annotated[ReasoningGymConfig | MathConfig | DatasetConfig, Field(discriminator="kind")]


class DataConfig(Section):
    """Which prompts, and how they are written."""

    train_size: PositiveInt | None = None
    """Prompts generated for training, or kept of a file at most; None: 2,048 of a generated task, all of a file."""
    validation_size: PositiveInt = 256
    """Prompts held out; no training prompt equals one of them."""
    system_prompt: str | None = None
    """A system message before every question; None: none."""
    shuffle: bool = True
    """Draw the order of the training prompts from the seed, anew for each pass."""
    overlong_prompts: Literal["refuse", "skip"] = "refuse"
    """A prompt that fills `policy.max_total_sequence_length`: end the run before it starts, or leave the prompt out of
    its split, with a warning that counts them."""


class WarmStartConfig(Section):
    """Supervised steps on the right answers before GRPO, so that rewards are not all zero."""

    enabled: bool = False
    """Take these steps."""
    steps: PositiveInt = 400
    """Supervised updates."""
    batch_size: PositiveInt = 128
    """Answers of one update, over all ranks."""
    lr: PositiveFloat = 1e-3
    """Learning rate at its peak; it falls linearly to 2 % of it."""
    warmup_steps: NonNegativeInt = 20
    """Updates over which the rate rises."""
    copy_fraction: Fraction = 0.0
    """Share of targets that repeat the prompt's text in place of the right answer."""


class ValidationConfig(Section):
    """Greedy and sampled accuracy on held-out prompts."""

    period: NonNegativeInt = 10
    """Steps between validations; 0: only before the first and after the last step."""
    at_start: bool = True
    """Validate before the first step."""
    at_end: bool = True
    """Validate after the last step."""
    batch_size: PositiveInt = 256
    """Prompts that are answered together."""
    max_samples: PositiveInt | None = None
    """Held-out prompts to use at most; None: all of them."""
    sampled: bool = True
    """Measure answers at the run's temperature too, beside greedy ones."""


class CheckpointingConfig(Section):
    """Checkpoints in the run directory."""

    enabled: bool = True
    """Write checkpoints; without them a run cannot be continued."""
    save_period: PositiveInt = 50
    """Steps between checkpoints. The last step, and one at which the run is stopped, always has one."""
    keep_top_k: PositiveInt | None = 2
    """The best checkpoints that are kept, beside the newest; None: all."""
    metric: ValidationMetric | None = None
    """What the best checkpoint is best at. None: accuracy, or reward where the environment gives no verdicts."""
    higher_is_better: bool = True
    """Whether more of the metric is better."""
    save_optimizer: bool = True
    """Write the optimizer's moments as well, two numbers per weight; without them a resumed run starts new ones."""


class LoggingConfig(Section):
    """What a run writes beside metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    samples_per_step: NonNegativeInt = 8
    """Samples of a step that are written to samples.jsonl."""
    progress: Literal["auto", "on", "off"] = "auto"
    """Draw a live view of the run: on, off, or auto, which draws on a terminal only."""

    @field_validator("progress", mode="before")
    @classmethod
    def _yaml_reads_on_and_off_as_booleans(cls, value: object) -> object:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


class ClusterConfig(Section):
    """The Ray cluster's part that a run takes: policy workers and, on a node of its choice, the rollout actor."""

    num_nodes: PositiveInt = 1
    """Nodes that the workers are spread over, equally many on each."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs of each of these nodes; 0: the workers are on CPUs."""
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
    """Decides first weights, the order of prompts, and every sampled token."""
    run_dir: str
    """Directory of this run; made if absent."""
    overwrite: bool = False
    """Empty a run directory that holds another run; otherwise it is resumed if it has a checkpoint."""
    resume: bool = True
    """Go on from the newest checkpoint in `run_dir`; false: refuse a directory that holds a run."""
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
    def uses_store(self) -> bool:
        """Whether rows go through a store; otherwise through the driver's memory."""
        if self.data_plane.enabled is not None:
            return self.data_plane.enabled
        elsewhere = self.policy.workers > 1 and self.policy.parallel.launcher != "ray"
        return not (self.data_plane.impl == "local" and elsewhere)

    @property
    def needs_reference(self) -> bool:
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
        if self.uses_store and self.data_plane.impl == "local" and shared:
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
                "loss.force_on_policy_ratio=true holds for one update per rollout only; set "
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
        if self.uses_store and self.data_plane.storage_capacity < held:
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
        refuse_idle_keys(self)
        return self
