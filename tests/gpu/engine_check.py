# ruff: noqa: E402 - the tests' folder has to be on the path first
"""vLLM in a process of its own, and its weights: python tests/gpu/engine_check.py [--out FILE]

Checks that greedy logprobs are those of a bfloat16 transformers forward before and after updates of the weights, and
that answers survive sleep. Measures updates, sleep, memory, and tokens per second.
--sleep-level 2: also that two updates bring back weights that were discarded, and nothing is answered before.

--placement beside (one GPU): updates through CUDA's IPC, against a plain copy on the device.
--placement in_place (one GPU): the same without a process, for comparison.
--placement apart (two GPUs): updates by NCCL, against a plain broadcast between two processes and a plain copy from
GPU to GPU, all in this run. CUDA graphs, sleep and speed are left out, so that it ends within three minutes:
python tests/gpu/engine_check.py --placement apart --models 1.7b --out apart.json
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src"), str(ROOT / "benchmarks")]

from run import where

from headrace.config import GenerationConfig
from headrace.errors import GenerationError
from headrace.models.generation.build import build_generator
from headrace.models.generation.interfaces import SamplingParams
from headrace.models.router_replay import Routes, install
from headrace.models.tokenizers import build_character_tokenizer

GIB = 1 << 30
DEVICE = (
    "cuda" if torch.cuda.is_available() else "cpu"
)  # on a CPU the script itself is tried, with --models tiny
VOCABULARY = 151_936
_SPECIAL = 5
QWEN: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "0.6b": {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, **QWEN},
    "1.7b": {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
             "num_attention_heads": 16, **QWEN, "initializer_range": 0.02},
    "tiny": {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 2, **QWEN, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 500},
    "tiny_moe": {"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
                 "num_attention_heads": 2, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
                 "norm_topk_prob": True, **QWEN, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 500},
    "moe": {"model_type": "qwen3_moe", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6,
            "num_attention_heads": 16, "moe_intermediate_size": 768, "num_experts": 32, "num_experts_per_tok": 4,
            "norm_topk_prob": True, **QWEN},
}  # fmt: skip
LARGEST_MEAN_GAP, LARGEST_STALE_SHARE, LARGEST_ROUNDING = 0.03, 0.2, 2.0


def model_of(name: str, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    values = dict(MODELS[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).eval()


def tokenizer_of_size(size: int) -> Any:
    codes = (code for code in range(0x4E00, 0x10FFFF) if not 0xD800 <= code < 0xE000)
    return build_character_tokenizer("".join(chr(code) for code, _ in zip(codes, range(size - _SPECIAL))))


def prompts_of(name: str, count: int, length: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(_SPECIAL, MODELS[name]["vocab_size"], (count, length), generator=generator).tolist()


@torch.no_grad()
def gaps(model: Any, prompts: list[list[int]], output: Any, *, replay: bool = False) -> dict[str, float]:
    """Compare the engine's logprobs with those of a forward pass over prompt and completion.

    With `replay` that pass has the engine's routes. Otherwise it has its own ones; where the engine gave some,
    `equal_choices` is how often a token's experts in a layer are the same, as sets.
    """
    found, equal = [], []
    for row, (prompt, new, logprobs) in enumerate(zip(prompts, output.token_ids, output.logprobs)):
        ids = torch.tensor([prompt + new], device=DEVICE)
        routes, given = None, None
        if output.routes is not None:
            # The last token has no row.
            given = F.pad(output.routes[row].long(), (0, 0, 0, 0, 0, 1), value=-1).to(DEVICE)
            routes = Routes.replay(given) if replay else Routes.record()
        truth = forward_scores(model, ids, len(prompt), **({} if routes is None else {"routes": routes}))
        found.append((truth - torch.tensor(logprobs, device=DEVICE)).abs())
        if routes is not None and given is not None and not replay:
            own = routes.ids.long().sort(-1)[0]
            equal.append((own == given.sort(-1)[0])[:-1].all(-1).float().mean())
    every = torch.cat(found)
    shares = {"equal_choices": float(torch.stack(equal).mean())} if equal else {}
    return {"mean": float(every.mean()), "max": float(every.max()), "tokens": len(every), **shares}


def forward_scores(model: Any, ids: torch.Tensor, prompt: int, **more: Any) -> torch.Tensor:
    """Return the logprobs of the tokens after the prompt: ids (1, L) give (L - prompt,) float32."""
    scores = model(ids, **more).logits[0, prompt - 1 : -1].float().log_softmax(-1)
    return scores.gather(-1, ids[0, prompt:, None])[:, 0]


@torch.no_grad()
def rounding(model: Any, prompts: list[list[int]], output: Any) -> float:
    """Return the mean gap between the trainer's own forwards in float32 and bfloat16, which the model is afterwards."""
    rows = [torch.tensor([prompt + new], device=DEVICE) for prompt, new in zip(prompts, output.token_ids)]
    exact = [forward_scores(model, ids, len(prompt)) for ids, prompt in zip(rows, prompts)]
    model.to(torch.bfloat16)
    rounded = [forward_scores(model, ids, len(prompt)) for ids, prompt in zip(rows, prompts)]
    return float((torch.cat(exact) - torch.cat(rounded)).abs().mean())


