"""Inside one router's forward: its top-k over the experts gives the ids that were asked for.

The router's own code runs as it is. Of its `topk` calls the one over all experts returns the given ids, with the live
scores at those ids as values; softmax or sigmoid, selection bias, renormalisation, scaling and the gradient stay the
family's own. Where that top-k sees scores with a group mask on them, values come from the scores before the mask: a
given expert may lie outside the groups that are best now.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from headrace.data_plane.routes_codec import missing_mark
from headrace.errors import ReplayError


class LayerRows(NamedTuple):
    """What one router is given, and where it writes what it used and what it would have chosen.

    (T, k) each, of a narrow integer dtype.
    """

    given: torch.Tensor | None
    used: torch.Tensor | None
    native: torch.Tensor | None = None


class TopK(NamedTuple):
    """What `torch.topk` returns, by the same names."""

    values: torch.Tensor
    indices: torch.Tensor


class ChoiceSizes(NamedTuple):
    """What tells a router's choice of experts from its other top-k calls; see `RouterSpec`."""

    top_k: int
    num_experts: int
    grouped: bool


class RouterChoice:
    """The state of one run of one router, which has a `_replay_name` and `_replay_sizes`.

    Compiled layers share their code as long as it reads nothing that differs between them: the name is for messages.
    """

    def __init__(self, router: Any, rows: LayerRows) -> None:
        self.router = router
        self.sizes: ChoiceSizes = router._replay_sizes
        self.rows = rows
        self.choices = 0
        self.masked: tuple[torch.Tensor, torch.Tensor] | None = None

    def note_mask(self, result: torch.Tensor, scores: torch.Tensor) -> None:
        """Remember that `result` is `scores` with a mask on it."""
        if scores.shape[-1] == self.sizes.num_experts:
            self.masked = (result, scores)

    def is_choice(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a topk call is the choice of the experts."""
        scores, k = args[0], args[1] if len(args) > 1 else kwargs["k"]
        if self.sizes.grouped and scores.dim() > 2:
            return False
        return bool(k == self.sizes.top_k and scores.shape[-1] == self.sizes.num_experts)

    def choose(self, native: Any, scores: torch.Tensor) -> Any:
        """Return the result of the top-k over `scores`, whose own result is `native`, and write down the ids."""
        self.choices += 1
        chosen = native[1]
        for rows in self.rows:
            if rows is not None and rows.numel() != chosen.numel():
                tokens = chosen.numel() // self.sizes.top_k
                raise ReplayError(
                    f"router {self.router._replay_name} sees {tokens} tokens, its routes have {len(rows)}; routes are "
                    "split over ranks as the router's input is"
                )
        result = native if self.rows.given is None else self._replay(chosen, scores, self.rows.given)
        if self.rows.used is not None:
            self.rows.used.copy_(result[1].reshape(self.rows.used.shape))
        if self.rows.native is not None:
            self.rows.native.copy_(chosen.reshape(self.rows.native.shape))
        return result

    def _replay(self, chosen: torch.Tensor, scores: torch.Tensor, given: torch.Tensor) -> TopK:
        if self.masked is not None and self.masked[0] is scores:
            scores = self.masked[1]
        wide = given.to(torch.int64).view(chosen.shape)
        missing = (wide == missing_mark(given.dtype)).all(-1, keepdim=True)
        ids = torch.where(missing, chosen, wide)
        return TopK(scores.gather(-1, ids), ids)


class InterceptTopK(TorchFunctionMode):
    """While active, the choice of the experts goes through `choice`."""

    def __init__(self, choice: RouterChoice) -> None:
        super().__init__()
        # The state lives in an object of its own: torch.compile does not trace changes of a mode's attributes.
        self.choice = choice

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`; replace the result of the one top-k."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.topk or func is torch.Tensor.topk:
            if self.choice.is_choice(args, kwargs):
                return self.choice.choose(result, args[0])
        elif func is torch.Tensor.masked_fill:
            self.choice.note_mask(result, args[0])
        return result
