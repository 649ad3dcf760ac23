"""Naive truth for the algorithms: plain Python floats, one row and one token at a time."""

import math
import random
from dataclasses import dataclass

import torch

from headrace.config import AdvantageConfig, LossConfig


@dataclass
class Row:
    """One padded row of S tokens; lists of S floats, as the columns hold them."""

    mask: list[int]
    sample_mask: float
    logprobs: list[float]
    prev: list[float]
    generation: list[float]
    reference: list[float]
    advantages: list[float]

    def places(self) -> list[int]:
        """Positions that count."""
        if self.sample_mask <= 0:
            return []
        return [t for t in range(1, len(self.mask)) if self.mask[t]]


def random_row(rng: random.Random, width: int = 7, sample_mask: float = 1.0) -> Row:
    """A prompt of one token or more, an answer (perhaps empty, perhaps in two turns), and padding of NaN."""
    length = rng.randint(1, width)
    mask = [0] + [int(rng.random() < 0.7) for _ in range(length - 1)] + [0] * (width - length)
    logprobs = [-rng.random() * 3 for _ in range(width)]

    def near(spread: float) -> list[float]:
        return [x + rng.gauss(0, spread) if m else math.nan for x, m in zip(logprobs, mask)]

    return Row(
        mask=mask,
        sample_mask=sample_mask,
        logprobs=[x if m else math.nan for x, m in zip(logprobs, mask)],
        prev=near(0.5),
        generation=near(0.5),
        reference=near(0.5),
        advantages=[rng.choice([-1.5, -0.5, 0.0, 0.5, 1.5])] * width,
    )


