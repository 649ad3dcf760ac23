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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from headrace.utils.algorithm_presets import PRESETS


@dataclass(frozen=True)
class Need:
    """What the value of one key has to be, in words and as a test."""

    key: str
    text: str
    test: Callable[[Any], bool]

    def holds(self, recipe: BaseModel) -> bool:
        return self.test(_value(recipe, self.key))


All = tuple[Need, ...]
"""Needs that have to hold together."""


@dataclass(frozen=True)
class Effect:
    """Keys that have an effect if all needs of one alternative hold; `refused`: else it is an error that one is set."""

    keys: tuple[str, ...]
    alternatives: tuple[All, ...]
    refused: bool = False

    @property
    def needs(self) -> str:
        return ", or ".join(" and ".join(need.text for need in needs) for needs in self.alternatives)

    def idle(self, recipe: BaseModel) -> str:
        """Return the keys that are set without effect, as `key=value, key=value`; none: an empty text."""
        if any(all(need.holds(recipe) for need in needs) for needs in self.alternatives):
            return ""
        given = _preset_keys(recipe)
        values = {key: _value(recipe, key) for key in self.keys if key not in given}
        idle = {key: value for key, value in values.items() if value != _default(recipe, key)}
        return ", ".join(f"{key}={_written(value)}" for key, value in idle.items())


def refuse_idle_keys(recipe: BaseModel) -> None:
    """Refuse keys without effect that would have the run train otherwise than the recipe says.

    Raises:
        ValueError: names key, value and what it needs.
    """
    for effect in EFFECTS:
        if effect.refused and (idle := effect.idle(recipe)):
            raise ValueError(
                f"{idle} has no effect here: it needs {effect.needs}; set that, or remove the key"
            )


def idle_lines(recipe: BaseModel) -> list[str]:
    found = ((effect.idle(recipe), effect.needs) for effect in EFFECTS)
    return [f"no effect: {idle} (needs {needs})" for idle, needs in found if idle]


def _value(recipe: BaseModel, key: str) -> Any:
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _preset_keys(recipe: BaseModel) -> set[str]:
    """Return the keys that a named algorithm sets: it is complete, so that some wait by design."""
    preset = PRESETS.get(str(getattr(recipe, "algorithm", None)))
    return set() if preset is None else {*preset.meaning, *preset.values}


def _default(recipe: BaseModel, key: str) -> Any:
    section, _, name = key.rpartition(".")
    model = type(_value(recipe, section) if section else recipe)
    return model.model_fields[name].get_default(call_default_factory=True)


