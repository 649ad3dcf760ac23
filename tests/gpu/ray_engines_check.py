# ruff: noqa: E402 - the tests' folder has to be on the path first
"""A whole run on Ray and TransferQueue with engines in actors: python tests/gpu/ray_engines_check.py --out FILE

On two GPUs, GRPO steps of a model with random weights, the mismatch guard after every step (`agrees`).
apart: one policy worker trains on a GPU, one engine generates on the other; weights by NCCL.
beside: two policy workers (FSDP2), an engine on the GPU of each, asleep while the policy trains; weights by CUDA's IPC.

Each line is printed, and FILE written, as soon as there is something to say. `gb_per_s` is of the transfer alone, and
`share` of a plain broadcast between two processes (apart) or of a plain copy on the device (beside), in this run;
`quick`: 0.6 of that or more, and an update takes less than a second.
`--model tiny --backend hf` tries everything on a CPU.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT / "src"), str(ROOT / "benchmarks")]

from engine_check import DEVICE, GIB, MODELS, broadcast_gb_per_s, copy_gb_per_s, model_of, tokenizer_of_size
from run import where

from headrace.algorithms.run import build_session, start_loop
from headrace.config import RecipeConfig
from headrace.environments.interfaces import StepResult
from headrace.environments.single_turn import conversation
from headrace.errors import HeadraceError
from headrace.experience.types import Prompt
from recorder import NeverStop, Recorder

PROMPT, GROUP, WARMING = 24, 4, 1
LARGEST_MEAN_GAP = 0.05
_SPECIAL, _FIRST = 5, 0x4E00


class Questions:
    """An environment whose rewards differ within a group."""

    def prompts(self, split: str) -> list[Prompt]:
        draw = torch.Generator().manual_seed(1)
        rows = torch.randint(_FIRST, _FIRST + 400, (64 if split == "train" else 4, PROMPT), generator=draw)
        texts = ["".join(map(chr, row)) for row in rows.tolist()]
        return [Prompt(f"{split}{i}", conversation(text, None)) for i, text in enumerate(texts)]

    def step(self, prompts: Any, conversations: Any, truncated: Any) -> list[StepResult]:
        return [StepResult(sum(talk[-1].content.encode()) % 101 / 100) for talk in conversations]


def save_model(name: str, folder: Path) -> None:
    """Write random weights, made on a GPU, which is quicker than each process making its own."""
    model_of(name, 0, torch.bfloat16).save_pretrained(folder)
    tokenizer_of_size(MODELS[name]["vocab_size"]).save_pretrained(folder)


def recipe_of(args: argparse.Namespace, placement: str, folder: Path) -> RecipeConfig:
    workers = 2 if placement == "beside" else 1
    length = PROMPT + 8 + args.tokens
    engine = {"enforce_eager": True, "gpu_memory_utilization": args.memory, "max_model_len": length + 8}
    return RecipeConfig.model_validate(
        {
            "run_dir": str(folder / placement),
            "code_path": [str(Path(__file__).parent)],
            "env": {"kind": "python", "target": "ray_engines_check:Questions"},
            "data": {"train_size": 64, "validation_size": 4},
            "policy": {
                "model": {"path": str(folder)},
                "precision": "bfloat16" if DEVICE == "cuda" else "float32",
                "workers": workers,
                "parallel": {"launcher": "ray"},
                "max_total_sequence_length": length,
                "train_global_batch_size": args.rows,
                "sequence_packing": {
                    "enabled": True,
                    "train_mb_tokens": 8 * length,
                    "logprob_mb_tokens": 16 * length,
                },
                "optimizer": {"lr": args.lr},
            },
            "generation": {
                "backend": args.backend,
                "precision": "bfloat16" if DEVICE == "cuda" else "float32",
                "placement": placement,
                "engines": workers,
                "max_new_tokens": args.tokens,
                "vllm": {
                    "args": {**engine, **json.loads(args.vllm_args)},
                    "sleep_level": args.sleep_level if placement == "beside" else 0,
                },
                # A wider gap does not stop the measurement.
                "guard": {"enabled": True, "every_n_steps": 1, "max_logprob_gap": 10 * LARGEST_MEAN_GAP},
            },
            "data_plane": {"impl": "transfer_queue", "backend": "simple", "startup_timeout_s": 300.0},
            "cluster": {"gpus_per_node": workers if DEVICE == "cuda" else 0, "startup_timeout_s": 300.0},
            "grpo": {
                "num_prompts_per_step": args.rows // GROUP,
                "num_generations_per_prompt": GROUP,
                "max_num_steps": args.steps,
            },
            "loss": {"importance_correction": "tis"},
            "validation": {"at_start": False, "at_end": False},
            "checkpointing": {"enabled": False},
            "logging": {"progress": "off", "trackers": []},
        }
    )


class Report:
    """What is known so far, in a file."""

    def __init__(self, path: Path | None, args: argparse.Namespace) -> None:
        gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else None
        self._path, self.values = path, {"gpu": gpu, "where": where(), "model": args.model, "placements": {}}

    def say(self, place: dict[str, Any], **values: Any) -> None:
        place |= values
        print(json.dumps(values), flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")


class Steps(Recorder):
    """Reports each step when it ends."""

    def __init__(self, report: Report, place: dict[str, Any]) -> None:
        super().__init__()
        self._report, self._place = report, place

    def on_step(self, record: Any) -> None:
        kept = {
            name: round(float(value), 8)
            for name, value in record.metrics.items()
            if name.startswith(
                ("generator/", "mismatch/guard_gap", "train/loss", "train/grad_norm", "reward/mean")
            )
        }
        stages = {name: round(value, 3) for name, value in record.timings_s.items()}
        self._place.setdefault("steps", []).append({"metrics": kept, "stages_s": stages})
        self._report.say({}, **self._place["steps"][-1])


@contextmanager
def watched() -> Iterator[list[float]]:
    """Return a context that notes the most memory in use, in GiB, of each GPU, whoever uses it."""
    peaks = [0.0] * torch.cuda.device_count()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            for index in range(len(peaks)):
                free, total = torch.cuda.mem_get_info(index)
                peaks[index] = max(peaks[index], (total - free) / GIB)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def figures(steps: Sequence[dict[str, Any]], plain: float) -> dict[str, Any]:
    """Return medians of the steps after the first, whose update makes connections.

    The sender's figures are of the policy's rank 0, which sends nothing beside an engine of its own that has died:
    `steps_without_figures` counts such steps, and `share` is 0 where there is no other.
    """
    names = ("tokens_per_s", "weights_seconds", "weights_pack_seconds", "weights_copy_seconds", "weights_gb")
    later = [step["metrics"] for step in steps[WARMING:]]
    whole = [metrics for metrics in later if all(f"generator/{name}" in metrics for name in names)]
    middle = {name: statistics.median(m[f"generator/{name}"] for m in whole) for name in names if whole}
    gb_per_s = middle["weights_gb"] / middle["weights_copy_seconds"] if whole else 0.0
    gap = max(step["metrics"]["mismatch/guard_gap_mean"] for step in steps)
    return {
        **middle,
        "steps_without_figures": len(later) - len(whole),
        "gb_per_s": gb_per_s,
        "share": gb_per_s / plain,
        "largest_mean_gap": gap,
    }


def run(args: argparse.Namespace, placement: str, folder: Path, plain: float, report: Report) -> bool:
    """Make the steps; what goes wrong is told, so that the other placement is tried too."""
    place: dict[str, Any] = {}
    report.values["placements"][placement] = place
    with watched() as peaks:
        started = time.perf_counter()
        try:
            session = build_session(recipe_of(args, placement, folder))
        except HeadraceError as error:
            report.say(place, error=str(error))
            return False
        try:
            report.say(place, start_s=time.perf_counter() - started, peak_gib=peaks)
            report.say(place, seats=[seat.devices for seat in session.policy.workers.seats()])
            steps = Steps(report, place)
            finished = start_loop(session, steps, NeverStop()).run()
            report.say(place, finished=finished, peak_gib=peaks)
            report.say(place, **figures(place["steps"], plain), seconds=time.perf_counter() - started)
        except HeadraceError as error:
            report.say(place, error=str(error), peak_gib=peaks)
            return False
        finally:
            session.close()
    agrees = finished and place["largest_mean_gap"] < LARGEST_MEAN_GAP
    quick = place["share"] >= 0.6 and place["weights_seconds"] < 1.0
    report.say(place, agrees=bool(agrees), quick=quick)
    return bool(agrees)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="1.7b")
    parser.add_argument("--backend", choices=["vllm", "hf"], default="vllm")
    parser.add_argument("--placements", nargs="+", choices=["apart", "beside"], default=["apart", "beside"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32, help="completions of a step")
    parser.add_argument("--tokens", type=int, default=128, help="of a completion, at most")
    parser.add_argument("--lr", type=float, default=1e-4, help="large enough for stale weights to show")
    parser.add_argument("--memory", type=float, default=0.3, help="gpu_memory_utilization of an engine")
    parser.add_argument("--sleep-level", type=int, choices=[0, 1, 2], default=1, help="of engines beside")
    parser.add_argument("--vllm-args", default="{}", help="more engine arguments, as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    # Ray's processes inherit both.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    report = Report(args.out, args)
    measure = {"apart": broadcast_gb_per_s, "beside": copy_gb_per_s}
    bandwidths = {placement: measure[placement]() for placement in args.placements}
    report.say(report.values, plain_gb_per_s=bandwidths)
    with tempfile.TemporaryDirectory() as folder:
        save_model(args.model, Path(folder))
        torch.cuda.empty_cache()
        done = [run(args, each, Path(folder), plain, report) for each, plain in bandwidths.items()]
    passed = all(done)
    report.say(report.values, passed=passed)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
