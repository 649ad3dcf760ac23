"""How do training and scoring grow with the GPUs of one machine, by layout, beside plain FSDP2 of transformers?

Weak scaling: every GPU adds as many rows to a step (32; 16 of the 8 B sizes), of 200 to 8,000 tokens by one lognormal
distribution, packed into microbatches of 16,384 tokens. Models have the sizes of Qwen3-0.6B, Qwen3-8B and an MoE of 32
experts; random weights, float32 with float32 AdamW, computed in bfloat16. Qwen3-8B with float32 AdamW does not fit one
GPU: its efficiency is that of 12 of its layers, and all 36 on several GPUs are held to what one GPU would take by the
cost of a layer between 6 and 12. `exposed` are collectives that no kernel overlaps, in one profiled step. Measured
cases are kept; a call that is cut leaves a whole report. The first line takes 4 minutes or so, the second goes on.

    python benchmarks/scaling.py --gpus 1 2 --limit-s 220 --out scaling_h200x2.json
    python benchmarks/scaling.py --gpus 1 2 --limit-s 420 --resume EARLIER.json --out scaling_h200x2.json
    python benchmarks/scaling.py --gpus 1 2 --cases "0.6b x" "spread" --out some.json      # parts of names; see --list
    python benchmarks/scaling.py --tiny --gpus 1 2 --out tiny.json                         # on a CPU, over gloo
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from layouts.cases import LARGE, MODELS, TINY, Case, cases
from layouts.driver import Ranks
from layouts.figures import merged, record
from run import Bench, gpu_options, gpu_parser, write_report

REPEATS, SAVE_S = 5, 90.0
Results = dict[str, dict[str, Any]]


def parse() -> argparse.Namespace:
    parser = gpu_parser(__doc__, tiny="tiny models over gloo")
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers of GPUs; default: 1 and all there are")
    parser.add_argument("--cases", nargs="+", default=[""], help="parts of the names of the cases to run")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds after which no case begins")
    parser.add_argument(
        "--resume", type=Path, help="keep what was measured in this report; default: that of --out"
    )
    parser.add_argument("--again", action="store_true", help="keep nothing")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and end")
    options = gpu_options(parser, quick_repeats=1, repeats=REPEATS)
    there = os.cpu_count() or 1 if options.quick else torch.cuda.device_count()
    options.gpus = sorted(set(options.gpus or [1, max(2, there)]))
    if not options.quick and options.gpus[-1] > there:
        parser.error(f"--gpus {options.gpus[-1]}: there are {there}")
    return options


def kept(options: argparse.Namespace) -> Results:
    """Return what earlier calls have left in the report."""
    file = options.resume or options.out
    if options.again or file is None or not (file.exists() or options.resume):
        return {}
    found: Results = json.loads(file.read_text())["notes"]["cases"]
    return {name: case for name, case in found.items() if "failed" not in case}


def wanted(options: argparse.Namespace) -> list[Case]:
    return [case for case in cases(options.gpus) if any(part in case.name for part in options.cases)]


def report(options: argparse.Namespace, results: Results) -> dict[str, Any]:
    """Return the report of what has been measured so far."""
    bench = Bench(options.quick, options.repeats, dict(options.target))
    record(bench, results, TINY if options.quick else LARGE)
    names = [case.name for case in cases(options.gpus)]
    bench.notes |= {
        "cases": {name: results[name] for name in [*names, *results] if name in results},
        "models": {name: dict(sizes.config) for name, sizes in MODELS.items()},
        "not_run": [name for name in names if name not in results],
        "hardware": {} if options.quick else {"gpu": torch.cuda.get_device_name(), "gpus": options.gpus[-1]},
    }
    done = bench.report("scaling", (__doc__ or "").splitlines()[0])
    done["ok"] &= not any("failed" in case for case in results.values())
    return done


def main() -> int:
    """Run the cases, write the report after each; 1 if a case fails or a figure misses its target."""
    options = parse()
    todo, results = wanted(options), kept(options)
    if options.list:
        print("\n".join(case.name for case in todo))
        return 0
    scale, began = TINY if options.quick else LARGE, time.monotonic()
    roomy = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=roomy if roomy.is_dir() else None) as scratch:
        ranks = Ranks(options.gpus[-1], Path(scratch), scale, options.repeats, cuda=not options.quick)
        try:
            for case in todo:
                if case.name in results or time.monotonic() - began > options.limit_s:
                    continue
                results[case.name] = merged(case, ranks.run(case, MODELS[case.model].limit_s, SAVE_S))
                write_report(report(options, results), options.out)
                print(case.name, _told(results[case.name]), file=sys.stderr, flush=True)
        finally:
            ranks.stop()
    done = report(options, results)
    write_report(done, options.out)
    return 0 if done["ok"] else 1


def _told(result: dict[str, Any]) -> str:
    numbers = {key: value for key, value in result.items() if isinstance(value, float)}
    return result.get("failed", "") or ", ".join(f"{key} {value:,.4g}" for key, value in numbers.items())


if __name__ == "__main__":
    sys.exit(main())
