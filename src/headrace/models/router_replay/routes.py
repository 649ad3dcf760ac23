"""The routes of one forward pass, and the call in which a model's layers take them."""

from collections.abc import Sequence

import torch

from headrace.data_plane.routes_codec import check_routes, missing_mark, missing_rows, wire_dtype
from headrace.errors import ReplayError, SchemaError
from headrace.models.router_replay.handle import RouterSpec
from headrace.models.router_replay.interception import LayerRows
from headrace.models.router_replay.stats import Counts, ReplayStats


class Routes:
    """The experts that the tokens of a forward use: written down by it (`record`), or given to it (`replay`).

    Rows are the tokens of the call's `input_ids`, flattened row by row (batch x sequence), padding included.
    """

    def __init__(
        self,
        given: torch.Tensor | None,
        *,
        padding: torch.Tensor | None = None,
        recording: bool = False,
        comparing: bool = False,
        check: bool = True,
    ) -> None:
        """Use `record` or `replay`."""
        self._given = given
        self._padding = padding
        self._recording = recording
        self._comparing = comparing
        self._check = check
        self._recorded: list[torch.Tensor] = []
        self._native: torch.Tensor | None = None
        self._calls: list[RoutedCall] = []

    @classmethod
    def record(cls) -> "Routes":
        """Return routes that every forward they are passed to appends to: a prefill, then each decode step, say."""
        return cls(None, recording=True)

    @classmethod
    def replay(
        cls,
        ids: torch.Tensor,
        *,
        padding: torch.Tensor | None = None,
        trace: bool = False,
        compare: bool = False,
        check: bool = True,
    ) -> "Routes":
        """Return routes for exactly one forward.

        Args:
            ids: (T, routers, k) expert ids of any integer dtype. A row that holds the missing mark (-1; 255 in uint8,
                65535 in uint16) is routed by the model itself.
            padding: (T,) bool, True on padding tokens, which are routed as given and not counted as replayed.
            trace: Also write down what the routers used, as `ids` of this object.
            compare: Also write down what each router would have chosen by itself, as `native`.
            check: Look at every id once per forward; turn it off for routes that `check_routes` has passed.
        """
        return cls(ids, padding=padding, recording=trace, comparing=compare, check=check)

    @property
    def ids(self) -> torch.Tensor:
        """The recorded experts, (T, routers, k), calls one after another; dtype as on the wire, device of the model.

        Raises:
            ReplayError: nothing has been recorded.
        """
        if not self._recorded:
            raise ReplayError("no routes recorded: pass Routes.record() to an installed model as routes=...")
        if len(self._recorded) > 1:
            self._recorded = [torch.cat(self._recorded)]
        return self._recorded[0]

    @property
    def native(self) -> torch.Tensor:
        """What the routers would have chosen in a replay, (T, routers, k), each on hidden states of the given routes.

        Raises:
            ReplayError: no forward of a replay with `compare=True`.
        """
        if self._native is None:
            raise ReplayError("no native routes: run a forward with Routes.replay(ids, compare=True)")
        return self._native

    @property
    def recomputed(self) -> torch.Tensor | None:
        """What the routers used when the backward pass ran layers again, (T, routers, k); missing where none ran.

        None without `trace=True`, and where there were no gradients.
        """
        return self._calls[0].recomputed() if self._given is not None and self._calls else None

    @property
    def consumed(self) -> bool:
        return bool(self._calls)

    @property
    def stats(self) -> ReplayStats:
        """What became of the rows, over all calls; reading it waits for the device."""
        return sum((call.stats() for call in self._calls), ReplayStats())

    receipt = stats
    """The documented name of an earlier version."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def open(self, routers: Sequence[RouterSpec], tokens: int, device: torch.device) -> "RoutedCall":
        """Begin a forward of `tokens` tokens; the model calls this.

        Raises:
            ReplayError: routes that a forward has consumed already, that do not fit the call, or that no router can
                have chosen.
        """
        call = RoutedCall(routers, tokens, device, self._recording, self._comparing)
        if self._given is None:
            return call
        if self._calls:
            raise ReplayError(
                "these routes are consumed: a forward has replayed them. Make one Routes.replay per microbatch and "
                "forward (checkpoint layers, not the whole model)"
            )
        expected = (tokens, len(routers), routers[0].top_k)
        if tuple(self._given.shape) != expected:
            raise ReplayError(
                f"routes have shape {tuple(self._given.shape)}; this forward takes {expected}: its tokens (batch x "
                "sequence, padding included), the model's routers and the experts per token. align_padded and "
                "align_packed build rows for a batch, LayerMap.select drops dense layers"
            )
        if self._padding is not None:
            if self._padding.shape != (tokens,):
                raise ReplayError(f"padding has shape {tuple(self._padding.shape)}; expected ({tokens},)")
            call.padding = self._padding.to(device, non_blocking=True)
        call.given = self._given.to(device, non_blocking=True)
        if self._check:
            _check_ids(call.given, routers)
        return call

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def close(self, call: "RoutedCall") -> None:
        """End a forward; the model calls this.

        Raises:
            ReplayError: routers that took no rows.
        """
        self._calls.append(call)
        used, self._native = call.close()
        if used is not None:
            self._recorded.append(used)


def _check_ids(ids: torch.Tensor, routers: Sequence[RouterSpec]) -> None:
    """Check all routers at once if they are alike, or one by one but those that are functions of the token."""
    alike = len({r.num_experts for r in routers}) == 1 and all(r.fixed_output is None for r in routers)
    slots = [i for i, r in enumerate(routers) if r.fixed_output is None]
    for group in [slice(None)] if alike else [slice(i, i + 1) for i in slots]:
        part, first = ids[:, group], routers[group][0]
        try:
            check_routes(part, num_experts=first.num_experts, num_layers=part.shape[1], top_k=first.top_k)
        except SchemaError as error:
            where = "" if alike else f" ({first.name})"
            raise ReplayError(f"these routes cannot be replayed{where}: {error}") from error


class RoutedCall:
    """One forward of a model: hands each router its rows once, and keeps what the routers write down.

    After `close` it still hands out rows, to layers that an activation checkpoint runs again, and counts nothing.
    """

    given: torch.Tensor | None = None
    padding: torch.Tensor | None = None

    def __init__(
        self,
        routers: Sequence[RouterSpec],
        tokens: int,
        device: torch.device,
        recording: bool,
        comparing: bool,
    ) -> None:
        self._routers = routers
        self._tokens = tokens
        self._device = device
        self._recording = recording
        self._comparing = comparing
        self._dtype = wire_dtype(max(r.num_experts for r in routers), routers[0].top_k)
        self._open = True
        self._taken: dict[int, LayerRows] = {}
        self._used: torch.Tensor | None = None

    def rows(self, slots: tuple[int, ...], device: torch.device) -> tuple[LayerRows, ...]:
        """Return the rows of a layer's routers, on the layer's device.

        Raises:
            ReplayError: a router takes its rows a second time in one forward.
        """
        return tuple(self._rows(slot, device) for slot in slots)

    def _rows(self, slot: int, device: torch.device) -> LayerRows:
        given = None if self.given is None else self.given[:, slot].to(device)
        if not self._open:
            return LayerRows(given, self._taken[slot].used)
        if slot in self._taken:
            raise ReplayError(
                f"router {self._routers[slot].name} took its rows twice in one forward; each row is consumed once"
            )
        used = self._blank(slot, device) if self._recording else None
        native = self._blank(slot, device) if self._comparing else None
        rows = self._taken[slot] = LayerRows(given, used, native)
        return rows

    def _blank(self, slot: int, device: torch.device) -> torch.Tensor:
        shape = (self._tokens, self._routers[slot].top_k)
        return torch.full(shape, missing_mark(self._dtype), dtype=self._dtype, device=device)

    def close(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """End the forward; return what the routers used and would have chosen, (T, routers, k) each if asked for.

        Where there is a backward pass, what routers use from now on is written into the same rows, to be told from it.

        Raises:
            ReplayError: routers that took no rows.
        """
        self._open = False
        unreached = [r.name for i, r in enumerate(self._routers) if i not in self._taken]
        if unreached:
            raise ReplayError(
                f"routes never reached {len(unreached)} of {len(self._routers)} routers: {', '.join(unreached)}. The "
                "model must pass its keyword arguments to all decoder layers, and run each of them"
            )
        used, native = self._join("used"), self._join("native")
        watched = self.given is not None and torch.is_grad_enabled()
        for slot, rows in self._taken.items():
            if rows.used is not None and watched:
                rows.used.fill_(missing_mark(self._dtype))
            self._taken[slot] = LayerRows(None, rows.used if watched else None)
        self._used = used if watched else None
        return used, native

    def recomputed(self) -> torch.Tensor | None:
        """Return what the routers used since `close`, missing where they did not run."""
        return None if self._used is None else self._join("used")

    def _join(self, column: str) -> torch.Tensor | None:
        parts = [getattr(self._taken[slot], column) for slot in range(len(self._routers))]
        return torch.stack([part.to(self._device) for part in parts], dim=1) if parts[0] is not None else None

    def stats(self) -> ReplayStats:
        """Count the rows; waits for the device."""
        real = self._tokens
        counted = torch.ones(self._tokens, 1, dtype=torch.bool, device=self._device)
        if self.padding is not None:
            counted = ~self.padding.unsqueeze(1)
            real = int(counted.sum())
        missing = self._missing(counted, real)
        reached = [slot in self._taken for slot in range(len(self._routers))]
        again, differs = self._run_again(counted)
        return ReplayStats(
            routers=tuple(r.name for r in self._routers),
            tokens=self._tokens,
            padding=self._tokens - real,
            replayed=tuple(real - gone if on else 0 for gone, on in zip(missing, reached)),
            native=tuple(gone if on else 0 for gone, on in zip(missing, reached)),
            never_reached=tuple(0 if on or self.given is None else real for on in reached),
            recomputed=again,
            recompute_differs=differs,
        )

    def _missing(self, counted: torch.Tensor, real: int) -> list[int]:
        """Return per slot how many counted rows the router chooses itself."""
        if self.given is None:
            return [real] * len(self._routers)
        missing = missing_rows(self.given)
        missing[:, [i for i, r in enumerate(self._routers) if r.fixed_output is not None]] = True
        return list((missing & counted).sum(0).tolist())

    def _run_again(self, counted: torch.Tensor) -> tuple[Counts, Counts]:
        """Return per slot how many counted rows ran again, and how many of them with other experts."""
        again = self.recomputed()
        if again is None or self._used is None:
            return (), ()
        ran = ~missing_rows(again) & counted
        differs = ran & (again != self._used).any(-1)
        return tuple(ran.sum(0).tolist()), tuple(differs.sum(0).tolist())
