"""The routes of rollouts: joined over turns, as a column, and as a few numbers per sample for the driver."""

from collections.abc import Sequence
from dataclasses import asdict

import torch

from headrace.data_plane.route_binding import bound_digests, sample_salts
from headrace.data_plane.routes_codec import RouteShape, check_routes, missing_mark, missing_rows
from headrace.distributed.ragged import offsets_from_lengths, ragged_indices
from headrace.errors import GenerationError, SchemaError
from headrace.experience.types import Rollout
from headrace.models.generation.interfaces import GenerationOutput


def check_recorded(output: GenerationOutput, active: Sequence[Rollout], shape: RouteShape | None) -> None:
    """Hold a generator to the routes that it says it records.

    Raises:
        GenerationError: routes that are absent, too few, or of another shape or dtype, with the sample.
    """
    if shape is None:
        return
    if output.routes is None or len(output.routes) != len(active):
        got = "no routes" if output.routes is None else f"routes of {len(output.routes)} samples"
        raise GenerationError(
            f"the generator records routes (route_shape={shape}), and returned {got} for {len(active)} samples"
        )
    for rollout, tokens, routes in zip(active, output.token_ids, output.routes):
        expected = (len(rollout.token_ids) + len(tokens) - 1, shape.num_layers, shape.top_k)
        if tuple(routes.shape) != expected or routes.dtype != shape.dtype:
            raise GenerationError(
                f"sample '{rollout.sample_id}': the generator returned routes of shape {tuple(routes.shape)} and "
                f"{routes.dtype}; expected {expected} (prompt and completion without the last token, MoE layers, k) "
                f"and {shape.dtype}"
            )


def append_routes(rollout: Rollout, recorded: torch.Tensor) -> None:
    """Add the rows of a turn, whose completion `rollout.token_ids` holds already, to those of earlier turns.

    A token keeps the route that it had when the completion after it was sampled. So earlier turns' rows stay, and the
    last token of a turn, sampled and not yet computed then, gets its row from this turn's prefill.
    """
    known = rollout.routes
    rows = recorded if known is None else torch.cat([known, recorded[len(known) :]])
    rollout.routes = rows[: len(rollout.token_ids)]


def routes_column(rollouts: Sequence[Rollout], shape: RouteShape) -> torch.Tensor:
    """Return (sum of lengths, layers, k) in the wire's dtype, missing where a token has no route.

    Raises:
        SchemaError: a sample without routes, with more routes than tokens, or with routes that no router can have
            chosen (`check_routes`); names sample, token and layer.
    """
    lengths = [len(r.token_ids) for r in rollouts]
    form = (shape.dtype, shape.num_layers, shape.top_k)
    expected = f"(tokens, {shape.num_layers} MoE layers, {shape.top_k} experts per token) in {shape.dtype}"
    rows = []
    for rollout, length in zip(rollouts, lengths):
        routes = rollout.routes
        if routes is None or (routes.dtype, *routes.shape[1:]) != form:
            got = "no routes" if routes is None else f"routes of shape {tuple(routes.shape)}, {routes.dtype}"
            raise SchemaError(
                f"sample '{rollout.sample_id}' has {got}; router replay (policy.router_replay.enabled) needs {expected}"
            )
        if len(routes) > length:
            raise SchemaError(
                f"sample '{rollout.sample_id}' has routes of {len(routes)} tokens and {length} tokens"
            )
        rows.append(_up_to(routes, length))
    column = torch.cat(rows)
    check_routes(column, **asdict(shape), lengths=lengths, sample_ids=[r.sample_id for r in rollouts])
    return column


def route_facts(rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the share of (token, layer) rows without a record, (N,) float32, and the digest, (N,) int64.

    Both leave out each sample's last token, from which nothing is scored. The digest is the wrapped sum of
    `bound_digests`, salted with the sample's id. Zeros where no rollout has routes.
    """
    count = len(rollouts)
    if all(r.routes is None for r in rollouts):
        return torch.zeros(count), torch.zeros(count, dtype=torch.int64)
    parts = [_without_last(r) for r in rollouts]
    lengths = torch.tensor([len(p) for p in parts])
    rows, positions = ragged_indices(offsets_from_lengths(lengths))
    routes = torch.cat(parts)
    tokens = torch.tensor([t for r in rollouts for t in r.token_ids[:-1]], dtype=torch.int64)
    salts = sample_salts([r.sample_id for r in rollouts])
    digests = torch.zeros(count, dtype=torch.int64).index_add_(
        0, rows, bound_digests(routes, tokens, positions, salts[rows])
    )
    missing = missing_rows(routes).float().mean(1)
    shares = torch.zeros(count).index_add_(0, rows, missing) / lengths.clamp(min=1)
    return shares, digests


def _without_last(rollout: Rollout) -> torch.Tensor:
    if rollout.routes is None:
        raise SchemaError(f"sample '{rollout.sample_id}' has no routes, and other samples of its batch have")
    return _up_to(rollout.routes, len(rollout.token_ids) - 1)


def _up_to(routes: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return (tokens, layers, k), missing where there is no record."""
    padding = (0, 0, 0, 0, 0, max(tokens - len(routes), 0))
    return torch.nn.functional.pad(routes[:tokens], padding, value=missing_mark(routes.dtype))
