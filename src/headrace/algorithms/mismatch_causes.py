"""Why generator and trainer disagree: every known cause, with the share of the disagreement that it explains.

Each cause predicts something that can be computed anew: log-probabilities under another temperature, an answer that
did not change with the weights, prompts that a cache has seen. The share is how much of the gap that accounts for.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from headrace.experience.probe import Probed

_TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0)
_TOP_K = (2, 3, 5, 8, 10, 15, 20, 30, 40, 50, 100)
_TOP_P = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_PARTS = 4
_SHIFT_MARGIN = 0.05
"""How much better rows have to fit with a lag than without, so that routes count as shifted."""
_HALF_NOISE = 1.5
"""A generator in bfloat16 is about this far from a bfloat16 forward of the trainer, as a multiple of what that is from
float32: both round, at different places."""
_WIDEST_NOISE = 2.5
"""The same multiple where few tokens are compared, at most."""
_NAMED, _CLEAR = 0.1, 0.5

Score = Callable[[Sequence[Probed], Sequence[dict[str, Any]], bool | None], "list[Answers]"]


@dataclass(frozen=True)
class Answers:
    """Completions, and the trainer's log-probabilities of their new tokens, (new,) float64 each."""

    rows: Sequence[Probed]
    trainer: Sequence[torch.Tensor]

    def slice(self, start: int, stop: int) -> "Answers":
        return Answers(self.rows[start:stop], self.trainer[start:stop])

    def __add__(self, other: "Answers") -> "Answers":
        return Answers([*self.rows, *other.rows], [*self.trainer, *other.trainer])

    @property
    def gaps(self) -> list[torch.Tensor]:
        """Generator minus trainer, per token."""
        own = [torch.tensor(row.logprobs, dtype=torch.float64) for row in self.rows]
        return [generator - trainer for generator, trainer in zip(own, self.trainer)]

    @property
    def flat(self) -> torch.Tensor:
        gaps = self.gaps
        return torch.cat(gaps) if gaps else torch.zeros(0, dtype=torch.float64)

    @property
    def gap(self) -> float:
        """The mean absolute gap per token; infinite where a logprob is not a number."""
        flat = self.flat.abs().nan_to_num(nan=math.inf)
        return float(flat.mean()) if len(flat) else 0.0


