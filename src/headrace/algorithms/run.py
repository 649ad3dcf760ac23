"""A run from recipe to summary: build the parts, warm up or resume, loop, let go."""

import logging
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as hf_logging

from headrace.algorithms.async_utils.actors import build_actors, start_actors
from headrace.algorithms.grpo import Session
from headrace.algorithms.grpo_async import AsyncLoop
from headrace.algorithms.loop import Loop, save_checkpoint, update_weights
from headrace.algorithms.mismatch_guard import MismatchGuard
from headrace.algorithms.observer import BEST_BY, RunObserver
from headrace.algorithms.own_code import build_loss, check_own_code
from headrace.algorithms.prompt_loader import PromptLoader
from headrace.algorithms.prompt_order import prompt_order
from headrace.algorithms.resume import keep_reference, prompts_state, restore, warming_up
from headrace.algorithms.step_detail import StepDetail
from headrace.algorithms.warm_start import check_demonstrations, warm_start, warm_start_optimizer
from headrace.config import DataPlaneConfig, ObservabilityConfig, RecipeConfig
from headrace.data_plane.schema import added_fields
from headrace.distributed.topology import lay_out_ranks
from headrace.distributed.worker_groups import LocalWorkerGroup, WorkerGroup, WorkerSpec
from headrace.environments.interfaces import Environment
from headrace.errors import ConfigError
from headrace.experience.metrics import GREEDY_ACCURACY, GREEDY_REWARD, SAMPLED_ACCURACY, SAMPLED_REWARD
from headrace.experience.prompt_room import FittingPrompts, prompts_that_fit
from headrace.experience.sync_rollout_actor import SyncRolloutActor
from headrace.models.automodel.setup import load_tokenizer
from headrace.models.policy.launch import rollout_gpus, start_on_ray, worker_place
from headrace.models.policy.lm_policy import Policy
from headrace.models.policy.tq_policy import TQPolicy, launcher_for
from headrace.utils.algorithm_presets import describe_preset
from headrace.utils.checkpoints import CheckpointManager
from headrace.utils.interrupt import InterruptFlag
from headrace.utils.paths import user_path
from headrace.utils.run_directory import RunDirectory
from headrace.utils.run_state import Metrics, Progress, read_state
from headrace.utils.seeding import derive_seed
from headrace.utils.targets import extend_import_path

logger = logging.getLogger(__name__)


def build_session(recipe: RecipeConfig) -> Session:
    """Build every part of a run; whatever a recipe gets wrong about them shows here, before any step."""
    hf_logging.disable_progress_bar()
    in_actor = rolls_out_in_actor(recipe)
    if recipe.cpu_threads:
        torch.set_num_threads(recipe.cpu_threads)
    extend_import_path(recipe.code_path or ())
    check_own_code(recipe)
    tokenizer = load_tokenizer(recipe.policy)
    environment = prompts_that_fit(recipe, tokenizer)
    train_prompts = environment.prompts("train")
    if recipe.warm_start.enabled:
        check_demonstrations(
            tokenizer,
            train_prompts,
            recipe.warm_start,
            max_total_tokens=recipe.policy.max_total_sequence_length,
        )
    prompts = PromptLoader(
        # An actor has the prompts itself; only their uids go there.
        [prompt.uid for prompt in train_prompts] if in_actor else train_prompts,
        seed=derive_seed(recipe.seed, "prompts"),
        shuffle=recipe.data.shuffle,
        order=prompt_order(recipe.data, train_prompts, seed=recipe.seed),
    )
    policy = _build_policy(recipe, tokenizer, in_actor)
    with ExitStack() as undo:
        undo.callback(policy.shutdown)
        (rollouts, *others), weights = _build_rollouts(recipe, policy, tokenizer, environment, in_actor)
        undo.pop_all()
    return Session(recipe, policy, rollouts, environment, prompts, build_loss(recipe), others, weights)


def _build_rollouts(
    recipe: RecipeConfig, policy: Policy, tokenizer: Any, environment: Environment, in_actor: bool
) -> tuple[list[WorkerGroup], WorkerGroup | None]:
    """Return a group of one rollout actor; in an asynchronous run one for each collector, and that of the weights."""
    if not isinstance(policy, TQPolicy):
        return [LocalWorkerGroup(SyncRolloutActor.from_recipe(recipe, tokenizer, environment))], None
    if in_actor:
        if recipe.asynchrony.enabled:
            gpus = rollout_gpus(recipe)
            start, start_keeper = partial(_start_actor, recipe, gpus), partial(_start_actor, recipe, 0)
            return start_actors(recipe, policy.dp_cfg, start, start_keeper)
        return [_start_rollout_actor(recipe, policy)], None
    if recipe.asynchrony.enabled:
        return build_actors(recipe, tokenizer, environment, policy.dp_client)
    seats = policy.workers.seats()
    actor = SyncRolloutActor.from_recipe(recipe, tokenizer, environment, policy.dp_client, seats=seats)
    return [LocalWorkerGroup(actor)], None


