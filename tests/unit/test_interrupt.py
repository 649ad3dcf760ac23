"""Ctrl-C, SIGTERM and a terminal that hangs up: the first asks, the second stops."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.utils.interrupt import InterruptFlag

# A suite under nohup has processes that ignore a hangup.
LOOP = """
import signal, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from headrace.utils.interrupt import InterruptFlag
with InterruptFlag() as interrupt:
    print("ready", flush=True)
    while not (interrupt.is_set() and STOPS):
        time.sleep(0.005)
    print("stopped", interrupt.exit_code, flush=True)
"""


@contextmanager
def started(*, stops: bool) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", LOOP.replace("STOPS", str(stops))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_the_first_signal_lets_the_loop_end_by_itself_and_says_so_once(
    number: signal.Signals, code: int
) -> None:
    with started(stops=True) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert out == f"stopped {code}\n"
    assert err.startswith("headrace: stopping")
    assert err.count("\n") == 1
    assert process.returncode == 0


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with InterruptFlag() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupt.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_message_that_nobody_can_read_does_not_end_the_run() -> None:
    source = "import os\nfrom headrace.utils.interrupt import tell_stderr\nos.close(2)\ntell_stderr('x')\nprint('on')"
    assert subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE).stdout == b"on\n"


def test_the_second_signal_stops_a_loop_that_does_not_look() -> None:
    with started(stops=False) as process:
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("headrace: stopping")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode != 0
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_handlers_are_put_back_at_the_end_also_after_an_error() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with InterruptFlag():
        assert signal.getsignal(signal.SIGINT) != before[0]
    with pytest.raises(ZeroDivisionError), InterruptFlag():
        print(1 / 0)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_where_nothing_can_be_lost_the_first_signal_raises_and_is_still_known_afterwards() -> None:
    messages: list[str] = []
    with InterruptFlag(messages.append) as interrupt:
        with pytest.raises(KeyboardInterrupt), interrupt.at_once():
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.is_set()
        assert interrupt.exit_code == 143
        with pytest.raises(KeyboardInterrupt), interrupt.at_once():
            messages.append("a block that a signal from before it should have ended")
    with InterruptFlag(messages.append) as interrupt:
        with interrupt.at_once():
            pass
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.is_set(), "after the block it only asks"
    assert [message.split(";")[0] for message in messages] == ["stopping", "stopping at the next safe point"]


def test_the_message_goes_where_it_is_asked_to() -> None:
    messages: list[str] = []
    with InterruptFlag(messages.append) as interrupt:
        assert not interrupt.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.is_set()
    assert len(messages) == 1


def test_a_flag_can_be_set_by_hand() -> None:
    interrupt = InterruptFlag()
    interrupt.set()
    assert interrupt.is_set()


def test_outside_the_main_thread_the_handlers_stay() -> None:
    before = signal.getsignal(signal.SIGINT)
    inside = []

    def work() -> None:
        with InterruptFlag():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]
