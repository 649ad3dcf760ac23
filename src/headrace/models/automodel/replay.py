"""Router replay in a worker: routes for each microbatch's forward, cut with the same indices as its tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from headrace.data_plane.route_binding import as_word, bound_digests
from headrace.data_plane.routes_codec import missing_mark, missing_rows
from headrace.data_plane.schema import INPUT_IDS, INPUT_LENGTHS, ROUTE_SALTS, ROUTED_EXPERTS_FIELD
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.ragged import offsets_from_lengths, ragged_indices, row_lengths
from headrace.errors import ConfigError, ReplayError
from headrace.models.router_replay import RouterReplay, Routes, align_padded, install
from headrace.models.router_replay.diagnosis import check_choices
from headrace.models.router_replay.stats import ReplayStats, TracedRows, join_rows, route_agreement

T = TypeVar("T")

PREV_LOGPROBS, TRAIN = "prev_logprobs", "train"

_KEPT_TOKENS = 2048
"""Tokens of a stage that compares, on each rank, that are kept to find out why their rows are not the routers' own."""

# A batch with this column was sampled by an engine, so it has routes; supervised rows have neither.
_SAMPLED = "generation_logprobs"


def install_replay(model: torch.nn.Module) -> RouterReplay:
    """Install router replay on the trained model."""
    try:
        return install(model)
    except ReplayError as error:
        raise ConfigError(
            f"policy.router_replay.enabled=true, and this model cannot replay: {error}"
        ) from error


@dataclass(frozen=True)
class AlignedMicrobatch:
    """The rows of one forward on this rank, (T,) each but `ids` (T, layers, k).

    `salts` are of the tokens' samples (`sample_salts`). `counted` is True on tokens that take part in stats and
    digests: neither padding nor a sample's last. The others have experts that spread evenly. `real` is True on all
    tokens of samples; `lengths` (N) are the samples'.
    """

    ids: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    salts: torch.Tensor
    counted: torch.Tensor
    real: torch.Tensor
    lengths: torch.Tensor

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "AlignedMicrobatch":
        """Return the same samples with `change` applied to every column of tokens."""
        columns = {name: change(column) for name, column in vars(self).items() if name != "lengths"}
        return AlignedMicrobatch(**columns, lengths=self.lengths)

    def digest(self, ids: torch.Tensor) -> int:
        """Return the sum of digests of the counted tokens, with `ids` as their routes."""
        return as_word((bound_digests(ids, self.tokens, self.positions, self.salts) * self.counted).sum())

    def traced(self, used: torch.Tensor, native: torch.Tensor | None) -> TracedRows:
        """Return all tokens of samples."""
        real = self.real
        own = None if native is None else native[real]
        return TracedRows(self.tokens[real], self.lengths, self.ids[real], used[real], own)


def align_microbatch(
    data: BatchedDataDict, tokens: torch.Tensor, *, packed: bool, num_experts: int
) -> AlignedMicrobatch:
    """Cut the routes column (b, S, layers, k) as the tokens of the forward are cut, packed (T,) or padded (b S,)."""
    rows = _padded_rows(data)
    if packed:
        row, place = ragged_indices(offsets_from_lengths(rows.lengths))
        at = (row * data[INPUT_IDS].shape[1] + place).to(rows.ids.device)
        rest = len(tokens) - len(at)
        rows = rows.each(lambda x: torch.cat([x.index_select(0, at), x.new_zeros(rest, *x.shape[1:])]))
    ids = align_padded(rows.ids.unsqueeze(0), rows.counted.unsqueeze(0), num_experts=num_experts).ids
    return replace(rows, ids=ids, tokens=tokens)


def _padded_rows(data: BatchedDataDict) -> AlignedMicrobatch:
    """Return all places of padded columns (b, S)."""
    tokens = data[INPUT_IDS]
    ends = data[INPUT_LENGTHS].to(tokens.device, non_blocking=True).unsqueeze(1)
    salts = data[ROUTE_SALTS] if ROUTE_SALTS in data else torch.zeros_like(ends)  # 0 for rows without names
    places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    salts = salts.to(tokens.device).view(-1, 1).expand(tokens.shape)
    return AlignedMicrobatch(
        data[ROUTED_EXPERTS_FIELD].flatten(0, 1),
        tokens.flatten(),
        places.flatten(),
        salts.flatten(),
        counted=(places < ends - 1).flatten(),
        real=(places < ends).flatten(),
        lengths=row_lengths(data[INPUT_LENGTHS]),
    )


