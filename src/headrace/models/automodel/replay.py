"""Router replay in a worker: routes for each microbatch's forward, cut with the same indices as its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from headrace.data_plane.route_binding import as_word, bound_digests, digest_sum, mask_missing
from headrace.data_plane.schema import INPUT_IDS, INPUT_LENGTHS, ROUTED_EXPERTS_FIELD
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.ragged import RowLayout, ragged_indices
from headrace.errors import ConfigError, ReplayError
from headrace.models.automodel.data import ProcessedMicrobatch
from headrace.models.router_replay import RouterReplay, Routes, align_padded, install
from headrace.models.router_replay.agreement import route_agreement
from headrace.models.router_replay.proof import ReplayProof, TracedRows

PREV_LOGPROBS, TRAIN = "prev_logprobs", "train"

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

    `counted` is True on tokens that take part in receipts and digests: neither padding nor a sample's last. The others
    have experts that spread evenly. `real` is True on all tokens of samples; `lengths` (N) are the samples'.
    """

    ids: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    counted: torch.Tensor
    real: torch.Tensor
    lengths: torch.Tensor

    def part(self, index: int, count: int) -> "AlignedMicrobatch":
        """Return part `index` of `count` equal consecutive parts of the tokens."""
        ids, tokens, positions, counted, real = (
            column.chunk(count)[index]
            for column in (self.ids, self.tokens, self.positions, self.counted, self.real)
        )
        return AlignedMicrobatch(ids, tokens, positions, counted, real, self.lengths)


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
    counted, real = (torch.zeros(total, dtype=torch.bool) for _ in range(2))
    positions[at] = places
    counted[at] = places != layout.lengths[rows] - 1
    real[at] = True
    counted = counted.to(device)
    aligned = align_padded(full.unsqueeze(0), counted.unsqueeze(0), num_experts=num_experts)
    tokens = inputs.input_ids.flatten()
    return AlignedMicrobatch(
        aligned.ids, tokens, positions.to(device), counted, real.to(device), layout.lengths
    )


class RouteReplayer:
    """Hands routes to the forwards of one model, stage by stage, and adds up what can be shown of them."""

    def __init__(
        self, handle: RouterReplay, *, trace: bool = False, context: dist.ProcessGroup | None = None
    ) -> None:
        """Hold the handle of an installed model; the ranks of `context` each run a part of a row's tokens."""
        self.handle = handle
        self._trace = trace
        self._context = context
        self._part = (0, 1) if context is None else (dist.get_rank(context), dist.get_world_size(context))
        self._stage: str | None = None
        self._proofs: dict[str, ReplayProof] = {}
        self._pending: tuple[AlignedMicrobatch, Routes] | None = None

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
        # Every context rank has all rows; one of them counts.
        self._add(ReplayProof(fetched=_digest_of_rows(data) if self._part[0] == 0 else 0))

    def routes(self, microbatch: ProcessedMicrobatch) -> Routes | None:
        """Return the routes for the next forward of the stage; None where the stage's rows have none."""
        self._settle()
        if self._stage is None:
            return None
        aligned = align_microbatch(microbatch, num_experts=self.handle.num_experts).part(*self._part)
        compare = self._stage == PREV_LOGPROBS or PREV_LOGPROBS not in self._proofs
        routes = Routes.replay(aligned.ids, padding=~aligned.counted, trace=True, compare=compare)
        self._pending = (aligned, routes)
        return routes

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
        if self._context is None:
            return proofs
        parts: list[dict[str, ReplayProof]] = [{} for _ in range(self._part[1])]
        dist.all_gather_object(parts, proofs, group=self._context)
        return {stage: _join_parts([p[stage] for p in parts]) for stage in proofs}

    def _settle(self) -> None:
        """Count the last forward; its backward pass, if any, is over."""
        if self._pending is None:
            return
        (rows, routes), self._pending = self._pending, None
        if not routes.consumed:
            return
        used = mask_missing(routes.ids, rows.ids)
        sliced, ran = (
            as_word(digest_sum(bound_digests(ids, rows.tokens, rows.positions), rows.counted))
            for ids in (rows.ids, used)
        )
        compared = self._stage == PREV_LOGPROBS or PREV_LOGPROBS not in self._proofs
        agreement = route_agreement(rows.ids, routes.native, rows.counted) if compared else None
        traced = (_traced(rows, used),) if self._trace else ()
        self._add(ReplayProof(routes.receipt, 0, sliced, ran, agreement, traced))

    def _add(self, proof: ReplayProof) -> None:
        assert self._stage is not None
        self._proofs[self._stage] = self._proofs.get(self._stage, ReplayProof()) + proof


def _digest_of_rows(data: BatchedDataDict) -> int:
    """Return the digest of padded rows, each without its last token."""
    routes, tokens = data[ROUTED_EXPERTS_FIELD], data[INPUT_IDS]
    column = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    counted = column < data[INPUT_LENGTHS].unsqueeze(1) - 1
    digests = bound_digests(routes.flatten(0, 1), tokens.flatten(), column.flatten())
    return as_word(digest_sum(digests, counted.flatten()))


def _join_parts(parts: Sequence[ReplayProof]) -> ReplayProof:
    """Return the proof of all tokens from those of consecutive parts of every microbatch's tokens."""
    total = sum(parts, ReplayProof())
    traced = tuple(_join_rows(rows) for rows in zip(*(p.traced for p in parts), strict=True))
    return replace(total, traced=traced)


def _join_rows(parts: Sequence[TracedRows]) -> TracedRows:
    tokens, given, used = (torch.cat(column) for column in zip(*((p.tokens, p.given, p.used) for p in parts)))
    return TracedRows(tokens, parts[0].lengths, given, used)


def _traced(rows: AlignedMicrobatch, used: torch.Tensor) -> TracedRows:
    real = rows.real
    parts = (rows.tokens[real], rows.ids[real], used[real])
    tokens, given, ran = (part.cpu() for part in parts)
    return TracedRows(tokens, rows.lengths, given, ran)