def copy_gb_per_s(nbytes: int = GIB) -> float:
    """Return the bandwidth of a plain copy on the device: bytes copied, not bytes read and written."""
    return _copied_gb_per_s(nbytes, DEVICE, DEVICE)


def peer_copy_gb_per_s(nbytes: int = GIB) -> float:
    """Return the bandwidth of a plain copy from the first GPU to the last, as by CUDA's IPC between processes."""
    if torch.cuda.device_count() < 2:
        return float("nan")
    return _copied_gb_per_s(nbytes, "cuda:0", f"cuda:{torch.cuda.device_count() - 1}")


def _copied_gb_per_s(nbytes: int, of: str, to: str) -> float:
    source = torch.empty(nbytes, dtype=torch.uint8, device=of)
    target = torch.empty(nbytes, dtype=torch.uint8, device=to)
    times = []
    for _ in range(6):
        synchronize()
        start = time.perf_counter()
        target.copy_(source)
        synchronize()
        times.append(time.perf_counter() - start)
    return nbytes / min(times) / 1e9


def broadcast_gb_per_s(nbytes: int = GIB if DEVICE == "cuda" else 64 << 20) -> float:
    """Return the bandwidth of a plain broadcast between two processes: NCCL's from GPU 0 to the last, or gloo's."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_broadcasting, args=(folder, nbytes), nprocs=2)  # type: ignore[no-untyped-call]
        return nbytes / float(Path(folder, "seconds").read_text()) / 1e9


def _broadcasting(rank: int, folder: str, nbytes: int) -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(rank * (torch.cuda.device_count() - 1))
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    data, times = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE), []
    for _ in range(8):
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        dist.broadcast(data, 0)
        synchronize()
        times.append(time.perf_counter() - start)
    if rank == 1:
        Path(folder, "seconds").write_text(str(min(times)))
    dist.destroy_process_group()


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def used_gib() -> float:
    if DEVICE == "cpu":
        return float("nan")
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def timed(call: Any, *args: Any, **kwargs: Any) -> float:
    start = time.perf_counter()
    call(*args, **kwargs)
    synchronize()
    return time.perf_counter() - start


def check(name: str, args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = tokenizer_of_size(MODELS[name]["vocab_size"])
    cfg = GenerationConfig(
        backend=args.backend,
        precision="bfloat16",
        max_new_tokens=512,
        placement=args.placement,
        engines=args.engines,
        python=args.python,
        vllm={
            "args": engine_args(args),
            "sleep_level": 0 if args.placement == "apart" else args.sleep_level,
            "tensor_parallel": args.ranks,
        },
    )  # fmt: skip
    apart = args.placement == "apart"
    report: dict[str, Any] = {"model": name, "copy_gb_per_s": copy_gb_per_s()}
    if apart:
        report |= {"broadcast_gb_per_s": broadcast_gb_per_s(), "peer_copy_gb_per_s": peer_copy_gb_per_s()}
    print(report, flush=True)
    torch.cuda.empty_cache()
    start = time.perf_counter()
    generator = build_generator(cfg, model_of(name, 0), tokenizer, record_routes="moe" in name)
    report["start_s"] = time.perf_counter() - start
    greedy = SamplingParams(64, greedy=True)
    few, versions = prompts_of(name, 8), []
    stale = None
    for version in range(3):
        policy = model_of(name, version)
        if version:
            seconds = timed(generator.update_weights, policy.state_dict().items(), version)
        output = generator.generate(few, greedy, seed=0)
        rounded = rounding(policy, few, output)
        half = policy
        if output.routes is not None:
            install(half)
        entry: dict[str, Any] = {"version": version, "rounding": rounded, "gap": gaps(half, few, output)}
        if output.routes is not None:
            entry["replayed_gap"] = gaps(half, few, output, replay=True)
        if version:
            assert stale is not None
            entry |= {"update_s": seconds, "stale_gap": gaps(half, few, stale), **_weights(output.metrics)}
        if output.routes is not None:
            entry["routes"] = list(output.routes[0].shape)
        versions.append(entry)
        stale = output
        print(name, entry, flush=True)
        del policy, half
        torch.cuda.empty_cache()
    report["versions"] = versions
    # Where a route differs, so does what follows: routes are held to their replay. Wide models round more.
    report["ok"] = all(
        v.get("replayed_gap", v["gap"])["mean"] < max(LARGEST_MEAN_GAP, LARGEST_ROUNDING * v["rounding"])
        for v in versions
    ) and all(v["gap"]["mean"] < LARGEST_STALE_SHARE * v["stale_gap"]["mean"] for v in versions[1:])
    report["updates"] = updates(generator, name, few)
    plain = report["broadcast_gb_per_s" if apart else "copy_gb_per_s"]
    report["copy_share"] = report["updates"].get("gb_per_s", 0.0) / plain
    if not apart:
        report["speed"] = speed(generator, name)
        if args.sleep_level == 2:  # first: torch keeps the host's memory that a sleep at level 1 takes
            report["discarded"] = discarded(generator, name, few, greedy)
            report["ok"] = bool(report["ok"] and report["discarded"]["ok"])
        report["sleep"] = sleep(generator, few, greedy, args.sleep_level)
        report["ok"] = bool(report["ok"] and report["sleep"]["answers_as_before"])
    generator.shutdown()
    return report


def engine_args(args: argparse.Namespace) -> dict[str, Any]:
    quick = {"enforce_eager": True} if args.placement == "apart" else {}
    shared = {"gpu_memory_utilization": args.memory, "max_model_len": 1024}
    return {**shared, **quick, **json.loads(args.vllm_args)}


def _weights(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key.startswith("weights_")}


def updates(generator: Any, name: str, prompts: list[list[int]], repeats: int = 6) -> dict[str, Any]:
    """Time updates from a trainer in float32: all of it, packing, and copying out of the trainer's memory."""
    policy = model_of(name, 2)
    whole, ways, packing, gigabytes = [], [], [], 0.0
    for repeat in range(repeats):
        whole.append(timed(generator.update_weights, policy.state_dict().items(), 3 + repeat))
        metrics = generator.generate(prompts[:1], SamplingParams(1, greedy=True), seed=0).metrics
        ways.append(metrics.get("weights_copy_seconds", float("nan")))
        packing.append(metrics.get("weights_pack_seconds", float("nan")))
        gigabytes = metrics.get("weights_gb", 0.0)
    found: dict[str, Any] = {
        "update_s": sorted(whole),
        "copy_s": sorted(ways),
        "pack_s": sorted(packing),
        "gb": gigabytes,
    }
    if gigabytes:
        found["gb_per_s"] = gigabytes / statistics.median(ways)
    print(name, found, flush=True)
    return found


