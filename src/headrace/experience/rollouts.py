"""Rolling out: prompts to scored samples, over one or several turns.

    render prompts -> [generate -> append and decode -> judge -> append observation]* -> Rollout

All rows that are still active take a turn together: one `generate` and one `step` of the environment.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from headrace.config import RecipeConfig
from headrace.environments.interfaces import Environment, StepResult
from headrace.errors import ConfigError, GenerationError, RewardError
from headrace.experience.chat import (
    ChatTokenizer,
    check_sampled,
    decode_answers,
    render_observation,
    render_prompt,
)
from headrace.experience.judging import fits_float32, judge
from headrace.experience.metrics import ANSWERS, NEW_TOKENS, SECONDS, combine_calls, rollout_metrics
from headrace.experience.rollout_routes import append_routes, check_recorded
from headrace.experience.types import Message, Prompt, Rollout
from headrace.models.generation.interfaces import sampling_params
from headrace.models.interfaces import GenerationOutput, Generator, SamplingParams
from headrace.utils.seeding import derive_seed


@dataclass(frozen=True)
class RolloutSettings:
    """How long and how samples are made, the same for all of a run.

    `max_total_tokens` bounds a whole sample: the prompt, all answers and all observations. `pad_to_multiple`
    goes with the rows, for the stages that pad them.
    """

    sampling: SamplingParams
    max_total_tokens: int
    max_turns: int = 1
    pad_to_multiple: int = 1

    @classmethod
    def from_recipe(cls, recipe: RecipeConfig) -> "RolloutSettings":
        """Return what a recipe says about rollouts."""
        return cls(
            sampling_params(recipe.generation),
            recipe.policy.max_total_sequence_length,
            recipe.grpo.max_rollout_turns,
            recipe.policy.make_sequence_length_divisible_by,
        )


@dataclass
class RolloutBatch:
    """Samples, prompt-major: the first prompt's group first, its samples by group index."""

    rollouts: list[Rollout]
    metrics: dict[str, float]
    generation_metrics: dict[str, float]


def run_rollouts(
    prompts: Sequence[Prompt],
    *,
    generator: Generator,
    tokenizer: ChatTokenizer,
    environment: Environment,
    settings: RolloutSettings,
    group_size: int,
    seed: int,
    tag: str | None = None,
    greedy: bool = False,
) -> RolloutBatch:
    """Sample `group_size` answers per prompt and have the environment score them.

    The result is a function of the weights, the prompts, the settings and `seed`. `tag` goes into the sample
    ids (see `group_ids`); by default it is made of the weight version and the seed, which together name the
    samples. An answer is cut where its sample reaches `settings.max_total_tokens`.

    Raises:
        ConfigError: no prompts, or a prompt that leaves no room for an answer, before anything is generated.
        GenerationError: the generator returns other than one answer per row, each with one finite logprob per
            token.
        RewardError: the environment returns other than one reward per row that fits in float32.
    """
    sampling = replace(
        settings.sampling,
        greedy=greedy or settings.sampling.greedy,
        max_total_tokens=settings.max_total_tokens,
    )
    if tag is None:
        tag = f"{generator.weight_version}.{derive_seed(seed, 'tag') >> 31:08x}"
    rollouts = _open_samples(prompts, tokenizer, settings, group_size, tag, generator.weight_version)
    calls: list[_Call] = []
    active = rollouts
    for turn in range(settings.max_turns):
        call = _generate(generator, active, sampling, derive_seed(seed, "turn", turn))
        calls.append(call)
        _append_answers(active, call.output, tokenizer, sampling)
        results = judge(environment, active)
        _credit(active, results)
        is_last = turn + 1 == settings.max_turns
        active = [] if is_last else _append_observations(active, results, tokenizer, settings)
        if not active:
            break
    return RolloutBatch(rollouts, _metrics(rollouts), combine_calls([call.metrics() for call in calls]))


def check_prompts(tokenizer: ChatTokenizer, environment: Environment, *, max_total_tokens: int) -> None:
    """Refuse a prompt of either split that leaves no room for an answer, before a run begins.

    Raises:
        ConfigError: the first such prompt, by its uid.
    """
    for split in ("validation", "train"):
        for prompt in environment.prompts(split):
            _render_with_room(tokenizer, prompt, max_total_tokens)


