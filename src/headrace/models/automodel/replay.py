"""Router replay in a worker: routes for each microbatch's forward, cut with the same indices as its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from headrace.data_plane.route_binding import as_word, bound_digests, digest_sum, mask_missing
from headrace.data_plane.schema import INPUT_IDS, INPUT_LENGTHS, ROUTE_SALTS, ROUTED_EXPERTS_FIELD
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.ragged import RowLayout, ragged_indices
from headrace.errors import ConfigError, ReplayError
from headrace.models.automodel.data import ProcessedMicrobatch
from headrace.models.router_replay import RouterReplay, Routes, align_padded, install
from headrace.models.router_replay.agreement import add_agreements, route_agreement
from headrace.models.router_replay.choices import check_choices, describe_misfit
from headrace.models.router_replay.proof import Evidence, ReplayProof, TracedRows

T = TypeVar("T")

PREV_LOGPROBS, TRAIN = "prev_logprobs", "train"

_EVIDENCE_TOKENS = 2048
"""Of a stage that compares, on each rank: what is kept to find out why its rows are not the routers' own."""

# A batch with this column was sampled by an engine, so it has routes; supervised rows have neither.
_SAMPLED = "generation_logprobs"


def install_replay(model: torch.nn.Module) -> RouterReplay:
    """Install router replay on the trained model.

    Raises:
        ConfigError: a dense model, or a family whose routers cannot be replayed.
    """
    try:
        return install(model)
    except ReplayError as error:
        raise ConfigError(
            f"policy.router_replay.enabled=true, and this model cannot replay: {error}"
        ) from error


@dataclass(frozen=True)
class AlignedMicrobatch:
    """The rows of one forward on this rank, (T,) each but `ids` (T, layers, k).

    `salts` are of the tokens' samples (`sample_salts`). `counted` is True on tokens that take part in receipts and
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

    def part(self, index: int, count: int) -> "AlignedMicrobatch":
        """Return part `index` of `count` equal consecutive parts of the tokens."""
        columns = (self.ids, self.tokens, self.positions, self.salts, self.counted, self.real)
        ids, tokens, positions, salts, counted, real = (column.chunk(count)[index] for column in columns)
        return AlignedMicrobatch(ids, tokens, positions, salts, counted, real, self.lengths)

    def digest(self, ids: torch.Tensor) -> int:
        """Return the sum of digests of the counted tokens, with `ids` as their routes."""
        return as_word(digest_sum(bound_digests(ids, self.tokens, self.positions, self.salts), self.counted))


def align_microbatch(microbatch: ProcessedMicrobatch, *, num_experts: int) -> AlignedMicrobatch:
    """Cut the routes column (b, S, layers, k) of a microbatch as its `input_ids` are cut, packed or padded."""
    data, inputs = microbatch.data_dict, microbatch.processed_inputs
    routes = data[ROUTED_EXPERTS_FIELD]
    layout = RowLayout(data[INPUT_LENGTHS], microbatch.original_seq_len)
    rows, places = ragged_indices(layout.offsets)
    total, device = inputs.input_ids.numel(), routes.device
    if inputs.has_flash_attention:
        at = torch.arange(len(rows))
        full = routes.new_zeros(total, *routes.shape[2:])
        full[: len(rows)] = layout.strip(routes)
    else:
        at = rows * layout.width + places
        full = routes.flatten(0, 1)
    positions = torch.zeros(total, dtype=torch.int64)
    salts = torch.zeros_like(positions, device=device)
    counted, real = (torch.zeros(total, dtype=torch.bool) for _ in range(2))
    positions[at] = places
    salts[at.to(device)] = _salts(data).to(device)[rows.to(device)]
    counted[at] = places != layout.lengths[rows] - 1
    real[at] = True
    counted = counted.to(device)
    aligned = align_padded(full.unsqueeze(0), counted.unsqueeze(0), num_experts=num_experts)
    columns = (positions.to(device), salts, counted, real.to(device))
    return AlignedMicrobatch(aligned.ids, inputs.input_ids.flatten(), *columns, layout.lengths)


@dataclass(frozen=True)
class _Ran:
    """One microbatch that ran: its rows, what its routers used and, where compared, what they would have chosen."""

    rows: AlignedMicrobatch
    used: torch.Tensor
    native: torch.Tensor | None

    def traced(self) -> TracedRows:
        """Return all tokens of samples, on the CPU."""
        rows, real = self.rows, self.rows.real
        parts = (rows.tokens, rows.ids, self.used, self.native)
        tokens, given, used, native = (None if part is None else part[real].cpu() for part in parts)
        assert tokens is not None
        assert given is not None
        assert used is not None
        return TracedRows(tokens, rows.lengths, given, used, native)


class RouteReplayer:
    """Hands routes to the forwards of one model, stage by stage, and adds up what can be shown of them.

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
        """Hold the handle of an installed model; the ranks of `context` each run a part of a row's tokens.

        `floor` is the least share of exact choices with which an update may be made.
        """
        self.handle = handle
        self._trace = trace
        self._floor = floor
        self._context = context
        self._part = (0, 1) if context is None else (dist.get_rank(context), dist.get_world_size(context))
        self._stage: str | None = None
        self._proofs: dict[str, ReplayProof] = {}
        self._pending: tuple[AlignedMicrobatch, Routes, bool] | None = None
        # Whether this step's rows have been compared before, or with weights that are not the rollout's any more.
        self._compared = False
        self._evidence: list[_Ran] = []
        self._earlier: list[_Ran] = []

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
        self._add(ReplayProof(fetched=_digest_of_rows(data) if self._part[0] == 0 else 0))

    def routes(self, microbatch: ProcessedMicrobatch) -> Routes | None:
        """Return the routes for the next forward of the stage; None where the stage's rows have none."""
        self._settle()
        if self._stage is None:
            return None
        aligned = align_microbatch(microbatch, num_experts=self.handle.num_experts).part(*self._part)
        compare = self._stage == PREV_LOGPROBS or not self._compared
        routes = Routes.replay(aligned.ids, padding=~aligned.counted, trace=True, compare=compare)
        self._pending = (aligned, routes, compare)
        return routes

    def before_update(self) -> None:
        """Hold the open training stage to what can be seen of it so far; all ranks call this before each update.

        Raises:
            ReplayError: on every rank, where one has routers that used other experts than they were given, also in a
                recomputation, or where the recorded experts are too seldom those that the routers choose.
        """
        self._settle()
        if TRAIN not in self._proofs:
            return
        proof = self._proofs[TRAIN]
        parts = _of_all_ranks((proof.own_fault(), proof.agreement))
        if (fault := next((fault for fault, _ in parts if fault), None)) is not None:
            raise ReplayError(f"stage '{TRAIN}': {fault}. No weight has changed by it")
        agreement = add_agreements(agreement for _, agreement in parts)
        if not self._compared and describe_misfit(agreement, self._floor) is not None:
            check_choices(TRAIN, agreement, self._floor, self._shared_evidence())
        self._compared = True

    def drop(self) -> None:
        """Forget the stage; after an error in it."""
        self._pending = None
        if self._stage is not None:
            self._proofs.pop(self._stage, None)
        self._stage = None

    def take(self) -> dict[str, ReplayProof]:
        """Return the proof of each stage since the last call; all ranks of a replica call this together."""
        self._settle()
        proofs, self._proofs, self._stage = self._proofs, {}, None
        if self._context is not None:
            parts: list[dict[str, ReplayProof]] = [{} for _ in range(self._part[1])]
            dist.all_gather_object(parts, proofs, group=self._context)
            proofs = {stage: _join_parts([p[stage] for p in parts]) for stage in proofs}
        for stage, proof in proofs.items():
            if describe_misfit(proof.agreement, self._floor) is not None:
                proofs[stage] = replace(proof, evidence=self._shared_evidence())
        if self._evidence:
            self._earlier, self._evidence = self._evidence, []
        if TRAIN in proofs:
            self._compared = False
        return proofs

    def _settle(self) -> None:
        """Count the last forward; its backward pass, if any, is over."""
        if self._pending is None:
            return
        (rows, routes, compared), self._pending = self._pending, None
        if not routes.consumed:
            return
        ran = _Ran(rows, mask_missing(routes.ids, rows.ids), routes.native if compared else None)
        sliced, used = rows.digest(rows.ids), rows.digest(ran.used)
        agreement = None if ran.native is None else route_agreement(rows.ids, ran.native, rows.counted)
        traced = (ran.traced(),) if self._trace else ()
        self._add(ReplayProof(routes.receipt, 0, sliced, used, agreement, traced))
        if compared and sum(len(r.rows.tokens) for r in self._evidence) < _EVIDENCE_TOKENS:
            self._evidence.append(ran)

    def _shared_evidence(self) -> Evidence:
        """Return this replica's evidence; all ranks of `context` call this together."""
        parts = [Evidence(*(tuple(r.traced() for r in ran) for ran in (self._evidence, self._earlier)))]
        if self._context is not None:
            parts *= self._part[1]
            dist.all_gather_object(parts, parts[0], group=self._context)
        return Evidence(
            _join_microbatches([p.samples for p in parts]), _join_microbatches([p.earlier for p in parts])
        )

    def _add(self, proof: ReplayProof) -> None:
        assert self._stage is not None
        self._proofs[self._stage] = self._proofs.get(self._stage, ReplayProof()) + proof


