"""The groups that lie ready in the store, between collectors and trainer; here are their ids and tags alone."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from threading import Lock

from headrace.algorithms.async_utils.staleness_sampler import OLDEST, StalenessSampler
from headrace.config import RecipeConfig
from headrace.config_async import room_of
from headrace.data_plane.claim_terms import TagRule
from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.schema import CLAIM, DP_TRAIN_FIELDS, ROLLOUT_FIELDS, ROUTED_EXPERTS_FIELD
from headrace.errors import ClaimExpired, ClaimTimeout, HeadraceError
from headrace.experience.collector import POSITION
from headrace.experience.own_columns import columns_asked_for
from headrace.experience.sync_rollout_actor import MADE_AT

TRAINS = "trains"
"""A tag: 1 where a step can learn from the row's group, else 0; stamped with dynamic sampling alone."""
_TASK = "train"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Staleness:
    """How old a step's samples are, by the steps made since their first tokens, and by seconds since they were put."""

    lags: Sequence[int]
    ages_s: Sequence[float]

    @classmethod
    def of(cls, rows: KVBatchMeta, step: int) -> "Staleness":
        now, tags = time.time(), rows.tags or []
        return cls([step - 1 - tag[OLDEST] for tag in tags], [now - tag[MADE_AT] for tag in tags])

    def metrics(self) -> dict[str, float]:
        count = max(len(self.lags), 1)
        return {
            "async/lag_mean": sum(self.lags) / count,
            "async/lag_max": float(max(self.lags, default=0)),
            "async/age_mean_s": sum(self.ages_s) / count,
        }


