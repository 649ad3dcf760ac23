"""How many tokens a second do scoring and training take on one GPU, packed against padded, and against others?

The model has the sizes of Qwen3-0.6B with a vocabulary of 151,936 and random weights; float32 weights, gradients and
optimizer state, bfloat16 products. 64 rows of up to 2,048 tokens fill 40 % of their padded batch; a microbatch is
8,192 tokens, padding included. A step is forward, backward, clipping and AdamW. Tokens are those that are not padding.
Every way starts from the same weights, and has to give the same loss and norm on its first step, before it is timed.
Ways run one after another, since each takes most of the memory. Seconds are by the wall clock, with the device
waited for.

    python benchmarks/train.py --out train.json [--vocabulary 32768] [--only packed,padded] [--recompute]
    python benchmarks/train.py --profile profile.txt   # the costliest ops of every way, on a quarter of the rows
    python benchmarks/train.py --tiny                  # every line on a CPU; says nothing about speed
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from run import Bench, gpu_options, gpu_parser, write_report
from training.batch import LARGE, TINY, Batch, Case, Way, draw_batch, save_model, set_old_logprobs
from training.ours import Ours
from training.rivals import TRL, Plain

PACKED, PADDED, DYNAMIC = "headrace packed", "headrace padded", "headrace dynamic"
PLAIN, PLAIN_HALF, TRL_UPDATE = "transformers", "transformers, bf16 weights", "TRL"
FILL, PACKED_FASTER, REPEATS = 0.4, 1.8, 5
LOSS_APART, NORM_APART, LOGPROB_APART = 5e-3, 0.05, 0.05
"""Absolute, relative, and absolute in the mean: what bfloat16 rounding may do."""

WAYS: dict[str, Callable[[Case, Batch, Path], Way]] = {
    PACKED: lambda case, batch, path: Ours(case, batch, path, "packed"),
    DYNAMIC: lambda case, batch, path: Ours(case, batch, path, "dynamic"),
    PADDED: lambda case, batch, path: Ours(case, batch, path, "padded"),
    PLAIN: Plain,
    PLAIN_HALF: lambda case, batch, path: Plain(case, batch, path, master=True),
    TRL_UPDATE: TRL,
}
"""The first gives the logprobs that ratios are taken to."""
FAILURES = (AssertionError, ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError)
FAILURES += (TypeError, ValueError)
"""What a way may fail with while the others go on: unequal losses, too little memory, another release of a package."""
Numbers = dict[str, float]


def wait(case: Case) -> None:
    if case.device.type == "cuda":
        torch.cuda.synchronize()


def timed(case: Case, call: Callable[[], Any], repeats: int) -> Numbers:
    """Return seconds over the repeats, and the peak of memory that tensors took."""
    cuda = case.device.type == "cuda"
    seconds = []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        wait(case)
        start = time.perf_counter()
        result = call()
        wait(case)
        seconds.append(time.perf_counter() - start)
        del result
    ordered = sorted(seconds)
    return {
        "median_ms": statistics.median(seconds) * 1e3,
        "p10_ms": ordered[round(0.1 * (repeats - 1))] * 1e3,
        "p90_ms": ordered[round(0.9 * (repeats - 1))] * 1e3,
        "min_ms": ordered[0] * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
    }


def profile(case: Case, name: str, call: Callable[[], Any]) -> str:
    """Return the ops that take most time on the device and on the host in one call."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    sorts = ["self_cpu_time_total"]
    if case.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        sorts.insert(0, "self_cuda_time_total")
    with torch.profiler.profile(activities=kinds) as trace:
        call()
        wait(case)
    averages = trace.key_averages()
    tables = [averages.table(sort_by=key, row_limit=30, max_name_column_width=90) for key in sorts]
    return "\n".join(f"===== {name}: by {key} =====\n{table}" for key, table in zip(sorts, tables))


