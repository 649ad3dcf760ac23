"""Records a step of a run: goes to where it begins, and keeps what it is given and what it makes of that."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from headrace.algorithms.grpo import Session, run_step
from headrace.algorithms.loop import update_weights
from headrace.algorithms.observer import BEST_BY, GRAD_NORM, LOSS, RunObserver
from headrace.algorithms.resume import restore_from
from headrace.algorithms.run import build_session, warm_up
from headrace.algorithms.step_record import (
    POLICY,
    REFERENCE,
    RecordingRollouts,
    ResultColumns,
    write_step,
)
from headrace.config import RecipeConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.utils import atomic
from headrace.utils.checkpoints import CheckpointInfo, CheckpointManager, list_checkpoints
from headrace.utils.interrupt import InterruptFlag
from headrace.utils.run_directory import RunDirectory
from headrace.utils.run_state import Progress
from headrace.utils.timer import Timer

Say = Callable[[str], None]


def record_step(
    recipe: RecipeConfig,
    folder: Path | None,
    *,
    run: RunDirectory | None,
    step: int | None,
    with_weights: bool,
    say: Say,
) -> Path:
    """Write step number `step` of a run, or of the one that the recipe would start; return the folder.

    The steps since the newest checkpoint before it are made again; the run's own files stay as they are.

    Args:
        folder: None: `step_000012`, in the working directory.
        step: None: the one after the newest checkpoint, the first where there is none.
        with_weights: Copy the weights that the step starts from, with the optimizer's state. Otherwise they stay in
            the checkpoint, or are what the recipe builds.

    Raises:
        ConfigError: the folder is there already, weights that lie nowhere are to stay where they are, or the run is
            asynchronous.
    """
    _require_synchronous(recipe)
    kept = [] if run is None else list_checkpoints(run.checkpoints_dir)
    found = next((info for info in reversed(kept) if step is None or info.step < step), None)
    wanted = step or (1 if found is None else found.step + 1)
    folder = folder or Path(f"step_{wanted:06d}")
    if folder.exists():
        raise ConfigError(f"{folder}: is there already; remove it, or give another folder with --to")
    begins = 0 if found is None else found.step
    if not with_weights and (begins != wanted - 1 or (found is None and recipe.warm_start.enabled)):
        raise ConfigError(
            f"--no-weights: step {wanted} starts from weights that lie nowhere; record step {begins + 1}, which "
            "follows a checkpoint, or leave --no-weights out"
            if found is not None
            else f"--no-weights: the weights that step {wanted} starts from lie nowhere; leave --no-weights out"
        )
    with TemporaryDirectory() as scratch, ExitStack() as closing:
        session = build_session(recipe)
        closing.callback(session.close)
        reference = None if run is None or not run.reference_dir.is_dir() else run.reference_dir
        _go_to(session, found, wanted, reference, Path(scratch), say)
        with atomic.writing_directory(folder) as draft:
            facts = {
                "step": wanted,
                "recorded_from": str(recipe.run_dir if run is None else run.path),
                POLICY: None if found is None else str((found.path / POLICY).absolute()),
                REFERENCE: None if reference is None else str(reference.absolute()),
            }
            if with_weights:
                session.policy.save_checkpoint(draft / POLICY)
                facts |= {POLICY: POLICY, REFERENCE: REFERENCE if recipe.needs_reference else None}
                if recipe.needs_reference:
                    session.policy.save_reference(draft / REFERENCE)
            _record(session, wanted, draft, facts, say)
    return folder


def _require_synchronous(recipe: RecipeConfig) -> None:
    if recipe.asynchrony.enabled:
        raise ConfigError(
            "async.enabled=true: which weights drew a step's samples is a matter of time, so that no step can be made "
            "again; to record what the synchronous loop makes of the recipe, add async.enabled=false"
        )


def _go_to(
    session: Session, found: CheckpointInfo | None, step: int, reference: Path | None, scratch: Path, say: Say
) -> None:
    """Bring a new session to where `step` begins."""
    recipe, progress = session.recipe, Progress.at_start()
    if found is not None:
        progress = restore_from(session, found, reference or scratch / REFERENCE)
        say(f"starting from the checkpoint of step {found.step}, {found.path}")
    none = CheckpointManager.configured(scratch / "checkpoints", recipe.checkpointing, BEST_BY)
    warm_up(session, none, RunObserver(), InterruptFlag(), progress, scratch)
    for number in range(progress.step + 1, step):
        update_weights(session)
        run_step(session, number, Timer())
        say(f"step {number} is made again")
    update_weights(session)


def _record(session: Session, step: int, folder: Path, facts: dict[str, object], say: Say) -> None:
    recording = RecordingRollouts(session.rollouts, session.policy)
    columns = ResultColumns(session.policy, recording.rounds)
    session.rollouts, session.before_clearing = recording, columns.take
    facts, results = {**facts, "error": None}, None
    try:
        results = columns.results(run_step(session, step, Timer()))
        loss, norm = (results.metrics.get(name, math.nan) for name in (LOSS, GRAD_NORM))
        say(f"step {step}: loss {loss:.9g}, gradient norm {norm:.9g}")
    except HeadraceError as error:
        if not recording.rounds:
            raise
        facts["error"] = str(error)
        say(f"step {step} is recorded up to its error: {error}")
    write_step(folder, session, facts, recording.rounds, columns, results)
