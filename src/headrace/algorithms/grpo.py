"""One GRPO step, the same code wherever its rows live: in memory (`Policy`) or in the store (`TQPolicy`).

    rollout -> (drop zero-variance groups, refill) -> previous and reference logprobs -> advantages -> train

Rows are what the policy takes: columns in memory, or the KVBatchMeta of rows in the store. Both give the same numbers
bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from headrace.algorithms.advantages import TokenKL, compute_advantages
from headrace.algorithms.filtering import (
    complete_batch,
    differ,
    divide_groups,
    own_filter,
    refill_groups,
    select_groups,
)
from headrace.algorithms.loss import KLKind
from headrace.algorithms.prompt_loader import PromptLoader
from headrace.algorithms.replay_checks import ReplayWatch
from headrace.algorithms.rewards import (
    check_rewards,
    overlong_mask,
    require_finite,
    scaled_rewards,
    shape_rewards,
    subtract_kl,
)
from headrace.algorithms.rollout_table import RolloutTable
from headrace.algorithms.sample_stats import (
    MISMATCH,
    MismatchLoss,
    kl_to_go_stats,
    mismatch_stats,
    mismatch_summary,
    sample_stats,
    stats_columns,
    token_advantages,
)
from headrace.algorithms.step_detail import StepDetail
from headrace.algorithms.updates import check_finite, update_metrics
from headrace.config import RecipeConfig
from headrace.data_plane.schema import MEAN_ADVANTAGES
from headrace.distributed.worker_groups import WorkerGroup, registered
from headrace.environments.interfaces import Environment
from headrace.errors import HeadraceError
from headrace.experience.metrics import combine_calls
from headrace.models.interfaces import LossFn
from headrace.models.policy.lm_policy import Policy
from headrace.models.policy.results import Traffic, moved_by
from headrace.utils.run_state import Metrics
from headrace.utils.seeding import derive_seed
from headrace.utils.timer import Timer

Stage = Callable[[str], AbstractContextManager[None]]
"""Opens a stage of a step, by its name."""


class StepInterrupted(HeadraceError):
    """The user asked to stop, and the step ended at a point where no weight has changed."""


@dataclass
class StepResult:
    """What one step reports."""

    metrics: dict[str, float]
    tokens: int
    bytes_by_column: dict[str, int]
    samples: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Session:
    """The live parts of a run; `rollouts` is a group of one `SyncRolloutActor`."""

    recipe: RecipeConfig
    policy: Policy
    rollouts: WorkerGroup
    environment: Environment
    prompts: PromptLoader
    loss_fn: LossFn
    others: Sequence[WorkerGroup] = ()
    """Further groups of one `SyncRolloutActor` each, in an asynchronous run."""
    weights: WorkerGroup | None = None
    """A group of one `PublishedWeights`, where these actors find the newest weights."""
    on_stage: Callable[[int, str], None] = lambda step, stage: None
    should_stop: Callable[[], bool] = lambda: False
    trace_dir: Path | None = None
    """Where the routes of every step are written, with `policy.router_replay.trace`."""
    detail: StepDetail = field(default_factory=StepDetail)
    moved: Callable[[], Traffic] = field(init=False)
    """Returns what the side that makes samples has moved so far."""
    before_clearing: Callable[[Any], None] = lambda rows: None
    """Is given a step's rows, trained on, before they are cleared."""

    @cached_property
    def answers(self) -> Mapping[str, str | None]:
        """The right answer to each training prompt, by the prompt's uid, where there is one."""
        return {prompt.uid: prompt.answer for prompt in self.environment.prompts("train")}

    def __post_init__(self) -> None:
        self.moved = lambda: moved_by(self.rollouts)

    def validate(self, rollouts: WorkerGroup | None = None) -> Metrics:
        """Validate on a rollout actor; None: the first."""
        metrics: Metrics = (rollouts or self.rollouts).run_all("validate", self.recipe.seed)[0]
        return metrics

    def close(self) -> None:
        for group in (self.rollouts, *self.others, *([self.weights] if self.weights else [])):
            group.shutdown()
        self.policy.shutdown()


def run_step(session: Session, step: int, timer: Timer) -> StepResult:
    """Run step number `step` (from 1) and return its report; the weights have changed when it returns.

    The generator has to get them before it generates again: for training it may have discarded those it had.

    Raises:
        StepInterrupted: `should_stop` turned true before training began; the prompt position is as before.
        RewardError: a reward or advantage that is not finite, or beyond float32, with its sample.
        HeadraceError: an update whose loss or gradient is not finite, with `loss.on_non_finite=stop`.
        ReplayError: router replay without effect, with rows used twice or changed on the way, or over its budget.
    """
    recipe, policy = session.recipe, session.policy
    stage = partial(open_stage, session, step, timer, position=session.prompts.position)
    # With dynamic sampling, a new round's rows stand beside those held of earlier rounds.
    most = recipe.samples_per_step * (2 if recipe.grpo.dynamic_sampling.enabled else 1)
    with policy.step_rows(most, recipe.grpo.num_generations_per_prompt):
        with stage("rollout"):
            collected = collect(session, step)
            session.rollouts.run_all("make_way_for_training")
        return learn(session, step, collected, stage)


