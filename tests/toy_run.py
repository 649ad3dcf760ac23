"""A run that trains nothing: real observers, run directory and checkpoints, made-up numbers; also a script."""

import math
import random
import sys
import time
from typing import Any

from headrace.algorithms.observer import (
    GRAD_NORM,
    GREEDY_ACCURACY,
    LOSS,
    REWARD,
    SAMPLED_ACCURACY,
    TOKENS_PER_S,
    RunObserver,
    StepRecord,
)
from headrace.progress import CompositeObserver, ConsoleObserver, FileObserver, make_console
from headrace.utils.checkpoints import CheckpointManager
from headrace.utils.interrupt import InterruptFlag
from headrace.utils.run_directory import RunDirectory
from headrace.utils.run_state import Progress, PromptsState, RunState, SplitState

STAGE_SHARES = {
    "rollout": 0.5,
    "prev_logprobs": 0.12,
    "advantages": 0.01,
    "train": 0.35,
    "update_weights": 0.02,
}
COLUMN_BYTES = {"input_ids": 41_000, "token_mask": 5_125, "prev_logprobs": 20_500, "sample_mask": 1_024}
TOKENS = 5_125


def toy_metrics(step: int, rng: random.Random) -> dict[str, float]:
    """Return metrics that get better with steps."""
    return {
        REWARD: 1 - 0.6 * math.exp(-step / 25) + rng.gauss(0, 0.03),
        LOSS: rng.gauss(0, 0.01),
        GRAD_NORM: abs(rng.gauss(0.5, 0.1)),
        TOKENS_PER_S: 5_200 + rng.gauss(0, 200),
    }


def toy_record(step: int, total: int, rng: random.Random, *, step_s: float = 0.6) -> StepRecord:
    """Return the record of one step."""
    timings = {stage: share * step_s for stage, share in STAGE_SHARES.items()}
    return StepRecord(step, total, toy_metrics(step, rng), timings, TOKENS, COLUMN_BYTES)


def toy_state(step: int, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint of a recipe remembers."""
    progress = Progress.at_start().model_copy(update={"step": step})
    split = SplitState(prompts=8, digest="0")
    return RunState(
        progress=progress, prompts=PromptsState(train=split, validation=split), recipe=recipe
    ).model_dump()


def toy_loop(
    run: RunDirectory, observer: RunObserver, interrupt: InterruptFlag, *, steps: int, step_s: float
) -> dict[str, Any]:
    """Do what a training loop does with its observer and its run directory."""
    checkpoints = CheckpointManager(run.checkpoints_dir, keep_top_k=2, metric=GREEDY_ACCURACY)
    rng = random.Random(0)
    first = run.resume_from.step + 1 if run.resume_from else 1
    observer.on_start(total_steps=steps, first_step=first, info={"model": "toy, 0.1 M", "device": "cpu"})
    accuracy = {GREEDY_ACCURACY: 0.46, SAMPLED_ACCURACY: 0.37}
    if first == 1:
        observer.on_phase("warm_start", 40)
        for done in range(1, 41):
            observer.on_phase_progress("warm_start", done, {"loss": 3 * math.exp(-done / 10)})
        observer.on_stage(0, "validation")
        observer.on_validation(0, accuracy)
    for step in range(first, steps + 1):
        for stage, share in STAGE_SHARES.items():
            observer.on_stage(step, stage)
            time.sleep(share * step_s)
        if step % 10 == 0:
            accuracy = {name: 1 - (1 - value) * 0.6 for name, value in accuracy.items()}
            observer.on_validation(step, accuracy)
        stopping = interrupt.is_set()
        if step % 5 == 0 or stopping:
            with checkpoints.writing(step) as draft:
                (draft / "weights").write_bytes(bytes(100_000))
            info = checkpoints.commit(step, accuracy, toy_state(step, {"seed": 0}))
            observer.on_checkpoint(step, info.path)
        observer.on_samples(step, "train", [{"prompt": "spell abc", "answer": "cba", "reward": 1.0}])
        observer.on_step(toy_record(step, steps, rng))
        if stopping:
            return {"completed": False, "steps": step}
    summary = {
        "completed": True,
        "steps": steps,
        "val_accuracy_before": 0.46,
        "val_accuracy_after": accuracy[GREEDY_ACCURACY],
        "val_accuracy_sampled_before": 0.37,
        "val_accuracy_sampled_after": accuracy[SAMPLED_ACCURACY],
        "train_seconds": 52.3,
    }
    observer.on_finish(summary)
    return summary


def main(run_dir: str, mode: Any = "auto", steps: str = "30", step_s: str = "0.02") -> int:
    """Run the toy loop in a directory, as `headrace train` runs a real one."""
    with (
        RunDirectory.open(run_dir, recipe_text="seed: 0\n") as run,
        ConsoleObserver(make_console(mode), title=str(run.path), mode=mode) as display,
        InterruptFlag(display.notice, display.show_cursor) as interrupt,
    ):
        observer = CompositeObserver([display, FileObserver(run)])
        summary = toy_loop(run, observer, interrupt, steps=int(steps), step_s=float(step_s))
        return 0 if summary["completed"] else interrupt.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
