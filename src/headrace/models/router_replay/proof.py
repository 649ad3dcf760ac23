"""What a stage of a training step can show of its replay: counts, digests, agreement and, if asked for, a trace.

Everything leaves out each sample's last token: nothing is scored from it, and an engine never routes it.
"""

from dataclasses import dataclass, field

import torch

from headrace.data_plane.route_binding import as_word
from headrace.models.router_replay.agreement import Agreement, add_agreements
from headrace.models.router_replay.receipts import Receipt


@dataclass(frozen=True)
class TracedRows:
    """Samples of one microbatch on the CPU, one after another: `tokens` (T,), `lengths` (N,), and routes (T, L, k).

    `given` are the rows handed to the forward, `used` those that its routers used, `native` those that they would have
    chosen by themselves, where that was compared.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    given: torch.Tensor
    used: torch.Tensor
    native: torch.Tensor | None = None


@dataclass(frozen=True)
class Evidence:
    """Some `samples` of a stage with what routers chose by themselves, and `earlier` ones of the step before."""

    samples: tuple[TracedRows, ...] = ()
    earlier: tuple[TracedRows, ...] = ()

    def __add__(self, other: "Evidence") -> "Evidence":
        return Evidence(self.samples + other.samples, self.earlier + other.earlier)


@dataclass(frozen=True)
class ReplayProof:
    """The sums over a stage's microbatches; proofs of parts add up.

    The digests are sums of `bound_digests` mod 2^64: of the rows as they reached the worker (`fetched`), as they were
    cut and aligned for forwards (`sliced`), and as the routers used them (`used`). Equal digests mean that every row
    was used once, with the token that it was recorded for. `agreement` compares the given experts with those that each
    router would have chosen by itself, on hidden states that follow the given routes below it; `evidence` is there to
    find out why, where they differ too much.
    """

    receipt: Receipt = field(default_factory=Receipt)
    fetched: int = 0
    sliced: int = 0
    used: int = 0
    agreement: Agreement | None = None
    traced: tuple[TracedRows, ...] = field(default=())
    evidence: Evidence = field(default_factory=Evidence)

    def __add__(self, other: "ReplayProof") -> "ReplayProof":
        return ReplayProof(
            self.receipt + other.receipt,
            as_word(self.fetched + other.fetched),
            as_word(self.sliced + other.sliced),
            as_word(self.used + other.used),
            add_agreements((self.agreement, other.agreement)),
            self.traced + other.traced,
            self.evidence + other.evidence,
        )

    def own_fault(self) -> str | None:
        """Return what is wrong with a rank's own proof, None if nothing is: routers that did not obey."""
        if self.used != self.sliced:
            return (
                f"the routes' digest is {self.used:016x} (used), and {self.sliced:016x} as given: the routers did not "
                "use the rows that they were given"
            )
        return self.receipt.recompute_fault()

    @property
    def tokens(self) -> int:
        return self.receipt.tokens - self.receipt.padding
