"""Naive truth for rollouts, and small real parts to roll out with: a bigram model and a guessing game."""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.environments.interfaces import StepResult
from headrace.experience.flatten import per_sample_values
from headrace.experience.metrics import rollout_metrics
from headrace.experience.types import Message, Prompt, Rollout
from headrace.models.generation.interfaces import GenerationOutput, SamplingParams
from headrace.models.tokenizers import build_character_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# A template with markers per role, as chat models have: <role>text<|end|>, and <assistant> to open an answer.
ROLE_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] | upper }}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)


def character_tokenizer(template: str | None = ROLE_TEMPLATE) -> Any:
    """Return a tokenizer of letters and the role marks S, U, A and T."""
    tokenizer = build_character_tokenizer(LETTERS + "SUAT")
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


class BigramGenerator:
    """A language model whose next token depends on the last one: a table drawn from `model_seed`.

    Row r of a call draws with its own numbers, from (seed, r). The end token has probability `end`.
    """

    def __init__(self, tokenizer: Any, *, model_seed: int = 0, end: float = 0.3) -> None:
        self.weight_version = 0
        self.route_shape = None
        self.calls: list[list[list[int]]] = []
        self.limits: list[list[int]] = []
        self.releases = 0
        self._end_id = int(tokenizer.eos_token_id)
        self._letters = tokenizer.convert_tokens_to_ids(list(LETTERS))
        table = random.Random(model_seed)
        self._table = {last: self._distribution(table, end) for last in range(len(tokenizer.get_vocab()))}

    def _distribution(self, table: random.Random, end: float) -> dict[int, float]:
        weights = [table.random() for _ in self._letters]
        total = sum(weights)
        letters = {i: (1 - end) * w / total for i, w in zip(self._letters, weights)}
        return {self._end_id: end, **letters}

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int
    ) -> GenerationOutput:
        self.calls.append([list(p) for p in prompts])
        self.limits.append([params.limit(len(p)) for p in prompts])
        rows = [self._row(p, params, random.Random(f"{seed}/{r}")) for r, p in enumerate(prompts)]
        return GenerationOutput(
            [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows], {"rows_max": float(len(rows))}
        )

    def _row(
        self, prompt: Sequence[int], params: SamplingParams, draws: random.Random
    ) -> tuple[list[int], list[float], bool]:
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < params.limit(len(prompt)):
            odds = self._table[tokens[-1] if tokens else prompt[-1]]
            token = (
                max(odds, key=odds.__getitem__) if params.greedy else draws.choices(*zip(*odds.items()))[0]
            )
            tokens.append(token)
            logprobs.append(math.log(odds[token]))
            if token == self._end_id or token in params.stop_token_ids:
                return tokens, logprobs, False
        return tokens, logprobs, True

    def update_weights(self, named_tensors: Iterable[tuple[str, Any]], version: int) -> None:
        self.weight_version = version

    def release(self) -> None:
        self.releases += 1

    def shutdown(self) -> None:
        self._table = {}


@dataclass
class GuessingGame:
    """Say a text that holds the secret letter. A wrong guess costs 0.25 and is answered with a hint.

    The hint's length depends on the guess, so rows of one batch differ in length and in number of turns.
    """

    secrets: str = "etaoin"
    role: Any = "user"
    prompt_lengths: tuple[int, ...] = (3, 3, 7, 1)
    judged: list[int] = field(default_factory=list)

    def prompts(self, split: str) -> list[Prompt]:
        draws = random.Random(split)
        return [
            Prompt(
                uid=f"{split}{i}",
                messages=(Message("user", "".join(draws.choices(LETTERS, k=length))),),
                info={"secret": self.secrets[i % len(self.secrets)], "task": "guess"},
                answer=self.secrets[i % len(self.secrets)],
            )
            for i, length in enumerate(self.prompt_lengths)
        ]

    def step(
        self, prompts: Sequence[Prompt], conversations: Sequence[Sequence[Message]], truncated: Sequence[bool]
    ) -> list[StepResult]:
        self.judged.append(len(prompts))
        return [self._judge(p, c[-1].content) for p, c in zip(prompts, conversations, strict=True)]

    def _judge(self, prompt: Prompt, guess: str) -> StepResult:
        right = prompt.info["secret"] in guess
        if right:
            return StepResult(reward=1.0, correct=True, metrics={"guess_length": float(len(guess))})
        hint = "no" * (1 + len(guess) % 3)
        return StepResult(reward=-0.25, done=False, observation=(Message(self.role, hint),), correct=False)


class Played(NamedTuple):
    """What `run_rollouts` returns, and the metrics of its samples."""

    rollouts: list[Rollout]
    generation_metrics: dict[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        return rollout_metrics(per_sample_values(self.rollouts))


@dataclass
class NaiveSample:
    """One sample as `naive_rollouts` makes it."""

    token_ids: list[int]
    token_mask: list[int]
    logprobs: list[float]
    texts: list[str]
    reward: float
    truncated: bool
    turns: int


def naive_rollouts(
    prompts: Sequence[Prompt],
    generator: BigramGenerator,
    tokenizer: Any,
    game: GuessingGame,
    *,
    group_size: int,
    max_new_tokens: int,
    max_total_tokens: int,
    max_turns: int,
    seeds: Sequence[int],
) -> list[NaiveSample]:
    """Play the game token by token, the role template written out by hand; turn t draws from `seeds[t]`."""
    end = tokenizer.eos_token

    def encode(text: str) -> list[int]:
        return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]

    samples, owners = [], []
    for prompt in prompts:
        for _ in range(group_size):
            ids = encode("U" + prompt.messages[0].content + end + "A")
            samples.append(NaiveSample(ids, [0] * len(ids), [0.0] * len(ids), [], 0.0, True, 0))
            owners.append(prompt)
    active = list(range(len(samples)))
    for turn in range(max_turns):
        still = []
        room = max(max_total_tokens - len(samples[i].token_ids) for i in active)
        params = SamplingParams(max_new_tokens=min(max_new_tokens, room))
        answers = generator.generate([samples[i].token_ids for i in active], params, seed=seeds[turn])
        for place, i in enumerate(active):
            sample, text, ended = samples[i], "", not answers.truncated[place]
            for token, logprob in zip(answers.token_ids[place], answers.logprobs[place]):
                if len(sample.token_ids) == max_total_tokens:
                    ended = False
                    break
                sample.token_ids.append(token)
                sample.token_mask.append(1)
                sample.logprobs.append(logprob)
                letter = tokenizer.convert_ids_to_tokens(token)
                text += letter if letter != end else ""
            sample.texts.append(text)
            sample.truncated = not ended
            sample.turns += 1
            result = game._judge(owners[i], text)
            sample.reward += result.reward
            if result.done or turn + 1 == max_turns:
                continue
            closing = "" if ended else end
            extra = encode(closing + "U" + result.observation[0].content + end + "A")
            if len(sample.token_ids) + len(extra) >= max_total_tokens:
                sample.truncated = True
                continue
            for token in extra:
                sample.token_ids.append(token)
                sample.token_mask.append(0)
                sample.logprobs.append(0.0)
            still.append(i)
        active = still
        if not active:
            break
    return samples


def naive_padded(rows: Sequence[Sequence[float]], width: int, pad: float) -> list[list[float]]:
    """Return rows padded on the right, one by one."""
    return [list(row) + [pad] * (width - len(row)) for row in rows]
