"""A generator that several collectors share, and that can take new weights while it makes answers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock

import torch

from headrace.errors import GenerationError, HeadraceError
from headrace.models.generation.interfaces import GenerationOutput, Generator, SamplingParams
from headrace.utils.seeding import derive_seed

_COUNTS = ("_tokens", "_s", "preemptions", "engines_lost")
_CACHED = "cached_prompt_fraction"


class LiveGenerator:
    """A Generator over another one, whose calls take turns.

    With `piece_tokens`, answers are made in pieces of so many tokens. Between two pieces `refresh` may give new
    weights; answers go on with them, and their tokens so far are computed anew, or, with `keeps_cache`, looked up in an
    engine's cache. A stop string that lies across two pieces is not seen. Without it, answers end with the weights that
    they began with.
    """

    def __init__(
        self, inner: Generator, piece_tokens: int | None = None, *, keeps_cache: bool = False
    ) -> None:
        self._inner, self._piece, self._keeps_cache = inner, piece_tokens, keeps_cache
        self.weight_version, self.route_shape = inner.weight_version, inner.route_shape
        self._lock = RLock()
        self._is_held = False
        self.has_weights = False
        """Whether the inner generator has weights of `weight_version`; a call that failed may have cost it them."""
        self.refresh: Callable[[], object] = lambda: None
        """Called before a call and between pieces, if the weights may change; it may call `update_weights`."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int
    ) -> GenerationOutput:
        with self._lock, self._doubted():
            if self._piece is None or self._is_held:
                output = self._inner.generate(prompts, params, seed=seed)
                output.weight_versions = [[self.weight_version] * len(row) for row in output.token_ids]
                return output
            return self._in_pieces(prompts, params, seed, self._piece)

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load weights, unless another collector has brought them, or newer ones, already."""
        with self._lock, self._doubted():
            if version > self.weight_version or (version == self.weight_version and not self.has_weights):
                self._inner.update_weights(named_tensors, version)
                self.has_weights, self.weight_version = True, version

    @contextmanager
    def _doubted(self) -> Iterator[None]:
        try:
            yield
        except HeadraceError:
            self.has_weights = False
            raise

    @contextmanager
    def held(self) -> Iterator[None]:
        """Return a context in which this thread alone generates, with the weights that there are."""
        with self._lock:
            was_held, self._is_held = self._is_held, True
            try:
                yield
            finally:
                self._is_held = was_held

    def release(self) -> None:
        """Nothing: the next call comes soon."""

    def shutdown(self) -> None:
        self._inner.shutdown()

    def _in_pieces(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int, piece: int
    ) -> GenerationOutput:
        limits = [params.limit(len(prompt)) for prompt in prompts]
        whole = GenerationOutput([[] for _ in prompts], [[] for _ in prompts], [True] * len(prompts))
        versions: list[list[int]] = [[] for _ in prompts]
        whole.weight_versions = versions
        going, begun_with = list(range(len(prompts))), None
        parts: list[tuple[int, dict[str, float]]] = []
        while going:
            number = len(parts)
            self.refresh()
            if self._keeps_cache and begun_with is None:
                begun_with = self.weight_version
            so_far = [[*prompts[i], *whole.token_ids[i]] for i in going]
            asked = replace(
                params,
                max_new_tokens=min(piece, params.max_new_tokens - number * piece),
                cache_version=begun_with,
            )
            part = self._inner.generate(
                so_far, asked, seed=derive_seed(seed, "piece", number) if number else seed
            )
            _check_cuts(part, [asked.limit(len(prompt)) for prompt in so_far])
            for row, i in enumerate(going):
                whole.token_ids[i] += part.token_ids[row]
                whole.logprobs[i] += part.logprobs[row]
                whole.truncated[i] = part.truncated[row]
                versions[i] += [self.weight_version] * len(part.token_ids[row])
            whole.stop_token_ids = part.stop_token_ids
            parts.append((sum(map(len, so_far)), part.metrics))
            going = [i for i in going if whole.truncated[i] and len(whole.token_ids[i]) < limits[i]]
        whole.metrics = _joined(parts, whole)
        return whole


def _check_cuts(part: GenerationOutput, limits: Sequence[int]) -> None:
    """Refuse an answer that was cut before its limit: it would be asked for again and again."""
    for row, (tokens, limit) in enumerate(zip(part.token_ids, limits)):
        if part.truncated[row] and len(tokens) < limit:
            raise GenerationError(
                f"the generator cut an answer at {len(tokens)} new tokens; expected {limit}, its limit"
            )


def _joined(parts: Sequence[tuple[int, dict[str, float]]], whole: GenerationOutput) -> dict[str, float]:
    """Return the metrics of a call from those of its pieces, each with the number of its prompts' tokens.

    Counts and seconds are added, peaks are the greatest, fractions and rates are of the whole, others of the last
    piece.
    """
    joined = {"pieces": float(len(parts))}
    for _, metrics in parts:
        for name, value in metrics.items():
            before = joined.get(name)
            if before is not None and name.endswith("_max"):
                joined[name] = max(before, value)
            elif before is not None and name.endswith(_COUNTS) and not name.endswith("_per_s"):
                joined[name] = before + value
            else:
                joined[name] = value
    if "generate_s" in joined:
        joined |= whole.rates(joined["generate_s"])
    if _CACHED in joined:
        cached = sum(tokens * metrics[_CACHED] for tokens, metrics in parts)
        joined[_CACHED] = cached / max(sum(tokens for tokens, _ in parts), 1)
    return joined