def learn(session: Session, step: int, collected: "Collected", stage: Stage) -> StepResult:
    """Score a step's rows, train on them and clear them; the same for rows that were made at any time."""
    recipe, policy = session.recipe, session.policy
    rows = policy.padded(collected.rows)
    table = collected.table
    replay = ReplayWatch(
        recipe.policy.router_replay,
        step=step,
        sample_ids=table.sample_ids,
        total_tokens=table.total_tokens,
        missing=table.routes_missing,
        digests=table.routes_digest,
        read=partial(policy.read_columns, rows),
        trace_dir=session.trace_dir,
    )
    weights = collected.weights * replay.budget()
    part = prepare(session, replace(collected, rows=rows, weights=weights), stage, replay)
    with stage("train"):
        # Without a sample that counts, an update would only apply momentum and weight decay.
        trained = policy.train(rows, loss_of(session)) if part.scored.sample_mask.any() else None
        if trained is not None:
            check_finite(trained, recipe.loss.on_non_finite, f"step {step}")
            replay.check(policy.take_replay_stats(), "train")
    return finish(session, [part], trained, {**collected.metrics, **part.scored.metrics}, replay.metrics)


@dataclass
class Part:
    """Rows of a step that are ready to train on; `stats` are what the workers told of each."""

    rows: Any
    table: RolloutTable
    weights: torch.Tensor
    stats: Mapping[str, torch.Tensor]
    scored: "Scored"


def prepare(
    session: Session, collected: "Collected", stage: Stage, replay: ReplayWatch | None = None
) -> Part:
    """Add previous and reference logprobs and advantages to rows."""
    recipe, policy, rows = session.recipe, session.policy, collected.rows
    if needs_prev_logprobs(recipe):
        with stage("prev_logprobs"):
            # The KL of the reward is of both policies without the generation's filters.
            filters = recipe.generation.filters and recipe.grpo.reward.kl_coefficient > 0
            policy.prev_logprobs(rows, unfiltered=filters)
            if replay is not None:
                replay.check(policy.take_replay_stats(), "prev_logprobs")
    if recipe.needs_reference:
        with stage("reference_logprobs"):
            policy.reference_logprobs(rows)
    with stage("advantages"):
        stats = _stats(recipe, policy, rows)
        scored = score(recipe, collected.table, stats, collected.weights)
        name = MEAN_ADVANTAGES if recipe.has_token_kl else "advantages"
        policy.write_columns(rows, {name: scored.advantages, "sample_mask": scored.sample_mask})
        if recipe.has_token_kl:
            kl_kind = recipe.grpo.reward.kl_kind
            make = partial(token_advantages, kl_kind=kl_kind, kl_scale=scored.kl_scale)
            policy.derive_columns(rows, make, (MEAN_ADVANTAGES, *stats_columns(reference=True)))
    return Part(rows, collected.table, collected.weights, stats, scored)


