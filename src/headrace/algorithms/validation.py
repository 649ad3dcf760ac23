"""Accuracy on held-out prompts, greedy and sampled."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.algorithms.observer import GREEDY_ACCURACY, SAMPLED_ACCURACY
from headrace.config import ValidationConfig
from headrace.environments.interfaces import Environment
from headrace.errors import ConfigError
from headrace.experience.rollouts import RolloutSettings, run_rollouts
from headrace.experience.types import Prompt
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
        """Return `validation/accuracy` (greedy) and, if configured, `validation/sampled_accuracy`.

        The sampling seed depends on `seed` alone, so validations of one run draw the same numbers.
        """
        metrics = {GREEDY_ACCURACY: self._accuracy(seed, greedy=True)}
        if self._cfg.sampled:
            metrics[SAMPLED_ACCURACY] = self._accuracy(seed, greedy=False)
        return metrics

    def _accuracy(self, seed: int, *, greedy: bool) -> float:
        size = self._cfg.batch_size
        batches = [self._prompts[i : i + size] for i in range(0, len(self._prompts), size)]
        return sum(self._correct(b, seed, i, greedy) for i, b in enumerate(batches)) / len(self._prompts)

    def _correct(self, prompts: Sequence[Prompt], seed: int, index: int, greedy: bool) -> float:
        generator, tokenizer, environment, settings = self._parts
        batch = run_rollouts(
            prompts,
            generator=generator,
            tokenizer=tokenizer,
            environment=environment,
            settings=settings,
            group_size=1,
            seed=derive_seed(seed, "validation", index),
            greedy=greedy,
        )
        return sum(1.0 for r in batch.rollouts if r.correct)