def _render_with_room(tokenizer: ChatTokenizer, prompt: Prompt, max_total_tokens: int) -> list[int]:
    ids = render_prompt(tokenizer, prompt.messages)
    if len(ids) >= max_total_tokens:
        place = f" ({prompt.info['place']})" if "place" in prompt.info else ""
        raise ConfigError(
            f"prompt '{prompt.uid}'{place} has {len(ids)} tokens and leaves no room for an answer within policy."
            f"max_total_sequence_length={max_total_tokens}; raise it, remove the prompt, or set "
            "data.overlong_prompts=skip"
        )
    return ids


def group_ids(prompts: Sequence[Prompt], tag: str) -> list[str]:
    """Return one uid per place in `prompts`, all different: `<prompt uid>@<tag>`, with `#2` for a second one.

    A uid names a group, so a prompt that is drawn twice in a step gives two groups.

    >>> group_ids([Prompt("a", ()), Prompt("b", ()), Prompt("a", ())], "7.0")
    ['a@7.0', 'b@7.0', 'a@7.0#2']
    """
    seen: dict[str, int] = {}
    uids = []
    for prompt in prompts:
        count = seen[prompt.uid] = seen.get(prompt.uid, 0) + 1
        uids.append(f"{prompt.uid}@{tag}" + (f"#{count}" if count > 1 else ""))
    return uids


def group_uid(rollout: Rollout) -> str:
    """Return the uid that a sample shares with its group, and with no other sample.

    Example: `group_uid(r)` is `a@7.0` for `r.sample_id == "a@7.0_g3"`.
    """
    return rollout.sample_id.removesuffix(f"_g{rollout.group_index}")


def _metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    names = ("reward", "response_tokens", "truncated", "turns", "correct", "metrics")
    return rollout_metrics({name: [getattr(r, name) for r in rollouts] for name in names})


def _open_samples(
    prompts: Sequence[Prompt],
    tokenizer: ChatTokenizer,
    settings: RolloutSettings,
    group_size: int,
    tag: str,
    weight_version: int,
) -> list[Rollout]:
    if not prompts or group_size < 1:
        raise ConfigError(
            f"a rollout needs prompts and at least one sample of each; got {len(prompts)} prompts x {group_size} "
            "samples (grpo.num_generations_per_prompt)"
        )
    rollouts: list[Rollout] = []
    for uid, prompt in zip(group_ids(prompts, tag), prompts):
        ids = _render_with_room(tokenizer, prompt, settings.max_total_tokens)
        rollouts.extend(
            Rollout(
                sample_id=f"{uid}_g{index}",
                prompt=prompt,
                group_index=index,
                token_ids=list(ids),
                token_mask=[0] * len(ids),
                logprobs=[0.0] * len(ids),
                messages=list(prompt.messages),
                reward=0.0,
                truncated=True,
                turns=0,
                weight_version=weight_version,
            )
            for index in range(group_size)
        )
    return rollouts


# Generating.


@dataclass
class _Call:
    """One call of the generator."""

    output: GenerationOutput
    seconds: float
    prompt_tokens: int

    def metrics(self) -> dict[str, float]:
        """Return the cost of the call, and the generator's own metrics."""
        own = {f"generator/{name}": value for name, value in self.output.metrics.items()}
        return {
            "generation/calls": 1.0,
            ANSWERS: float(len(self.output.token_ids)),
            "generation/prompt_tokens": float(self.prompt_tokens),
            NEW_TOKENS: float(sum(map(len, self.output.token_ids))),
            SECONDS: self.seconds,
            **own,
        }


def _generate(generator: Generator, active: Sequence[Rollout], params: SamplingParams, seed: int) -> _Call:
    started = time.perf_counter()
    output = generator.generate([r.token_ids for r in active], params, seed=seed)
    seconds = time.perf_counter() - started
    _check_output(output, active, params)
    if params.record_routes:
        check_recorded(output, active, generator.route_shape)
    return _Call(output, seconds, sum(len(r.token_ids) for r in active))


