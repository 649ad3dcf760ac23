"""Environments of the package `verifiers` as environments here: their prompts, their turns, their rubric's rewards.

Each sample is one `run_rollout` of theirs, whose model is a client that waits for `step` to bring a completion. Its
next request holds what the environment answered; when it ends, the rubric has scored it.

Source: the package verifiers, classic API (`verifiers.legacy` since 0.2; `verifiers` before), Environment.run_rollout.
"""

import asyncio
import signal
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, get_args

from headrace.config import DataConfig, VerifiersConfig
from headrace.environments.interfaces import Prompts, StepResult, Talks
from headrace.errors import ConfigError, RewardError
from headrace.experience.types import Message, Prompt, Role
from headrace.utils.targets import load_optional

_MODEL, _MOST_WAITING, _END_S = "headrace", 16_384, 1.0
Talk = tuple[Message, ...]


class VerifiersEnvironment:
    """One environment of the package, with its own prompts."""

    def __init__(self, cfg: VerifiersConfig, data: DataConfig) -> None:
        """Load it.

        Raises:
            ConfigError: the package is not installed, or has no classic API; no such environment, one that fails to
                load, or one that needs what is not there: a server that parses calls of tools, rewards of whole
                groups, prompts in parts.
        """
        needs = "env.kind=verifiers needs the package verifiers below 0.4 ({error}); pip install 'headrace[verifiers]'"
        self._who, self._vf = f"env.id={cfg.id}", load_optional("verifiers.legacy", needs)
        with _signals_kept(), _named(self._who):
            self._env = self._vf.load_environment(cfg.id, **cfg.args)
        if self._env.requires_group_rollouts:
            raise ConfigError(
                f"{self._who}: its rubric scores groups of samples together, and samples are scored one by one here"
            )
        if self._env.tool_defs:
            raise ConfigError(
                f"{self._who}: its tools are called by a server that parses calls; use an environment that reads text"
            )
        self._client = _client(self._vf)
        self._rows: dict[str, Any] = {}
        with _named(self._who):
            held_out = self._read("validation", self._env.get_eval_dataset(data.validation_size))
            train = self._read("train", self._env.get_dataset(data.train_size or -1))
        if self._env.eval_dataset is None:
            held_out, train = train[: data.validation_size], train[data.validation_size :]
        asked = {prompt.messages for prompt in held_out}
        self._prompts = {"train": [p for p in train if p.messages not in asked], "validation": held_out}
        if not self._prompts["train"]:
            raise ConfigError(
                f"{self._who}: {len(train) + len(held_out)} prompts leave none to train on beside "
                f"data.validation_size={data.validation_size}; lower that"
            )
        self._waiting: OrderedDict[tuple[str, Talk], list[_Episode]] = OrderedDict()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self._loop,), daemon=True, name="verifiers").start()
        weakref.finalize(self, _end, self._loop)

    def prompts(self, split: str) -> list[Prompt]:
        return list(self._prompts[split])

    def step(self, prompts: Prompts, conversations: Talks, truncated: Sequence[bool]) -> list[StepResult]:
        """Bring each completion to its rollout; return what came of it.

        Raises:
            RewardError: a rollout of the environment failed.
        """
        samples = list(zip(prompts, map(tuple, conversations), truncated))
        # Where samples wait with the same words, any of them may go on with any next word.
        episodes = [self._episode(prompt, talk[:-1]) for prompt, talk, _ in samples]
        answers = [
            asyncio.run_coroutine_threadsafe(episode.answer(talk[-1].content, cut), self._loop)
            for episode, (_, talk, cut) in zip(episodes, samples)
        ]
        results = [answer.result() for answer in answers]
        for episode, (prompt, talk, _), result in zip(episodes, samples, results):
            if not result.done:
                self._waiting.setdefault((prompt.uid, (*talk, *result.observation)), []).append(episode)
        # Of conversations that ended elsewhere, at a limit of turns or tokens, nobody asks again.
        while len(self._waiting) > _MOST_WAITING:
            for episode in self._waiting.popitem(last=False)[1]:
                self._loop.call_soon_threadsafe(episode.cancel)
        return results

    def _episode(self, prompt: Prompt, talk: Talk) -> "_Episode":
        if waiting := self._waiting.get((prompt.uid, talk)):
            episode = waiting.pop()
            if not waiting:
                del self._waiting[prompt.uid, talk]
            return episode
        if talk == prompt.messages:
            return _Episode(self._env, self._client, self._rows[prompt.uid], self._who)
        raise RewardError(f"{self._who}: no rollout of prompt '{prompt.uid}' waits at this turn")

    def _read(self, split: str, rows: Any) -> list[Prompt]:
        found = []
        for row in rows:
            if not all(isinstance(m.get("content"), str) for m in row["prompt"]):
                raise ConfigError(f"{self._who}: row {row['example_id']} has a prompt that is not text")
            uid = f"{split}-{row['example_id']}"
            messages = tuple(Message(m["role"], m["content"]) for m in row["prompt"])
            answer = row.get("answer")
            self._rows[uid] = dict(row)
            found.append(
                Prompt(uid, messages, {"task": "verifiers"}, answer if isinstance(answer, str) else None)
            )
        return found


