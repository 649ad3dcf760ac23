"""Router replay on Megatron-Core, by the `RouterReplay` objects of its routers (`moe_enable_routing_replay=True`).

Megatron keeps these objects in one global list per process, wants int64 ids without gaps, and replays a recompute from
a list that it consumes once. Here every model has its own, found in its modules: routes go to routers by their global
layer number, so dense layers, pipeline stages and virtual pipeline need no care; missing rows are routed natively; and
what is left over after a backward pass is an error.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from headrace.data_plane.routes_codec import signed_routes
from headrace.errors import ReplayError
from headrace.models.router_replay.layer_map import LayerMap
from headrace.models.router_replay.receipts import Receipt


class GapReplay(RouterReplay):  # type: ignore[misc]
    """A router's replay object that routes rows of -1 natively and counts what it does."""

    replayed: int
    native: int
    forwards: int

    def start(self, target: torch.Tensor) -> None:
        """Take the rows (tokens, k) of one forward."""
        self.set_target_indices(target)
        self.replayed, self.native, self.forwards = 0, 0, 0

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
            chosen: tuple[torch.Tensor, torch.Tensor] = super().get_replay_topk(
                scores, topk, num_groups, group_topk, default_compute_topk
            )
            return chosen
        target = self._target(action).to(scores.device)
        if tuple(target.shape) != (len(scores), topk):
            raise ReplayError(
                f"a router sees {len(scores)} tokens and takes {topk} experts, its routes have shape "
                f"{tuple(target.shape)}; split them over ranks as the router's input is (rows_of_rank)"
            )
        missing = (target < 0).all(-1, keepdim=True)
        ids = target
        if bool(missing.any()):
            _, native = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            ids = torch.where(missing, native, target)
        if action == RouterReplayAction.REPLAY_FORWARD:
            self.forwards += 1
            self.native += int(missing.sum())
            self.replayed += len(scores) - int(missing.sum())
        return scores.gather(1, ids), ids

    def _target(self, action: RouterReplayAction) -> torch.Tensor:
        if action == RouterReplayAction.REPLAY_FORWARD:
            if self.target_topk_idx is None or self.forwards:
                raise ReplayError(
                    "a router ran twice in one forward, or without routes; each row is consumed once"
                )
            target: torch.Tensor = self.target_topk_idx
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
            ReplayError: no routers with a replay object, or layers that do not fit `moe_layer_freq`.
        """
        found: dict[int, GapReplay] = {}
        for chunk in chunks:
            for layer, replay in _routers(chunk):
                if layer in found:
                    raise ReplayError(
                        f"decoder layer {layer} has two routers in these chunks; give each chunk once"
                    )
                replay.__class__ = GapReplay
                found[layer] = replay
        if not found:
            raise ReplayError(
                "these chunks have no router with a replay object; build the model with "
                "moe_enable_routing_replay=True and with experts"
            )
        config: Any = next(m.config for m in chunks[0].modules() if hasattr(m, "config"))
        self.layer_map = LayerMap(config.num_layers, moe_layers(config))
        self.top_k = int(config.moe_router_topk)
        self.num_experts = int(config.num_moe_experts)
        strangers = sorted(set(found) - set(self.layer_map.moe_layers))
        if strangers:
            raise ReplayError(
                f"decoder layers {strangers} have routers, and moe_layer_freq={config.moe_layer_freq} calls them dense"
            )
        self._routers = dict(sorted(found.items()))

    @property
    def slots(self) -> tuple[int, ...]:
        """Which slots of the routes' layer axis (all MoE layers of the model) this rank's routers are."""
        return tuple(self.layer_map.moe_layers.index(layer) for layer in self._routers)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write down the choices of the forwards inside; `recorded` returns those of the last one."""
        self._act(RouterReplayAction.RECORD)
        try:
            yield
        finally:
            self._act(None)

    def recorded(self) -> torch.Tensor:
        """Return (tokens, routers of this rank, k) of the last recorded forward."""
        rows = [r.get_recorded_indices() for r in self._routers.values()]
        if any(r is None for r in rows):
            raise ReplayError("no routes recorded; run a forward inside recording()")
        return torch.stack([r for r in rows if r is not None], dim=1)

    @contextmanager
    def forward(self, ids: torch.Tensor, *, keep_for_recompute: bool = False) -> Iterator[None]:
        """Replay `ids` (tokens of this rank, all MoE layers, k) in the one forward inside.

        Any dtype of the wire; rows with the missing mark are routed natively. `keep_for_recompute` keeps the rows for
        a backward pass that recomputes layers (`backward`); otherwise nothing is left behind, as after an evaluation.

        Raises:
            ReplayError: another number of layers or experts per token, or, at the end, routers that did not run.
        """
        expected = (len(self.layer_map.moe_layers), self.top_k)
        if ids.dim() != 3 or tuple(ids.shape[1:]) != expected:
            raise ReplayError(
                f"routes have shape {tuple(ids.shape)}; expected (tokens, {expected[0]} MoE layers, {expected[1]})"
            )
        for slot, router in zip(self.slots, self._routers.values()):
            router.start(signed_routes(ids[:, slot]).contiguous())
        self._act(RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
            idle = [layer for layer, r in self._routers.items() if not r.forwards]
            if idle:
                raise ReplayError(f"routes never reached the routers of decoder layers {idle}")
        finally:
            self._act(None)
            for router in self._routers.values():
                router.target_topk_idx = None
                if not keep_for_recompute:
                    router.replay_backward_list = []

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Replay the kept rows, oldest forward first, in the recomputes of the backward pass inside."""
        self._act(RouterReplayAction.REPLAY_BACKWARD)
        try:
            yield
        finally:
            self._act(None)

    def finish(self) -> None:
        """End a step.

        Raises:
            ReplayError: rows that were kept for a recompute that did not come.
        """
        left = {layer: len(r.replay_backward_list) for layer, r in self._routers.items()}
        self.clear()
        if any(left.values()):
            raise ReplayError(f"rows kept for recompute were not consumed (decoder layer: forwards): {left}")

    def clear(self) -> None:
        """Forget all rows and records."""
        for router in self._routers.values():
            router.clear_indices()

    def receipt(self) -> Receipt:
        """Return what became of the rows of the last forward on this rank."""
        routers = self._routers.values()
        return Receipt(
            tuple(f"decoder layer {layer}" for layer in self._routers),
            max(r.replayed + r.native for r in routers),
            0,
            tuple(r.replayed for r in routers),
            tuple(r.native for r in routers),
            tuple(0 for _ in routers),
        )

    def _act(self, action: RouterReplayAction | None) -> None:
        for router in self._routers.values():
            router.router_replay_action = action


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
    for layer in chunk.modules():
        number = getattr(layer, "layer_number", None)
        router = getattr(getattr(layer, "mlp", None), "router", None)
        replay = getattr(router, "router_replay", None)
        if number is not None and isinstance(replay, RouterReplay):
            yield int(number) - 1, replay