def _check_output(output: GenerationOutput, active: Sequence[Rollout], params: SamplingParams) -> None:
    for name in ("token_ids", "logprobs", "truncated"):
        fault = _miscount(len(getattr(output, name)), active)
        if fault:
            raise GenerationError(f"the generator returned {name} for {fault}")
    for rollout, tokens, logprobs in zip(active, output.token_ids, output.logprobs):
        limit = params.limit(len(rollout.token_ids))
        if len(tokens) > limit:
            raise GenerationError(
                f"sample '{rollout.sample_id}': the generator returned {len(tokens)} tokens; expected at "
                f"most {limit}, the limit of max_new_tokens and max_total_tokens that it was given"
            )
        if len(logprobs) != len(tokens):
            raise GenerationError(
                f"sample '{rollout.sample_id}': the generator returned {len(logprobs)} logprobs for "
                f"{len(tokens)} tokens; expected one per token"
            )
    _check_finite(output.logprobs, active)


def _check_finite(logprobs: Sequence[Sequence[float]], active: Sequence[Rollout]) -> None:
    lengths = [len(row) for row in logprobs]
    flat = np.fromiter(chain.from_iterable(logprobs), dtype=np.float64, count=sum(lengths))
    bad = np.flatnonzero(~np.isfinite(flat))
    if bad.size:
        ends = np.cumsum(lengths)
        row = int(np.searchsorted(ends, bad[0], side="right"))
        position = int(bad[0] - ends[row]) + lengths[row]
        raise GenerationError(
            f"sample '{active[row].sample_id}': the generator returned logprob {flat[bad[0]]} for new token "
            f"{position} ({bad.size} such values in all); expected finite numbers"
        )


def _miscount(got: int, active: Sequence[Rollout]) -> str | None:
    """Return what is wrong with a count of results, or None if there is one per sample."""
    if got == len(active):
        return None
    fate = f"sample '{active[got].sample_id}' has none" if got < len(active) else "some belong to no sample"
    return f"{got} samples in place of {len(active)}; {fate}"


def _append_answers(
    active: Sequence[Rollout],
    output: GenerationOutput,
    tokenizer: ChatTokenizer,
    sampling: SamplingParams,
) -> None:
    recorded: Sequence[torch.Tensor | None] = output.routes or [None] * len(active)
    for rollout, tokens, logprobs, truncated, routes in zip(
        active, output.token_ids, output.logprobs, output.truncated, recorded
    ):
        rollout.token_ids.extend(tokens)
        rollout.token_mask.extend([1] * len(tokens))
        rollout.logprobs.extend(logprobs)
        rollout.truncated = bool(truncated)
        rollout.turns += 1
        if routes is not None:
            append_routes(rollout, routes)
    check_sampled(tokenizer, output.token_ids, [rollout.sample_id for rollout in active])
    stops = (*sampling.stop_token_ids, *output.stop_token_ids)
    for rollout, text in zip(active, decode_answers(tokenizer, output.token_ids, stops)):
        rollout.messages.append(Message("assistant", text))


# Judging.


def _credit(active: Sequence[Rollout], results: Sequence[StepResult]) -> None:
    for rollout, result in zip(active, results):
        rollout.reward += float(result.reward)
        if not fits_float32(rollout.reward):
            raise RewardError(
                f"sample '{rollout.sample_id}': the rewards of {rollout.turns} turns add up to {rollout.reward!r}; "
                "expected a sum that fits in float32"
            )
        rollout.correct = rollout.correct if result.correct is None else bool(result.correct)
        rollout.metrics.update(result.metrics)


def _append_observations(
    active: Sequence[Rollout],
    results: Sequence[StepResult],
    tokenizer: ChatTokenizer,
    settings: RolloutSettings,
) -> list[Rollout]:
    """Give the environment's messages to the rows that go on, and return those rows."""
    going_on = []
    for rollout, result in zip(active, results):
        if result.done:
            continue
        # The last token is the answer's unless the answer is empty.
        stopped_by = rollout.token_ids[-1] if rollout.token_mask[-1] and not rollout.truncated else None
        ids = render_observation(tokenizer, rollout.messages[:-1], result.observation, stopped_by=stopped_by)
        if len(rollout.token_ids) + len(ids) >= settings.max_total_tokens:
            # No room for another answer: the token limit ends the episode.
            rollout.truncated = True
            continue
        rollout.token_ids.extend(ids)
        rollout.token_mask.extend([0] * len(ids))
        rollout.logprobs.extend([0.0] * len(ids))
        rollout.messages.extend(result.observation)
        going_on.append(rollout)
    return going_on
