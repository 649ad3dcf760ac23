"""What do routes cost on the wire, and to pack and unpack, against one copy of the bytes?

Qwen3-30B-A3B's shape: 48 layers, 8 of 128 experts. Baseline and candidates run in turn in one process, on one thread;
before any timing, what comes out is held against what went in.

    python benchmarks/routes.py [--rows 8192] [--repeats 21] [--output benchmarks/results/routes.json]
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.data_plane.routes_codec import check_routes, pack_routes, signed_routes, unpack_routes
from headrace.models.router_replay import align_jagged, row_digests

LAYERS, TOP_K, EXPERTS = 48, 8, 128
BYTES_PER_TOKEN_TARGET = 385
COPIES_TARGET = 4.0


def make_samples(rows: int) -> list[torch.Tensor]:
    """Routes of samples of 64 to 512 tokens, as the recorder writes them (uint8)."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < rows:
        lengths.append(min(int(torch.randint(64, 513, (), generator=generator)), rows - sum(lengths)))
    ids = torch.rand(rows, LAYERS, EXPERTS, generator=generator).topk(TOP_K).indices.to(torch.uint8)
    return list(ids.split(lengths))


def round_trip(samples: Sequence[torch.Tensor], lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Pack samples into a wire column and cut the column into samples again."""
    return unpack_routes(pack_routes(samples, num_experts=EXPERTS), lengths)


def measure(candidates: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each candidate, all of them in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(seconds: list[float], baseline: list[float]) -> dict[str, float]:
    """Median and p10/p90 in milliseconds, and the ratio to the baseline of the same round."""
    cuts = statistics.quantiles(seconds, n=10)
    ratios = [a / b for a, b in zip(seconds, baseline)]
    return {
        "median_ms": round(statistics.median(seconds) * 1e3, 3),
        "p10_ms": round(cuts[0] * 1e3, 3),
        "p90_ms": round(cuts[-1] * 1e3, 3),
        "copies": round(statistics.median(ratios), 2),
    }


def run(rows: int, repeats: int) -> dict[str, Any]:
    """Return the figures."""
    samples = make_samples(rows)
    lengths = [len(ids) for ids in samples]
    wire = pack_routes(samples, num_experts=EXPERTS)
    width = max(lengths)
    candidates: dict[str, Callable[[], Any]] = {"copy of the bytes": wire.clone}
    for dtype in (torch.uint8, torch.int16, torch.int32):
        source = [ids.to(dtype) for ids in samples]
        for sample, back in zip(samples, round_trip(source, lengths), strict=True):
            assert torch.equal(sample, back)
        name = f"pack and unpack, from {str(dtype).removeprefix('torch.')}"
        candidates[name] = lambda source=source: round_trip(source, lengths)
    aligned = align_jagged(wire, lengths, width, num_experts=EXPERTS)
    assert torch.equal(aligned.ids[~aligned.padding], wire)
    candidates["pad into a batch"] = lambda: align_jagged(wire, lengths, width, num_experts=EXPERTS)
    candidates["check every id"] = lambda: check_routes(
        wire, num_experts=EXPERTS, num_layers=LAYERS, top_k=TOP_K
    )
    candidates["digest every row"] = lambda: row_digests(wire)
    candidates["widen to int64"] = lambda: [signed_routes(wire[:, i]) for i in range(LAYERS)]
    seconds = measure(candidates, repeats)
    baseline = seconds["copy of the bytes"]
    results = {name: summary(values, baseline) for name, values in seconds.items()}
    copies = results["pack and unpack, from uint8"]["copies"]
    return {
        "shape": {"tokens": rows, "layers": LAYERS, "k": TOP_K, "experts": EXPERTS, "samples": len(samples)},
        "bytes_per_token": wire.nbytes / rows,
        "bytes_per_token_target": BYTES_PER_TOKEN_TARGET,
        "pack_and_unpack_copies": copies,
        "pack_and_unpack_copies_target": COPIES_TARGET,
        "met": wire.nbytes / rows <= BYTES_PER_TOKEN_TARGET and copies <= COPIES_TARGET,
        "results": results,
        "where": where(repeats),
    }


def where(repeats: int) -> dict[str, Any]:
    """Hardware, versions and commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit,
        "repeats": repeats,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [
        line.split(":", 1)[1].strip()
        for line in info.read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def main() -> None:
    """Measure, print and, if asked, write the results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = run(options.rows, options.repeats)
    for name, figures in report["results"].items():
        print(f"{name:32s} {figures['median_ms']:9.2f} ms  {figures['copies']:7.2f} copies")
    print(f"bytes per token {report['bytes_per_token']:.0f} (target {BYTES_PER_TOKEN_TARGET})")
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
