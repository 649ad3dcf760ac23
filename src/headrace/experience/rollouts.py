"""Rolling out: prompts to scored samples, over one or several turns.

    render prompts -> [generate -> append and decode -> score -> append observation]* -> Rollout

All samples that are still active take a turn together: one `generate` and one `step` of the environment.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import numpy as np

from headrace.config import RecipeConfig
from headrace.environments.interfaces import Environment, StepResult
from headrace.errors import ConfigError, GenerationError
from headrace.experience.chat import (
    ChatTokenizer,
    UnknownText,
    check_sampled,
    decode_completions,
    render_observation,
    render_prompt,
)
from headrace.experience.metrics import COMPLETIONS, NEW_TOKENS, SECONDS, combine_calls
from headrace.experience.own_columns import columns_asked_for
from headrace.experience.rollout_routes import append_routes, check_recorded
from headrace.experience.scoring import score_group
from headrace.experience.types import Message, Prompt, Rollout
from headrace.models.generation.interfaces import GenerationOutput, Generator, SamplingParams, sampling_params
from headrace.utils.seeding import derive_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutSettings:
    """How long and how samples are made, the same for all of a run.

    `max_total_tokens` bounds a whole sample: the prompt, all completions and all observations. `pad_to_multiple`
    goes with the rows, for the stages that pad them; `columns` are those that a loss of the user's own asks for.
    """

    sampling: SamplingParams
    max_total_tokens: int
    max_turns: int = 1
    pad_to_multiple: int = 1
    columns: tuple[str, ...] = ()

    @classmethod
    def from_recipe(cls, recipe: RecipeConfig) -> "RolloutSettings":
        return cls(
            sampling_params(recipe.generation),
            recipe.policy.max_total_sequence_length,
            recipe.grpo.max_rollout_turns,
            recipe.policy.make_sequence_length_divisible_by,
            columns_asked_for(recipe.loss),
        )


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
) -> tuple[list[Rollout], dict[str, float]]:
    """Sample `group_size` completions per prompt and have the environment score them.

    The result is a function of the weights, the prompts, the settings and `seed`. `tag` goes into the sample
    ids (see `group_ids`); by default it is made of the weight version and the seed, which together name the
    samples. A completion is cut where its sample reaches `settings.max_total_tokens`.

    Returns:
        The samples, the first prompt's group first; and metrics of the generator's calls.

    Raises:
        ConfigError: no prompts, or a prompt that leaves no room for a completion, before anything is generated.
        GenerationError: the generator returns other than one completion per sample, each with one finite logprob
            per token.
        RewardError: the environment returns other than one reward per sample that fits in float32.
    """
    sampling = replace(
        settings.sampling,
        greedy=greedy or settings.sampling.greedy,
        max_total_tokens=settings.max_total_tokens,
    )
    if tag is None:
        tag = f"{generator.weight_version}.{derive_seed(seed, 'tag') >> 31:08x}"
    rollouts = _open_samples(prompts, tokenizer, settings, group_size, tag, generator.weight_version)
    calls: list[dict[str, float]] = []
    active = rollouts
    for turn in range(settings.max_turns):
        output, metrics = _generate(generator, active, sampling, derive_seed(seed, "turn", turn))
        calls.append(metrics)
        _append_completions(active, output, tokenizer, sampling)
        results = score_group(environment, active)
        if settings.max_turns == 1 and not all(result.done for result in results):
            tell_of_one_turn()
        is_last = turn + 1 == settings.max_turns
        active = [] if is_last else _append_observations(active, results, tokenizer, settings)
        if not active:
            break
    return rollouts, combine_calls(calls)


@lru_cache(maxsize=1)
def tell_of_one_turn() -> None:
    """Say, once in a process, that the environment would go on."""
    logger.warning(
        "the environment goes on with a conversation after its first turn, and grpo.max_rollout_turns=1 ends it there; "
        "raise it for more turns"
    )


def prompt_ids(tokenizer: ChatTokenizer, prompt: Prompt) -> list[int]:
    """Return a prompt's ids, as `render_prompt` does; an error of its text names the prompt and its line."""
    try:
        return render_prompt(tokenizer, prompt.messages)
    except UnknownText as error:
        raise UnknownText(f"{prompt.named}: {error}") from error


