"""Accuracy and mean reward on held-out prompts, greedy and sampled."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from headrace.algorithms.observer import GREEDY_ACCURACY, GREEDY_REWARD, SAMPLED_ACCURACY, SAMPLED_REWARD
from headrace.config import ValidationConfig
from headrace.environments.interfaces import Environment
from headrace.errors import ConfigError
from headrace.experience.rollouts import RolloutSettings, run_rollouts
from headrace.experience.types import Prompt, Rollout
from headrace.models.interfaces import Generator
from headrace.utils.seeding import derive_seed


class Validator:
    """Rolls out the validation split; nothing of it is trained on, so nothing enters the store."""

    def __init__(
        self,
        cfg: ValidationConfig,
        generator: Generator,
        tokenizer: Any,
        environment: Environment,
        settings: RolloutSettings,
    ) -> None:
        self._cfg = cfg
        # Nothing of a validation is replayed.
        settings = replace(settings, sampling=replace(settings.sampling, record_routes=False))
        self._parts = (generator, tokenizer, environment, settings)
        self._prompts = environment.prompts("validation")[: cfg.max_samples]
        if not self._prompts:
            raise ConfigError("the validation split has no prompts; raise data.validation_size")

    def run(self, *, seed: int) -> dict[str, float]:
        """Return accuracy and mean reward of greedy answers and, if configured, of sampled ones, by metric name.

        The accuracy is there if the environment gives any verdict; an answer without one is then not right. The
        sampling seed depends on `seed` alone, so validations of one run draw the same numbers.
        """
        metrics = self._measure(seed, GREEDY_ACCURACY, GREEDY_REWARD, greedy=True)
        if self._cfg.sampled:
            metrics |= self._measure(seed, SAMPLED_ACCURACY, SAMPLED_REWARD, greedy=False)
        return metrics

    def _measure(self, seed: int, accuracy: str, reward: str, *, greedy: bool) -> dict[str, float]:
        size = self._cfg.batch_size
        batches = [self._prompts[i : i + size] for i in range(0, len(self._prompts), size)]
        answers = [r for i, batch in enumerate(batches) for r in self._answers(batch, seed, i, greedy)]
        metrics = {reward: fmean(r.reward for r in answers)}
        if any(r.correct is not None for r in answers):
            metrics = {accuracy: fmean(r.correct is True for r in answers), **metrics}
        return metrics

    def _answers(self, prompts: Sequence[Prompt], seed: int, index: int, greedy: bool) -> list[Rollout]:
        generator, tokenizer, environment, settings = self._parts
        return run_rollouts(
            prompts,
            generator=generator,
            tokenizer=tokenizer,
            environment=environment,
            settings=settings,
            group_size=1,
            seed=derive_seed(seed, "validation", index),
            greedy=greedy,
        ).rollouts
