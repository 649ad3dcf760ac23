"""A check that the generator computes what the trainer computes, at the start of a run and every N steps.

Before a step, the generator answers a few training prompts greedily. After the step's update it answers them again,
and random prompts that it has never seen, greedily and as the run samples. The trainer scores all of these tokens as
it scores in training. Where the two disagree, the run stops, with likely causes in the order of their evidence
(`mismatch_causes.py`).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.algorithms.mismatch_causes import PLAIN, Agreement, Answers, Evidence, explain, widest_rounding
from headrace.config import RecipeConfig
from headrace.data_plane.routes_codec import missing_mark
from headrace.data_plane.schema import INPUT_IDS, INPUT_LENGTHS, ROUTED_EXPERTS_FIELD
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.worker_groups import WorkerGroup
from headrace.errors import GenerationError
from headrace.experience.chat import render_prompt
from headrace.experience.probe import Probe, Probed
from headrace.experience.types import Prompt
from headrace.models.policy.lm_policy import Policy
from headrace.models.router_replay.stats import ReplayStats, route_agreement
from headrace.models.tokenizers import known_ids
from headrace.utils.rounding import round_up
from headrace.utils.seeding import derive_seed

PREFIX = "mismatch/guard_"
_LIKELIEST = {**PLAIN, "top_k": 1}
_LAGS = (0, 1, -1)
_MOST_RANDOM = 24
"""Tokens of a random prompt at most."""


@dataclass
class MismatchGuard:
    """Compares generator and trainer around weight updates; `prompts` are the training prompts, in their order."""

    recipe: RecipeConfig
    policy: Policy
    rollouts: WorkerGroup
    prompts: Sequence[Prompt]
    _checks: int = 0
    _before: Answers | None = None
    _last: tuple[int, Answers] | None = None
    _seconds: float = 0.0
    _found: dict[str, float] = field(default_factory=dict)

    def due(self, step: int) -> bool:
        cfg = self.recipe.generation
        # What an engine lost with its old weights, and no update brings back, shows after the first of them.
        discards = cfg.backend == "vllm" and cfg.vllm.sleep_level == 2
        return step % cfg.guard.every_n_steps == 0 or (discards and self._checks == 1)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Return a context in which new weights reach the generator; at its end both sides are compared.

        `take_metrics` then has what was measured.

        Raises:
            GenerationError: they disagree; names likely causes.
        """
        self._ask()
        yield
        self._check(step)

    def compare(self, step: int) -> None:
        """Compare both sides now, without what they said before an update; raises as `around`."""
        self._before, self._seconds = None, 0.0
        self._check(step)

    def _ask(self) -> None:
        started = time.perf_counter()
        greedy = self._probe([], sampled=False).greedy
        self._before = self._answers(greedy, [PLAIN])[0]
        self._seconds = time.perf_counter() - started

    def _check(self, step: int) -> None:
        started = time.perf_counter()
        cfg = self.recipe.generation.guard
        self._checks += 1
        probe = self._probe(self._random_prompts(), sampled=True)
        agreement = self._compare(probe)
        self._seconds += time.perf_counter() - started
        self._found = {f"{PREFIX}{name}": value for name, value in agreement.metrics().items()}
        self._found[f"{PREFIX}s"] = self._seconds
        rendered = [render_prompt(self.policy.tokenizer, p.messages) for p in self.prompts[: cfg.num_prompts]]
        evidence = Evidence(
            agreement,
            bound=cfg.max_logprob_gap,
            rendered=(rendered, probe.task),
            before=self._before,
            last=self._last[1] if self._last else None,
            steps_since_last=step - self._last[0] if self._last else None,
            weights_are_new=self.policy.weight_version > 0,
            distribution=self.recipe.generation.distribution,
            score=lambda rows, distributions, half: self._answers(rows, distributions, half=half),
        )
        agrees = agreement.within(cfg.max_logprob_gap)
        if probe.task == rendered and (
            agrees or (self._rounds and agreement.within(widest_rounding(evidence)))
        ):
            self._last = (step, agreement.greedy_task)
            return
        when = "at the start" if self._checks == 1 else f"after step {step}"
        raise GenerationError(f"generator and trainer disagree {when}: {explain(evidence)}")

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the last check, once."""
        found, self._found = self._found, {}
        return found

    @property
    def _rounds(self) -> bool:
        """Whether the recipe itself asks one side to round."""
        return "bfloat16" in (self.recipe.generation.precision, self.recipe.policy.precision)

    def _probe(self, others: list[list[int]], *, sampled: bool) -> Probe:
        cfg = self.recipe.generation.guard
        seed = derive_seed(self.recipe.seed, "guard", self._checks)
        wanted = {"max_new_tokens": cfg.max_new_tokens, "seed": seed, "sampled": sampled}
        probe: Probe = self.rollouts.run_all("probe", cfg.num_prompts, others, **wanted)[0]
        return probe

    def _random_prompts(self) -> list[list[int]]:
        """Return prompts of random ids, so that no cache holds a beginning of theirs."""
        cfg, tokenizer = self.recipe.generation.guard, self.policy.tokenizer
        special = torch.tensor(sorted(tokenizer.all_special_ids), dtype=torch.int64)
        known = known_ids(tokenizer)
        known[special[special < len(known)]] = False
        ids = known.nonzero().flatten()
        length = max(1, min(_MOST_RANDOM, self.recipe.policy.max_total_sequence_length // 2))
        random = torch.Generator().manual_seed(derive_seed(self.recipe.seed, "guard prompts", self._checks))
        return ids[torch.randint(len(ids), (cfg.num_prompts, length), generator=random)].tolist()

    def _compare(self, probe: Probe) -> Agreement:
        rows = [*probe.greedy, *probe.sampled]
        run, plain, likeliest = self._answers(rows, [self.recipe.generation.distribution, PLAIN, _LIKELIEST])
        count, task = len(probe.greedy), len(probe.task)
        greedy, sampled = plain.slice(0, count), run.slice(count, len(rows))
        agreement = Agreement(
            greedy_task=greedy.slice(0, task),
            greedy_other=greedy.slice(task, count),
            sampled_task=sampled.slice(0, task),
            sampled_other=sampled.slice(task, count),
            greedy_tokens=likeliest.slice(0, count),
        )
        if any(row.routes is not None for row in rows):
            agreement.lags, agreement.layers = self._compare_routes(rows)
        return agreement

    def _answers(
        self, rows: Sequence[Probed], distributions: Sequence[dict[str, Any]], *, half: bool | None = None
    ) -> list[Answers]:
        """Return the rows with the trainer's logprobs, under each distribution; with replay, by the rows' routes."""
        columns, _ = self.policy.score_under(self._batch(rows, replay=True), distributions, half=half)
        spans = [slice(len(row.prompt), len(row.prompt) + len(row.new)) for row in rows]
        return [Answers(rows, [row[new].double() for row, new in zip(column, spans)]) for column in columns]

    def _batch(self, rows: Sequence[Probed], *, replay: bool) -> BatchedDataDict:
        """Return rows as columns; without `replay`, every route is missing, so that routers choose themselves."""
        lengths = [len(row.prompt) + len(row.new) for row in rows]
        width = round_up(max(lengths), self.policy.cfg.make_sequence_length_divisible_by)
        ids = torch.full((len(rows), width), int(self.policy.tokenizer.pad_token_id))
        for row, place in zip(rows, ids):
            place[: len(row.prompt) + len(row.new)] = torch.tensor([*row.prompt, *row.new])
        batch: BatchedDataDict = BatchedDataDict({INPUT_IDS: ids, INPUT_LENGTHS: torch.tensor(lengths)})
        first = rows[0].routes
        if first is not None:
            mark = missing_mark(first.dtype)
            batch[ROUTED_EXPERTS_FIELD] = torch.full(
                (len(rows), width, *first.shape[1:]), mark, dtype=first.dtype
            )
            for row, place in zip(rows, batch[ROUTED_EXPERTS_FIELD]):
                if replay and row.routes is not None:
                    place[: len(row.routes)] = row.routes
        return batch

    def _compare_routes(self, rows: Sequence[Probed]) -> tuple[dict[int, float], list[float]]:
        """Return the share of recorded experts that the trainer's routers choose, by lag and, without one, by layer."""
        _, stats = self.policy.score_under(self._batch(rows, replay=False), [PLAIN])
        own = dict(_native(stats))
        pairs = [
            (row.routes, own[(*row.prompt, *row.new)][: len(row.routes)])
            for row in rows
            if row.routes is not None and (*row.prompt, *row.new) in own
        ]
        by_lag = {}
        for lag in _LAGS:
            # A lag of 1: row t is that of the token before.
            shifted = [
                (
                    given[max(lag, 0) : len(given) + min(lag, 0)],
                    chosen[max(-lag, 0) : len(chosen) - max(lag, 0)],
                )
                for given, chosen in pairs
            ]
            by_lag[lag] = sum((route_agreement(*pair) for pair in shifted), ReplayStats())
        layers = [exact / max(n, 1) for exact, n in zip(by_lag[0].exact, by_lag[0].compared)]
        return {lag: stats.agreement().get("route_exact", 1.0) for lag, stats in by_lag.items()}, layers


def _native(stats: ReplayStats | None) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield each sample's tokens and what the routers chose for them."""
    for part in stats.rows if stats is not None else ():
        if part.native is None:
            continue
        lengths = part.lengths.tolist()
        for tokens, chosen in zip(torch.split(part.tokens, lengths), torch.split(part.native, lengths)):
            yield tuple(tokens.tolist()), chosen
