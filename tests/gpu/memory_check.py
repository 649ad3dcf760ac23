# ruff: noqa: E402 - the tests' folder has to be on the path first
"""Hold `headrace plan --memory` to what one GPU really takes: models of 1.7 B and 8 B parameters, random weights.

    python tests/gpu/memory_check.py --out "$OUT/memory.json"

It needs one GPU of 141 GB, about 105 GiB of host memory for the largest case, and peft; cases that do not fit into
`--seconds` (330 unless set) are left out and named. `--cases 8b_lora,8b_offload` chooses; `--tiny` runs all with tiny
models on a CPU, where nothing is measured. Every case prints one JSON line as it ends: by stage, the plan's GiB,
`torch.cuda.max_memory_allocated`, and how far the plan is off. The last line is the whole, which `--out` gets as well.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from headrace.config import RecipeConfig
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.models.automodel import setup
from headrace.models.automodel.setup import load_model, load_tokenizer
from headrace.models.generation.hf import HFGenerator
from headrace.models.generation.interfaces import SamplingParams
from headrace.models.memory_plan import MemoryPlan, plan_memory
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from reference_training import PolicyGradient

GIB = 2**30
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
SIZES: dict[str, dict[str, Any]] = {
    "1.7b": {
        **QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": {
        **QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
LORA, OFFLOAD, RECOMPUTE = (
    {"lora": {"rank": 16}},
    {"parallel": {"cpu_offload": True}},
    {"activation_checkpointing": True},
)
# Name: size, keys of the policy, whether there is a reference, optimizer steps.
CASES: dict[str, tuple[str, dict[str, Any], bool, int]] = {
    "1.7b_full": ("1.7b", {}, False, 2),
    "1.7b_recompute_reference": ("1.7b", RECOMPUTE, True, 2),
    "1.7b_lora": ("1.7b", LORA, True, 2),
    "1.7b_offload": ("1.7b", OFFLOAD, False, 1),
    "8b_lora": ("8b", {**LORA, **RECOMPUTE}, True, 2),
    "1.7b_generation": ("1.7b", {}, False, 0),
    "8b_offload": ("8b", {**OFFLOAD, **RECOMPUTE}, False, 1),
}
ROWS, LENGTH, TRAIN_TOKENS, SCORE_TOKENS = 16, 1024, 8192, 16384
PROMPT, NEW, PROMPTS = 256, 64, 64


def recipe(name: str, *, tiny: bool) -> RecipeConfig:
    size, changes, reference, _ = CASES[name]
    generates = name.endswith("generation")
    packing = {"enabled": True, "train_mb_tokens": TRAIN_TOKENS, "logprob_mb_tokens": SCORE_TOKENS}
    policy = {
        "model": {"config": {**SIZES[size], **(TINY if tiny else {})}},
        "tokenizer": {"builder": "characters"},
        "precision": "bfloat16",
        "max_total_sequence_length": PROMPT + NEW if generates else LENGTH,
        "train_global_batch_size": PROMPTS if generates else ROWS,
        "sequence_packing": packing,
        **changes,
    }
    groups = (PROMPTS // 2, 2) if generates else (2, 8)
    return RecipeConfig.model_validate(
        {
            "run_dir": "runs/none",
            "policy": policy,
            "generation": {"precision": "bfloat16", "max_new_tokens": NEW, "batch_size": PROMPTS},
            "grpo": {"num_prompts_per_step": groups[0], "num_generations_per_prompt": groups[1]},
            "loss": {"kl_coefficient": 0.1 if reference else 0.0},
            "env": {"kind": "dataset", "path": "none"},
        }
    )


def rows(vocabulary: int, budget: int, *, batch_size: int | None) -> BatchedDataDict:
    """Return rows of the full length with a plan of packed microbatches."""
    shape, generator = (ROWS, LENGTH), torch.Generator().manual_seed(0)
    noise = torch.randn(shape, generator=generator)
    data: Any = BatchedDataDict(
        {
            "input_ids": torch.randint(5, min(vocabulary, 57), shape, generator=generator),
            "input_lengths": torch.full((ROWS,), LENGTH),
            "token_mask": torch.ones(shape, dtype=torch.uint8),
            "sample_mask": torch.ones(ROWS),
            "advantages": noise,
            "generation_logprobs": -noise.abs(),
            "prev_logprobs": -noise.abs(),
        }
    )
    packing: Any = {
        "algorithm": "first_fit_decreasing",
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "sequence_length_pad_multiple": 1,
        "max_tokens_per_microbatch": budget,
    }
    (part,), _ = data.shard_by_batch_size(1, batch_size=batch_size, sequence_packing_args=packing)
    return part


class OnDevice:
    """transformers' way to make a model, with its random weights drawn on the GPU, where that takes a second."""

    @staticmethod
    def from_config(**options: Any) -> Any:
        with torch.device("cuda"):
            return transformers.AutoModelForCausalLM.from_config(**options)