class _Episode:
    """A rollout of the package, which runs from one request for a completion to the next."""

    def __init__(self, env: Any, client: Any, row: Any, who: str) -> None:
        self._env, self._client, self._row, self._who = env, client, row, who
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._reply: asyncio.Future[Any] | None = None
        self._seen = 0
        self._task: asyncio.Task[Any] | None = None

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def ask(self, prompt: Any) -> Any:
        """Wait for the completion to a conversation."""
        self._reply = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(prompt)
        return await self._reply

    async def answer(self, text: str, truncated: bool) -> StepResult:
        """Give a completion; return the environment's answer to it, or what the rubric says at the end."""
        if self._task is None:
            client = self._client(self)
            self._task = asyncio.create_task(self._env.run_rollout(self._row, client, _MODEL, {}))
            await self._next()
        if self._task.done():
            return self._result()
        assert self._reply is not None
        self._reply.set_result((text, truncated))
        said = await self._next()
        return self._result() if said is None else StepResult(0.0, done=False, observation=said)

    async def _next(self) -> Talk | None:
        """Return what is new in the next request; None once there is none."""
        assert self._task is not None
        request = asyncio.create_task(self._requests.get())
        await asyncio.wait({request, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            return None
        messages = request.result()
        new, self._seen = messages[self._seen :], len(messages) + 1  # and the completion that is awaited
        return tuple(_message(m) for m in new)

    def _result(self) -> StepResult:
        assert self._task is not None
        error = asyncio.CancelledError() if self._task.cancelled() else self._task.exception()
        if error is not None:
            raise RewardError(
                f"{self._who}: a rollout failed with {type(error).__name__}: {error}"
            ) from error
        output = self._task.result()
        if failure := output.get("error"):
            raise RewardError(f"{self._who}: a rollout failed: {' '.join(str(failure).split())[:300]}")
        parts = {f"reward/{name}": float(value) for name, value in (output.get("metrics") or {}).items()}
        return StepResult(float(output["reward"]), metrics=parts)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop, also beyond a rollout that leaves by `sys.exit`; whoever waits for that one is told."""
    while True:
        with suppress(SystemExit):
            loop.run_forever()
            return


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """End a loop with the rollouts that still wait in it, of which Python would tell one by one."""

    async def cancel() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)

    with suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(cancel(), loop).result(2 * _END_S)
    loop.call_soon_threadsafe(loop.stop)


def _message(message: Any) -> Message:
    role, content = message.role, message.content
    if not isinstance(content, str):
        content = "".join(getattr(part, "text", "") for part in content or ())
    return Message(role if role in get_args(Role) else "user", content)


def _client(vf: Any) -> Any:
    """Return a class of clients that answer with what an episode is given."""
    from verifiers.legacy.clients import Client  # noqa: PLC0415  (optional)
    from verifiers.legacy.types import Response, ResponseMessage  # noqa: PLC0415

    class WaitingClient(Client):  # type: ignore[misc]
        """Asks the episode that it is made with."""

        async def get_response(self, prompt: Any, model: str, *_: Any, **__: Any) -> Any:
            text, truncated = await self.client.ask(prompt)
            finish = "length" if truncated else "stop"
            message = ResponseMessage(content=text, finish_reason=finish, is_truncated=truncated)
            return Response(id="", created=0, model=model, message=message)

        async def close(self) -> None:
            pass

        # What only the package's own `get_response` calls.
        def _unused(self, *_: Any) -> Any:
            raise NotImplementedError

        setup_client = to_native_tool = to_native_prompt = get_native_response = _unused
        raise_from_native_response = from_native_response = _unused

    return WaitingClient


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Put back the handlers of signals, which an environment of the package takes for itself."""
    mine = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if mine else ()
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _named(who: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{who}: {' '.join(str(error).split())[:300]}") from error
