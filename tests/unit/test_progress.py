"""What a run shows and writes: plain lines in a pipe, a picture on a terminal, the same files with both."""

import io
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.algorithms.observer import (
    COLLECTORS_WAIT_S,
    FAILED_CALLS,
    GREEDY_ACCURACY,
    LAG,
    REWARD,
    SAMPLED_ACCURACY,
    StepRecord,
)
from headrace.live_view import Pace, ViewState, render, sparkline
from headrace.progress import CompositeObserver, ConsoleObserver, FileObserver
from headrace.run_tables import (
    RunTotals,
    final_tables,
    format_bytes,
    format_clock,
    format_number,
    format_seconds,
    metrics_table,
    render_text,
    summary_table,
)
from headrace.utils.run_directory import RunDirectory, read_log
from toy_run import COLUMN_BYTES, TOKENS, toy_record

TOY = str(Path(__file__).parent.parent / "toy_run.py")
ESCAPE = "\x1b"


def toy_in_a_pipe(run_dir: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, TOY, str(run_dir), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        check=True,
    )


def test_a_pipe_gets_plain_lines_and_few_of_them(tmp_path: Path) -> None:
    out = toy_in_a_pipe(tmp_path, "auto", "30", "0.001").stdout
    assert ESCAPE not in out
    assert "\r" not in out
    lines = out.splitlines()
    assert lines[0] == "steps 1 to 30 (model toy, 0.1 M · device cpu)"
    assert [line for line in lines if line.startswith("warm_start")] == [
        "warm_start: 40 steps",
        "warm_start 10/40, loss 1.104",
        "warm_start 20/40, loss 0.406",
        "warm_start 30/40, loss 0.1494",
        "warm_start 40/40, loss 0.05495",
    ]
    assert "validation at step 0: greedy 46.0%, sampled 37.0%" in lines
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split(",")[0] for line in steps] == ["step 1/30", "step 10/30", "step 20/30", "step 30/30"]
    assert re.search(r"reward 0\.\d{3}, [45],\d{3} tokens/s, 600\.0 ms per step, 0:\d\d left", steps[1])
    assert "left" not in steps[-1]
    assert sum(line.startswith("checkpoint of step") for line in lines) == 6


def test_a_pipe_stays_plain_when_the_environment_forces_colours(tmp_path: Path) -> None:
    out = toy_in_a_pipe(tmp_path, "auto", "3", "0.001", FORCE_COLOR="1").stdout
    assert "\x1b[?25l" not in out
    assert "\x1b[1A" not in out
    assert "step 3/3" in out


def test_off_prints_the_result_only(tmp_path: Path) -> None:
    out = toy_in_a_pipe(tmp_path, "off", "3", "0.001").stdout
    assert "step 1" not in out
    assert "warm_start" not in out
    assert re.search(r"greedy +46\.0% +46\.0%", out)
    assert re.search(r"sampled +37\.0% +37\.0%", out)


