"""What router replay did, in one object that adds up over microbatches, ranks and stages.

Digests, agreement and kept rows leave out each sample's last token: nothing is scored from it, and no engine routes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from headrace.data_plane.route_binding import as_word
from headrace.data_plane.routes_codec import missing_mark, missing_rows
from headrace.errors import ReplayError

Counts = tuple[int, ...]

_KEPT = ("rows", "earlier")

# A single layer may be further off than all of them together: one of many layers hardly moves the whole fraction.
_LAYER_PART = 0.5
_DIGESTS = {
    "fetched": "what the workers fetched is not what the rollout recorded (transport, or stale rows)",
    "sliced": "the rows cut for forwards are not those that were fetched (a shift, or rows taken twice)",
    "used": "the routers did not use the rows that they were given",
}


@dataclass(frozen=True)
class TracedRows:
    """Samples of one microbatch, one after another: `tokens` (T,), `lengths` (N,), and routes (T, layers, k).

    `given` are the rows handed to the forward, `used` those that its routers used, `native` those that they would have
    chosen by themselves, where that was compared.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    given: torch.Tensor
    used: torch.Tensor
    native: torch.Tensor | None = None

    @property
    def counted(self) -> torch.Tensor:
        """A bool (T,), False on the last token of each sample."""
        counted = torch.ones(len(self.tokens), dtype=torch.bool)
        counted[self.lengths[self.lengths > 0].cumsum(0) - 1] = False
        return counted

    def cpu(self) -> "TracedRows":
        native = None if self.native is None else self.native.cpu()
        return TracedRows(self.tokens.cpu(), self.lengths, self.given.cpu(), self.used.cpu(), native)


def join_rows(parts: Sequence[TracedRows], lengths: torch.Tensor) -> TracedRows:
    """Return the tokens of all parts, one after another; choices that only some have compared are missing rows."""
    tokens, given, used = (torch.cat(column) for column in zip(*((p.tokens, p.given, p.used) for p in parts)))
    if all(p.native is None for p in parts):
        return TracedRows(tokens, lengths, given, used)
    natives = [
        torch.full_like(p.given, missing_mark(p.given.dtype)) if p.native is None else p.native for p in parts
    ]
    return TracedRows(tokens, lengths, given, used, torch.cat(natives))