class RouteReplayer:
    """Hands routes to the forwards of one model, stage by stage, and adds up what router replay did.

    The first stage of a step that runs with the weights of the rollout also compares the recorded experts with those
    that the routers would choose: scoring, or, without it, training up to the first update.
    """

    def __init__(
        self,
        handle: RouterReplay,
        *,
        trace: bool = False,
        floor: float = 0.0,
        context: dist.ProcessGroup | None = None,
    ) -> None:
        """Take the handle of an installed model; the ranks of `context` each run a part of a row's tokens.

        `floor` is the least fraction of exact choices with which an update may be made.
        """
        self.handle = handle
        self._trace = trace
        self._floor = floor
        self._context = context
        self._part = (0, 1) if context is None else (dist.get_rank(context), dist.get_world_size(context))
        self._stage: str | None = None
        self._stats: dict[str, ReplayStats] = {}
        self._pending: tuple[AlignedMicrobatch, Routes, bool] | None = None
        # Whether this step's rows have been compared before, or with weights that are not the rollout's any more.
        self._compared = False
        self._kept: list[TracedRows] = []
        self._earlier: list[TracedRows] = []

    def begin(self, stage: str, data: BatchedDataDict) -> None:
        """Begin or continue a stage over the rows of `data`.

        Raises:
            ReplayError: rows that an engine sampled, without their routes.
        """
        self._settle()
        if ROUTED_EXPERTS_FIELD not in data:
            self._stage = None
            if stage == TRAIN and _SAMPLED not in data:
                return
            raise ReplayError(
                f"stage '{stage}': policy.router_replay.enabled=true, and the rows have no column "
                f"'{ROUTED_EXPERTS_FIELD}' (there are: {', '.join(sorted(data))}); the generator must record routes, "
                "and the step must fetch the column"
            )
        self._stage = stage
        self._compared |= stage == PREV_LOGPROBS
        # Every context rank has all rows; one of them counts.
        rows = _padded_rows(data)
        self._add(ReplayStats(fetched=rows.digest(rows.ids) if self._part[0] == 0 else 0))

    def routes(self, data: BatchedDataDict, tokens: torch.Tensor, *, packed: bool) -> Routes | None:
        """Return the routes of the `tokens` of the stage's next forward; None where the stage's rows have none."""
        self._settle()
        if self._stage is None:
            return None
        index, ranks = self._part
        aligned = align_microbatch(data, tokens, packed=packed, num_experts=self.handle.num_experts)
        aligned = aligned.each(lambda column: column.chunk(ranks)[index])
        compare = self._stage == PREV_LOGPROBS or not self._compared
        routes = Routes.replay(aligned.ids, padding=~aligned.counted, trace=True, compare=compare)
        self._pending = (aligned, routes, compare)
        return routes

    def before_update(self) -> None:
        """Check the open training stage as far as it has run; all ranks call this before each update.

        Raises:
            ReplayError: on every rank, where one has routers that used other experts than they were given, also in a
                recomputation, or where the recorded experts are too seldom those that the routers choose.
        """
        self._settle()
        if TRAIN not in self._stats:
            return
        stats = replace(self._stats[TRAIN], rows=())
        parts = _gathered((stats.router_fault(), stats))
        if (fault := next((fault for fault, _ in parts if fault), None)) is not None:
            raise ReplayError(f"stage '{TRAIN}': {fault}. No weight has changed by it")
        if not self._compared:
            total = sum((part for _, part in parts), ReplayStats())
            if total.misfit(self._floor) is not None:
                check_choices(TRAIN, self._with_kept_rows(total), self._floor)
        self._compared = True

    def drop(self) -> None:
        """Forget the stage; after an error in it."""
        self._pending = None
        if self._stage is not None:
            self._stats.pop(self._stage, None)
        self._stage = None

    def take(self) -> dict[str, ReplayStats]:
        """Return the stats of each stage since the last call; all ranks of a replica call this together."""
        self._settle()
        taken, self._stats, self._stage = self._stats, {}, None
        if self._context is not None:
            parts = _gathered(taken, self._context)
            taken = {stage: _join([part[stage] for part in parts]) for stage in taken}
        for stage, stats in taken.items():
            if stats.misfit(self._floor) is not None:
                taken[stage] = self._with_kept_rows(stats)
        if self._kept:
            self._earlier, self._kept = self._kept, []
        if TRAIN in taken:
            self._compared = False
        return taken

    def _settle(self) -> None:
        """Count the last forward; its backward pass, if any, is over."""
        if self._pending is None:
            return
        (rows, routes, compared), self._pending = self._pending, None
        if not routes.consumed:
            return
        # Where a row was missing, the router chose itself: the digest knows it as missing.
        unknown = missing_rows(rows.ids).unsqueeze(-1)
        used = routes.ids.masked_fill(unknown, missing_mark(routes.ids.dtype))
        native = routes.native if compared else None
        stats = replace(routes.stats, sliced=rows.digest(rows.ids), used=rows.digest(used))
        if native is not None:
            stats += route_agreement(rows.ids, native, rows.counted)
        keep = compared and sum(len(kept.tokens) for kept in self._kept) < _KEPT_TOKENS
        if self._trace or keep:
            traced = rows.traced(used, native)
            stats = replace(stats, rows=(traced.cpu(),) if self._trace else ())
            self._kept += [traced] if keep else []
        self._add(stats)

    def _with_kept_rows(self, stats: ReplayStats) -> ReplayStats:
        """Add what is kept to find a cause, of all ranks of `context`, which call this together."""
        kept, earlier = (tuple(rows.cpu() for rows in part) for part in (self._kept, self._earlier))
        own = ReplayStats(rows=kept, earlier=earlier)
        found = own if self._context is None else _join(_gathered(own, self._context))
        return replace(stats, rows=stats.rows or found.rows, earlier=found.earlier)

    def _add(self, stats: ReplayStats) -> None:
        assert self._stage is not None
        self._stats[self._stage] = self._stats.get(self._stage, ReplayStats()) + stats


def _gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return something small of each rank of a group, or of the run, on every one of them."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _join(parts: list[ReplayStats]) -> ReplayStats:
    """Add up ranks that ran parts of the same microbatches."""
    rows, earlier = (
        tuple(
            join_rows(same, same[0].lengths) for same in zip(*(getattr(p, kept) for p in parts), strict=True)
        )
        for kept in ("rows", "earlier")
    )
    return replace(sum(parts, ReplayStats()), rows=rows, earlier=earlier)
