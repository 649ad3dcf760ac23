"""Keys of a recipe that have no effect beside its other keys.

A key counts as set if its value is not the default and no named algorithm sets it. One that is set and has no effect
never passes without a word:

- It is refused where the run would train otherwise than the recipe says: a bound that the chosen correction does not
  have, an option of another estimator.
- It is said, in a line at the start, where the run trains as the recipe says and the key only waits: for a feature that
  is off (packing, a coefficient of 0), or as machinery of another choice (a store's address). So a recipe that inherits
  turns a feature off by one key.

What depends on the model's architecture is told by the code that loads it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from headrace.config_logging import LoggingConfig
from headrace.utils.algorithm_presets import PRESETS
from headrace.utils.section import Section, written


@dataclass(frozen=True)
class Need:
    """What other keys of a recipe have to be, in words and as a test; `&` and `|` join two."""

    text: str
    holds: Callable[[BaseModel], bool]

    def __and__(self, other: "Need") -> "Need":
        return Need(
            f"{self.text} and {other.text}", lambda recipe: self.holds(recipe) and other.holds(recipe)
        )

    def __or__(self, other: "Need") -> "Need":
        return Need(f"{self.text}, or {other.text}", lambda recipe: self.holds(recipe) or other.holds(recipe))


@dataclass(frozen=True)
class Effect:
    """Keys that have an effect where `need` holds; `refused`: elsewhere it is an error that one is set."""

    keys: tuple[str, ...]
    need: Need
    refused: bool = False

    def idle(self, recipe: BaseModel) -> str:
        """Return the keys that are set without effect, as `key=value, key=value`; none: an empty text."""
        if self.need.holds(recipe):
            return ""
        # A preset is complete, so that some of its keys wait by design.
        given = PRESETS.get(str(getattr(recipe, "algorithm", None)), {})
        values = {key: _value(recipe, key) for key in self.keys if key not in given and _has(recipe, key)}
        idle = {key: value for key, value in values.items() if value != _default(recipe, key)}
        return ", ".join(f"{key}={written(value)}" for key, value in idle.items())


def refused_idle_keys(recipe: BaseModel) -> Iterator[str]:
    """Yield what is wrong with keys without effect that would have the run train otherwise than the recipe says."""
    for effect in EFFECTS:
        if effect.refused and (idle := effect.idle(recipe)):
            yield f"{idle} has no effect here: it needs {effect.need.text}; set that, or remove the key"


def idle_lines(recipe: BaseModel) -> list[str]:
    found = ((effect.idle(recipe), effect.need.text) for effect in EFFECTS)
    return [f"no effect: {idle} (needs {need})" for idle, need in found if idle]


def _value(recipe: BaseModel, key: str) -> Any:
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _has(recipe: BaseModel, key: str) -> bool:
    """Return whether the recipe has the key; each kind of environment has keys of its own."""
    section, _, name = key.rpartition(".")
    return not section or hasattr(_value(recipe, section), name)


def _default(recipe: BaseModel, key: str) -> Any:
    section, _, name = key.rpartition(".")
    model = type(_value(recipe, section) if section else recipe)
    return model.model_fields[name].get_default(call_default_factory=True)


def _need(key: str, text: str, test: Callable[[Any], bool]) -> Need:
    return Need(text, lambda recipe: test(_value(recipe, key)))


def _is(key: str, *values: object) -> Need:
    return _need(key, f"{key}={' or '.join(map(written, values))}", lambda value: value in values)


def _above_0(key: str) -> Need:
    return _need(key, f"{key} above 0", lambda value: value > 0)


def _given(key: str) -> Need:
    return _need(key, key, lambda value: value is not None)


def _when(need: Need, section: str, names: str, *, refused: bool = False) -> Effect:
    return Effect(tuple(f"{section}.{name}" for name in names.split()), need, refused)


def _tracked(name: str) -> Need:
    return _need("logging.trackers", f"{name} in logging.trackers", lambda trackers: name in trackers)


def _when_enabled(section: str, names: str) -> Effect:
    return _when(_is(f"{section}.enabled", True), section, names)


_STORE = _is("data_plane.enabled", None, True)
_REMOTE_STORE = _is("data_plane.impl", "transfer_queue") & _STORE
_MOONCAKE = _is("data_plane.backend", "mooncake_cpu") & _REMOTE_STORE
_POLLING = Need("a store that polls for rows, which none does", lambda recipe: False)
_SAMPLES = _above_0("logging.samples_per_step")
_DETAIL = _above_0("logging.detail_every")
_FIXED = _is("policy.sequence_packing.enabled", False) & _is("policy.dynamic_batching.enabled", False)
_LAUNCHED_BY_RAY = _is("policy.parallel.launcher", "ray")
_AUTO = _is("policy.parallel.launcher", "auto")
_SEVERAL = _need("policy.workers", "policy.workers above 1", lambda workers: workers > 1)
_RAY_BY_STORE = _AUTO & _SEVERAL & _REMOTE_STORE
_GGUF = _given("policy.model.gguf_package")
_LORA = _given("policy.lora.rank")
_DIVIDES = _is("grpo.advantage.estimator", "grpo", "reinforce_plus_plus")
_ONE_TURN = ("reasoning_gym", "math", "dataset")
_TURNS = _need(
    "env.kind", f"a env.kind other than {', '.join(_ONE_TURN)}", lambda kind: kind not in _ONE_TURN
)
_VALIDATES = _above_0("validation.period") | _is("validation.at_start", True) | _is("validation.at_end", True)
_CONTINUES = _is("overwrite", False)
_SGLANG_FILES = _is("generation.backend", "sglang") & _is("generation.sglang.weights", "disk")
_OWN_SGLANG = _is("generation.backend", "sglang") & _is("generation.sglang.url", None)
_GUARDED = _need(
    "generation", "generation.guard.enabled=true, or a generation.backend other than hf", lambda g: g.guarded
)
_ASYNC = _is("async.enabled", True)
_ANY_READY = _is("async.on_stale", "drop") | _given("async.sampler")
# Each kind of environment has keys of its own.
_FUNCTIONS = _need("env.rewards", "env.rewards", bool)
_LIMITED, _ONE_FILE = _given("env.reward_timeout_s"), _given("env.path")
_NO_SETS = {
    name: _need(f"data.{name}", f"no data.{name}", lambda sets: not sets) for name in ("train", "validation")
}
_RAY = _LAUNCHED_BY_RAY | _RAY_BY_STORE
_CORRECTION = "loss.importance_correction"

EFFECTS: tuple[Effect, ...] = (
    _when(_STORE, "data_plane", "impl storage_capacity observability.enabled"),
    _when(
        _REMOTE_STORE,
        "data_plane",
        "backend num_storage_units indexes store_name ray_address timeout_s startup_timeout_s",
    ),
    _when(_POLLING, "data_plane", "claim_meta_poll_interval_s"),
    _when(_STORE, "data_plane", "journal.enabled"),
    _when(
        _is("data_plane.journal.enabled", True), "data_plane.journal", "folder segment_bytes max_bytes fsync"
    ),
    _when(_MOONCAKE, "data_plane", "global_segment_size local_buffer_size mooncake_master_port"),
    _when_enabled("policy.sequence_packing", "algorithm train_mb_tokens logprob_mb_tokens microbatch_order"),
    _when_enabled("policy.dynamic_batching", "train_mb_tokens logprob_mb_tokens sequence_length_round"),
    _when(_FIXED, "policy", "train_micro_batch_size logprob_batch_size"),
    _when(
        _is("policy.optimizer.kind", "adamw_8bit"), "policy.optimizer", "stochastic_rounding", refused=True
    ),
    _when(_is("policy.scheduler.kind", "linear", "cosine"), "policy.scheduler", "decay_steps min_lr_ratio"),
    _when(_given("policy.model.path"), "policy.model", "revision trust_remote_code"),
    _when(_given("policy.tokenizer.path"), "policy.tokenizer", "revision"),
    _when(_LORA, "policy.lora", "alpha targets dropout base"),
    _when(_is("policy.tokenizer.builder", None), "policy.tokenizer", "path", refused=True),
    _when(_is("policy.tokenizer.builder", "characters"), "policy.tokenizer", "characters"),
    _when(_GGUF, "policy.model", "cache_dir"),
    _when_enabled("policy.router_replay", "max_missing_fraction min_exact_fraction on_excess trace"),
    _when(_is("generation.backend", "vllm"), "generation.vllm", "args sleep_level tensor_parallel"),
    _when(_is("generation.backend", "hf"), "generation", "static_cache"),
    _when(
        _is("generation.backend", "sglang"),
        "generation.sglang",
        "url weights sleep timeout_s startup_timeout_s",
    ),
    _when(_SGLANG_FILES, "generation.sglang", "weights_dir"),
    _when(_OWN_SGLANG, "generation.sglang", "args python"),
    _when(_GUARDED, "generation.guard", "every_n_steps max_logprob_gap num_prompts max_new_tokens"),
    _when(_is("generation.placement", "beside", "apart"), "generation", "python"),
    _when(_is("generation.placement", "apart"), "generation", "weights_timeout_s"),
    _when(_is("grpo.advantage.estimator", "grpo"), "grpo.advantage", "leave_one_out"),
    _when(_DIVIDES, "grpo.advantage", "normalize_std"),
    _when(_is("grpo.advantage.normalize_std", True) & _DIVIDES, "grpo.advantage", "epsilon"),
    _when(_above_0("grpo.reward.overlong_penalty"), "grpo.reward", "overlong_buffer_tokens"),
    _when(_above_0("grpo.reward.kl_coefficient"), "grpo.reward", "kl_kind"),
    _when_enabled("grpo.dynamic_sampling", "max_refills target"),
    _when(_FUNCTIONS, "env", "reward_timeout_s"),
    _when(_FUNCTIONS & _LIMITED, "env", "reward_workers"),
    _when(_ONE_FILE, "env", "question_key answer_key"),
    _when(_NO_SETS["train"], "env", "terms largest"),
    _when(_NO_SETS["validation"], "data", "validation_size"),
    _when(_TURNS, "grpo", "max_rollout_turns"),
    _when(_above_0("loss.kl_coefficient"), "loss", "kl_kind kl_gradient"),
    _when(_is("loss.force_on_policy_ratio", False), "loss", "clip_low clip_high dual_clip"),
    _when(_is(_CORRECTION, "none", "icepop", "sequence_mask"), "loss", "importance_low", refused=True),
    _when(_is(_CORRECTION, "tis", "icepop", "sequence_mask"), "loss", "importance_low importance_high"),
    _when_enabled("warm_start", "steps batch_size lr warmup_steps copy_fraction"),
    _when(_VALIDATES, "validation", "batch_size max_samples sampled"),
    _when_enabled("checkpointing", "save_period keep_top_k metric higher_is_better save_optimizer"),
    _when((_LAUNCHED_BY_RAY & _STORE) | (_RAY_BY_STORE & _STORE), "cluster", "rollout"),
    _when(_RAY, "cluster", "startup_timeout_s autoscales num_nodes gpus_per_node rollout_gpus"),
    _when(
        _ASYNC,
        "async",
        "max_lag sampler collectors prompts_per_call room on_update max_failures lease_s micro_steps validation",
    ),
    _when(_ASYNC & _is("async.sampler", None), "async", "on_stale"),
    _when(_ASYNC & _ANY_READY, "async", "order"),
    _when(_ASYNC & _is("async.on_update", "resume"), "async", "piece_tokens kv_cache"),
    Effect(("resume",), _CONTINUES),
    Effect(("allow_changes",), _CONTINUES & _is("resume", True)),
    _when(_SAMPLES, "logging", "tokens_of_samples"),
    _when(_SAMPLES & _above_0("logging.tokens_of_samples"), "logging", "tokens_per_sample"),
    _when(_DETAIL, "logging", "detail_mb"),
    _when(_given("logging.prometheus_port"), "logging", "prometheus_address"),
    *(
        _when(_tracked(name), f"logging.{name}", " ".join(type(section).model_fields))
        for name, section in LoggingConfig()
        if isinstance(section, Section)
    ),
)
"""When each key has an effect; a key that is not here always has one."""
