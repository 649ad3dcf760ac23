"""Router replay on Megatron-Core, by the `RouterReplay` objects of its routers (`moe_enable_routing_replay=True`).

Megatron keeps these objects in one global list per process, wants int64 ids without gaps, and replays a recompute from
a list that it consumes once. Here every model has its own, found in its modules: routes go to routers by their global
layer number, so dense layers and pipeline stages need no care; the routers of multi-token prediction are left alone;
missing rows are routed natively; and what is left over after a backward pass is an error.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from headrace.data_plane.routes_codec import check_routes, signed_routes
from headrace.errors import ReplayError, SchemaError
from headrace.models.router_replay.handle import LayerMap
from headrace.models.router_replay.stats import ReplayStats


class GapReplay(RouterReplay):  # type: ignore[misc]
    """A router's replay object that routes rows of -1 natively and counts what it does."""

    target_topk_idx: torch.Tensor | None
    replayed: int
    native: int
    forwards: int
    keeps: bool
    kept_before: int

    def start(self, target: torch.Tensor, *, keeps: bool) -> None:
        """Take the rows (tokens, k) of one forward; `keeps` them if this router is one that will be recomputed."""
        self.target_topk_idx, self.keeps = target, keeps
        self.kept_before = len(self.replay_backward_list)
        self.replayed, self.native, self.forwards = 0, 0, 0

    def end(self, *, failed: bool) -> None:
        """End the forward; one that failed leaves no rows for a recompute."""
        self.target_topk_idx = None
        if failed:
            del self.replay_backward_list[self.kept_before :]

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and ids of the given rows, and of the router's own choice where a row is missing."""
        action = self.router_replay_action
        if action not in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD):
            own: tuple[torch.Tensor, torch.Tensor] = super().get_replay_topk(
                scores, topk, num_groups, group_topk, default_compute_topk
            )
            return own
        target = self._target(action).to(scores.device)
        if tuple(target.shape) != (len(scores), topk):
            raise ReplayError(
                f"a router sees {len(scores)} tokens and takes {topk} experts, its routes have shape "
                f"{tuple(target.shape)}; split them over ranks as the router's input is (rows_of_rank)"
            )
        missing = (target < 0).all(-1, keepdim=True)
        native, ids = int(missing.sum()), target
        if native:
            _, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            ids = torch.where(missing, chosen, target)
        if action == RouterReplayAction.REPLAY_FORWARD:
            self.forwards += 1
            self.native += native
            self.replayed += len(scores) - native
        return scores.gather(1, ids), ids

    def _target(self, action: RouterReplayAction) -> torch.Tensor:
        if action == RouterReplayAction.REPLAY_FORWARD:
            if self.target_topk_idx is None or self.forwards:
                raise ReplayError(
                    "a router ran twice in one forward, or without routes; each row is consumed once"
                )
            target: torch.Tensor = self.target_topk_idx
            # Megatron runs a layer without gradients when, and only when, it will run it again for them.
            if self.keeps and not torch.is_grad_enabled():
                self.replay_backward_list.append(target)
            return target
        if not self.replay_backward_list:
            raise ReplayError("a recompute asked for routes that an earlier one has consumed")
        recomputed: torch.Tensor = self.replay_backward_list.pop(0)
        return recomputed


