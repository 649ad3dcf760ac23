"""The decode steps of a batch after its prefill: in a cache that grows, or in a static one.

A decode step launches some thousand small kernels, and on a fast GPU the launches take longer than the kernels. A graph
launches them at once; it needs fixed shapes, so rows that have ended stay in a static cache until half of them have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from headrace.utils.rounding import round_up

Output = tuple[torch.Tensor, torch.Tensor | None]
"""The last position's logits (b, V), and routes (tokens, layers, k)."""
Forward = Callable[[dict[str, Any], Any], Output]
"""From the inputs of a forward and its cache."""

DECODE_ATTENTION = "headrace_decode"
"""The name by which transformers knows `decode_attention`."""
_NOTHING: Output = (torch.empty(0), None)
_SPARE, _GROWTH = 256, 1.5
"""Free places of a new static cache, and how much longer than its content it may be instead: attention reads all."""


def decode_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention (b, queries, heads, D); of one query without a copy of keys and values for each of its heads.

    transformers before 5.20 makes that copy, since SDPA takes no grouped queries beside a mask. Here the queries of a
    group take the place of a sequence.
    """
    rows, heads, queries, width = query.shape
    if queries > 1 or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        whole = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return whole[0], None
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], width)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, 1, heads, -1), None


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)


@dataclass
class PaddedPrompts:
    """Where the U distinct prompts of a batch of B lie, which are padded on the left to a common width W.

    `mask` (U, W), or None when no row has padding; `lengths` (U); `source` (B) says which of them each row of the
    batch is.
    """

    mask: torch.Tensor | None
    width: int
    lengths: torch.Tensor
    source: torch.Tensor


class GrowingSteps:
    """Runs the model on a cache that grows, which has the U prompts of the prefill."""

    def __init__(self, forward: Forward, cache: DynamicCache, prompts: PaddedPrompts) -> None:
        self._forward, self._cache, self._prompts = forward, cache, prompts
        self._rows = prompts.source
        self._fed = 0
        cache.reorder_cache(prompts.source)

    def keep(self, going: torch.Tensor) -> None:
        """Go on with the rows `going` only, counted among those of the last step."""
        self._rows = self._rows[going]
        self._cache.reorder_cache(going)

    def step(self, ids: torch.Tensor) -> Output:
        """Feed one token to every row, `ids` (b); return logits (b, V) and routes (b, layers, k)."""
        mask = self._prompts.mask
        inputs = {
            "input_ids": ids.unsqueeze(1),
            "attention_mask": None if mask is None else pad(mask[self._rows], (0, self._fed + 1), value=1),
            "position_ids": (self._prompts.lengths[self._rows] + self._fed).unsqueeze(1),
        }
        self._fed += 1
        return self._forward(inputs, self._cache)


class StaticSteps:
    """Runs the model on a static cache; on CUDA as a graph, captured anew when the cache shrinks or grows."""

    def __init__(
        self, forward: Forward, cache: DynamicCache, prompts: PaddedPrompts, config: Any, new_tokens: int
    ) -> None:
        """Take the U prompts of the prefill out of `cache`, which is empty then; at most `new_tokens` steps follow."""
        self._forward, self._config = forward, config
        self._filled, self._total = prompts.width, prompts.width + new_tokens
        # Whoever has `cache` would hold the layers while the graph is captured.
        self._layers: list[Any] = cache.layers
        cache.layers = []
        self._graph: torch.cuda.CUDAGraph | None = None
        source = self._slots = prompts.source
        self._positions = self._ids = prompts.lengths[source].unsqueeze(1) - 1
        self._padding = None if prompts.mask is None else prompts.mask[source]
        self._prepare(source)

    @staticmethod
    def fits(cache: DynamicCache, config: Any) -> bool:
        """Return whether all layers keep all keys and values, and attention takes the mask of a static cache."""
        kept = all(type(layer) is DynamicLayer for layer in cache.layers)
        static = StaticCache(config=config, max_cache_len=1).layers
        plain = len(static) == len(cache.layers) and all(type(layer) is StaticLayer for layer in static)
        return kept and plain and config._attn_implementation in ("sdpa", "eager", DECODE_ATTENTION)

    def keep(self, going: torch.Tensor) -> None:
        """Go on with the rows `going` only, counted among those of the last step."""
        self._slots = self._slots[going]
        if 2 * len(self._slots) <= len(self._ids):
            self._renew()

    def step(self, ids: torch.Tensor) -> Output:
        """Feed one token to every row, `ids` (b); return logits (b, V) and routes (b, layers, k)."""
        if self._filled == self._capacity:
            self._renew()
        self._ids[self._slots, 0] = ids
        self._positions[self._slots] += 1  # not of ended rows: a model may have no more positions
        if self._graph is None:
            self._output = self._run()
        else:
            self._graph.replay()
        self._filled += 1
        logits, routes = self._output
        return logits[self._slots], None if routes is None else routes[self._slots]

    def _renew(self) -> None:
        slots = self._slots
        self._positions = self._positions[slots]
        self._padding = None if self._padding is None else self._padding[slots]
        self._prepare(slots)

    def _prepare(self, rows: torch.Tensor) -> None:
        """Move `rows` of the present layers into a static cache of their number, and capture the step for it."""
        self._graph, self._output = None, _NOTHING  # their memory first
        self._slots = torch.arange(len(rows), device=rows.device)
        places = min(self._total, max(self._filled + _SPARE, int(self._filled * _GROWTH)))
        self._capacity: int = round_up(places, 8)  # rows of a mask that begin elsewhere are copied
        self._cache = StaticCache(config=self._config, max_cache_len=self._capacity)
        for i, layer in enumerate(self._cache.layers):
            past, self._layers[i] = self._layers[i], layer
            layer.update(past.keys[rows, :, : self._filled], past.values[rows, :, : self._filled])
            del past
        free = self._capacity - (0 if self._padding is None else self._padding.shape[1])
        self._mask = None if self._padding is None else pad(self._padding, (0, free), value=1)
        self._ids = torch.zeros_like(self._positions)
        if rows.is_cuda:
            self._capture()

    def _capture(self) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are chosen and compiled here
            self._run()
        torch.cuda.current_stream().wait_stream(side)
        for layer in self._cache.layers:  # the next step writes over what that one wrote
            layer.cumulative_length.sub_(1)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = self._run()

    def _run(self) -> Output:
        inputs = {"input_ids": self._ids, "attention_mask": self._mask, "position_ids": self._positions}
        return self._forward(inputs, self._cache)