class ReplayBuffer:
    """One partition of the store for a whole run: collectors put groups, and steps take them under a lease."""

    def __init__(
        self, client: DataPlaneClient, partition_id: str, sampler: StalenessSampler, recipe: RecipeConfig
    ) -> None:
        cfg, grpo = recipe.asynchrony, recipe.grpo
        self.partition_id, self._client, self._sampler = partition_id, client, sampler
        self._group_size, self._order, self._lease_s = grpo.num_generations_per_prompt, cfg.order, cfg.lease_s
        self.rows = self._group_size * room_of(recipe)
        self._columns = [*ROLLOUT_FIELDS, "message_log", *columns_asked_for(recipe.loss)]
        if recipe.policy.router_replay.enabled:
            self._columns.append(ROUTED_EXPERTS_FIELD)
        self._filter = grpo.dynamic_sampling
        self._flat_of_step = 0, 0  # the step, and its groups without a signal so far
        self._most_flat = self._filter.max_refills * grpo.num_prompts_per_step
        self._dropped, self._flat = 0, list[KVBatchMeta]()
        self._dropping = Lock()  # collectors drop, too
        # Rows that the partition takes beyond its room, for those that were restored.
        self._spare = 0

    def open(self) -> None:
        """Open the partition, unless there is one that will do: rows that were restored are trained on."""
        is_there = self.partition_id in self._client.partition_ids()
        # One without rows only knows the ids that it has had.
        if is_there and (there := self._client.partition_report(self.partition_id, limit=0)).rows:
            spare = (there.num_samples or 0) - self.rows
            is_whole = all(there.rows_by_column.get(name) == there.rows for name in self._columns)
            if there.group_size == self._group_size and spare >= there.rows and is_whole:
                self._spare = spare
                return
            _log.warning(
                "%d rows of partition '%s' have other columns, or are of groups of another size; they are made again",
                there.rows,
                self.partition_id,
            )
        names = list(dict.fromkeys([*self._columns, *DP_TRAIN_FIELDS]))
        self._client.register_partition(
            self.partition_id, names, self.rows, [_TASK], grpo_group_size=self._group_size
        )

    def close(self) -> None:
        with suppress(HeadraceError):  # a store that is lost would hide the error that ended the run
            self._client.clear_samples(None, self.partition_id)

    def wait_for_room(self, rows: int, timeout_s: float) -> None:
        """Wait until so many rows more fit into the room; below 0, until it is overdrawn by no more.

        Raises:
            ClaimTimeout: not in time.
        """
        self._client.wait_for_room(self.partition_id, rows + self._spare, timeout_s)

    def take(self, step: int, groups: int, timeout_s: float) -> KVBatchMeta | None:
        """Lease groups to a step, in the order of their prompts; None: too few came in time.

        With dynamic sampling they have a signal, until so many had none that `max_refills` rounds are over.
        """
        signal = [TagRule(TRAINS, at_least=1)] if self._filters(step) else []
        rows = self._claim(groups, [*self._sampler.rules(step), *signal], timeout_s)
        if rows is None or rows.tags is None:
            return None
        tags = rows.tags
        return rows.subset(
            sorted(range(rows.size), key=lambda i: (tags[i][POSITION], tags[i]["group_index"]))
        )

    def drop(self, step: int) -> list[int]:
        """Clear the groups that no step from this one on can train on, or learn from; return their positions."""
        with self._dropping:
            stale, flat = list(self._dropped_by(self._sampler.stale(step))), list[KVBatchMeta]()
            self._dropped += len(stale)
            while self._filters(step) and (
                rows := next(self._dropped_by([TagRule(TRAINS, at_most=0)]), None)
            ):
                flat.append(rows)
                self._flat_of_step = step, self._flat_of(step) + 1
            self._flat += flat
        return [(rows.tags or [])[0][POSITION] for rows in [*stale, *flat]]

    def _dropped_by(self, rules: Sequence[TagRule]) -> Iterator[KVBatchMeta]:
        while rules and (rows := self._claim(1, rules)) is not None:
            self._client.clear_samples(rows.sample_ids, self.partition_id, claim=rows.extra_info[CLAIM])
            yield rows

    def _filters(self, step: int) -> bool:
        return self._filter.enabled and self._flat_of(step) < self._most_flat

    def _flat_of(self, step: int) -> int:
        of, count = self._flat_of_step
        return count if of == step else 0

    def take_flat(self) -> list[KVBatchMeta]:
        """Return the groups that were dropped since the last time because they teach nothing."""
        with self._dropping:
            flat, self._flat = self._flat, []
        return flat

    def renew(self, taken: Sequence[KVBatchMeta]) -> None:
        """Count their leases anew; raises ClaimExpired: one has run out."""
        for rows in taken:
            self._client.renew_claim(rows, self._lease_s)

    @contextmanager
    def leased(self, taken: Sequence[KVBatchMeta]) -> Iterator[None]:
        """Return a context in which a step works on rows; if it fails, those taken by then are given back.

        Raises:
            ClaimExpired: a lease has run out, as whoever renewed it, wrote or cleared under it was told.
        """
        with ExitStack() as undo:
            undo.callback(self._give_back, taken)
            try:
                yield
            except ClaimExpired as error:
                raise ClaimExpired(f"{error}; raise async.lease_s={self._lease_s:g}") from error
            undo.pop_all()

    def _give_back(self, taken: Sequence[KVBatchMeta]) -> None:
        for rows in taken:
            with suppress(HeadraceError):  # the error that ended the step is the one to tell
                self._client.release_claim(rows)

    def positions_there(self) -> list[int]:
        """Return the positions of the groups that the partition holds."""
        report = self._client.partition_report(self.partition_id, limit=self.rows + self._spare)
        return sorted({row.tags[POSITION] for row in report.unconsumed if POSITION in row.tags})

    def take_metrics(self) -> dict[str, float]:
        dropped, self._dropped = self._dropped, 0
        held = self._client.partition_report(self.partition_id, limit=0).rows // self._group_size
        groups = self.rows // self._group_size
        return {
            "async/dropped_groups": float(dropped),
            "async/ready_groups": float(held),
            "async/room_groups": float(max(0, groups - held)),
        }

    def _claim(
        self, groups: int, rules: Sequence[TagRule], timeout_s: float | None = None
    ) -> KVBatchMeta | None:
        try:
            return self._client.claim_meta(
                self.partition_id,
                _TASK,
                self._columns,
                groups * self._group_size,
                blocking=timeout_s is not None,
                timeout_s=timeout_s or 0.0,
                lease_s=self._lease_s,
                holder="trainer",
                where=rules,
                order=self._order,
            )
        except ClaimTimeout:
            return None
