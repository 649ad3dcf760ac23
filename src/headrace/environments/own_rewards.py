"""Rewards by functions of a user's own, beside those that come along; weighed, counted and logged one by one."""

import logging
import queue
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.config import DatasetConfig, RewardFunctionConfig
from headrace.environments.interfaces import Reward, StepResult
from headrace.environments.judge_process import JudgeProcess, NoVerdict
from headrace.environments.reward_calls import Reply, RewardFunction, Sample, call_reward, reward_function
from headrace.errors import ConfigError, RewardError
from headrace.experience.types import Prompt
from headrace.utils.background import in_background
from headrace.utils.targets import is_local

logger = logging.getLogger(__name__)

FAILED_CALL = re.compile(r"reward/[^/]+_errors")
"""The metric of a sample that tells whether a function failed on it."""
_MOST_FAILED, _MOST_FAILED_BATCHES = 32, 3


@dataclass
class OwnRewards:
    """The rewards of an `env.rewards` list. Functions run beside this process, or in it where there is no time limit.

    A call that raises, or takes too long, counts as 0 and in `reward/NAME_errors`. If 32 do in a row (3, of a
    function of all completions), with no good one in their batches, the run ends with a RewardError. So it does for a
    result of another type.
    """

    cfg: DatasetConfig
    built_in: dict[str, Reward]
    functions: dict[str, RewardFunction] = field(init=False)
    _pool: "_Processes" = field(init=False)
    _told: set[str] = field(default_factory=set, init=False)
    _failed: Counter[str] = field(default_factory=Counter, init=False)
    """Of each function, the calls that failed since a batch in which one did not."""

    def __post_init__(self) -> None:
        own = [spec for spec in self.cfg.rewards if spec.target not in self.built_in]
        self.functions = {spec.target: reward_function(spec.target) for spec in own}
        self._pool = _Processes(self.cfg.reward_workers, self.cfg.reward_timeout_s)

    def probe(self, prompt: Prompt) -> None:
        """Call each function once, with the right answer (or nothing) as the completion, before anything is trained.

        Raises:
            ConfigError: it raises, takes too long, or returns something else than a reward.
        """
        for spec in self.cfg.rewards:
            if function := self.functions.get(spec.target):
                (reply,) = self._pool.call(function, [_sample(prompt, prompt.answer or "", False)])
                if reply[0] != "ok":
                    raise ConfigError(
                        f"env.rewards={spec.target}: tried on prompt '{prompt.uid}', it {_told(reply)}; mend it"
                    )

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], truncated: Sequence[bool]
    ) -> list[StepResult]:
        parts = [self._values(spec, prompts, completions, truncated) for spec in self.cfg.rewards]
        results = []
        for row in zip(*parts):
            total = sum(spec.weight * part.reward for spec, part in zip(self.cfg.rewards, row))
            correct = next((part.correct for part in row if part.correct is not None), None)
            answer = next((part.answer for part in row if part.answer is not None), None)
            metrics = {name: value for part in row for name, value in part.metrics.items()}
            results.append(StepResult(total, correct=correct, answer=answer, metrics=metrics))
        return results

    def _values(
        self,
        spec: RewardFunctionConfig,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        truncated: Sequence[bool],
    ) -> list[StepResult]:
        """Return what one function gives each sample, not weighed, with its metrics."""
        rows = list(zip(prompts, completions, truncated))
        if spec.target in self.built_in:
            found = [self.built_in[spec.target](*row) for row in rows]
            named = [{f"reward/{spec.label}": result.reward, **result.metrics} for result in found]
            return [
                StepResult(r.reward, correct=r.correct, answer=r.answer, metrics=m)
                for r, m in zip(found, named)
            ]
        replies = self._pool.call(self.functions[spec.target], [_sample(*row) for row in rows])
        self._watch(spec, replies, [prompt.uid for prompt in prompts])
        return [_result(spec.label, reply) for reply in replies]

    def _watch(self, spec: RewardFunctionConfig, replies: Sequence[Reply], uids: Sequence[str]) -> None:
        failed = [i for i, reply in enumerate(replies) if reply[0] == "error"]
        wrong = next((i for i, reply in enumerate(replies) if reply[0] == "wrong"), None)
        who = f"reward function {spec.target}"
        if wrong is not None:
            raise RewardError(f"{who} {_told(replies[wrong])} (prompt '{uids[wrong]}')")
        in_a_row = self._failed_in_a_row(spec.target, len(failed), len(replies))
        if not failed:
            return
        told = f"of prompt '{uids[failed[0]]}' it {_told(replies[failed[0]])}"
        if in_a_row:
            raise RewardError(
                f"{who} failed on {in_a_row} calls in a row; {told}; mend it, or remove it from env.rewards"
            )
        if spec.target not in self._told:
            self._told.add(spec.target)
            logger.warning(
                "%s failed on %d of %d samples; %s; such samples get 0 of it, and count in reward/%s_errors",
                who,
                len(failed),
                len(replies),
                told,
                spec.label,
            )

    def _failed_in_a_row(self, target: str, failed: int, count: int) -> int:
        """Count the failures of a batch; return how many calls failed in a row, 0 while that may be chance."""
        if not failed or failed < count:
            self._failed[target] = 0
            return 0
        is_batched = self.functions[target].is_batched
        self._failed[target] += 1 if is_batched else count
        in_a_row = self._failed[target]
        return in_a_row if in_a_row >= (_MOST_FAILED_BATCHES if is_batched else _MOST_FAILED) else 0