@dataclass(frozen=True)
class ReplayStats:
    """Sums over forwards with the same routers.

    Counts of rows, one per router slot: `replayed` (the given experts were used), `native` (the router chose itself: a
    missing row, a router that is a function of the token, or a recording), `never_reached` (no router took the row).
    `padding` of the `tokens` are routed as given and in none of these. Where a replay writes down what it used,
    `recomputed` counts the rows that an activation checkpoint has routed again in the backward pass, and
    `recompute_differs` those of them that got other experts than in the forward.

    Agreement of the given experts with those that each router would have chosen by itself, on hidden states that follow
    the given routes below it, one per slot: rows `compared`, those with the same set of experts (`exact`), and the sum
    of intersection over union (`iou`). `tokens_compared` were compared in at least one slot, and `tokens_differing`
    differ in one.

    Digests are sums of `bound_digests` mod 2^64: of the rows as they reached the worker (`fetched`), as they were cut
    and aligned for forwards (`sliced`), and as the routers used them (`used`). Equal digests mean that every row was
    used once, with the token that it was recorded for.

    `rows` are microbatches kept for a trace, or to find out why too few choices are exact; `earlier` those of the step
    before.
    """

    routers: tuple[str, ...] = ()
    tokens: int = 0
    padding: int = 0
    replayed: Counts = ()
    native: Counts = ()
    never_reached: Counts = ()
    recomputed: Counts = ()
    recompute_differs: Counts = ()
    compared: Counts = ()
    exact: Counts = ()
    iou: tuple[float, ...] = ()
    tokens_compared: int = 0
    tokens_differing: int = 0
    fetched: int = 0
    sliced: int = 0
    used: int = 0
    rows: tuple[TracedRows, ...] = ()
    earlier: tuple[TracedRows, ...] = ()

    def __add__(self, other: "ReplayStats") -> "ReplayStats":
        if self.routers and other.routers and self.routers != other.routers:
            raise ReplayError(
                f"stats of {len(self.routers)} and {len(other.routers)} routers, not the same ones, do not add up"
            )
        numbers = [f.name for f in fields(self) if f.name not in ("routers", *_KEPT)]
        sums = {name: _sum(getattr(self, name), getattr(other, name)) for name in numbers}
        sums |= {name: as_word(sums[name]) for name in _DIGESTS}
        sums |= {name: getattr(self, name) + getattr(other, name) for name in _KEPT}
        return ReplayStats(self.routers or other.routers, **sums)

    def totals(self) -> dict[str, int]:
        """Return row counts over all slots: replayed, native, never_reached, padding."""
        counts = {name: sum(getattr(self, name)) for name in ("replayed", "native", "never_reached")}
        return {**counts, "padding": self.padding * len(self.routers)}

    def require_effect(self) -> None:
        """Refuse a replay that did nothing, or whose gradients are not those of its forward.

        Raises:
            ReplayError: not one row was replayed, rows never reached a router, or a recomputation used other experts.
        """
        if not self.routers:
            raise ReplayError(
                "router replay had no effect: no forward took these routes; install(model), then pass them to its "
                "forward as routes=... (a model without it ignores them)"
            )
        unreached = [name for name, rows in zip(self.routers, self.never_reached) if rows]
        if not sum(self.replayed) or unreached:
            raise ReplayError(
                f"router replay had no effect: {self.totals()}; never reached: {', '.join(unreached) or 'none'}"
            )
        if (fault := self._recompute_fault()) is not None:
            raise ReplayError(fault)

    def router_fault(self) -> str | None:
        """Return how routers used other experts than they were given, also in a recomputation; None if none did."""
        if self.used != self.sliced:
            return f"the routes' digest is {self.used:016x} (used), and {self.sliced:016x} as given: {_DIGESTS['used']}"
        return self._recompute_fault()

    def _recompute_fault(self) -> str | None:
        if not any(self.recompute_differs):
            return None
        named = ", ".join(name for name, rows in zip(self.routers, self.recompute_differs) if rows)
        return (
            "recomputation in the backward pass used other experts than the forward in "
            f"{sum(self.recompute_differs)} rows ({named}), so its gradients are wrong; a hook or wrapper changes "
            "routes there, or policy.activation_checkpointing has to be false"
        )

    def check(self, stage: str, *, digests: torch.Tensor, total_tokens: torch.Tensor) -> None:
        """Require that `stage`, summed over all workers, used every recorded row exactly once.

        `digests` (N,) are those that the rollout computed (`route_facts`), `total_tokens` (N,) of the same samples.

        Raises:
            ReplayError: nothing was replayed, rows that no router reached, rows used twice or not at all, or rows that
                are not those of the rollout; says between which two places they changed.
        """
        self.require_effect()
        tokens, expected = self.tokens - self.padding, int((total_tokens - 1).clamp(min=0).sum())
        if tokens != expected:
            fault = "rows were consumed twice" if tokens > expected else "rows were never reached"
            raise ReplayError(
                f"stage '{stage}': {tokens} tokens were replayed, the step's samples have {expected}: {fault}"
            )
        recorded = as_word(digests.sum())
        for place, fault in _DIGESTS.items():
            if (found := getattr(self, place)) != recorded:
                raise ReplayError(
                    f"stage '{stage}': the routes' digest is {found:016x} ({place}), and {recorded:016x} at rollout: "
                    f"{fault}; policy.router_replay.trace=true and 'headrace trace-check' show where"
                )

    def misfit(self, floor: float) -> str | None:
        """Return what is below the floor, or None: the fraction of exact choices, or in a slot less than half of it."""
        if not (rows := sum(self.compared)):
            return None
        fraction = sum(self.exact) / rows
        if fraction < floor:
            return f"{fraction:.1%} of {rows} recorded choices (token x layer) are those of the trainer's own routers"
        for layer, (exact, compared) in enumerate(zip(self.exact, self.compared)):
            if exact < compared * floor * _LAYER_PART:
                return (
                    f"{exact / compared:.1%} of {compared} recorded choices in layer {layer} are those of the "
                    f"trainer's own router ({fraction:.1%} in all layers)"
                )
        return None

    def agreement(self) -> dict[str, float]:
        """Return fractions: `route_exact`, `route_iou`, `route_tokens_differing`; empty where nothing was compared."""
        if not (rows := sum(self.compared)):
            return {}
        return {
            "route_exact": sum(self.exact) / rows,
            "route_iou": sum(self.iou) / rows,
            "route_tokens_differing": self.tokens_differing / self.tokens_compared,
        }

    def metrics(self, stage: str) -> dict[str, float]:
        """Return counts of rows (token x layer) and agreement, by metric name."""
        totals = self.totals()
        metrics = {
            f"router_replay/{stage}/{name}": float(totals[name])
            for name in ("replayed", "native", "never_reached")
        }
        for name, fraction in self.agreement().items():
            # One stage of a step compares; the name without a stage is the step's.
            metrics |= {f"router_replay/{stage}/{name}": fraction, f"router_replay/{name}": fraction}
        for name, sums in (("exact", self.exact), ("iou", self.iou)):
            metrics |= {
                f"router_replay/{name}_layer_{layer}": value / rows
                for layer, (value, rows) in enumerate(zip(sums, self.compared))
                if rows
            }
        return metrics


def _sum(left: Any, right: Any) -> Any:
    if not isinstance(left, tuple):
        return left + right
    return tuple(a + b for a, b in zip(left, right, strict=True)) if left and right else left or right


def route_agreement(left: torch.Tensor, right: torch.Tensor, mask: torch.Tensor | None = None) -> ReplayStats:
    """Compare routes (T, layers, k) as sets of experts, where neither is missing and `mask` (T,) is not 0.

    Example: experts [1, 2] against [2, 3] have intersection over union 1/3, and [1, 2] against [2, 1] agree exactly.
    """
    if left.shape != right.shape or left.dim() != 3:
        raise ReplayError(
            f"routes of shape {tuple(left.shape)} against {tuple(right.shape)}; expected (T, layers, k)"
        )
    top_k = left.shape[-1]
    compared = ~(missing_rows(left) | missing_rows(right))  # (T, layers)
    if mask is not None:
        compared &= mask.bool().unsqueeze(1)
    wide, other = left.to(torch.int32).unsqueeze(3), right.to(torch.int32).unsqueeze(2)
    # How many experts two choices share, layer by layer: all at once would take k times the memory of the routes.
    common = torch.stack([(wide[:, i] == other[:, i]).any(2).sum(1) for i in range(left.shape[1])], dim=1)
    exact = (common == top_k) & compared
    iou = (common / (2 * top_k - common)) * compared
    return ReplayStats(
        compared=tuple(compared.sum(0).tolist()),
        exact=tuple(exact.sum(0).tolist()),
        iou=tuple(iou.double().sum(0).tolist()),
        tokens_compared=int(compared.any(1).sum()),
        tokens_differing=int((compared & ~exact).any(1).sum()),
    )