def toy_on_a_terminal(
    run_dir: Path,
    *arguments: str,
    ctrl_c_after: Sequence[str] = (),
    hang_up_after: str | None = None,
    width: int = 100,
    code: str | None = None,
) -> tuple[int, str]:
    """Run the toy on a pseudo-terminal; type a Ctrl-C when each text has appeared. Return exit code and output.

    `code` runs in place of the toy's own. The terminal hangs up when a text has appeared.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(width), LINES="40")
        os.chdir(Path(TOY).parent)
        script = [TOY] if code is None else ["-c", code]
        os.execv(sys.executable, [sys.executable, *script, str(run_dir), *arguments])
    output, left, deadline = "", list(ctrl_c_after), time.monotonic() + 60
    while time.monotonic() < deadline and not (hang_up_after and hang_up_after in output):
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # the terminal's other end is closed
                break
            if not chunk:
                break
            output += chunk.decode(errors="replace")
        if left and left[0] in output:
            os.write(terminal, b"\x03")
            left.pop(0)
    if hang_up_after:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    if not hang_up_after:
        os.close(terminal)
    return os.waitstatus_to_exitcode(status), output


def test_a_terminal_gets_a_picture_that_is_gone_at_the_end(tmp_path: Path) -> None:
    code, output = toy_on_a_terminal(tmp_path, "auto", "20", "0.05")
    assert code == 0
    assert "\x1b[?25l" in output  # the cursor is hidden ...
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # ... and comes back
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    for part in (
        "reward",
        "grad norm",
        "tokens/s",
        "greedy accuracy",
        "data plane",
        "rollout",
        "gone",
        "left",
    ):
        assert part in text
    assert "toy, 0.1 M" in text
    assert re.search(r"step 1\d/20", text)
    end = text[text.rindex("held-out accuracy") :]
    assert re.search(r"greedy +46\.0% +80\.6%", end)
    assert "│" not in end


def test_ctrl_c_on_a_terminal_stops_after_the_step_and_says_so(tmp_path: Path) -> None:
    code, output = toy_on_a_terminal(tmp_path, "auto", "1000", "0.05", ctrl_c_after=["grad norm"])
    assert code == 130
    assert "stopping at the next safe point" in output
    with RunDirectory.open(tmp_path, recipe_text="seed: 0\n") as run:
        assert run.resume_from is not None
        steps = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
        assert steps[-1]["step"] == run.resume_from.step


# As where a library in C does not come back: nothing is unwound after the second Ctrl-C.
CUT_OFF = """
import os, sys
from toy_run import *
with (
    RunDirectory.open(sys.argv[1], recipe_text="seed: 0") as run,
    ConsoleObserver(make_console(), title="x") as display,
    InterruptFlag(display.notice, display.show_cursor) as interrupt,
):
    try:
        toy_loop(run, display, interrupt, steps=1000, step_s=2)
    except KeyboardInterrupt:
        os._exit(7)
