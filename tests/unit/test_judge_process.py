"""The judge process: values and failures come back, limits hold, it dies and returns, and it leaves nobody behind."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.environments.judge_process import JudgeProcess, NoVerdict, judge_process
from headrace.environments.task_scorer import TaskScorer
from headrace.errors import HeadraceError


@pytest.fixture(scope="module")
def judge() -> Iterator[JudgeProcess]:
    process = JudgeProcess(limit_s=0.3)
    yield process
    process.close()


def test_a_value_comes_back_from_another_process(judge: JudgeProcess) -> None:
    assert judge.ask(eval, "[1 + 1, True, None, 0.5, 'x']") == [2, True, None, 0.5, "x"]
    assert math.isnan(judge.ask(float, "nan"))
    assert judge.ask(os.getpid) == judge.pid != os.getpid()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sum(k**9 for k in range(10**9))", "it took more than 0.3 s of computing"),
        ("[0] * 10**11", "MemoryError"),
        ("1 / 0", "ZeroDivisionError"),
        ("exit()", "SystemExit"),
        ("nothing", "NameError"),
        ("__import__('os').abort()", "had to be ended"),
        # A sum is made in one go, which no exception interrupts: the second clock kills.
        ("sum(range(10**12))", "had to be ended"),
    ],
)
def test_what_cannot_be_judged_is_no_verdict_and_the_next_question_is_answered(
    judge: JudgeProcess, text: str, reason: str
) -> None:
    with pytest.raises(NoVerdict, match=reason):
        judge.ask(eval, text)
    assert judge.ask(eval, "2 + 2") == 4


def test_a_text_that_sleeps_is_ended_by_the_clock() -> None:
    judge = JudgeProcess(limit_s=0.1)
    with pytest.raises(NoVerdict, match="had to be ended"):
        judge.ask(time.sleep, 1000)
    judge.close()


def test_the_limit_holds_in_every_thread(judge: JudgeProcess) -> None:
    found: list[str] = []

    def ask(text: str) -> None:
        try:
            found.append(str(judge.ask(eval, text)))
        except NoVerdict:
            found.append("none")

    threads = [threading.Thread(target=ask, args=(t,)) for t in ["all(map(int, '1' * 10**9))", "1", "2", "3"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(found) == ["1", "2", "3", "none"]


def test_a_process_that_was_killed_between_questions_is_replaced(judge: JudgeProcess) -> None:
    judge.ask(eval, "1")
    first = judge.pid or 0
    os.kill(first, signal.SIGKILL)
    assert judge.ask(eval, "2") == 2
    assert judge.pid not in (None, first)


def test_a_function_that_cannot_be_loaded_there_is_an_error_and_no_verdict(judge: JudgeProcess) -> None:
    class Stranger:
        def __reduce__(self) -> Any:
            return __import__, ("nowhere_to_be_found",)

    with pytest.raises(
        HeadraceError, match="the process that judges completions cannot load them: ModuleNotFound"
    ):
        judge.ask(len, Stranger())


def test_each_process_has_one_judge() -> None:
    assert judge_process() is judge_process()


def test_a_scorer_travels_as_its_task_and_scores_as_here(judge: JudgeProcess) -> None:
    scorer = TaskScorer("countdown", {"min_numbers": 2, "max_numbers": 3})
    entry = scorer._dataset[0]
    for answer in (entry["answer"], "1 + 1"):
        assert judge.ask(scorer, answer, entry) == scorer(answer, entry)


OWNER = """
import os, pickle, signal
from headrace.environments.judge_process import JudgeProcess
judge = JudgeProcess(limit_s=100)
judge.ask(eval, "1")
{before}
os.write(1, f"{{judge.pid}}\\n".encode())
{after}
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "os.kill(os.getpid(), signal.SIGKILL)"),
        ("", ""),
        (
            "import time; judge._loaded(pickle.dumps((time.sleep, (1000,))))",
            "os.kill(os.getpid(), signal.SIGKILL)",
        ),
    ],
    ids=["killed", "ended", "killed during a question"],
)
def test_the_process_ends_with_its_owner(before: str, after: str) -> None:
    script = OWNER.format(before=before, after=after)
    owner = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    pid = int(owner.stdout)
    deadline = time.monotonic() + 20
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