class MegatronRouterReplay:
    """The routers of one model on this rank, over all of its (virtual) pipeline chunks."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Find the routers.

        Raises:
            ReplayError: no routers with a replay object, layers that do not fit `moe_layer_freq`, or a capacity factor,
                with which a router drops choices that it was given.
        """
        self._chunks: list[dict[int, GapReplay]] = [
            dict(sorted(dict(_routers(chunk)).items())) for chunk in chunks
        ]
        numbers = sorted(layer for own in self._chunks for layer in own)
        if twice := [layer for layer in numbers if numbers.count(layer) > 1]:
            raise ReplayError(
                f"decoder layer {twice[0]} has two routers in these chunks; give each chunk once"
            )
        if not numbers:
            raise ReplayError(
                "these chunks have no router with a replay object; build the model with "
                "moe_enable_routing_replay=True and with experts"
            )
        config: Any = next(m.config for m in chunks[0].modules() if hasattr(m, "config"))
        if config.moe_expert_capacity_factor is not None:
            raise ReplayError(
                f"moe_expert_capacity_factor={config.moe_expert_capacity_factor} lets a router drop experts that its "
                "routes name; build the model with moe_expert_capacity_factor=None"
            )
        self.layer_map = LayerMap(config.num_layers, moe_layers(config))
        self.top_k = int(config.moe_router_topk)
        self.num_experts = int(config.num_moe_experts)
        strangers = sorted(set(numbers) - set(self.layer_map.moe_layers))
        if strangers:
            raise ReplayError(
                f"decoder layers {strangers} have routers, and moe_layer_freq={config.moe_layer_freq} calls them dense"
            )
        everything = {layer: router for own in self._chunks for layer, router in own.items()}
        self._routers = {layer: everything[layer] for layer in numbers}
        self._last: dict[int, GapReplay] = {}
        for router in everything.values():
            router.__class__ = GapReplay

    @property
    def slots(self) -> tuple[int, ...]:
        """Which slots of the routes' layer axis (all MoE layers of the model) this rank's routers are."""
        return tuple(self.layer_map.moe_layers.index(layer) for layer in self._routers)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write down the choices of the forwards inside; `recorded` returns those of the last one."""
        with self._acting(RouterReplayAction.RECORD, self._routers):
            yield

    def recorded(self, chunk: int | None = None) -> torch.Tensor:
        """Return (tokens, routers of this rank, k) of the last recorded forward; of one chunk's routers, if given."""
        rows = [r.get_recorded_indices() for r in self._of(chunk).values()]
        if any(r is None for r in rows):
            raise ReplayError("no routes recorded; run a forward inside recording()")
        return torch.stack([r for r in rows if r is not None], dim=1)

    @contextmanager
    def forward(
        self, ids: torch.Tensor, *, chunk: int | None = None, keep_for_recompute: bool = False
    ) -> Iterator[None]:
        """Replay `ids` (tokens of this rank, all MoE layers, k) in the one forward inside.

        Any dtype of the wire; rows with the missing mark are routed natively. `chunk` is the chunk that runs, by its
        place among those of this rank, where a virtual pipeline runs one at a time. `keep_for_recompute` keeps the
        rows of layers that Megatron will recompute for a backward pass (`backward`); without it nothing is left
        behind, and rows that earlier forwards kept stay.

        Raises:
            ReplayError: routes that no router of this model can have chosen, or, at the end, routers that did not run.
        """
        try:
            check_routes(
                ids, num_experts=self.num_experts, num_layers=len(self.layer_map.moe_layers), top_k=self.top_k
            )
        except SchemaError as error:
            raise ReplayError(str(error)) from error
        running = self._of(chunk)
        for layer, router in running.items():
            slot = self.layer_map.moe_layers.index(layer)
            router.start(signed_routes(ids[:, slot]).contiguous(), keeps=keep_for_recompute)
        self._last, failed = running, True
        try:
            with self._acting(RouterReplayAction.REPLAY_FORWARD, running):
                yield
            if idle := [layer for layer, router in running.items() if not router.forwards]:
                raise ReplayError(
                    f"routes never reached the routers of decoder layers {idle}; where a virtual pipeline runs one "
                    "chunk at a time, say which: forward(ids, chunk=...)"
                )
            failed = False
        finally:
            for router in running.values():
                router.end(failed=failed)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Replay the kept rows, oldest forward first, in the recomputes of the backward pass inside."""
        with self._acting(RouterReplayAction.REPLAY_BACKWARD, self._routers):
            yield

    def finish(self) -> None:
        left = {layer: len(r.replay_backward_list) for layer, r in self._routers.items()}
        for router in self._routers.values():
            router.clear_indices()
        if any(left.values()):
            raise ReplayError(f"rows kept for recompute were not consumed (decoder layer: forwards): {left}")

    def stats(self) -> ReplayStats:
        """Return what became of the rows of the last forward on this rank."""
        if not self._last:
            raise ReplayError("no forward has replayed routes yet; run one inside forward(ids)")
        routers = self._last.values()
        return ReplayStats(
            routers=tuple(f"decoder layer {layer}" for layer in self._last),
            tokens=max(r.replayed + r.native for r in routers),
            replayed=tuple(r.replayed for r in routers),
            native=tuple(r.native for r in routers),
            never_reached=(0,) * len(routers),
        )

    def _of(self, chunk: int | None) -> dict[int, GapReplay]:
        if chunk is None:
            return self._routers
        if not 0 <= chunk < len(self._chunks):
            raise ReplayError(f"chunk={chunk}; this rank has the chunks 0 to {len(self._chunks) - 1}")
        return self._chunks[chunk]

    @contextmanager
    def _acting(self, action: RouterReplayAction, routers: dict[int, GapReplay]) -> Iterator[None]:
        for router in routers.values():
            router.router_replay_action = action
        try:
            yield
        finally:
            for router in routers.values():
                router.router_replay_action = None


def moe_layers(config: Any) -> tuple[int, ...]:
    """Return the decoder layers (from 0, over all pipeline stages) that are mixtures of experts.

    `moe_layer_freq` is a period N (every N-th layer from the first) or a list of 0 and 1 per layer.
    """
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return tuple(range(0, config.num_layers, frequency))
    return tuple(layer for layer, is_moe in enumerate(frequency) if is_moe)


def rows_of_rank(
    ids: torch.Tensor,
    *,
    context: tuple[int, int] = (0, 1),
    sequence: tuple[int, int] = (0, 1),
) -> torch.Tensor:
    """Return the rows (tokens, layers, k) of this rank's routers, of a padded batch (B, S, layers, k).

    Megatron's tokens are in the order sequence, then batch. `context` is (rank, ranks) of context parallelism, which
    gives rank r the parts r and 2 ranks - 1 - r of 2 x ranks parts of every sequence; `sequence` that of sequence
    parallelism over tensor ranks, in consecutive parts.

    Example: S = 8 on 2 context ranks: rank 0 has positions 0, 1, 6, 7.

    Raises:
        ReplayError: a length that does not divide into the parts.
    """
    (context_rank, context_ranks), (rank, ranks) = context, sequence
    length = ids.shape[1]
    parts = (2 * context_ranks if context_ranks > 1 else 1) * ranks
    if length % parts:
        raise ReplayError(
            f"sequences of {length} tokens do not divide into {parts} parts (context parallel {context_ranks}, "
            f"sequence parallel {ranks}); pad them to a multiple"
        )
    if context_ranks > 1:
        chunks = ids.chunk(2 * context_ranks, dim=1)
        ids = torch.cat([chunks[context_rank], chunks[2 * context_ranks - 1 - context_rank]], dim=1)
    return ids.chunk(ranks, dim=1)[rank].transpose(0, 1).flatten(0, 1)


def _routers(chunk: torch.nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield the decoder layer (from 0, over the whole model) and the replay object of a chunk's routers."""
    drafting = {
        m for mtp in chunk.modules() if isinstance(mtp, MultiTokenPredictionLayer) for m in mtp.modules()
    }
    for layer in chunk.modules():
        if layer in drafting:
            continue
        number = getattr(layer, "layer_number", None)
        router = getattr(getattr(layer, "mlp", None), "router", None)
        replay = getattr(router, "router_replay", None)
        if number is not None and isinstance(replay, RouterReplay):
            yield int(number) - 1, replay
