"""What a stage of a training step can show of its replay: counts, digests, agreement and, if asked for, a trace.

Everything leaves out each sample's last token: nothing is scored from it, and an engine never routes it.
"""

from dataclasses import dataclass, field

import torch

from headrace.data_plane.route_binding import as_word
from headrace.models.router_replay.agreement import Agreement
from headrace.models.router_replay.receipts import Receipt


@dataclass(frozen=True)
class TracedRows:
    """Samples of one microbatch on the CPU, one after another: `tokens` (T,), `lengths` (N,), and routes (T, L, k).

    `given` are the rows handed to the forward, `used` those that its routers used.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    given: torch.Tensor
    used: torch.Tensor


@dataclass(frozen=True)
class ReplayProof:
    """The sums over a stage's microbatches; proofs of parts add up.

    The digests are sums of `bound_digests` mod 2^64: of the rows as they reached the worker (`fetched`), as they were
    cut and aligned for forwards (`sliced`), and as the routers used them (`used`). Equal digests mean that every row
    was used once, with the token that it was recorded for. `agreement` compares the given experts with those that each
    router would have chosen by itself, on hidden states that follow the given routes below it.
    """

    receipt: Receipt = field(default_factory=Receipt)
    fetched: int = 0
    sliced: int = 0
    used: int = 0
    agreement: Agreement | None = None
    traced: tuple[TracedRows, ...] = field(default=())

    def __add__(self, other: "ReplayProof") -> "ReplayProof":
        parts = [a for a in (self.agreement, other.agreement) if a is not None]
        return ReplayProof(
            self.receipt + other.receipt,
            as_word(self.fetched + other.fetched),
            as_word(self.sliced + other.sliced),
            as_word(self.used + other.used),
            parts[0] + parts[1] if len(parts) == 2 else (parts[0] if parts else None),
            self.traced + other.traced,
        )

    @property
    def tokens(self) -> int:
        """Tokens that took part, last ones left out."""
        return self.receipt.tokens - self.receipt.padding