class _Processes:
    """Processes beside this one, and threads that ask them; without a limit, functions run here."""

    def __init__(self, count: int, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._count = count
        self._free: queue.SimpleQueue[JudgeProcess] = queue.SimpleQueue()
        if timeout_s is not None:
            for _ in range(count):
                # A little more, so that of asynchronous calls those that are late are told from the others.
                self._free.put(JudgeProcess(limit_s=1.1 * timeout_s, code_of_user=True))

    def call(self, function: RewardFunction, samples: Sequence[Sample]) -> list[Reply]:
        if self._timeout_s is None or is_local(function.target):
            replies = call_reward(function, samples, self._timeout_s)
        elif function.is_batched or function.is_async:
            replies = self._ask(function, samples)
        else:
            replies = self._ask_one_by_one(function, samples)
        # One reply that is wrong may stand for all.
        return replies if len(replies) == len(samples) else replies * len(samples)

    def _ask_one_by_one(self, function: RewardFunction, samples: Sequence[Sample]) -> list[Reply]:
        places, replies = iter(range(len(samples))), dict[int, Reply]()

        def work() -> None:
            for place in places:
                (replies[place],) = self._ask(function, [samples[place]])

        try:
            for worker in [in_background(work, "rewards") for _ in range(min(self._count, len(samples)))]:
                worker.result()
        finally:
            list(places)  # after an error or an interrupt, no more are asked
        return [replies[place] for place in range(len(samples))]

    def _ask(self, function: RewardFunction, samples: Sequence[Sample]) -> list[Reply]:
        process = self._free.get()
        try:
            replies: list[Reply] = process.ask(call_reward, function, list(samples), self._timeout_s)
            return replies
        except NoVerdict as error:
            told = f"took more than {self._timeout_s:g} s"
            if "more than" not in str(error):
                told += f", or ended its process ({error})"
            return [["error", told]] * len(samples)
        finally:
            self._free.put(process)


def _sample(prompt: Prompt, completion: str, truncated: bool) -> Sample:
    messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
    own = {"answer": prompt.answer, "messages": messages, "uid": prompt.uid, "truncated": truncated}
    return prompt.messages[-1].content, completion, {**prompt.info, **own}


def _result(label: str, reply: Reply) -> StepResult:
    name = f"reward/{label}"
    metrics = {f"{name}_errors": float(reply[0] == "error")}
    if reply[0] == "error":
        return StepResult(0.0, metrics=metrics)
    value: Any = reply[1] if isinstance(reply[1], dict) else {"reward": reply[1]}
    metrics[name] = value["reward"]
    metrics |= {f"{name}/{k}": v for k, v in value.items() if k not in ("reward", "correct", "answer")}
    return StepResult(
        value["reward"], correct=value.get("correct"), answer=value.get("answer"), metrics=metrics
    )


def _told(reply: Reply) -> str:
    kind, text = reply
    if kind == "wrong":
        return f"returned {text}"
    return text.removeprefix("it ") if text.startswith(("it ", "took ")) else f"raised {text}"
