"""What became of the rows that a replay was given."""

from dataclasses import dataclass, field

from headrace.errors import ReplayError


@dataclass(frozen=True)
class Receipt:
    """Counts of token rows, per router slot; receipts of microbatches with the same routers add up.

    Every token is one row in every slot: `replayed` (the given experts were used), `native` (the router chose itself:
    a missing row, a router that is a function of the token, or a recording), `never_reached` (rows that no router
    took) or one of `padding` (routed as given, counted for all slots alike).

    Of a replay that writes down what it used (`trace=True`), `recomputed` counts the rows that an activation checkpoint
    has routed again in the backward pass, and `strayed` those of them that got other experts than in the forward.
    """

    routers: tuple[str, ...] = ()
    tokens: int = 0
    padding: int = 0
    replayed: tuple[int, ...] = field(default=())
    native: tuple[int, ...] = field(default=())
    never_reached: tuple[int, ...] = field(default=())
    recomputed: tuple[int, ...] = field(default=())
    strayed: tuple[int, ...] = field(default=())

    def __add__(self, other: "Receipt") -> "Receipt":
        """Return the sums.

        Raises:
            ReplayError: receipts of different routers.
        """
        if not self.routers or not other.routers:
            return other if not self.routers else self
        if self.routers != other.routers:
            raise ReplayError(
                f"receipts of {len(self.routers)} and {len(other.routers)} routers, not the same ones"
            )
        return Receipt(
            self.routers,
            self.tokens + other.tokens,
            self.padding + other.padding,
            _sums(self.replayed, other.replayed),
            _sums(self.native, other.native),
            _sums(self.never_reached, other.never_reached),
            _sums(self.recomputed, other.recomputed),
            _sums(self.strayed, other.strayed),
        )

    def totals(self) -> dict[str, int]:
        """Return row counts over all slots: replayed, native, never_reached, padding."""
        return {
            "replayed": sum(self.replayed),
            "native": sum(self.native),
            "never_reached": sum(self.never_reached),
            "padding": self.padding * len(self.routers),
        }

    def require_effect(self) -> None:
        """Refuse a replay that did nothing, or whose gradients are not those of its forward.

        Raises:
            ReplayError: not one row was replayed, rows never reached a router, or a recomputation used other experts.
        """
        totals = self.totals()
        unreached = [name for name, rows in zip(self.routers, self.never_reached) if rows]
        if totals["replayed"] == 0 or unreached:
            raise ReplayError(
                f"router replay had no effect: {totals}; never reached: {', '.join(unreached) or 'none'}"
            )
        if (fault := self.recompute_fault()) is not None:
            raise ReplayError(fault)

    def recompute_fault(self) -> str | None:
        """Return what is wrong with the recomputation, None if nothing is."""
        if not any(self.strayed):
            return None
        named = ", ".join(name for name, rows in zip(self.routers, self.strayed) if rows)
        return (
            f"recomputation in the backward pass used other experts than the forward in {sum(self.strayed)} rows "
            f"({named}), so its gradients are wrong; a hook or wrapper changes routes there, or "
            "policy.activation_checkpointing has to be false"
        )


def _sums(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    if not left or not right:
        return left or right
    return tuple(a + b for a, b in zip(left, right, strict=True))