def columns(
    rows: list[Row], dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logprobs (a leaf with gradient) and the other columns of these rows."""

    def tensor(values: list[list[float]]) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    data = {
        "token_mask": torch.tensor([row.mask for row in rows], dtype=torch.uint8),
        "sample_mask": torch.tensor([row.sample_mask for row in rows], dtype=torch.float32),
        "prev_logprobs": tensor([row.prev for row in rows]),
        "generation_logprobs": tensor([row.generation for row in rows]),
        "reference_policy_logprobs": tensor([row.reference for row in rows]),
        "advantages": tensor([row.advantages for row in rows]),
    }
    return tensor([row.logprobs for row in rows]).requires_grad_(), data


def held(x: float) -> float:
    return max(-20.0, min(20.0, x))


def kl(a: float, b: float, kind: str) -> float:
    d = held(a - b)
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


def global_counts(rows: list[Row]) -> tuple[float, float]:
    seqs = sum(row.sample_mask for row in rows)
    return seqs, sum(len(row.places()) * row.sample_mask for row in rows)


def loss_and_metrics(
    rows: list[Row], cfg: LossConfig, seqs: float, toks: float
) -> tuple[float, dict[str, float]]:
    """The loss of these rows as their part of a global batch, and the metrics that sum."""
    seqs, toks = seqs or 1.0, toks or 1.0
    sums = dict.fromkeys(
        [
            "policy_loss",
            "kl",
            "ratio_mean",
            "clip_fraction_low",
            "clip_fraction_high",
            "dual_clip_fraction",
            "approx_kl",
            "approx_entropy",
            "token_mult_prob_error",
            "importance_weight_mean",
            "impossible_fraction",
            "masked_sequence_fraction",
        ],
        0.0,
    )
    for row in rows:
        _add_row(row, cfg, seqs, toks, sums)
    return sums["policy_loss"] + cfg.kl_coefficient * sums["kl"], sums


def _add_row(row: Row, cfg: LossConfig, seqs: float, toks: float, sums: dict[str, float]) -> None:
    prev = row.logprobs if cfg.force_on_policy_ratio else row.prev
    every = row.places()
    places = [t for t in every if row.logprobs[t] > -math.inf and prev[t] > -math.inf]
    sums["impossible_fraction"] += (len(every) - len(places)) * row.sample_mask / toks
    if not places:
        return
    n = len(places)
    gaps = [prev[t] - row.generation[t] for t in places]
    error = sum(math.exp(held(abs(g))) for g in gaps) / n
    keep = cfg.max_sequence_logprob_error is None or error <= cfg.max_sequence_logprob_error
    if cfg.importance_correction == "sequence_mask":
        geometric_mean = math.prod(math.exp(g) for g in gaps) ** (1 / n)
        keep = keep and cfg.importance_low <= geometric_mean <= cfg.importance_high
    if not keep:
        sums["masked_sequence_fraction"] += row.sample_mask / seqs
    sequence_ratio = math.exp(sum(row.logprobs[t] - prev[t] for t in places) / n)
    for t, gap in zip(places, gaps):
        per_token = row.sample_mask / toks
        length = len(every) if cfg.aggregation == "sequence_mean" else cfg.constant_tokens
        weight = per_token if cfg.aggregation == "token_mean" else row.sample_mask / seqs / length
        ratio = math.exp(held(row.logprobs[t] - prev[t]))
        if cfg.ratio_level == "sequence":
            ratio = sequence_ratio
        importance = _importance(gap, cfg)
        advantage = row.advantages[t]
        if keep:
            sums["policy_loss"] += weight * importance * _surrogate(row.logprobs[t], ratio, advantage, cfg)
            if cfg.kl_coefficient:
                moved = math.exp(held(row.logprobs[t] - prev[t]))
                estimate = kl(row.logprobs[t], row.reference[t], cfg.kl_kind)
                sums["kl"] += weight * estimate * (moved if cfg.kl_gradient == "score_function" else 1.0)
        low, high = ratio < 1 - cfg.clip_low, ratio > 1 + cfg.clip_high
        if cfg.kind == "clipped_pg":
            low, high = low and advantage < 0, high and advantage > 0
        sums["ratio_mean"] += per_token * ratio
        sums["clip_fraction_low"] += per_token * low
        sums["clip_fraction_high"] += per_token * high
        if cfg.dual_clip is not None:
            sums["dual_clip_fraction"] += per_token * (ratio > cfg.dual_clip and advantage < 0)
        sums["approx_kl"] += per_token * kl(prev[t], row.logprobs[t], "k3")
        sums["approx_entropy"] -= per_token * row.logprobs[t]
        sums["token_mult_prob_error"] += per_token * math.exp(held(abs(gap)))
        sums["importance_weight_mean"] += per_token * importance


def _importance(gap: float, cfg: LossConfig) -> float:
    w = math.exp(held(gap))
    if cfg.importance_correction == "none":
        return 1.0
    if cfg.importance_correction == "tis":
        return min(w, cfg.importance_high)
    if cfg.importance_correction == "icepop":
        return w if cfg.importance_low <= w <= cfg.importance_high else 0.0
    return w


def _surrogate(logprob: float, ratio: float, advantage: float, cfg: LossConfig) -> float:
    clipped = min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high)
    if cfg.kind == "cispo":
        return -clipped * advantage * logprob
    objective = min(ratio * advantage, clipped * advantage)
    if cfg.dual_clip is not None and advantage < 0:
        objective = max(objective, cfg.dual_clip * advantage)
    return -objective


def advantages(
    rewards: list[float], group_ids: list[int], valid: list[bool], tokens: list[int], cfg: AdvantageConfig
) -> list[float]:
    """Advantages, one row at a time; of reinforce_plus_plus, the mean over a row's tokens."""
    if cfg.estimator == "reinforce_plus_plus":
        kl = [[0.0] * n for n in tokens]
        rows = token_advantages(rewards, group_ids, valid, kl, cfg, coefficient=0.0)
        return [sum(row) / len(row) if row else 0.0 for row in rows]
    result = []
    for i, reward in enumerate(rewards):
        if not valid[i]:
            result.append(0.0)
            continue
        members = [j for j in range(len(rewards)) if valid[j] and group_ids[j] == group_ids[i]]
        peers = members
        if cfg.estimator == "rloo" or cfg.leave_one_out:
            peers = [j for j in members if j != i] or [i]
        if len({rewards[j] for j in members}) == 1:
            result.append(0.0)
            continue
        advantage = reward - sum(rewards[j] for j in peers) / len(peers)
        if cfg.normalize_std and cfg.estimator != "rloo":
            mean = sum(rewards[j] for j in members) / len(members)
            variance = sum((rewards[j] - mean) ** 2 for j in members) / (len(members) - 1)
            advantage /= math.sqrt(variance) + cfg.epsilon
        result.append(advantage)
    return result


def token_advantages(
    rewards: list[float],
    group_ids: list[int],
    valid: list[bool],
    kl: list[list[float]],
    cfg: AdvantageConfig,
    coefficient: float,
) -> list[list[float]]:
    """REINFORCE++, one token at a time; `kl` has a number for each token of each row."""
    returns: list[list[float]] = []
    for i, reward in enumerate(rewards):
        group = [r for r, g, v in zip(rewards, group_ids, valid) if v and g == group_ids[i]]
        start = reward - sum(group) / len(group) if cfg.minus_baseline and valid[i] else reward
        returns.append([start - coefficient * sum(kl[i][t:]) for t in range(len(kl[i]))])
    every = [x for row, v in zip(returns, valid) if v for x in row]
    mean = sum(every) / len(every) if every else 0.0
    variance = sum((x - mean) ** 2 for x in every) / len(every) if every else 0.0
    divisor = math.sqrt(variance) + cfg.epsilon if cfg.normalize_std else 1.0
    return [[(x - mean) / divisor if v else 0.0 for x in row] for row, v in zip(returns, valid)]
