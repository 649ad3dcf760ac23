"""What `nemo_rl.algorithms.async_utils.staleness_sampler` names: samplers, and the configs that name them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from headrace.compat.samplers import (
    _GATE_POLL_SECONDS,
    BaseSampler,
    InOrderSampler,
    PromptGroupSampler,
    ReadyFirstSampler,
    WeightFifoSampler,
    WindowedSampler,
)
from headrace.errors import ConfigError
from headrace.utils.config_errors import validated
from headrace.utils.section import Section
from headrace.utils.targets import load_target

__all__ = [
    "BaseSampler",
    "CustomSamplerConfig",
    "InOrderSampler",
    "InOrderSamplerConfig",
    "PromptGroupSampler",
    "ReadyFirstSampler",
    "ReadyFirstSamplerConfig",
    "SamplerConfig",
    "WeightFifoSampler",
    "WeightFifoSamplerConfig",
    "WindowedSampler",
    "WindowedSamplerConfig",
    "_GATE_POLL_SECONDS",
    "create_sampler",
    "required_buffer_capacity_for_config",
]


class WindowedSamplerConfig(Section):
    """Keys of a WindowedSampler."""

    name: Literal["windowed"] = "windowed"
    max_staleness_versions: NonNegativeInt = 1
    sample_freshest_first: bool = False


class ReadyFirstSamplerConfig(Section):
    """Keys of a ReadyFirstSampler."""

    name: Literal["ready_first"] = "ready_first"
    max_staleness_versions: NonNegativeInt = 1


class WeightFifoSamplerConfig(Section):
    """Keys of a WeightFifoSampler."""

    name: Literal["weight_fifo"] = "weight_fifo"
    max_staleness_versions: NonNegativeInt = 1


class InOrderSamplerConfig(Section):
    """Keys of an InOrderSampler."""

    name: Literal["in_order"] = "in_order"
    max_lookahead_versions: NonNegativeInt = 1


class CustomSamplerConfig(BaseModel):
    """A sampler of one's own: `target` is `module:class`, and further keys are its arguments."""

    model_config = ConfigDict(extra="allow")

    name: Literal["custom"] = "custom"
    target: str


SamplerConfig = Annotated[
    WindowedSamplerConfig
    | ReadyFirstSamplerConfig
    | WeightFifoSamplerConfig
    | InOrderSamplerConfig
    | CustomSamplerConfig,
    Field(discriminator="name"),
]

_KINDS: dict[str, tuple[type[Section], Any]] = {
    "windowed": (WindowedSamplerConfig, WindowedSampler),
    "ready_first": (ReadyFirstSamplerConfig, ReadyFirstSampler),
    "weight_fifo": (WeightFifoSamplerConfig, WeightFifoSampler),
    "in_order": (InOrderSamplerConfig, InOrderSampler),
}


def create_sampler(buffer: Any, cfg: Any) -> PromptGroupSampler:
    """Return the sampler of a config, a model or a mapping with its keys.

    Raises:
        ConfigError: an unknown name or key, a value out of range, a target that is no class, or whose objects are no
            samplers.
    """
    keys = cfg.model_dump() if isinstance(cfg, BaseModel) else dict(cfg)
    name = keys.get("name")
    if name in _KINDS:
        section, kind = _KINDS[name]
        sampler: PromptGroupSampler = kind(
            buffer, **validated(section, keys, "sampler").model_dump(exclude={"name"})
        )
        return sampler
    if name != "custom":
        raise ConfigError(f"sampler.name={name}; expected one of {', '.join(_KINDS)}, custom")
    target = str(keys.pop("target", None))
    kind = load_target(target, "sampler.target")
    if not isinstance(kind, type):
        raise ConfigError(f"sampler.target={target} is not a class; expected module:class of a sampler")
    made = kind(buffer, **{key: value for key, value in keys.items() if key != "name"})
    if not isinstance(made, PromptGroupSampler):
        raise ConfigError(
            f"sampler.target={target} has not all methods of a sampler; derive it from BaseSampler"
        )
    return made


def required_buffer_capacity_for_config(cfg: Any, groups_per_step: int) -> int | None:
    """Return how many groups the sampler of a config needs room for; None: it does not say."""
    return create_sampler(None, cfg).required_buffer_capacity(groups_per_step)
