"""Going on from a checkpoint: what is read back, and what has to be as it was."""

import hashlib
import json
import logging
from pathlib import Path

from headrace.algorithms.async_utils.producers import worth_restoring
from headrace.algorithms.grpo import Session
from headrace.algorithms.warm_start import warm_start_optimizer
from headrace.config import RecipeConfig
from headrace.data_plane.journal.client import journal_of
from headrace.data_plane.journal.restore import restore as restore_rows
from headrace.environments.interfaces import Environment
from headrace.errors import ConfigError
from headrace.models.policy.lm_policy import Policy
from headrace.utils import atomic
from headrace.utils.checkpoints import CheckpointInfo, CheckpointManager
from headrace.utils.run_state import Progress, PromptsState, SplitState, prompt_changes, read_state

logger = logging.getLogger(__name__)


def prompts_state(environment: Environment) -> PromptsState:
    """Return a count and a digest of each split: of every prompt's messages and answer, in order.

    It is for the split alone: so that none is measured on what it was trained on. Other columns change a reward as code
    of one's own does, and neither is compared; weights and `data.order` are keys of the recipe, whose changes are told.
    """
    splits = {}
    for split in ("train", "validation"):
        prompts, digest = environment.prompts(split), hashlib.blake2b(digest_size=16)
        for prompt in prompts:
            texts = [prompt.answer, *(part for m in prompt.messages for part in (m.role, m.content))]
            digest.update(json.dumps(texts).encode() + b"\n")
        splits[split] = SplitState(prompts=len(prompts), digest=digest.hexdigest())
    return PromptsState(**splits)


def restore(session: Session, checkpoints: CheckpointManager, reference_dir: Path) -> Progress:
    """Load the newest checkpoint into a session that was just built; without one, a fresh progress.

    The store has the rows that it had when the checkpoint was written, if its journal can say; in an asynchronous run
    also those that were put or trained on since.
    """
    latest = checkpoints.latest()
    state = None if latest is None else read_state(latest)
    client = getattr(session.policy, "dp_client", None)
    if client is not None and (journal := journal_of(client)) is not None:
        position = {} if state is None else state.journal or {}
        if position and state is not None and session.recipe.asynchrony.enabled:
            keep = worth_restoring(session.recipe, state.progress, state.recipe)
            report = restore_rows(client, journal.folder, position, later=True, keep=keep)
        else:
            report = restore_rows(client, journal.folder, position)
        if report.total:
            logger.warning("%s: %d rows are in the store again", journal.folder, report.total)
    return Progress.at_start() if latest is None else restore_from(session, latest, reference_dir)


def restore_from(session: Session, latest: CheckpointInfo, reference_dir: Path) -> Progress:
    """Load a checkpoint into a session that was just built.

    Raises:
        ConfigError: a checkpoint that is damaged, or of other prompts than the session's without
            `recipe.allow_changes`; or a reference policy that cannot be had any more.
    """
    state = read_state(latest)
    progress, recipe = state.progress, session.recipe
    _check_prompts(
        state.prompts, prompts_state(session.environment), latest.path, allowed=recipe.allow_changes
    )
    if not (latest.path / "policy").is_dir():
        raise ConfigError(f"{latest.path}: no policy in this checkpoint; remove it, or set overwrite=true")
    if warming_up(recipe, progress):
        session.policy.reset_optimizer(*warm_start_optimizer(recipe.policy, recipe.warm_start))
    if recipe.needs_reference and progress.step > 0:
        _restore_reference(session.policy, progress, reference_dir)
    session.policy.load_checkpoint(latest.path / "policy")
    session.prompts.position, session.prompts.used = progress.prompt_position, set(progress.prompts_ahead)
    return progress


def warming_up(recipe: RecipeConfig, progress: Progress) -> bool:
    cfg = recipe.warm_start
    return cfg.enabled and progress.step == 0 and progress.warm_start_steps < cfg.steps


def keep_reference(policy: Policy, reference_dir: Path) -> None:
    """Make the current weights the reference policy, and write it for a later resume."""
    policy.snapshot_reference()
    with atomic.writing_directory(reference_dir) as draft:
        policy.save_reference(draft)


def _check_prompts(then: PromptsState | None, now: PromptsState, checkpoint: Path, *, allowed: bool) -> None:
    if then is None:
        told = "of an early version, which kept no digest of its prompts; they are taken to be these"
        logger.warning("%s: %s", checkpoint, told)
    elif changes := prompt_changes(then, now):
        fault = f"{checkpoint}: {changes} are not those of this checkpoint"
        if not allowed:
            raise ConfigError(
                f"{fault}, and the policy might be measured on what it was trained on; put env and data back, or set "
                "overwrite=true, another run_dir, or allow_changes=true to go on all the same"
            )
        logger.warning("%s; the policy may be measured on what it was trained on (allow_changes=true)", fault)


def _restore_reference(policy: Policy, progress: Progress, reference_dir: Path) -> None:
    """Read the reference back, or, in a run that had none so far, take the first weights, which were just built."""
    if reference_dir.is_dir():
        policy.load_reference(reference_dir)
    elif progress.warm_start_steps:
        raise ConfigError(
            f"{reference_dir}: the run kept no reference policy, which is what its warm start ended with, so that "
            "kl_coefficient cannot be switched on any more; set it to 0 in loss and grpo.reward, or start anew with "
            "overwrite=true or another run_dir"
        )
    else:
        keep_reference(policy, reference_dir)