def _start_actor(recipe: RecipeConfig, gpus: int, spec: WorkerSpec, name: str) -> WorkerGroup:
    return start_on_ray(
        spec,
        lay_out_ranks(1),
        device="cuda" if gpus else "cpu",
        alone=name,
        gpus_per_node=gpus,
        cpus_per_worker=0,
        startup_timeout_s=recipe.cluster.startup_timeout_s,
        autoscales=recipe.cluster.autoscales,
    )


def _start_rollout_actor(recipe: RecipeConfig, policy: TQPolicy) -> WorkerGroup:
    """Start a Ray actor; rows go from there to the store, weights from the policy's actors, on Ray too, to it."""
    spec = WorkerSpec(SyncRolloutActor.from_recipe, (recipe,), {"seats": policy.workers.seats()})
    group = _start_actor(recipe, rollout_gpus(recipe), spec, "the rollout actor")
    with ExitStack() as undo:
        undo.callback(group.shutdown)
        group.run_all("setup_data_plane", policy.dp_cfg, added_fields())
        undo.pop_all()
    return group


def rolls_out_in_actor(recipe: RecipeConfig) -> bool:
    """Return whether answers are generated in a Ray actor of their own, and not in the driver's process.

    Raises:
        ConfigError: `cluster.rollout=actor`, and the policy's workers are no Ray actors; or `cluster.rollout_gpus`, and
            there is no such actor.
    """
    on_ray = recipe.uses_store and worker_place(recipe.policy, launcher_for(recipe.data_plane)) == "ray"
    if recipe.cluster.rollout == "actor" and not on_ray:
        raise ConfigError(
            "cluster.rollout=actor needs the policy's workers on Ray as well; set data_plane.impl=transfer_queue "
            "and policy.parallel.launcher=ray, or cluster.rollout=auto"
        )
    in_actor = on_ray and recipe.cluster.rollout != "driver"
    if recipe.cluster.rollout_gpus is not None and not in_actor:
        remedy = "data_plane.impl=transfer_queue and policy.parallel.launcher=ray"
        raise ConfigError(
            f"cluster.rollout_gpus={recipe.cluster.rollout_gpus} is for a rollout actor, and this run generates its "
            f"completions in the driver's process; remove it, or set {'cluster.rollout=auto' if on_ray else remedy}"
        )
    return in_actor


def _build_policy(recipe: RecipeConfig, tokenizer: Any, in_actor: bool) -> Policy:
    actors = recipe.asynchrony.collectors if recipe.asynchrony.enabled else 1
    place: dict[str, Any] = {"rollout": "driver"}
    if in_actor:
        place = {
            "rollout": "actor",
            "rollout_gpus": actors * rollout_gpus(recipe),
        }
    common: dict[str, Any] = {
        "tokenizer": tokenizer,
        "seed": recipe.seed,
        "with_reference": recipe.needs_reference,
        "cluster": recipe.cluster.model_copy(update=place),
    }
    if not recipe.uses_store:
        return Policy(recipe.policy, recipe.generation, **common)
    return TQPolicy(recipe.policy, recipe.generation, dp_cfg=_of_run(recipe), **common)


def _of_run(recipe: RecipeConfig) -> DataPlaneConfig:
    """A run counts bytes by column and has its journal in its directory, unless the recipe says otherwise."""
    cfg, changes = recipe.data_plane, dict[str, Any]()
    if cfg.observability.enabled is None:
        changes["observability"] = ObservabilityConfig(enabled=True)
    if cfg.journal.enabled:
        folder = cfg.journal.folder or RunDirectory(user_path(recipe.run_dir, "run_dir")).journal_dir
        # Rollouts and workers may have another working directory.
        changes["journal"] = cfg.journal.model_copy(update={"folder": str(Path(folder).absolute())})
    return cfg.model_copy(update=changes)


def train(
    recipe: RecipeConfig, run_dir: Path, observer: RunObserver, stopper: InterruptFlag
) -> dict[str, Any]:
    """Run a recipe in `run_dir`, from its newest checkpoint if there is one, and return the summary.

    The summary's `completed` is False if the user stopped the run; the newest checkpoint then resumes it. While the
    parts are built, a stop is at once.
    """
    checkpoints = CheckpointManager.configured(run_dir / "checkpoints", recipe.checkpointing, BEST_BY)
    started = time.perf_counter()
    try:
        with stopper.at_once():
            session = build_session(recipe)
    except KeyboardInterrupt:
        if not stopper.is_set():
            raise
        latest = checkpoints.latest()
        progress = Progress.at_start() if latest is None else read_state(latest).progress
        return _summary(recipe, progress, False, time.perf_counter() - started)
    try:
        if isinstance(session.environment, FittingPrompts) and (notice := session.environment.notice()):
            logger.warning("%s", notice)
        progress = restore(session, checkpoints, RunDirectory(run_dir).reference_dir)
        _warn_of_biased_kl(recipe)
        observer.on_start(
            total_steps=recipe.grpo.max_num_steps,
            first_step=progress.step + 1,
            info=_describe(session),
        )
        completed = warm_up(session, checkpoints, observer, stopper, progress, run_dir)
        if completed:
            loop = start_loop(
                session, observer, stopper, checkpoints, progress, RunDirectory(run_dir).traces_dir
            )
            completed = loop.run()
    finally:
        session.close()
    summary = _summary(recipe, progress, completed, time.perf_counter() - started)
    if completed:
        observer.on_finish(summary)
    return summary