def _written(value: object) -> str:
    """Return a value as overrides have it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is(key: str, *values: object) -> Need:
    return Need(key, f"{key}={' or '.join(map(_written, values))}", lambda value: value in values)


def _above(key: str, limit: int) -> Need:
    return Need(key, f"{key} above {limit}", lambda value: value > limit)


def _given(key: str) -> Need:
    return Need(key, key, lambda value: value is not None)


def _other_than(key: str, *values: object) -> Need:
    return Need(
        key, f"a {key} other than {', '.join(map(_written, values))}", lambda value: value not in values
    )


def _keys(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


_STORE = _is("data_plane.enabled", None, True)
_REMOTE_STORE: All = (_is("data_plane.impl", "transfer_queue"), _STORE)
_MOONCAKE: All = (_is("data_plane.backend", "mooncake_cpu"), *_REMOTE_STORE)
_CLAIMS = Need("data_plane", "a trainer that claims rows; a run by recipe does not", lambda value: False)
_PACKING = _is("policy.sequence_packing.enabled", True)
_DYNAMIC = _is("policy.dynamic_batching.enabled", True)
_FIXED: All = (_is("policy.sequence_packing.enabled", False), _is("policy.dynamic_batching.enabled", False))
_ON_RAY: tuple[All, ...] = (
    (_is("policy.parallel.launcher", "ray"),),
    (_is("policy.parallel.launcher", "auto"), _above("policy.workers", 1), *_REMOTE_STORE),
)
_DIVIDES = _is("grpo.advantage.estimator", "grpo", "reinforce_plus_plus")
_CORRECTION = "loss.importance_correction"

EFFECTS: tuple[Effect, ...] = (
    Effect(_keys("data_plane", "impl storage_capacity observability.enabled"), ((_STORE,),)),
    Effect(
        _keys("data_plane", "backend num_storage_units store_name ray_address timeout_s startup_timeout_s"),
        (_REMOTE_STORE,),
    ),
    Effect(("data_plane.claim_meta_poll_interval_s",), ((_CLAIMS,),)),
    Effect(_keys("data_plane", "global_segment_size local_buffer_size mooncake_master_port"), (_MOONCAKE,)),
    Effect(
        _keys("policy.sequence_packing", "algorithm train_mb_tokens logprob_mb_tokens microbatch_order"),
        ((_PACKING,),),
    ),
    Effect(
        _keys("policy.dynamic_batching", "train_mb_tokens logprob_mb_tokens sequence_length_round"),
        ((_DYNAMIC,),),
    ),
    Effect(_keys("policy", "train_micro_batch_size logprob_batch_size"), (_FIXED,)),
    Effect(
        _keys("policy.scheduler", "decay_steps min_lr_ratio"),
        ((_is("policy.scheduler.kind", "linear", "cosine"),),),
    ),
    Effect(("policy.tokenizer.path",), ((_is("policy.tokenizer.builder", None),),), refused=True),
    Effect(("policy.tokenizer.characters",), ((_is("policy.tokenizer.builder", "characters"),),)),
    Effect(("policy.model.cache_dir",), ((_given("policy.model.gguf_package"),),)),
    Effect(
        _keys("policy.router_replay", "max_missing_fraction min_exact_fraction on_excess trace"),
        ((_is("policy.router_replay.enabled", True),),),
    ),
    Effect(("grpo.advantage.leave_one_out",), ((_is("grpo.advantage.estimator", "grpo"),),)),
    Effect(("grpo.advantage.normalize_std",), ((_DIVIDES,),)),
    Effect(("grpo.advantage.epsilon",), ((_is("grpo.advantage.normalize_std", True), _DIVIDES),)),
    Effect(("grpo.reward.overlong_buffer_tokens",), ((_above("grpo.reward.overlong_penalty", 0),),)),
    Effect(("grpo.reward.kl_kind",), ((_above("grpo.reward.kl_coefficient", 0),),)),
    Effect(("grpo.dynamic_sampling.max_refills",), ((_is("grpo.dynamic_sampling.enabled", True),),)),
    Effect(("grpo.max_rollout_turns",), ((_other_than("env.kind", "reasoning_gym", "math", "dataset"),),)),
    Effect(_keys("loss", "kl_kind kl_gradient"), ((_above("loss.kl_coefficient", 0),),)),
    Effect(_keys("loss", "clip_low clip_high dual_clip"), ((_is("loss.force_on_policy_ratio", False),),)),
    Effect(("loss.importance_low",), ((_is(_CORRECTION, "none", "icepop", "sequence_mask"),),), refused=True),
    Effect(
        _keys("loss", "importance_low importance_high"),
        ((_is(_CORRECTION, "tis", "icepop", "sequence_mask"),),),
    ),
    Effect(
        _keys("warm_start", "steps batch_size lr warmup_steps copy_fraction"),
        ((_is("warm_start.enabled", True),),),
    ),
    Effect(
        _keys("validation", "batch_size max_samples sampled"),
        (
            (_above("validation.period", 0),),
            (_is("validation.at_start", True),),
            (_is("validation.at_end", True),),
        ),
    ),
    Effect(
        _keys("checkpointing", "save_period keep_top_k metric higher_is_better save_optimizer"),
        ((_is("checkpointing.enabled", True),),),
    ),
    Effect(("cluster.rollout",), tuple((*needs, _STORE) for needs in _ON_RAY)),
    Effect(_keys("cluster", "startup_timeout_s autoscales"), _ON_RAY),
    Effect(("resume",), ((_is("overwrite", False),),)),
    Effect(("allow_changes",), ((_is("overwrite", False), _is("resume", True)),)),
)
"""When each key has an effect; a key that is not here always has one."""