@dataclass
class Agreement:
    """What a check has measured.

    Answers to the task's prompts, which the generator has seen before, and to other ones; greedy ones are scored by the
    plain softmax, sampled ones under the run's filters. `greedy_tokens` are greedy answers whose trainer logprob is 0
    where the trainer's likeliest token is the generator's. `lags` and `layers` are shares of equal routes.
    """

    greedy_task: Answers
    greedy_other: Answers
    sampled_task: Answers
    sampled_other: Answers
    greedy_tokens: Answers
    lags: dict[int, float] = field(default_factory=dict)
    layers: list[float] = field(default_factory=list)

    @property
    def parts(self) -> dict[str, Answers]:
        return {
            "greedy answers to prompts of the task": self.greedy_task,
            "greedy answers to new prompts": self.greedy_other,
            "sampled answers to prompts of the task": self.sampled_task,
            "sampled answers to new prompts": self.sampled_other,
        }

    @property
    def worst(self) -> tuple[str, Answers]:
        return max(self.parts.items(), key=lambda part: part[1].gap)

    @property
    def everything(self) -> Answers:
        return self.greedy_task + self.greedy_other + self.sampled_task + self.sampled_other

    @property
    def lag(self) -> int:
        """The lag with which recorded routes fit best; 0 unless another one fits clearly better."""
        if not self.lags:
            return 0
        best = max(self.lags, key=lambda lag: self.lags[lag])
        return best if self.lags[best] > self.lags[0] + _SHIFT_MARGIN else 0

    def within(self, bound: float) -> bool:
        return self.worst[1].gap <= bound and self.lag == 0

    def metrics(self) -> dict[str, float]:
        """Return what was measured by name; `gap_part_1` to `gap_part_4` are means over quarters of completions."""
        everything = self.everything
        flat = everything.flat.abs()
        agreed = torch.cat([row == 0 for row in self.greedy_tokens.trainer])
        found = {
            "gap_mean": float(flat.mean()),
            "gap_worst": self.worst[1].gap,
            "gap_max": float(flat.max()),
            "greedy_agreement": float(agreed.double().mean()),
        }
        for part in range(_PARTS):
            pieces = [
                row[part * len(row) // _PARTS : (part + 1) * len(row) // _PARTS] for row in everything.gaps
            ]
            joined = torch.cat(pieces)
            if len(joined):
                found[f"gap_part_{part + 1}"] = float(joined.abs().mean())
        found |= {f"routes_lag_{lag}": share for lag, share in self.lags.items()}
        found |= {f"routes_layer_{layer}": share for layer, share in enumerate(self.layers)}
        return found


@dataclass(frozen=True)
class Evidence:
    """What is known of a disagreement.

    `rendered` are the task's prompts as the trainer's side and the generator's side render them. `before` are greedy
    answers of before the last update, with the trainer's logprobs of that time, `last` those of the last check that
    passed. `weights_are_new` is False where no update has changed the weights of the start. `score` gives the trainer's
    logprobs of now, under distributions and, with True or False, in bfloat16 or not.
    """

    agreement: Agreement
    bound: float
    rendered: tuple[list[list[int]], list[list[int]]]
    before: Answers | None
    last: Answers | None
    steps_since_last: int | None
    weights_are_new: bool
    distribution: dict[str, Any]
    score: Score

    @cached_property
    def noise(self) -> float:
        """How far the trainer's own forwards in float32 and bfloat16 are apart on the rows that agree least."""
        rows = self.agreement.worst[1].rows
        exact, half = (self.score(rows, [self.distribution], x)[0] for x in (False, True))
        return _mean([a - b for a, b in zip(exact.trainer, half.trainer)])


@dataclass(frozen=True)
class Cause:
    """A cause, the share of the disagreement that it explains, and what was seen."""

    name: str
    share: float
    text: str


def explain(evidence: Evidence) -> str:
    """Return what was measured, and the likely causes, the likeliest first."""
    agreement, (where, worst) = evidence.agreement, evidence.agreement.worst
    causes = sorted(find_causes(evidence), key=lambda cause: -cause.share)
    largest = float(agreement.everything.flat.abs().max())
    said = [
        f"({number}) {cause.name} ({cause.share:.0%}): {cause.text}"
        for number, cause in enumerate(causes, 1)
        if cause.share >= _NAMED
    ]
    above = "above" if worst.gap > evidence.bound else "within"
    doubt = "" if causes[0].share >= _CLEAR else "no known cause explains half of it; "
    return (
        f"the mean logprob gap is {worst.gap:.3g} over {len(worst.flat)} tokens of {where}, the largest "
        f"{largest:.3g}, {above} generation.guard.max_logprob_gap={evidence.bound:g}; "
        f"{doubt}likely causes, by the share that each explains: {'; '.join(said) or 'none'}. "
        "generation.guard.enabled=false runs without this check"
    )


def find_causes(evidence: Evidence) -> list[Cause]:
    """Return every known cause with its share."""
    return [
        _prompts(evidence),
        _routes(evidence),
        _stale_weights(evidence),
        _stale_cache(evidence),
        _filters(evidence),
        _precision(evidence),
    ]


def _prompts(evidence: Evidence) -> Cause:
    name = "template or tokenizer"
    for number, (ours, theirs) in enumerate(zip(*evidence.rendered)):
        if ours == theirs:
            continue
        at = _first_difference(ours, theirs)
        text = (
            f"training prompt {number} is {len(theirs)} tokens where completions are generated and {len(ours)} where "
            f"they are trained on, first different at token {at} ({theirs[at : at + 1]} against {ours[at : at + 1]}); "
            "give both sides the same policy.tokenizer"
        )
        return Cause(name, 1.0, text)
    return Cause(name, 0.0, "")


def _routes(evidence: Evidence) -> Cause:
    lags, lag = evidence.agreement.lags, evidence.agreement.lag
    if not lag:
        return Cause("shifted routes", 0.0, "")
    side = "before" if lag > 0 else "after"
    text = (
        f"recorded experts are those of the token {side} their own: {lags[lag]:.0%} equal the trainer's choice so, "
        f"{lags[0]:.0%} as they are; mend the engine's capture"
    )
    return Cause("shifted routes", lags[lag], text)


def _stale_weights(evidence: Evidence) -> Cause:
    """The generator answers as before the update, and the trainer has moved as far as the gap is wide."""
    now, before = evidence.agreement.greedy_task, evidence.before
    name = "weights not updated"
    if now.gap <= evidence.bound or before is None:
        return Cause(name, 0.0, "")
    if evidence.last is None:
        # The trainer's weights of before the first update are not known.
        moved = now.gap if evidence.weights_are_new else 0.0
        steady, reach = (1 - _change(before, now, now.gap) / now.gap, moved) if moved else (0.0, 0.0)
    else:
        moved = _moved(evidence, before)
        change = _change(before, now, max(moved, now.gap))
        steady = 1 - change / moved if moved else 0.0
        reach = max(moved, min(_moved(evidence, evidence.last), moved * (evidence.steps_since_last or 1)))
    share = max(0.0, min(1.0, steady)) * min(1.0, reach / now.gap)
    text = (
        f"the generator answers as it did before the last update, and the trainer has moved by {moved:.3g}; look at "
        "the generator's update_weights, and at what it caches of weights"
    )
    return Cause(name, share, text)


def _moved(evidence: Evidence, then: Answers) -> float:
    """Return how far the trainer's logprobs of these answers have moved since."""
    (now,) = evidence.score(then.rows, [PLAIN], None)
    return _mean([new - old for new, old in zip(now.trainer, then.trainer)])


def _change(before: Answers, now: Answers, other: float) -> float:
    """Return how far the generator's greedy answers have changed; a token that another has replaced counts `other`."""
    changes = []
    for old, new in zip(before.rows, now.rows):
        size, same = max(len(old.new), len(new.new)), _first_difference(old.new, new.new)
        left, right = (torch.tensor(row.logprobs[:same], dtype=torch.float64) for row in (old, new))
        changes.append(torch.cat([left - right, torch.full((size - same,), other, dtype=torch.float64)]))
    return _mean(changes)


def _stale_cache(evidence: Evidence) -> Cause:
    """Only prompts that the generator has seen before disagree."""
    agreement = evidence.agreement
    seen = (agreement.greedy_task + agreement.sampled_task).gap
    new = (agreement.greedy_other + agreement.sampled_other).gap
    share = max(0.0, 1 - new / seen) if seen > evidence.bound else 0.0
    text = (
        f"prompts that were asked before the update have a gap of {seen:.3g}, new ones {new:.3g}: the engine keeps "
        "keys and values of old weights; have it empty its prefix cache after each update"
    )
    return Cause("stale prefix cache", share, text)


def _filters(evidence: Evidence) -> Cause:
    """Sampled tokens agree under another temperature, top-p or top-k."""
    agreement = evidence.agreement
    sampled = agreement.sampled_task + agreement.sampled_other
    greedy = (agreement.greedy_task + agreement.greedy_other).gap
    if sampled.gap <= evidence.bound:
        return Cause("sampling filters", 0.0, "")
    tried = list(_other_distributions(evidence.distribution))
    found = evidence.score(sampled.rows, tried, None)
    best, distribution = min(
        ((answers.gap, given) for answers, given in zip(found, tried)), key=lambda p: p[0]
    )
    own = evidence.distribution
    changed = {key: value for key, value in distribution.items() if value != own[key]}
    # Greedy answers are the same under any filters.
    share = max(0.0, 1 - best / sampled.gap) * max(0.0, 1 - greedy / sampled.gap)
    text = (
        f"sampled tokens are those of {_written(changed)}, not of generation's "
        f"{_written({key: own[key] for key in changed})} (gap {best:.3g} in place of {sampled.gap:.3g}); look at the "
        "engine's own defaults"
    )
    return Cause("sampling filters", share, text)


def _other_distributions(own: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield PLAIN
    yield {**own, "top_k": None, "top_p": 1.0}
    for temperature in _TEMPERATURES:
        yield {**own, "temperature": temperature}
    yield from ({**own, "top_k": k} for k in _TOP_K)
    yield from ({**own, "top_p": p} for p in _TOP_P)


def widest_rounding(evidence: Evidence) -> float:
    """Return the widest mean gap that bfloat16 makes for this model, on the rows that agree least."""
    return _WIDEST_NOISE * evidence.noise


def _precision(evidence: Evidence) -> Cause:
    """The gap is as wide as that of the trainer's own forwards in float32 and bfloat16, and has no direction."""
    worst = evidence.agreement.worst[1]
    if worst.gap <= evidence.bound:
        return Cause("precision", 0.0, "")
    noise = evidence.noise
    # A mean of few tokens has a direction by chance.
    direction = abs(float(worst.flat.mean())) / worst.gap - 2 / math.sqrt(len(worst.flat))
    share = min(1.0, _HALF_NOISE * noise / worst.gap) * (1 - max(0.0, direction))
    text = (
        f"the trainer's own forwards in float32 and bfloat16 are {noise:.3g} apart; set generation.precision and "
        "policy.precision alike, or raise generation.guard.max_logprob_gap"
    )
    return Cause("precision", share, text)


PLAIN = {"temperature": 1.0, "top_k": None, "top_p": 1.0}


def _mean(parts: Sequence[torch.Tensor]) -> float:
    joined = torch.cat(list(parts)) if parts else torch.zeros(0)
    return float(joined.abs().mean()) if len(joined) else 0.0


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)


def _written(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={'null' if value is None else value}" for key, value in values.items())