def evaluate(recipe: RecipeConfig, checkpoint: Path | None) -> Metrics:
    """Return the validation metrics of a checkpoint's policy, or of the recipe's own weights."""
    session = build_session(recipe)
    try:
        if checkpoint is not None:
            session.policy.load_checkpoint(checkpoint / "policy")
        update_weights(session)
        return session.validate()
    finally:
        session.close()


def start_loop(
    session: Session,
    observer: RunObserver,
    stopper: InterruptFlag,
    checkpoints: CheckpointManager | None = None,
    progress: Progress | None = None,
    trace_dir: Path | None = None,
) -> Loop:
    """Return the loop over a session's rows, ready to run; without `checkpoints` it saves none.

    With `policy.router_replay.trace`, routes are written to `trace_dir`.
    """
    session.on_stage, session.should_stop, session.trace_dir = observer.on_stage, stopper.is_set, trace_dir
    session.detail = StepDetail(session.recipe.logging, observer.on_detail)
    progress, prompts = progress or Progress.at_start(), prompts_state(session.environment)
    kind = AsyncLoop if session.recipe.asynchrony.enabled else Loop
    guard = None
    if session.recipe.generation.guarded:
        asked = session.environment.prompts("train")
        guard = MismatchGuard(session.recipe, session.policy, session.rollouts, asked)
    return kind(session, observer, progress, prompts, checkpoints, guard)


def warm_up(
    session: Session,
    checkpoints: CheckpointManager,
    observer: RunObserver,
    stopper: InterruptFlag,
    progress: Progress,
    run_dir: Path,
) -> bool:
    """Bring a fresh policy to where GRPO starts; return False if the user stopped it."""
    recipe, policy = session.recipe, session.policy
    if progress.step > 0:
        return True
    if warming_up(recipe, progress):
        cfg = recipe.warm_start
        observer.on_phase("warm_start", cfg.steps)
        if progress.warm_start_steps == 0:
            policy.reset_optimizer(*warm_start_optimizer(recipe.policy, cfg))
        progress.warm_start_steps = warm_start(
            policy,
            session.environment.prompts("train"),
            cfg,
            seed=recipe.seed,
            first=progress.warm_start_steps,
            on_non_finite=recipe.loss.on_non_finite,
            filtered=recipe.generation.filters,
            on_progress=partial(observer.on_phase_progress, "warm_start"),
            should_stop=stopper.is_set,
        )
        if warming_up(recipe, progress):
            if recipe.checkpointing.enabled:
                save_checkpoint(policy, checkpoints, recipe, progress, prompts_state(session.environment))
            return False
        policy.reset_optimizer(recipe.policy.optimizer, recipe.policy.scheduler)
    if recipe.needs_reference:
        keep_reference(policy, RunDirectory(run_dir).reference_dir)
    return True


def _describe(session: Session) -> dict[str, str]:
    recipe = session.recipe
    store = f"{recipe.data_plane.impl} data plane" if recipe.uses_store else "rows in memory"
    parameters = session.policy.num_parameters
    train, held_out = (len(session.environment.prompts(split)) for split in ("train", "validation"))
    about = {
        "model": f"{parameters / 1e6:.1f} M parameters, {recipe.policy.precision}",
        "loop": f"{'asynchronous ' if recipe.asynchrony.enabled else ''}GRPO, {store}",
        "batch": f"{recipe.grpo.num_prompts_per_step} prompts x {recipe.grpo.num_generations_per_prompt} samples",
        "prompts": f"{train:,} to train on, {held_out:,} held out",
        "seed": str(recipe.seed),
    }
    if recipe.algorithm is not None:
        about["algorithm"] = describe_preset(recipe.algorithm, recipe.model_dump())
    return about


def _warn_of_biased_kl(recipe: RecipeConfig) -> None:
    if recipe.generation.filters and recipe.needs_reference:
        logger.warning(
            "generation.top_p=%s and top_k=%s leave tokens out, and the KL to the reference is of all of them: its "
            "estimate from such samples is biased",
            recipe.generation.top_p,
            recipe.generation.top_k,
        )


def _summary(
    recipe: RecipeConfig, progress: Progress, completed: bool, total_seconds: float
) -> dict[str, Any]:
    before, after = progress.first_validation or {}, progress.last_validation
    measured = {
        "val_accuracy": GREEDY_ACCURACY,
        "val_accuracy_sampled": SAMPLED_ACCURACY,
        "val_reward": GREEDY_REWARD,
        "val_reward_sampled": SAMPLED_REWARD,
    }
    return {
        "completed": completed,
        "steps": progress.step,
        "steps_without_signal": progress.idle_steps,
        "seed": recipe.seed,
        **{f"{key}_before": before.get(name) for key, name in measured.items()},
        **{f"{key}_after": after.get(name) for key, name in measured.items()},
        "train_seconds": progress.train_seconds,
        "total_seconds": total_seconds,
    }