"""


def test_the_second_ctrl_c_shows_the_cursor_again_whatever_happens_then(tmp_path: Path) -> None:
    stops = ["once more to stop at once"]
    code, output = toy_on_a_terminal(tmp_path, code=CUT_OFF, ctrl_c_after=["step 0/1000", *stops])
    assert code == 7
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


# The signal alone: test_interrupt; a signal and the checkpoint: below, in a pipe.
@pytest.mark.slow
def test_a_terminal_that_hangs_up_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    code, _ = toy_on_a_terminal(tmp_path, "auto", "1000", "0.05", hang_up_after="grad norm")
    assert code == 129
    with RunDirectory.open(tmp_path, recipe_text="seed: 0\n") as run:
        assert run.resume_from is not None
        steps = [json.loads(line) for line in run.metrics_path.read_text().split("\n")[:-1]]
        assert steps[-1]["step"] == run.resume_from.step


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    command = [sys.executable, TOY, str(tmp_path), "auto", "40", "0.02"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait() == 0
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 40


def test_a_narrow_terminal_does_not_break_the_picture(tmp_path: Path) -> None:
    code, output = toy_on_a_terminal(tmp_path, "auto", "5", "0.05", width=50)
    assert code == 0
    assert "Traceback" not in output


def test_a_signal_in_a_pipe_ends_with_a_checkpoint_and_whole_files(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, TOY, str(tmp_path), "auto", "100000", "0.01"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while "step 10/" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "headrace: stopping at the next safe point; once more to stop at once\n"
    hidden = [p.name for p in tmp_path.rglob(".*") if p.name not in (".headrace-lock", ".headrace-run")]
    assert hidden == []
    for log in ("metrics.jsonl", "samples.jsonl"):
        assert all(json.loads(line) for line in (tmp_path / log).read_text().splitlines())
    assert not (tmp_path / "summary.json").exists()


def test_a_continued_run_counts_from_its_checkpoint(tmp_path: Path) -> None:
    toy_in_a_pipe(tmp_path, "auto", "10", "0.001")
    out = toy_in_a_pipe(tmp_path, "auto", "20", "0.001").stdout
    lines = out.splitlines()
    assert lines[0].startswith("steps 11 to 20")
    assert not any("warm_start" in line for line in lines)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if s["kind"] == "step"] == list(range(1, 21))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    with RunDirectory.open(tmp_path / "run", recipe_text="seed: 0\n") as opened:
        yield opened


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_one_flat_line_of_metrics(run: RunDirectory) -> None:
    files = FileObserver(run)
    files.on_step(
        StepRecord(3, 9, {REWARD: 0.5, "train/loss": float("nan")}, {"rollout": 1.5}, 70, {"input_ids": 560})
    )
    files.on_validation(3, {GREEDY_ACCURACY: 0.75})
    files.on_phase_progress("warm_start", 20, {"loss": 2.0})
    assert read_lines(run.metrics_path) == [
        {
            "kind": "step",
            "step": 3,
            "phase": "grpo",
            "reward/mean": 0.5,
            "train/loss": None,
            "tokens": 70,
            "time_s/rollout": 1.5,
            "bytes/input_ids": 560,
        },
        {"kind": "validation", "step": 3, "validation/accuracy": 0.75},
        {"kind": "phase", "step": 20, "phase": "warm_start", "warm_start/loss": 2.0},
    ]


def test_metrics_may_be_numpy_or_torch_numbers(run: RunDirectory) -> None:
    import numpy
    import torch

    metrics: dict[str, Any] = {"a": numpy.float32(0.5), "b": torch.tensor(0.25), "c": numpy.int64(3)}
    FileObserver(run).on_validation(1, metrics)
    assert read_lines(run.metrics_path)[0] == {"kind": "validation", "step": 1, "a": 0.5, "b": 0.25, "c": 3}


def test_samples_and_summary_are_written(run: RunDirectory) -> None:
    files = FileObserver(run)
    files.on_samples(4, "train", [{"answer": "één", "reward": 1.0}, {"answer": "b", "reward": 0.0}])
    files.on_finish({"steps": 4})
    assert read_lines(run.samples_path)[0] == {"step": 4, "split": "train", "answer": "één", "reward": 1.0}
    assert len(read_lines(run.samples_path)) == 2
    assert json.loads(run.summary_path.read_text()) == {"steps": 4}


def test_half_a_surrogate_pair_in_a_sample_is_a_question_mark_and_its_line_reads_back(
    run: RunDirectory,
) -> None:
    FileObserver(run).on_samples(
        4, "train", [{"answer": "a\ud83db", "reward": 1.0}, {"answer": "\U0001f600"}]
    )
    assert [line.value["answer"] for line in read_log(run.samples_path)] == ["a?b", "\U0001f600"]


def test_a_summary_goes_when_there_are_steps_to_run_and_stays_otherwise(run: RunDirectory) -> None:
    files = FileObserver(run)
    files.on_finish({"steps": 4})
    files.on_start(total_steps=4, first_step=5, info={})
    assert run.summary_path.exists()
    files.on_start(total_steps=6, first_step=5, info={})
    assert not run.summary_path.exists()


def test_a_composite_passes_every_event_on_in_order(tmp_path: Path) -> None:
    with (
        RunDirectory.open(tmp_path / "a", recipe_text="seed: 0") as first,
        RunDirectory.open(tmp_path / "b", recipe_text="seed: 0") as second,
    ):
        both = CompositeObserver([FileObserver(r) for r in (first, second)])
        both.on_start(total_steps=1, first_step=1, info={})
        both.on_phase("warm_start", 1)
        both.on_phase_progress("warm_start", 1, {"loss": 1.0})
        both.on_stage(1, "rollout")
        both.on_step(toy_record(1, 1, random.Random(0)))
        both.on_validation(1, {GREEDY_ACCURACY: 1.0})
        both.on_samples(1, "train", [{"answer": "x"}])
        both.on_checkpoint(1, tmp_path)
        both.on_finish({"steps": 1})
        for name in ("metrics.jsonl", "samples.jsonl", "summary.json"):
            assert (first.path / name).read_text() == (second.path / name).read_text() != ""


def test_a_display_survives_steps_without_the_usual_metrics() -> None:
    console = Console(file=io.StringIO(), width=80)
    display = ConsoleObserver(console, title="x")
    display.on_start(total_steps=2, first_step=1, info={})
    display.on_step(StepRecord(1, 2, {}, {}, 0, {}))
    display.on_step(StepRecord(2, 2, {"odd": float("nan")}, {"new_stage": 0.1}, 0, {}))
    display.on_validation(2, {"validation/pass@4": 0.5})
    display.on_finish({})
    assert isinstance(console.file, io.StringIO)
    assert "validation at step 2: pass@4 50.0%" in console.file.getvalue()


def picture(state: ViewState, now_s: float, width: int = 100) -> str:
    return render_text(render(state, now_s, width), width)


def test_the_picture_shows_progress_metrics_stages_and_bytes() -> None:
    state = ViewState("runs/demo", info={"model": "tiny"}, pace=Pace(80, done=0, started_s=100.0))
    assert state.pace is not None
    for step in range(1, 41):
        state.pace.advance(step, 100.0 + step)
        state.add(toy_record(step, 80, random.Random(step)))
    state.validation = (40, {GREEDY_ACCURACY: 0.9, SAMPLED_ACCURACY: 0.8})
    state.notice = "stopping soon"
    text = picture(state, 140.0)
    for part in ("step 40/80", "0:40 gone, 0:40 left", "90.0%", "80.0%", "step 40", "stopping soon", "tiny"):
        assert part in text
    assert re.search(r"rollout +300\.0 ms .*50%", text)
    in_step, in_all = sum(COLUMN_BYTES.values()), 40 * sum(COLUMN_BYTES.values())
    assert format_bytes(in_step) in text
    assert f"{format_bytes(in_all)} in all" in text
    assert max(map(len, text.splitlines())) <= 96


@pytest.mark.parametrize("width", [60, 80, 200])
def test_an_asynchronous_run_shows_its_lag_its_waits_and_what_was_lost(width: int) -> None:
    state = ViewState("runs/demo", pace=Pace(80, started_s=100.0))
    for step in (1, 2):
        record = toy_record(step, 80, random.Random(step))
        record.metrics.update({LAG: 0.75, COLLECTORS_WAIT_S: 1.5, FAILED_CALLS: 2.0})
        state.add(record)
    text = picture(state, 140.0, width)
    for part in (r"lag +0\.75 +steps", r"collectors wait +1\.50 s", "failed calls +4 +made again"):
        assert re.search(part, text)
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [50, 60, 80, 100])
def test_nothing_is_cut_off_on_a_narrow_terminal(width: int) -> None:
    info = {
        "model": "1.7 M parameters, float32",
        "batch": "32 prompts x 8 samples",
        "prompts": "8,192 to train on",
    }
    state = ViewState(
        "runs/" + "long/" * 20, info=info, pace=Pace(80, started_s=100.0), activity="reference_logprobs"
    )
    totals = RunTotals()
    for step in range(1, 41):
        assert state.pace is not None
        state.pace.advance(step, 100.0 + 60 * step)
        state.add(toy_record(step, 80, random.Random(step)))
        totals.add({"reference_logprobs": 100.0}, {"reference_policy_logprobs": 10**11}, 5125)
    state.validation = (40, {GREEDY_ACCURACY: 0.9, SAMPLED_ACCURACY: 0.8})
    summary = summary_table({"val_accuracy_before": 0.125, "val_accuracy_after": 0.5})
    shown = (
        picture(state, 2540.0, width) + render_text(final_tables(totals), width) + render_text(summary, width)
    )
    assert max(map(len, shown.split("\n"))) <= width
    assert "…" not in shown
    words = shown.replace("│", " ").split()
    for part in (
        "40:40 gone, 39:20 left",
        "reference_logprobs",
        "greedy accuracy 90.0% step 40",
        "50%",
        "35%",
        "12%",
    ):
        assert part in " ".join(words)
    for part in (
        "1.7 M parameters",
        "8,192 to train on",
        "1:06:40",
        "100 GB",
        "4.00 TB",
        "100.0%",
        "12.5%",
        "50.0%",
    ):
        assert part in " ".join(words)
    assert "runs/" + "long/" * 20 in "".join(words)
    assert "reference_policy_logprobs" in re.sub(r"[ \d.,%TGB]*\n ", "", shown)


def test_time_left_follows_the_steps_of_this_session_and_shrinks_within_a_step() -> None:
    pace = Pace(total=100, first=51, done=50, started_s=10.0)
    assert pace.left_s(11.0) is None
    pace.advance(60, 30.0)  # 10 steps in 20 s, 40 steps to go
    assert pace.left_s(30.0) == 80.0
    assert pace.left_s(35.0) == 75.0
    assert pace.left_s(1000.0) == 0.0


def test_sparklines_go_from_the_least_to_the_greatest() -> None:
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▅"


def test_the_final_tables_sum_up_time_and_bytes() -> None:
    totals = RunTotals()
    totals.add({"train": 1.0, "rollout": 3.0}, {"input_ids": 800, "token_mask": 100}, tokens=100)
    totals.add({"rollout": 3.0, "train": 1.0, "validation": 2.0}, {"input_ids": 800}, tokens=100)
    rows = [line.split() for line in render_text(final_tables(totals)).splitlines() if line.strip()]
    assert ["rollout", "6.00", "s", "3.00", "s", "2", "60.0%"] in rows
    assert ["train", "2.00", "s", "1.00", "s", "2", "20.0%"] in rows
    assert ["validation", "2.00", "s", "2.00", "s", "1", "20.0%"] in rows
    assert ["all", "10.00", "s", "5.00", "s", "2"] in rows
    assert ["input_ids", "1.60", "kB", "800", "B", "8.00", "B", "94.1%"] in rows
    assert ["all", "1.70", "kB", "850", "B", "8.50", "B"] in rows
    stages = [row[0] for row in rows]
    assert stages.index("rollout") < stages.index("train") < stages.index("validation")


def test_a_run_that_moved_no_bytes_has_no_table_of_them() -> None:
    totals = RunTotals()
    totals.add({"rollout": 1.0}, {}, tokens=0)
    assert "column" not in render_text(final_tables(totals))


def test_names_with_brackets_are_shown_as_they_are_everywhere() -> None:
    totals = RunTotals()
    totals.add({"[/x]": 1.0}, {"[bold]y": 5}, tokens=1)
    state = ViewState("t", activity="[/a]")
    state.validation = (1, {"validation/[/x]/pass@2": 0.5, "validation/[bold]y/pass@2": 0.5})
    measured = {"validation/[/x]/reward": 0.5, "validation/[bold]y/reward": 0.5}
    for shown in (final_tables(totals), metrics_table(measured), summary_table({"[/x]": "[bold]y"})):
        assert all(name in render_text(shown) for name in ("[/x]", "[bold]y"))
    assert all(name in picture(state, 1.0) for name in ("[/x]/pass@2", "[bold]y/pass@2", "[/a]"))
    state.metrics, state.label = {"[/m]": 1.0}, "warm_start"
    assert "[/m]" in picture(state, 1.0)


def test_the_result_says_before_and_after() -> None:
    text = render_text(
        summary_table({"val_accuracy_before": 0.461, "val_accuracy_after": None, "train_seconds": 52.345})
    )
    assert re.search(r"greedy +46\.1% +-", text)
    assert "sampled" not in text
    assert re.search(r"train seconds +52\.3", text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9994, "9.99 kB"),
        (9996, "10.0 kB"),
        (999_499, "999 kB"),
        (999_501, "1.00 MB"),
        (41_500_000_000, "41.5 GB"),
        (5e15, "5000 TB"),
    ],
)
def test_bytes_have_three_digits(size: float, text: str) -> None:
    assert format_bytes(size) == text


def test_durations_and_numbers_are_short() -> None:
    assert [format_seconds(s) for s in (0.0004, 0.25, 7.5, 119.0, 3725)] == [
        "0.4 ms",
        "250.0 ms",
        "7.50 s",
        "119.00 s",
        "1:02:05",
    ]
    assert [format_clock(s) for s in (0, 59.6, 3600)] == ["0:00", "1:00", "1:00:00"]
    assert [format_number(v) for v in (0.123456, 12345.6, 7, None)] == ["0.1235", "12,346", "7", "None"]
    assert TOKENS > 0