def render_with_room(tokenizer: ChatTokenizer, prompt: Prompt, max_total_tokens: int) -> list[int]:
    """Return a prompt's ids.

    Raises:
        ConfigError: they leave no room for a completion; names the prompt's uid.
    """
    ids = prompt_ids(tokenizer, prompt)
    if len(ids) >= max_total_tokens:
        raise ConfigError(
            f"{prompt.named} has {len(ids)} tokens and leaves no room for a completion within policy."
            f"max_total_sequence_length={max_total_tokens}; raise it, remove the prompt, or set "
            "data.overlong_prompts=skip or truncate"
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
        ids = render_with_room(tokenizer, prompt, settings.max_total_tokens)
        for index in range(group_size):
            rollout = Rollout(f"{uid}_g{index}", prompt, index, messages=list(prompt.messages))
            rollout.weight_version = rollout.weight_version_min = weight_version
            rollout.append(ids)
            rollouts.append(rollout)
    return rollouts


def _generate(
    generator: Generator, active: Sequence[Rollout], params: SamplingParams, seed: int
) -> tuple[GenerationOutput, dict[str, float]]:
    """Return the output of one call, and what it cost with the generator's own metrics."""
    started = time.perf_counter()
    output = generator.generate([r.token_ids for r in active], params, seed=seed)
    seconds = time.perf_counter() - started
    _check_output(output, active, params)
    if params.record_routes:
        check_recorded(output, active, generator.route_shape)
    return output, {
        "generation/calls": 1.0,
        COMPLETIONS: float(len(output.token_ids)),
        "generation/prompt_tokens": float(sum(len(r.token_ids) for r in active)),
        NEW_TOKENS: float(sum(map(len, output.token_ids))),
        SECONDS: seconds,
        **{f"generator/{name}": value for name, value in output.metrics.items()},
    }


def _check_output(output: GenerationOutput, active: Sequence[Rollout], params: SamplingParams) -> None:
    for name in ("token_ids", "logprobs", "truncated"):
        got = len(getattr(output, name))
        if got != len(active):
            named = f"sample '{active[got].sample_id}' has none" if got < len(active) else None
            raise GenerationError(
                f"the generator returned {name} for {got} samples in place of {len(active)}; "
                f"{named or 'some belong to no sample'}"
            )
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


def _append_completions(
    active: Sequence[Rollout],
    output: GenerationOutput,
    tokenizer: ChatTokenizer,
    sampling: SamplingParams,
) -> None:
    for i, rollout in enumerate(active):
        rollout.append(output.token_ids[i], output.logprobs[i])
        rollout.truncated = bool(output.truncated[i])
        rollout.turns += 1
        if output.weight_versions is not None:
            _append_versions(rollout, output.weight_versions[i])
        if output.routes:
            append_routes(rollout, output.routes[i])
    check_sampled(tokenizer, output.token_ids, [rollout.sample_id for rollout in active])
    stops = (*sampling.stop_token_ids, *output.stop_token_ids)
    for rollout, text in zip(active, decode_completions(tokenizer, output.token_ids, stops)):
        rollout.messages.append(Message("assistant", text))


def _append_versions(rollout: Rollout, versions: Sequence[int]) -> None:
    """Note the versions of the tokens that were just drawn; those before them that have none yet were not drawn."""
    missing = len(rollout.token_ids) - len(rollout.token_versions) - len(versions)
    is_first = not any(version >= 0 for version in rollout.token_versions)
    rollout.token_versions += [*[-1] * missing, *versions]
    if versions:
        rollout.weight_version = versions[-1]
        rollout.weight_version_min = versions[0] if is_first else rollout.weight_version_min


def _append_observations(
    active: Sequence[Rollout],
    results: Sequence[StepResult],
    tokenizer: ChatTokenizer,
    settings: RolloutSettings,
) -> list[Rollout]:
    """Give the environment's messages to the samples that go on, and return those."""
    going_on = []
    for rollout, result in zip(active, results):
        if result.done:
            continue
        # The last token is the completion's unless the completion is empty.
        stopped_by = rollout.token_ids[-1] if rollout.token_mask[-1] and not rollout.truncated else None
        ids = render_observation(tokenizer, rollout.messages[:-1], result.observation, stopped_by=stopped_by)
        if len(rollout.token_ids) + len(ids) >= settings.max_total_tokens:
            # No room for another completion: the token limit ends the episode.
            rollout.truncated = True
            continue
        rollout.append(ids)
        rollout.messages.extend(result.observation)
        going_on.append(rollout)
    return going_on