def finish(
    session: Session,
    parts: Sequence[Part],
    trained: Mapping[str, Any] | None,
    metrics: Mapping[str, float],
    replayed: Mapping[str, float],
) -> StepResult:
    """Clear the rows of a step that has trained on them, and report it."""
    recipe, policy = session.recipe, session.policy
    if len(parts) == 1:  # parts have a plan each
        session.detail.microbatches(policy, parts[0].table.total_tokens.tolist())
    samples = _samples(session, parts[0].rows, parts[0].table, parts[0].scored)
    for part in parts:
        session.before_clearing(part.rows)
        policy.finish_step(part.rows)
    traffic = policy.traffic(session.moved())
    updates = update_metrics(trained, recipe.samples_per_step // recipe.policy.train_global_batch_size)
    told = {**metrics, **updates, **replayed, **traffic.metrics()}
    tokens = sum(int(part.table.total_tokens.sum()) for part in parts)
    return StepResult(told, tokens, dict(traffic.by_column), samples)


def needs_prev_logprobs(recipe: RecipeConfig) -> bool:
    """Return whether anything reads the previous policy's logprobs (the on-policy shortcut skips them)."""
    return (
        not recipe.loss.force_on_policy_ratio
        or recipe.loss.max_sequence_logprob_error is not None
        or recipe.grpo.reward.kl_coefficient > 0
    )


def loss_of(session: Session) -> LossFn:
    # Without previous logprobs, the training forward says how far the generator is from the trainer.
    return session.loss_fn if needs_prev_logprobs(session.recipe) else MismatchLoss(session.loss_fn)


@contextmanager
def open_stage(
    session: Session, step: int, timer: Timer, name: str, *, position: int | None = None
) -> Iterator[None]:
    """Announce, time, and offer a safe point to stop before a stage; a stop puts the prompts back to `position`."""
    if session.should_stop():
        if position is not None:
            session.prompts.position = position
        raise StepInterrupted(f"stopped before stage '{name}' of step {step}")
    session.on_stage(step, name)
    with timer.time(name), session.detail.stage(step, name, session.policy):
        yield


# Collecting rollouts.


@dataclass
class Collected:
    """A step's rows; `weights` (N,) is 0 for rows that only fill the batch."""

    rows: Any
    table: RolloutTable
    weights: torch.Tensor
    metrics: dict[str, float]


def collect(session: Session, step: int) -> Collected:
    """Roll out until the step has its groups; without dynamic sampling that is one round."""
    grpo = session.recipe.grpo
    if not grpo.dynamic_sampling.enabled:
        rows, table, calls = _round(session, step, 0, grpo.num_prompts_per_step)
        return Collected(rows, table, torch.ones(len(table)), {**table.drawn_metrics(), **calls})
    return _collect_filtered(session, step)


def _round(
    session: Session, step: int, number: int, prompts: int
) -> tuple[Any, RolloutTable, dict[str, float]]:
    method, arguments = session.policy.rollout_call
    request = {
        "prompts": session.prompts.take(prompts),
        "seed": derive_seed(session.recipe.seed, "rollout", step, number),
        "tag": f"{step}.{number}",
    }
    group_size = session.recipe.grpo.num_generations_per_prompt
    arguments |= {"group_size": group_size, "carry_keys": RolloutTable.sources(), "finish_generation": False}
    made = session.rollouts.run_all(method, request, **arguments)
    rows, values, _, calls = made[0]
    table = RolloutTable.from_values(values)
    check_rewards(table.rewards, table.sample_ids)
    return rows, table, calls


def _collect_filtered(session: Session, step: int) -> Collected:
    """Dynamic sampling: after each round clear what does not train, then roll out what is likely to fill the batch.

    After `max_refills` rounds the batch is filled with groups of equal rewards, of weight 0. Metrics are of all rounds.
    """
    grpo = session.recipe.grpo
    needed = grpo.num_prompts_per_step
    rows, table, calls = _round(session, step, 0, needed)
    drawn, all_calls = [table], [calls]
    while True:
        chosen = select_groups(**compared(session.recipe, table), needed=needed)
        if not chosen.missing_groups or len(drawn) == grpo.dynamic_sampling.max_refills:
            break
        held = sorted([*chosen.keep, *chosen.spare])
        rows, table = session.policy.keep_rows(rows, held), table.select(held)
        # Those held fill one batch at most, and the partition has room for another.
        more = refill_groups(chosen.missing_groups, most=needed, **_counted(session.recipe, drawn))
        new_rows, new_table, calls = _round(session, step, len(drawn), more)
        drawn, all_calls = [*drawn, new_table], [*all_calls, calls]
        rows, table = session.policy.join_rows([rows, new_rows]), RolloutTable.join([table, new_table])
    trained, weights = complete_batch(chosen.keep, chosen.spare, table.uids, needed=needed)
    counts = _counted(session.recipe, drawn)
    metrics = {
        **RolloutTable.join(drawn).drawn_metrics(),
        **combine_calls(all_calls),
        "dynamic_sampling/rounds": float(len(drawn)),
        "dynamic_sampling/varied_fraction": counts["useful"] / counts["drawn"],
        "dynamic_sampling/useful_fraction": (needed - chosen.missing_groups) / counts["drawn"],
    }
    return Collected(
        session.policy.keep_rows(rows, trained), table.select(trained), torch.tensor(weights), metrics
    )


def compared(recipe: RecipeConfig, table: RolloutTable) -> dict[str, Any]:
    """Return what tells useful groups from others: scaled and clipped rewards, and who counts in the loss."""
    reward, replay = recipe.grpo.reward, recipe.policy.router_replay
    valid = overlong_mask(table.truncated, reward).bool()
    if replay.enabled and replay.on_excess == "mask":
        valid &= table.routes_missing <= replay.max_missing_fraction
    rewards = scaled_rewards(table.rewards, reward, table.sample_ids)
    target = recipe.grpo.dynamic_sampling.target
    trains = differ if target is None else own_filter(target)
    return {"rewards": rewards.tolist(), "group_keys": table.uids, "valid": valid.tolist(), "trains": trains}


def _counted(recipe: RecipeConfig, drawn: Sequence[RolloutTable]) -> dict[str, int]:
    """Return how many groups were drawn, and how many of them have rewards that differ."""
    divided = [divide_groups(**compared(recipe, table)) for table in drawn]
    useful = sum(len(varied) for varied, _ in divided)
    return {"useful": useful, "drawn": useful + sum(len(equal) for _, equal in divided)}


# Scoring.


@dataclass
class Scored:
    """Advantages and masks of N samples, (N,) float32 each; `kl_scale` as in `AdvantageResult`."""

    advantages: torch.Tensor
    sample_mask: torch.Tensor
    rewards: torch.Tensor
    metrics: dict[str, float]
    kl_scale: float = 0.0


def score(
    recipe: RecipeConfig, table: RolloutTable, stats: Mapping[str, torch.Tensor], weights: torch.Tensor
) -> Scored:
    """Turn rewards into advantages, and decide which samples count in the loss."""
    grpo = recipe.grpo
    shaped = shape_rewards(
        table.rewards,
        table.longest_turn_tokens,
        table.truncated,
        grpo.reward,
        max_new_tokens=recipe.generation.max_new_tokens,
        sample_ids=table.sample_ids,
    )
    rewards = subtract_kl(shaped, stats.get("kl_sum"), grpo.reward, table.sample_ids)
    mask = weights * overlong_mask(table.truncated, grpo.reward)
    limit = recipe.loss.max_sequence_logprob_error
    if limit is not None:
        mask = mask * (stats["logprob_error"] <= limit).float()
    kl = None
    if recipe.has_token_kl:
        kl = TokenKL(grpo.reward.kl_coefficient, stats["kl_to_go_sum"], stats["kl_to_go_squares"])
    # Tokens that the trainer's filters exclude do not count, once it has scored them.
    tokens = stats.get(f"{MISMATCH}tokens", table.response_tokens).long()
    result = compute_advantages(
        rewards if kl is None else shaped, table.group_ids, mask, tokens, grpo.advantage, kl=kl
    )
    require_finite(result.advantages, table.sample_ids, "advantages", "Lower grpo.reward.scale")
    metrics = {"sample_mask/mean": float(mask.mean()), **result.metrics}
    kept = weights > 0
    if kept.any():
        metrics["reward/kept_mean"] = float(table.rewards[kept].mean())
        metrics["reward/shaped_mean"] = float(rewards[kept].mean())
        if "logprob_error" in stats:
            metrics["logprob_error/mean"] = float(stats["logprob_error"][kept].mean())
    gaps = {n.removeprefix(MISMATCH): v for n, v in stats.items() if n.startswith(MISMATCH)}
    metrics |= {f"{MISMATCH}{name}": value for name, value in mismatch_summary(gaps, mask).items()}
    return Scored(result.advantages, mask, rewards, metrics, result.kl_scale)


def _stats(recipe: RecipeConfig, policy: Policy, rows: Any) -> Mapping[str, torch.Tensor]:
    if not needs_prev_logprobs(recipe):
        return {}
    reduce_fn = partial(_row_stats, kl_kind=recipe.grpo.reward.kl_kind, by_token=recipe.has_token_kl)
    return policy.reduce_rows(rows, reduce_fn, stats_columns(reference=recipe.needs_reference))


@registered
def _row_stats(data: Mapping[str, Any], *, kl_kind: KLKind, by_token: bool) -> dict[str, torch.Tensor]:
    gaps = {f"{MISMATCH}{name}": values for name, values in mismatch_stats(data).items()}
    token_kl = kl_to_go_stats(data, kl_kind=kl_kind) if by_token else {}
    return {**sample_stats(data, kl_kind=kl_kind), **token_kl, **gaps}


def _samples(session: Session, rows: Any, table: RolloutTable, scored: Scored) -> list[dict[str, Any]]:
    count = min(session.recipe.logging.samples_per_step, len(table))
    messages = session.policy.read_columns(rows, ["message_log"], count)["message_log"] if count else []
    tokens = session.detail.tokens(session.policy, rows)
    return [
        {
            "sample_id": table.sample_ids[i],
            "messages": messages[i],
            "reward": float(table.rewards[i]),
            "advantage": float(scored.advantages[i]),
            "truncated": bool(table.truncated[i]),
            "expected": session.answers.get(table.uids[i].rpartition("@")[0]),
            "correct": table.correct[i],
            "parts": table.metrics[i],
            **({"tokens": tokens[i]} if i < len(tokens) and tokens[i] else {}),
        }
        for i in range(count)
    ]
