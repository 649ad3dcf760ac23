"""Measuring a policy on held-out prompts: one set or several, greedy and sampled, pass@k and maj@k."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from statistics import fmean
from typing import TypeVar

from headrace.config import ValidationConfig, ValidationSourceConfig
from headrace.experience.metrics import own_metrics
from headrace.experience.types import Prompt, Rollout
from headrace.models.generation.interfaces import SamplingParams

_PREFIX, _SAMPLED = "validation/", "validation/sampled_"
T = TypeVar("T")
RollOut = Callable[[Sequence[Prompt], SamplingParams, int, int, bool], list[Rollout]]
"""From prompts, sampling, samples of each, the number of the call, and whether it is greedy, to samples."""


@dataclass(frozen=True)
class ValidationSet:
    """Prompts that are measured together; `name` is empty where the recipe names no sets."""

    name: str
    prompts: Sequence[Prompt]
    cfg: ValidationSourceConfig

    def sampling(self, of_run: SamplingParams) -> SamplingParams:
        keys = ("temperature", "top_p", "top_k", "max_new_tokens")
        own = {key: value for key in keys if (value := getattr(self.cfg, key)) is not None}
        # Nothing of a validation is replayed.
        return replace(of_run, record_routes=False, **own)


def sets_of(
    prompts: Sequence[Prompt], sets: Mapping[str, ValidationSourceConfig], max_samples: int | None
) -> list[ValidationSet]:
    """Return the sets of a validation split, each with `max_samples` prompts at most.

    Beside named sets, the prompts that an environment makes are a set of its name, measured as by default.
    """
    if not sets:
        return [ValidationSet("", prompts[:max_samples], ValidationSourceConfig(path=""))]
    found: dict[str, list[Prompt]] = {name: [] for name in sets}
    for prompt in prompts:
        found.setdefault(prompt.data_set, []).append(prompt)
    plain = ValidationSourceConfig(path="")
    return [ValidationSet(name, own[:max_samples], sets.get(name, plain)) for name, own in found.items()]


def measure(
    sets: Sequence[ValidationSet], cfg: ValidationConfig, sampling: SamplingParams, roll_out: RollOut
) -> dict[str, float]:
    """Return the metrics of all sets: `validation/NAME/...`, and under plain names their mean over the sets.

    The accuracy is there if the environment gives any verdict; a completion without one is then not right. For pass@k
    and maj@k, without verdicts, a reward of 1 or more counts as right.
    """
    by_set = {one.name: _measure_set(one, cfg, sampling, roll_out) for one in sets}
    values = defaultdict(list)
    for metrics in by_set.values():
        for name, value in metrics.items():
            values[name].append(value)
    named = {
        f"{_PREFIX}{name}/{key.removeprefix(_PREFIX)}": value
        for name, metrics in by_set.items()
        if name
        for key, value in metrics.items()
    }
    return {**{name: fmean(given) for name, given in values.items()}, **named}


def _measure_set(
    one: ValidationSet, cfg: ValidationConfig, sampling: SamplingParams, roll_out: RollOut
) -> dict[str, float]:
    own = one.sampling(sampling)

    def run(samples: int, greedy: bool) -> list[Rollout]:
        parts = _batched(one.prompts, max(1, cfg.batch_size // samples))
        return [r for n, part in enumerate(parts) for r in roll_out(part, own, samples, n, greedy)]

    metrics: dict[str, float] = {}
    if one.cfg.greedy:
        metrics |= _means(run(1, True), _PREFIX)
    if cfg.sampled:
        rollouts = run(one.cfg.samples, False)
        metrics |= _means(rollouts, _SAMPLED)
        groups = _batched(rollouts, one.cfg.samples)
        for k in one.cfg.pass_at:
            metrics[f"{_PREFIX}pass@{k}"] = fmean(pass_at(len(g), sum(map(_is_right, g)), k) for g in groups)
        for k in one.cfg.maj_at:
            metrics[f"{_PREFIX}maj@{k}"] = fmean(maj_at(*_votes(g), k) for g in groups)
    return metrics


def pass_at(n: int, right: int, k: int) -> float:
    """Return the chance that one of k samples is right, of n samples of which `right` are.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1.

    >>> pass_at(4, 1, 4), pass_at(4, 1, 2), pass_at(4, 0, 2)
    (1.0, 0.5, 0.0)
    """
    return 1.0 - comb(n - right, k) / comb(n, k)


def maj_at(answers: Sequence[str], right: Sequence[bool], k: int) -> float:
    """Return the chance that the answer which most of k samples give is right; of answers that tie, a random one wins.

    It is the mean over the n // k runs of k samples that the n samples hold, so that it has no bias.

    >>> maj_at(["4", "5", "4"], [True, False, True], 3), maj_at(["4", "5"], [True, False], 2)
    (1.0, 0.5)
    """
    runs = [range(start, start + k) for start in range(0, len(answers) - k + 1, k)]
    return fmean(_majority([answers[i] for i in run], [right[i] for i in run]) for run in runs)


def _majority(answers: Sequence[str], right: Sequence[bool]) -> float:
    counts = Counter(answers)
    most = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == most]
    return fmean(right[answers.index(winner)] for winner in winners)


def _votes(group: Sequence[Rollout]) -> tuple[list[str], list[bool]]:
    texts = [r.messages[-1].content.strip() if r.answer is None else r.answer for r in group]
    return texts, [_is_right(r) for r in group]


def _is_right(rollout: Rollout) -> bool:
    return rollout.reward >= 1 if rollout.correct is None else rollout.correct


def _means(rollouts: Sequence[Rollout], prefix: str) -> dict[str, float]:
    metrics = {f"{prefix}reward": fmean(r.reward for r in rollouts)}
    if any(r.correct is not None for r in rollouts):
        metrics = {f"{prefix}accuracy": fmean(r.correct is True for r in rollouts), **metrics}
    own = own_metrics([r.metrics for r in rollouts])
    return metrics | {f"{prefix}{name}": value for name, value in own.items()}


def _batched(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
