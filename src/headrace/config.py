"""The recipe: frozen pydantic models, one per section.

`headrace.utils.recipe.load_recipe` reads a YAML file (with inheritance and dotted overrides) into `RecipeConfig`
and turns every mistake into a ConfigError of one line. Rules that tie several sections together stand in
`RecipeConfig.faults`, keys without effect in `utils.idle_keys`; rules that need the model (its length limit,
its vocabulary) stand with the code that loads it.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from headrace.config_async import AsyncConfig as AsyncConfig  # others look for these names here
from headrace.config_async import async_faults
from headrace.config_data import DataConfig as DataConfig
from headrace.config_data import SourceConfig as SourceConfig
from headrace.config_data import TrainSourceConfig as TrainSourceConfig
from headrace.config_data import ValidationSourceConfig as ValidationSourceConfig
from headrace.config_env import ByColumnConfig as ByColumnConfig
from headrace.config_env import CalculatorConfig as CalculatorConfig
from headrace.config_env import DatasetConfig as DatasetConfig
from headrace.config_env import EnvironmentConfig as EnvironmentConfig
from headrace.config_env import GuessNumberConfig as GuessNumberConfig
from headrace.config_env import MathConfig as MathConfig
from headrace.config_env import PythonConfig as PythonConfig
from headrace.config_env import ReasoningGymConfig as ReasoningGymConfig
from headrace.config_env import RewardFunctionConfig as RewardFunctionConfig
from headrace.config_env import VerifiersConfig as VerifiersConfig
from headrace.config_generation import GuardConfig as GuardConfig
from headrace.config_generation import SGLangConfig as SGLangConfig
from headrace.config_grpo import AdvantageConfig as AdvantageConfig
from headrace.config_grpo import GRPOConfig as GRPOConfig
from headrace.config_grpo import LossConfig as LossConfig
from headrace.config_grpo import RewardConfig as RewardConfig
from headrace.config_journal import JournalConfig as JournalConfig
from headrace.config_logging import LoggingConfig as LoggingConfig
from headrace.config_policy import LoraConfig as LoraConfig
from headrace.config_policy import ModelConfig as ModelConfig
from headrace.config_policy import OptimizerConfig as OptimizerConfig
from headrace.config_policy import PolicyConfig as PolicyConfig
from headrace.config_policy import RouterReplayConfig as RouterReplayConfig
from headrace.config_policy import SchedulerConfig as SchedulerConfig
from headrace.config_policy import SequencePackingConfig as SequencePackingConfig
from headrace.utils.algorithm_presets import with_preset
from headrace.utils.idle_keys import refused_idle_keys
from headrace.utils.section import Fraction, Integers, Section, Settings, Strings

_VALIDATION_METRICS = ("accuracy", "sampled_accuracy", "reward", "sampled_reward")


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
    indexes: PositiveInt = 1
    """Processes that know where the rows of a transfer_queue store are; one is enough for some hundred ranks."""
    store_name: str = "headrace"
    """Which store of a Ray cluster, or of this process; runs that share one need a name each, while they run."""
    ray_address: str | None = None
    """Ray cluster of a transfer_queue store; None: RAY_ADDRESS, or a local one."""
    timeout_s: PositiveFloat = 120.0
    """Longest time that one operation may take before it fails with a TransportError."""
    startup_timeout_s: PositiveFloat = 180.0
    """Longest time that starting the store, or attaching to it, may take."""
    claim_meta_poll_interval_s: PositiveFloat = 0.05
    """Taken, and without effect: a claim that waits for rows is answered when they are there."""
    global_segment_size: PositiveInt = 2 * 1024**3
    """Bytes that one storage unit holds (mooncake_cpu)."""
    local_buffer_size: PositiveInt = 512 * 1024**2
    """Bytes of the transfer buffer of each process that connects (mooncake_cpu)."""
    mooncake_master_port: PositiveInt | None = None
    """Port of the Mooncake master; None: a free one."""
    observability: ObservabilityConfig = ObservabilityConfig()
    journal: JournalConfig = JournalConfig()


class VLLMConfig(Section):
    """The engines of `generation.backend=vllm`."""

    args: Settings = Field(default_factory=dict)
    """Engine arguments as vLLM names them, such as `gpu_memory_utilization` (0.4 unless set) and `max_model_len`."""
    tensor_parallel: PositiveInt = 1
    """Devices of each engine, which hold a part of every matrix; `generation.placement=apart` if there are several."""
    sleep_level: Literal[0, 1, 2] = 0
    """1: between rollouts, keep the weights in the host's memory and free the cache. 2: the same, and for training keep
    no weights at all, since new ones follow. 0: keep both on the device."""


class GenerationConfig(Section):
    """How completions are sampled. The trainer scores tokens under the same temperature, top-p and top-k; a KL to the
    reference policy is of both policies without top-p and top-k, and samples that these cut estimate it with a bias."""

    backend: Literal["hf", "sglang", "vllm"] = "hf"
    """What generates: transformers (`hf`), vLLM engines or an SGLang server (docs/engines.md)."""
    vllm: VLLMConfig = VLLMConfig()
    sglang: SGLangConfig = SGLangConfig()
    guard: GuardConfig = GuardConfig()
    placement: Literal["in_place", "beside", "apart"] = "in_place"
    """Where engines run: in the rollout's process, in processes of their own on its GPUs (`beside`), or on GPUs of
    their own (`apart`), the last that it sees. Where the policy's workers are Ray actors: on their GPUs, or others."""
    engines: PositiveInt = 1
    """Engines that share the prompts, a process each; in place there is one."""
    python: str | None = None
    """Interpreter of the engines' processes, which may have an environment of its own; None: this one."""
    weights_timeout_s: PositiveFloat = 300.0
    """Engines apart: longest wait for another rank while weights are on their way."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the generator's weights and products."""
    max_new_tokens: PositiveInt = 256
    """Tokens of a turn at most; `policy.max_total_sequence_length` bounds all turns and the prompt together."""
    batch_size: PositiveInt = 256
    """Sequences that decode together."""
    static_cache: bool | None = None
    """`hf`: decode in a cache of fixed size, on a GPU as CUDA graphs; None: on a GPU, if the model can."""
    temperature: PositiveFloat = 1.0
    """The logits are divided by this before a token is drawn."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that together have this probability; 1: from all."""
    top_k: PositiveInt | None = None
    """Draw from this many likeliest tokens; None: from all."""
    stop_strings: Strings = ()
    """A completion ends when one of these appears in its text; it stays part of it."""
    stop_token_ids: Integers = ()
    """Token ids that end a completion, beside the model's own end-of-text."""

    @property
    def distribution(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    @property
    def filters(self) -> bool:
        return self.top_k is not None or self.top_p != 1

    @property
    def guarded(self) -> bool:
        """Whether a run checks that generator and trainer agree."""
        if self.guard.enabled is not None:
            return self.guard.enabled
        return self.backend != "hf" or self.placement != "in_place"

    def faults(self) -> Iterator[str]:
        if self.placement == "in_place" and self.engines > 1:
            yield (
                f"generation.engines={self.engines} with generation.placement=in_place, where there is one; set "
                "generation.placement=beside or apart"
            )
        ranks = self.vllm.tensor_parallel
        if self.backend == "vllm" and ranks > 1 and self.placement != "apart":
            yield (
                f"generation.vllm.tensor_parallel={ranks} with generation.placement={self.placement}, where an engine "
                "has one device; set generation.placement=apart"
            )


class WarmStartConfig(Section):
    """Supervised steps on the right answers before GRPO, so that rewards are not all zero."""

    enabled: bool = False
    """Take these steps."""
    steps: PositiveInt = 400
    """Supervised updates."""
    batch_size: PositiveInt = 128
    """Completions of one update, over all ranks."""
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
    """Measure completions at the run's temperature too, beside greedy ones."""


class CheckpointingConfig(Section):
    """Checkpoints in the run directory."""

    enabled: bool = True
    """Write checkpoints; without them a run cannot be continued."""
    save_period: PositiveInt = 50
    """Steps between checkpoints. The last step, and one at which the run is stopped, always has one."""
    keep_top_k: PositiveInt | None = 2
    """The best checkpoints that are kept, beside the newest; None: all."""
    metric: str | None = None
    """What the best checkpoint is best at, such as `validation/accuracy`, or `validation/NAME/pass@4` of a set of
    `data.validation`. None: accuracy, or reward where the environment gives no verdicts, of greedy completions if they
    are measured, else of sampled ones."""
    higher_is_better: bool = True
    """Whether more of the metric is better."""
    save_optimizer: bool = True
    """Write the optimizer's moments as well, two numbers per weight; without them a resumed run starts new ones."""

    def faults(self) -> Iterator[str]:
        known = re.fullmatch(
            rf"validation/([^/]+/)?({'|'.join(_VALIDATION_METRICS)}|(pass|maj)@\d+)", self.metric or ""
        )
        if self.metric is not None and not known:
            names = ", ".join(f"'validation/{name}'" for name in _VALIDATION_METRICS)
            yield f"metric={self.metric!r}: expected {names}, or one of a set, as in validation/NAME/pass@4"


class ClusterConfig(Section):
    """The Ray cluster's part that a run takes: policy workers and, on a node of its choice, the rollout actor."""

    num_nodes: PositiveInt = 1
    """Nodes that the workers are spread over, equally many on each."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs of each of these nodes; 0: the workers are on CPUs."""
    rollout: Literal["auto", "driver", "actor"] = "auto"
    """Where completions are generated; auto: in an actor of its own where the policy's workers are actors."""
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
    code_path: Strings | None = None
    """Folders in which modules of your own are found, beside the working directory; unset: those of the recipe and
    of the recipes that it starts from."""
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
    # A keyword of Python, so that it cannot be written as the others are; `asynchrony` reads it.
    __annotations__["async"] = AsyncConfig
    locals()["async"] = AsyncConfig()

    @property
    def asynchrony(self) -> AsyncConfig:
        section: AsyncConfig = getattr(self, "async")
        return section

    @property
    def samples_per_step(self) -> int:
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

    def faults(self) -> Iterator[str]:
        """Yield combinations of sections that cannot work together, and keys without effect that are refused."""
        if not self.run_dir.strip():
            yield "run_dir is empty; set it to a directory of its own"
        yield from self._batch_faults()
        yield from self._place_faults()
        yield from self._length_faults()
        yield from self._turn_faults()
        yield from self._data_faults()
        yield from self._generation_faults()
        yield from async_faults(self)
        yield from refused_idle_keys(self)

    def _batch_faults(self) -> Iterator[str]:
        if self.samples_per_step % self.policy.train_global_batch_size:
            yield (
                f"policy.train_global_batch_size={self.policy.train_global_batch_size} does not divide the "
                f"{self.samples_per_step} samples of a step (grpo.num_prompts_per_step="
                f"{self.grpo.num_prompts_per_step} x grpo.num_generations_per_prompt="
                f"{self.grpo.num_generations_per_prompt}); change one of the three"
            )
        if self.loss.force_on_policy_ratio and self.samples_per_step != self.policy.train_global_batch_size:
            yield (
                "loss.force_on_policy_ratio=true holds for one update per rollout only; set "
                f"policy.train_global_batch_size={self.samples_per_step} (the samples of a step), or switch "
                "it off"
            )
        if "/sampled_" in (metric := self.checkpointing.metric or "") and not self.validation.sampled:
            yield (
                f"checkpointing.metric={metric} is not measured with validation.sampled=false; switch it on, or choose "
                f"{metric.replace('sampled_', '')}"
            )
        mbs = self.policy.train_micro_batch_size * self.policy.replicas
        fixed = self.policy.has_fixed_microbatches
        if self.warm_start.enabled and fixed and self.warm_start.batch_size % mbs:
            yield (
                f"warm_start.batch_size={self.warm_start.batch_size} is not divisible by {mbs} "
                "(policy.train_micro_batch_size x data-parallel replicas); change one of them"
            )

    def _place_faults(self) -> Iterator[str]:
        shared = self.policy.workers > 1 or self.policy.parallel.launcher == "ray"
        if self.uses_store and self.data_plane.impl == "local" and shared:
            yield (
                f"data_plane.impl=local lives in one process, and policy.workers={self.policy.workers} with "
                f"policy.parallel.launcher={self.policy.parallel.launcher} run in others; set "
                "data_plane.impl=transfer_queue, or data_plane.enabled=false"
            )
        for key in ("gpus_per_node", "rollout_gpus"):
            if self.policy.device == "cpu" and (gpus := getattr(self.cluster, key)):
                yield (
                    f"cluster.{key}={gpus} with policy.device=cpu, which uses no GPU; set cluster.{key}=0, or "
                    "policy.device=auto"
                )
        # With dynamic sampling, a new round's rows stand beside those that are held.
        held = self.samples_per_step * (2 if self.grpo.dynamic_sampling.enabled else 1)
        if self.uses_store and self.data_plane.storage_capacity < held:
            yield (
                f"data_plane.storage_capacity={self.data_plane.storage_capacity} cannot hold the {held} samples "
                "of a step; raise it"
            )

    def _turn_faults(self) -> Iterator[str]:
        inner = getattr(self.env, "environments", {})
        named = {f"env.environments.{name}": one.kind for name, one in inner.items()} | {"env": self.env.kind}
        for key, kind in named.items():
            if kind in ("calculator", "guess_number") and self.grpo.max_rollout_turns == 1:
                yield (
                    f"grpo.max_rollout_turns=1 with {key}.kind={kind}, which answers a completion so that the next one "
                    "can use it; set it to 2 or more"
                )

    def _data_faults(self) -> Iterator[str]:
        path = getattr(self.env, "path", None)
        if self.env.kind in ("math", "dataset") and path is None and not self.data.train:
            yield (
                f"missing key 'env.path', or 'data.train': env.kind={self.env.kind} has no questions; set one to a "
                "file, a dataset of the hub, or a function (package.module:function)"
            )
        if path is not None and self.data.train:
            yield (
                f"env.path={path} and data.train={', '.join(self.data.train)} both name training questions; remove one"
            )
        if self.env.kind in ("reasoning_gym", "guess_number", "verifiers") and (
            self.data.train or self.data.validation
        ):
            key = "train" if self.data.train else "validation"
            yield f"data.{key} has no effect with env.kind={self.env.kind}, which makes its own questions; remove it"
        for name, one in self.data.validation.items():
            if (one.pass_at or one.maj_at) and not self.validation.sampled:
                key = "pass_at" if one.pass_at else "maj_at"
                yield f"data.validation.{name}.{key} is of samples; set validation.sampled=true, or remove it"
            if not (one.greedy or self.validation.sampled):
                yield f"data.validation.{name}.greedy=false and validation.sampled=false measure nothing; set one true"
        metric = (self.checkpointing.metric or "").split("/")
        if len(metric) == 3 and metric[1] not in self.data.validation:
            sets = ", ".join(self.data.validation) or "none"
            yield f"checkpointing.metric={'/'.join(metric)} is of a set that data.validation lacks (it has {sets})"

    def _generation_faults(self) -> Iterator[str]:
        if self.policy.lora.rank is not None and self.generation.backend == "vllm":
            yield (
                f"policy.lora.rank={self.policy.lora.rank} with generation.backend=vllm, whose engines take whole "
                "weights only; set generation.backend=hf, or remove policy.lora"
            )
        sglang = self.generation.backend == "sglang" and self.generation.sglang.weights == "tensor"
        if self.policy.lora.rank is not None and sglang:
            yield (
                f"policy.lora.rank={self.policy.lora.rank} with generation.sglang.weights=tensor, which sends whole "
                "weights only; set generation.sglang.weights=disk, or remove policy.lora"
            )

    def _length_faults(self) -> Iterator[str]:
        if self.generation.max_new_tokens >= self.policy.max_total_sequence_length:
            yield (
                f"generation.max_new_tokens={self.generation.max_new_tokens} leaves no room for a prompt in "
                f"policy.max_total_sequence_length={self.policy.max_total_sequence_length}; lower the first "
                "or raise the second"
            )
        buffer = self.grpo.reward.overlong_buffer_tokens
        if buffer > self.generation.max_new_tokens:
            yield (
                f"grpo.reward.overlong_buffer_tokens={buffer} is more than generation.max_new_tokens="
                f"{self.generation.max_new_tokens}; lower the first or raise the second"
            )