def speed(generator: Any, name: str) -> list[dict[str, float]]:
    found = []
    for repeat in range(3):
        output = generator.generate(
            prompts_of(name, 256 if DEVICE == "cuda" else 8), SamplingParams(512), seed=repeat
        )
        found.append(output.metrics)
        print(output.metrics, flush=True)
    return found


def sleep(generator: Any, prompts: list[list[int]], greedy: SamplingParams, level: int) -> dict[str, Any]:
    """Let the engine sleep, and wake it by asking again.

    Cached prefixes, which it wakes without, change the rounding of an answer: the one before is of a waking too.
    """
    generator.release()
    before = generator.generate(prompts, greedy, seed=0)
    used = used_gib()
    asleep_s = timed(generator.release)
    asleep = used_gib()
    start = time.perf_counter()
    after = generator.generate(prompts, greedy, seed=0)
    found = {
        "level": level,
        "used_gib": used,
        "asleep_gib": asleep,
        "release_s": asleep_s,
        "wake_and_generate_s": time.perf_counter() - start,
        "answers_as_before": before.token_ids == after.token_ids,
    }
    print(found, flush=True)
    return found


def discarded(generator: Any, name: str, prompts: list[list[int]], greedy: SamplingParams) -> dict[str, Any]:
    """Twice let the engine discard its weights, as for training, and bring back others by an update.

    It has to refuse to generate before the update; answers after it are held to a forward pass with the new weights.
    `freed_gib` is of the device's memory, `host_gib` what the host has less of.
    """
    cycles, weights_gib = [], 0.0
    for seed in (3, 4):
        policy = model_of(name, seed)
        weights_gib = 2 * sum(parameter.numel() for parameter in policy.parameters()) / GIB
        used, free = used_gib(), host_free_gib()
        found: dict[str, Any] = {"release_s": timed(generator.release, weights_follow=True)}
        found |= {"freed_gib": used - used_gib(), "host_gib": free - host_free_gib()}
        try:
            generator.generate(prompts, greedy, seed=0)
            found["refusal"] = ""
        except GenerationError as error:
            found["refusal"] = str(error)
        found["update_s"] = timed(generator.update_weights, policy.state_dict().items(), 100 + seed)
        start = time.perf_counter()
        output = generator.generate(prompts, greedy, seed=0)
        found["wake_and_generate_s"] = time.perf_counter() - start
        found["rounding"] = rounding(policy, prompts, output)
        if output.routes is not None:
            install(policy)
        found["gap"] = gaps(policy, prompts, output, replay=output.routes is not None)
        agrees = found["gap"]["mean"] < max(LARGEST_MEAN_GAP, LARGEST_ROUNDING * found["rounding"])
        frees = DEVICE == "cpu" or found["freed_gib"] > weights_gib
        found["ok"] = agrees and frees and "generation.vllm.sleep_level" in found["refusal"]
        cycles.append(found)
        print(name, "discarded", found, flush=True)
        del policy
        torch.cuda.empty_cache()
    return {"cycles": cycles, "weights_gib": weights_gib, "ok": all(cycle["ok"] for cycle in cycles)}


def host_free_gib() -> float:
    """Return the memory that the host can still give, pinned memory left out."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024 / GIB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["0.6b"])
    parser.add_argument(
        "--backend", choices=["vllm", "hf"], default="vllm", help="hf tries the script without vLLM"
    )
    parser.add_argument("--placement", choices=["beside", "in_place", "apart"], default="beside")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks of an engine apart")
    parser.add_argument("--python", help="interpreter of the engines")
    parser.add_argument("--memory", type=float, default=0.4, help="gpu_memory_utilization of an engine")
    parser.add_argument("--sleep-level", type=int, choices=[0, 1, 2], default=1)
    parser.add_argument("--vllm-args", default="{}", help="more engine arguments, as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    started = time.perf_counter()
    # It has no part in a broadcast.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    reports = [check(name, args) for name in args.models]
    passed = all(report["ok"] for report in reports)
    result = {
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else None,
        "where": where(),
        "placement": args.placement,
        "engines": args.engines,
        "ranks": args.ranks,
        "passed": passed,
        "seconds": time.perf_counter() - started,
        "models": reports,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("passed" if passed else "FAILED", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