def _of_all_ranks(value: T) -> list[T]:
    """Return something small of each rank of the run, on every one of them."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _digest_of_rows(data: BatchedDataDict) -> int:
    """Return the digest of padded rows, each without its last token."""
    routes, tokens = data[ROUTED_EXPERTS_FIELD], data[INPUT_IDS]
    column = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    counted = column < data[INPUT_LENGTHS].unsqueeze(1) - 1
    salts = _salts(data).to(tokens.device).unsqueeze(1).expand(tokens.shape)
    digests = bound_digests(routes.flatten(0, 1), tokens.flatten(), column.flatten(), salts.flatten())
    return as_word(digest_sum(digests, counted.flatten()))


def _salts(data: BatchedDataDict) -> torch.Tensor:
    """Return the salts of the rows' samples, int64 (N,); zeros for rows without names."""
    return data[ROUTE_SALTS] if ROUTE_SALTS in data else torch.zeros_like(data[INPUT_LENGTHS])


def _join_parts(parts: Sequence[ReplayProof]) -> ReplayProof:
    total = sum(parts, ReplayProof())
    return replace(total, traced=_join_microbatches([p.traced for p in parts]))


def _join_microbatches(parts: Sequence[tuple[TracedRows, ...]]) -> tuple[TracedRows, ...]:
    return tuple(_join_rows(rows) for rows in zip(*parts, strict=True))


def _join_rows(parts: Sequence[TracedRows]) -> TracedRows:
    tokens, given, used = (torch.cat(column) for column in zip(*((p.tokens, p.given, p.used) for p in parts)))
    natives = [p.native for p in parts if p.native is not None]
    return TracedRows(tokens, parts[0].lengths, given, used, torch.cat(natives) if natives else None)
