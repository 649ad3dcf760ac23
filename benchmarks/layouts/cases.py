"""Models, layouts and rows of the scaling benchmark, and the order in which they run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.models.automodel import flops

MIDDLE, SPREAD = 1000, 1.0
"""Median of the lengths, and the standard deviation of their logarithm."""
HEADRACE, COMPILED, TRANSFORMERS = "headrace", "headrace compiled", "transformers"
WHOLE = "headrace whole scores"
"""headrace with the scores of a whole microbatch in memory at once, as plain transformers has them."""


@dataclass(frozen=True)
class Sizes:
    """A model by its sizes, and how much of it one GPU computes in a step."""

    config: Mapping[str, Any]
    rows_per_gpu: int
    recompute: bool = False
    limit_s: float = 150.0


@dataclass(frozen=True)
class Scale:
    """Lengths of rows, tokens of a microbatch, and the vocabulary of all models."""

    shortest: int
    longest: int
    middle: int
    mb_tokens: int
    vocabulary: int
    tiny: bool = False


LARGE = Scale(200, 8000, MIDDLE, 16_384, 151_936)
TINY = Scale(4, 64, 16, 128, 128, tiny=True)
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
_8B = {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32}
_0_6B = {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
MODELS: dict[str, Sizes] = {
    "0.6b": Sizes({**_0_6B, "tie_word_embeddings": True}, 32),
    "8b-6": Sizes({**_8B, "num_hidden_layers": 6}, 16, recompute=True),
    "8b-12": Sizes({**_8B, "num_hidden_layers": 12}, 16, recompute=True),
    "moe-32": Sizes(_MOE, 32, recompute=True),
    "8b-36": Sizes({**_8B, "num_hidden_layers": 36}, 16, recompute=True, limit_s=270.0),
}
"""The sizes of Qwen3-0.6B, of Qwen3-8B with 6, 12 and all 36 layers, and a third of Qwen3-30B-A3B in its width."""
_TINY_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
LAYOUTS: dict[str, dict[str, int]] = {
    "data": {},
    "tensor": {"tensor": 2},
    "context": {"context": 2},
    "tensor and context": {"tensor": 2, "context": 2},
    "experts of 2": {"expert": 2},
    "experts of 4": {"expert": 4},
}
"""What ranks share a replica, or experts; the rest of the ranks are data parallel (FSDP2)."""


@dataclass(frozen=True)
class Case:
    """One model in one layout, trained one way; `kind` says what is measured."""

    model: str
    gpus: int
    way: str = HEADRACE
    layout: str = "data"
    kind: str = "speed"

    @property
    def name(self) -> str:
        """Its name, as the command line and the results have it."""
        kind = "" if self.kind == "speed" else f" {self.kind}"
        return f"{self.model} x{self.gpus} {self.layout} {self.way}{kind}"

    @property
    def parallel(self) -> dict[str, int]:
        """`policy.parallel` of the layout."""
        return LAYOUTS[self.layout]

    @property
    def replica(self) -> int:
        """Ranks that share a row."""
        return self.parallel.get("tensor", 1) * self.parallel.get("context", 1)

    @property
    def can_be(self) -> bool:
        """Whether the GPUs make whole replicas of the layout, and there are experts where they are shared."""
        experts = self.parallel.get("expert", 1)
        has_experts = "num_experts" in MODELS[self.model].config
        whole = self.gpus % self.replica == 0 and self.gpus % experts == 0
        return whole and (experts == 1 or has_experts)


def cases(gpus: Sequence[int]) -> Iterator[Case]:
    """Yield all cases for these numbers of GPUs, the most telling first."""
    counts = sorted(gpus)
    several = [count for count in counts if count > 1]
    compared = ("0.6b", "8b-12", "moe-32")
    yield from (Case("0.6b", count, way) for way in (HEADRACE, TRANSFORMERS) for count in counts)
    yield from (Case(model, count) for model in compared[1:] for count in counts)
    yield from (Case("0.6b", count, kind="spread") for count in several)
    shared = (
        Case(model, count, layout=layout)
        for model in compared
        for layout in LAYOUTS
        if layout != "data"
        for count in several
    )
    yield from (case for case in shared if case.can_be)
    yield from (Case(model, count, TRANSFORMERS) for model in compared[1:] for count in counts)
    if 1 in counts:
        yield Case("8b-6", 1)
    yield from (Case("8b-36", count) for count in several)
    yield from (Case(model, count, WHOLE) for model in compared[1:] for count in several)
    yield from (Case("0.6b", count, COMPILED) for count in counts)
    yield from (Case("8b-12", count, COMPILED) for count in several)


def model_config(name: str, scale: Scale) -> dict[str, Any]:
    """Return the transformers config of a model; tiny where the scale is."""
    found = {**MODELS[name].config, "vocab_size": scale.vocabulary, "max_position_embeddings": 8192}
    found["pad_token_id"] = 0
    if not scale.tiny:
        return found
    found |= {**_TINY_SIZES, "num_hidden_layers": 2}
    return found | ({"num_experts": 4, "moe_intermediate_size": 16} if "num_experts" in found else {})


def rows_per_gpu(name: str, scale: Scale) -> int:
    """Return the rows of a step that each GPU adds."""
    return 8 if scale.tiny else MODELS[name].rows_per_gpu


def even_lengths(count: int, scale: Scale) -> np.ndarray[Any, Any]:
    """Return lengths at equal steps through the lognormal distribution, shuffled: any count has the same mean."""
    shares = (np.arange(count) + 0.5) / count
    normal = np.array([NormalDist().inv_cdf(share) for share in shares])
    return np.random.default_rng(0).permutation(_lengths(normal, scale))


def drawn_lengths(count: int, scale: Scale, seed: int) -> np.ndarray[Any, Any]:
    """Return lengths drawn from the same distribution."""
    return _lengths(np.random.default_rng(seed).standard_normal(count), scale)


def _lengths(normal: np.ndarray[Any, Any], scale: Scale) -> np.ndarray[Any, Any]:
    drawn = scale.middle * np.exp(SPREAD * normal)
    return drawn.clip(scale.shortest, scale.longest).astype(np.int64)


def make_rows(lengths: np.ndarray[Any, Any], scale: Scale) -> BatchedDataDict:
    """Return rows of random tokens on the CPU; the loss counts all but the first eighth of each."""
    sizes = torch.from_numpy(lengths)
    column = torch.arange(int(sizes.max()))
    there = column < sizes[:, None]
    ids = torch.randint(5, scale.vocabulary, there.shape, generator=torch.Generator().manual_seed(1))
    return BatchedDataDict(
        {
            "input_ids": ids * there,
            "input_lengths": sizes,
            "token_mask": (there & (column >= (sizes // 8).clamp(min=1)[:, None])).to(torch.uint8),
            "sample_mask": torch.ones(len(sizes)),
        }
    )


@cache
def attention_ratio(name: str, scale: Scale) -> float:
    """Return the planner's ratio for a model."""
    config = model_config(name, scale)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    return flops.attention_ratio(model)


def packing_args(mb_tokens: int, attention_ratio: float) -> dict[str, Any]:
    """Return how rows are packed, as the policy says it to the planner."""
    return {
        "algorithm": "modified_first_fit_decreasing",
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "max_tokens_per_microbatch": mb_tokens,
        "sequence_length_pad_multiple": 1,
        "attention_ratio": attention_ratio,
    }
