"""Which samples may be made, trained on and dropped, by the age of the weights that drew them.

Steps count from 1, and weights of version v have made v steps: step s trains weights of version s - 1. Samples of
version w then lag by s - 1 - w.
"""

from collections.abc import Sequence
from typing import Protocol

from headrace.config import RecipeConfig
from headrace.data_plane.claim_terms import TagRule
from headrace.errors import ConfigError
from headrace.experience.collector import MADE_FOR
from headrace.utils.targets import load_callable, user_code

OLDEST, NEWEST = "weight_version_min", "weight_version"
"""The tags with the versions of the weights that drew a sample's first and last tokens."""
_METHODS = ("may_begin", "rules", "stale")


class StalenessSampler(Protocol):
    """Decides by numbers alone; one of your own is built with `max_lag`."""

    def may_begin(self, made_for: int, version: int) -> bool:
        """Return whether answers for step `made_for` may begin with weights of `version`."""
        ...

    def rules(self, step: int) -> Sequence[TagRule]:
        """Return what the tags of a group have to be for `step` to train on it."""
        ...

    def stale(self, step: int) -> Sequence[TagRule]:
        """Return what they are in a group that neither `step` nor a later one can train on; none: there is no such."""
        ...


class InOrderSampler:
    """Each step trains on the groups made for it, and none begins with weights that would be too old by then.

    Nothing is ever dropped; the slowest group of a step is waited for. With `max_lag` 0 this is the synchronous loop.
    """

    def __init__(self, max_lag: int) -> None:
        self.max_lag = max_lag

    def may_begin(self, made_for: int, version: int) -> bool:
        return made_for - 1 - version <= self.max_lag

    def rules(self, step: int) -> Sequence[TagRule]:
        return [TagRule(MADE_FOR, at_least=step, at_most=step)]

    def stale(self, step: int) -> Sequence[TagRule]:
        return []


class WindowedSampler:
    """Each step trains on whatever is ready and lags by `max_lag` at most; what lags more is dropped."""

    def __init__(self, max_lag: int) -> None:
        self.max_lag = max_lag

    def may_begin(self, made_for: int, version: int) -> bool:
        return True

    def rules(self, step: int) -> Sequence[TagRule]:
        return [TagRule(OLDEST, at_least=step - 1 - self.max_lag)]

    def stale(self, step: int) -> Sequence[TagRule]:
        return [TagRule(OLDEST, at_most=step - 2 - self.max_lag)]


class RefillingSampler(WindowedSampler):
    """As `WindowedSampler`, and no answer begins with weights that would be too old in the step that it is made for.

    With dynamic sampling a step takes what was made for later ones in place of groups without a signal.
    """

    def may_begin(self, made_for: int, version: int) -> bool:
        return made_for - 1 - version <= self.max_lag


def build_sampler(recipe: RecipeConfig) -> StalenessSampler:
    """Return the sampler that the recipe asks for.

    Raises:
        ConfigError: `async.sampler` names nothing that can be built with `max_lag`, or lacks a method.
    """
    cfg = recipe.asynchrony
    if cfg.sampler is None:
        in_order = RefillingSampler if recipe.grpo.dynamic_sampling.enabled else InOrderSampler
        return (in_order if cfg.on_stale == "wait" else WindowedSampler)(cfg.max_lag)
    who = f"async.sampler={cfg.sampler}"
    make = load_callable(cfg.sampler, "async.sampler")
    with user_code(who):
        sampler: StalenessSampler = make(max_lag=cfg.max_lag)
    lacking = [name for name in _METHODS if not callable(getattr(sampler, name, None))]
    if lacking:
        raise ConfigError(f"{who} has no {lacking[0]}(); expected the methods {', '.join(_METHODS)}")
    return sampler