def peak() -> float | None:
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() / GIB
    torch.cuda.reset_peak_memory_stats()
    return found


def run_worker(name: str, cfg: RecipeConfig) -> Iterator[tuple[str, float | None, float]]:
    """Yield stage, measured peak and seconds."""
    _, _, reference, steps = CASES[name]
    start = time.perf_counter()
    worker = AutomodelPolicyWorker(
        cfg.policy, cfg.generation, tokenizer=load_tokenizer(cfg.policy), seed=0, with_reference=reference
    )
    yield "build", peak(), time.perf_counter() - start
    vocabulary = worker.model.config.vocab_size
    for step in range(steps):
        # The state of AdamW is there from the first step's end on, and with it the peak of the others.
        for stage in ("scoring", "training"):
            start = time.perf_counter()
            if stage == "scoring":
                worker.get_logprobs(rows(vocabulary, SCORE_TOKENS, batch_size=None))
                if reference:
                    worker.get_reference_policy_logprobs(rows(vocabulary, SCORE_TOKENS, batch_size=None))
            else:
                data = rows(vocabulary, TRAIN_TOKENS, batch_size=ROWS)
                result = worker.train(data, PolicyGradient())
                assert result["outcomes"] == ["updated"], result["outcomes"]
            yield f"{stage}, step {step + 1} of {steps}", peak(), time.perf_counter() - start


def run_generator(cfg: RecipeConfig) -> Iterator[tuple[str, float | None, float]]:
    tokenizer = load_tokenizer(cfg.policy)
    generator = HFGenerator(load_model(cfg.policy, seed=0), tokenizer, cfg.generation)
    yield "build", peak(), 0.0
    start = time.perf_counter()
    prompts = [[5 + (i + j) % 40 for j in range(PROMPT)] for i in range(PROMPTS)]
    generator.generate(prompts, SamplingParams(max_new_tokens=NEW, record_routes=False), seed=0)
    yield "generation, step 1 of 1", peak(), time.perf_counter() - start


def compare(name: str, plan: MemoryPlan, cfg: RecipeConfig) -> dict[str, Any]:
    generates = name.endswith("generation")
    # The worker and the generator run alone here.
    without = ("weights", "optimizer") if generates else ("generator",)
    measured: dict[str, Any] = {}
    for label, found, seconds in run_generator(cfg) if generates else run_worker(name, cfg):
        stage, _, step = label.partition(", step ")
        entry: dict[str, Any] = {"measured_gib": found, "seconds": round(seconds, 1)}
        if step and step.split(" of ")[0] == step.split(" of ")[1]:
            planned = plan.total(stage, without=without) / GIB
            entry["planned_gib"] = planned
            if found:
                entry["off"] = planned / found - 1
        measured[label] = entry
    parts = {s: {p: n / GIB for p, n in sizes.items() if n} for s, sizes in plan.parts.items()}
    return {"case": name, "stages": measured, "plan_gib": parts}


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    started, results, left_out = time.perf_counter(), [], []
    recipes = {name: recipe(name, tiny=options.tiny) for name in options.cases.split(",")}
    plans = {}
    for name, cfg in recipes.items():
        begun = time.perf_counter()
        plans[name] = plan_memory(cfg)
        print(json.dumps({"planned": name, "seconds": round(time.perf_counter() - begun, 1)}), flush=True)
    if torch.cuda.is_available():
        setup.AutoModelForCausalLM = OnDevice
    for name, cfg in recipes.items():
        if time.perf_counter() - started > options.seconds * (0.55 if name == "8b_offload" else 0.85):
            left_out.append(name)
            continue
        try:
            results.append(rounded(compare(name, plans[name], cfg)))
        except (RuntimeError, AssertionError) as error:
            results.append({"case": name, "error": " ".join(str(error).split())[:500]})
        print(json.dumps(results[-1]), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    off = [e["off"] for r in results for e in r.get("stages", {}).values() if "off" in e]
    whole = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": round(time.perf_counter() - started, 1),
        "worst_off": max(map(abs, off), default=None),
        "left_out": left_out,
        "cases": results,
    }
    print(json.dumps(whole), flush=True)
    if options.out:
        options.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
