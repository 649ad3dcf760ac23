"""The routes of one forward pass, and the call in which a model's layers take them."""

from collections.abc import Sequence
from functools import partial

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

    def __init__(self) -> None:
        """Use `record` or `replay`."""
        self._given: torch.Tensor | None = None
        self._padding: torch.Tensor | None = None
        self._recording = self._comparing = self._check = False
        self._recorded: list[torch.Tensor] = []
        self._native: torch.Tensor | None = None
        self._calls: list[RoutedCall] = []

    @classmethod
    def record(cls) -> "Routes":
        """Return routes that every forward they are passed to appends to: a prefill, then each decode step, say."""
        routes = cls()
        routes._recording = True
        return routes

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

        Raises:
            ReplayError: `ids` are no tensor.
        """
        if not isinstance(ids, torch.Tensor):
            raise ReplayError(
                f"routes are a {type(ids).__name__}; expected a tensor of ids (tokens, routers, k), as "
                "torch.as_tensor(ids) makes of an array or a list"
            )
        routes = cls()
        routes._given, routes._padding = ids, padding
        routes._recording, routes._comparing, routes._check = trace, compare, check
        return routes

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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def open(self, routers: Sequence[RouterSpec], tokens: int, device: torch.device) -> "RoutedCall":
        """Begin a forward of `tokens` tokens; the model calls this."""
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
        """End a forward; the model calls this."""
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
        self._routers, self._tokens, self._device = routers, tokens, device
        self._open = True
        self._reached: set[int] = set()
        dtype = wire_dtype(max(r.num_experts for r in routers), routers[0].top_k)
        self._mark = missing_mark(dtype)
        # (T, routers, k) each; the layers write into views.
        blank = partial(torch.full, (tokens, len(routers), routers[0].top_k), self._mark, dtype=dtype)
        self._used = blank(device=device) if recording else None
        self._native = blank(device=device) if comparing else None
        self._used_in_forward: torch.Tensor | None = None

    def rows(self, slots: tuple[int, ...], device: torch.device) -> tuple[LayerRows, ...]:
        """Return the rows of a layer's routers; those given on the layer's device."""
        for slot in slots:
            if self._open and slot in self._reached:
                raise ReplayError(
                    f"router {self._routers[slot].name} took its rows twice in one forward; each row is consumed once"
                )
            self._reached.add(slot)
        parts = (self.given, self._used, self._native if self._open else None)
        columns = [[None if p is None else p[:, slot] for p in parts] for slot in slots]
        return tuple(LayerRows(None if given is None else given.to(device), *out) for given, *out in columns)

    def close(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """End the forward; return what the routers used and would have chosen, (T, routers, k) each if asked for.

        Where there is a backward pass, what routers use from now on is written into the same rows, to be told from it.
        """
        self._open = False
        unreached = [r.name for i, r in enumerate(self._routers) if i not in self._reached]
        if unreached:
            raise ReplayError(
                f"routes never reached {len(unreached)} of {len(self._routers)} routers: {', '.join(unreached)}. The "
                "model must pass its keyword arguments to all decoder layers, and run each of them"
            )
        used, buffer = self._used, self._used
        self._used = None
        if buffer is not None and torch.is_grad_enabled():
            used = buffer.clone()
            if self.given is not None:
                self._used_in_forward, self._used = used, buffer.fill_(self._mark)
        return used, self._native

    def recomputed(self) -> torch.Tensor | None:
        """Return what the routers used since `close`, missing where they did not run."""
        return None if self._open else self._used

    def stats(self) -> ReplayStats:
        """Count the rows; waits for the device."""
        real = self._tokens
        counted = torch.ones(self._tokens, 1, dtype=torch.bool, device=self._device)
        if self.padding is not None:
            counted = ~self.padding.unsqueeze(1)
            real = int(counted.sum())
        missing = self._missing(counted, real)
        reached = [slot in self._reached for slot in range(len(self._routers))]
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
        missing = missing_rows(self.given)  # (T, routers)
        missing[:, [i for i, r in enumerate(self._routers) if r.fixed_output is not None]] = True
        return list((missing & counted).sum(0).tolist())

    def _run_again(self, counted: torch.Tensor) -> tuple[Counts, Counts]:
        """Return per slot how many counted rows ran again, and how many of them with other experts."""
        again, used = self.recomputed(), self._used_in_forward
        if again is None or used is None:
            return (), ()
        ran = ~missing_rows(again) & counted
        differs = ran & (again != used).any(-1)
        return tuple(ran.sum(0).tolist()), tuple(differs.sum(0).tolist())