class Comparison:
    """What all ways are held to, and what was measured of them."""

    def __init__(self, case: Case, batch: Batch, directory: Path, repeats: int) -> None:
        self.case, self.batch, self.directory, self.repeats = case, batch, directory, repeats
        self.measured: dict[str, dict[str, Numbers]] = {"logprobs": {}, "step": {}}
        self.first: dict[str, Numbers] = {}
        self.failed: dict[str, str] = {}
        self.traces: list[str] = []
        self._truth: torch.Tensor | None = None

    def run(self, name: str, *, with_trace: bool) -> None:
        """Build one way, check it against the first, time it, and let go of it; a way that fails leaves why."""
        try:
            self._measure(name, with_trace=with_trace)
        except FAILURES as error:
            self.failed[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        gc.collect()
        if self.case.device.type == "cuda":
            torch.cuda.empty_cache()

    def _measure(self, name: str, *, with_trace: bool) -> None:
        way = WAYS[name](self.case, self.batch, self.directory)
        self._check_scores(name, way.logprobs())
        self._check_step(name, way.step())
        for kind, call in (("logprobs", way.logprobs), ("step", way.step)):
            call()
            self.measured[kind][name] = self._rates(timed(self.case, call, self.repeats))
            if with_trace:
                self.traces.append(profile(self.case, f"{name}: {kind}", call))

    def _rates(self, numbers: Numbers) -> Numbers:
        numbers["tokens_per_s"] = self.batch.tokens / numbers["median_ms"] * 1e3
        return {key: round(value, 3) for key, value in numbers.items()}

    def _check_scores(self, name: str, scores: torch.Tensor) -> None:
        if self._truth is None:
            self._truth = scores
            set_old_logprobs(self.batch, scores)
        apart = float((scores - self._truth).abs()[self.batch.mask].mean())
        self.first[name] = {"logprobs_apart": apart}
        assert apart < LOGPROB_APART, f"{name}: logprobs are {apart:.2e} from {PACKED}'s in the mean"

    def _check_step(self, name: str, found: tuple[float, float]) -> None:
        loss, norm = found
        self.first[name] |= {"loss": loss, "grad_norm": norm}
        truth = next(iter(self.first.values()))
        assert abs(loss - truth["loss"]) < LOSS_APART, f"{name}: loss {loss}, expected {truth['loss']}"
        assert abs(norm / truth["grad_norm"] - 1) < NORM_APART, f"{name}: {norm}, not {truth['grad_norm']}"


def record(bench: Bench, comparison: Comparison, *, with_targets: bool) -> None:
    """Turn rates into figures: ratios of tokens per second, held to their targets."""
    for kind, ways in comparison.measured.items():
        rates = {name: numbers["tokens_per_s"] for name, numbers in ways.items()}
        bench.measurements[kind] = ways
        for name, rate in rates.items():
            bench.figure(f"{kind}.tokens_per_s.{name}", rate, "tokens/s")
            bench.figure(f"{kind}.peak.{name}", ways[name]["peak_gib"], "GiB")
        for other, least in ((PADDED, PACKED_FASTER), (PLAIN, 1.0), (PLAIN_HALF, None), (TRL_UPDATE, 1.0)):
            if PACKED in rates and other in rates:
                # Scoring has no target of its own but against padded rows.
                target = least if with_targets and (kind == "step" or other == PADDED) else None
                ratio = rates[PACKED] / rates[other]
                bench.figure(f"{kind}.packed_faster_than.{other}", ratio, "x", at_least=target)
        if PADDED in rates and PLAIN in rates:
            bench.figure(f"{kind}.padded_faster_than.{PLAIN}", rates[PADDED] / rates[PLAIN], "x")


def table(bench: Bench) -> str:
    """Return the figures, one a line."""
    lines = []
    for figure in bench.figures:
        verdict = "" if figure.target is None else f">= {figure.target:g} {figure.verdict}"
        lines.append(f"{figure.name:<58}{figure.value:>14,.2f} {figure.unit:<9} {verdict}")
    return "\n".join(lines)


def hardware(device: torch.device) -> dict[str, Any]:
    """Return the device, and versions of what runs on it."""
    found: dict[str, Any] = {"device": str(device)}
    for name in ("trl", "accelerate", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return found


def make_case(options: argparse.Namespace) -> Case:
    """Return the sizes: large on CUDA, tiny where asked for."""
    if options.quick:
        rows, longest, together, vocabulary, sizes = 8, 64, 2, 128, TINY
    else:
        rows, longest, together, vocabulary, sizes = 64, 2048, 4, 151_936, LARGE
    return Case(
        rows if options.profile is None or options.quick else rows // 4,
        longest,
        FILL,
        options.microbatch_rows or together,
        options.vocabulary or vocabulary,
        sizes,
        recompute=options.recompute,
        device=options.device,
    )


def parse() -> argparse.Namespace:
    parser = gpu_parser(__doc__, tiny="a tiny model")
    parser.add_argument("--vocabulary", type=int, help="tokens of the model's vocabulary")
    parser.add_argument("--microbatch-rows", type=int, help="padded rows of a microbatch")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing, in every way")
    parser.add_argument("--only", default="", help="comma-separated parts of names, of ways to run")
    parser.add_argument("--profile", type=Path, help="write the costliest ops of every way to this file")
    return gpu_options(parser, quick_repeats=REPEATS, repeats=REPEATS)


def chosen(only: str) -> list[str]:
    """Return the ways to run: those named, but TRL only where it is installed."""
    wanted = [part.strip().lower() for part in only.split(",") if part.strip()]
    names = [name for name in WAYS if not wanted or any(part in name.lower() for part in wanted)]
    return [name for name in names if name != TRL_UPDATE or find_spec("trl")]


def main() -> int:
    """Run all ways, print the table, write the report; 1 if a figure misses its target."""
    options = parse()
    case = make_case(options)
    bench = Bench(options.quick, options.repeats, dict(options.target))
    batch = draw_batch(case)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        parameters = save_model(case, directory)
        comparison = Comparison(case, batch, directory, options.repeats)
        for name in chosen(options.only):
            started = time.perf_counter()
            comparison.run(name, with_trace=options.profile is not None)
            print(f"{name}: {time.perf_counter() - started:.0f} s in all", file=sys.stderr, flush=True)
            if options.profile is not None:
                options.profile.write_text("\n".join(comparison.traces))
    record(bench, comparison, with_targets=not options.quick and options.profile is None)
    bench.notes |= {
        "model": {**case.config(), "parameters": parameters},
        "batch": {
            "rows": case.rows,
            "longest": case.longest,
            "tokens": batch.tokens,
            "fill": round(batch.tokens / batch.ids.numel(), 4),
            "tokens_in_loss": int(batch.mask.sum()),
            "microbatch_tokens": case.microbatch_tokens,
            "recompute": case.recompute,
        },
        "first_step": comparison.first,
        "hardware": hardware(case.device),
        "failed": comparison.failed,
        "left_out": [name for name in WAYS if name not in comparison.measured["step"]],
    }
    report = bench.report("train", (__doc__ or "").splitlines()[0])
    report["ok"] &= not comparison.failed
    write_report(report, options.out)
    print(table(bench), file=sys.stderr if options.out is None else sys.stdout)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
