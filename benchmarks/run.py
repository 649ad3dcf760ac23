"""What every benchmark shares: rounds that take turns, figures held to targets, and the report.

A benchmark is a file beside this one: a docstring that asks its question, `measure(bench)`, and
`if __name__ == "__main__": main(measure, __doc__)`. `headrace bench` runs each in a process of its own:

    python benchmarks/codec.py [--quick] [--repeats 15] [--target NAME=VALUE] [--out FILE.json]

Every way of doing a thing runs once per round, on one thread, after a first round that does not count. A ratio is
the median, over the rounds, of the ratio to the baseline of the same round, so that a machine that slows down
slows both. Seconds are processor seconds unless a benchmark says otherwise.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

REPEATS, QUICK_REPEATS = 11, 3
_CACHE_BYTES = 96 * 2**20
_MEASURED = ("..", ":!results", ":!../docs")
_PACKAGES = ("headrace", "torch", "tensordict", "numpy", "transformers", "ray", "TransferQueue")


@dataclass(frozen=True)
class Figure:
    """One number, and its target, if there is one; only a `judged` figure is held to it."""

    name: str
    value: float
    unit: str
    target: float | None
    at_least: bool
    note: str
    judged: bool

    @property
    def ok(self) -> bool:
        """Whether the target is met; true without one, and for a figure that is not judged."""
        if self.target is None or not self.judged:
            return True
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def verdict(self) -> str:
        """What is said beside the figure: ok, MISSED, or nothing where it is held to no target."""
        return ("ok" if self.ok else "MISSED") if self.target is not None and self.judged else ""

    def as_json(self) -> dict[str, Any]:
        """Return the figure as the results file has it."""
        return {
            "name": self.name,
            "figure": round(self.value, 4),
            "unit": self.unit,
            "target": self.target,
            "relation": "at least" if self.at_least else "at most",
            "judged": self.judged,
            "ok": self.ok,
            "note": self.note,
        }


@dataclass(frozen=True)
class Timing:
    """Seconds of one way, and its ratio to the baseline of the same round, over the rounds."""

    seconds: list[float]
    ratios: list[float]
    page_faults: list[int]

    @property
    def median_s(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """Median over the rounds of the ratio to the baseline."""
        return statistics.median(self.ratios)

    def as_json(self) -> dict[str, float]:
        """Return the distribution in milliseconds."""
        return {
            "median_ms": round(self.median_s * 1e3, 4),
            "p10_ms": round(_quantile(self.seconds, 0.1) * 1e3, 4),
            "p90_ms": round(_quantile(self.seconds, 0.9) * 1e3, 4),
            "min_ms": round(min(self.seconds) * 1e3, 4),
            "ratio": round(self.ratio, 3),
            "ratio_of_minima": round(min(self.seconds) / self._baseline_min, 3),
            "page_faults": statistics.median(self.page_faults),
        }

    @property
    def _baseline_min(self) -> float:
        return min(s / r for s, r in zip(self.seconds, self.ratios))


@dataclass
class Bench:
    """What a benchmark is given, and what it leaves behind."""

    quick: bool = False
    repeats: int = REPEATS
    targets: Mapping[str, float] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    measurements: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    _other_bytes: torch.Tensor | None = None

    def race(
        self,
        case: str,
        ways: Mapping[str, Callable[[], object]],
        *,
        clock: Callable[[], float] = time.thread_time,
        between: Callable[[], object] = lambda: None,
        repeats: int | None = None,
    ) -> dict[str, Timing]:
        """Time each way once per round; the first is the baseline. `between` runs before each, untimed.

        The default clock is this thread's processor time: the wall clock without the time that the system gave to
        others. Ways that wait, or work in other threads or processes, take `time.perf_counter`.
        """
        count = repeats or self.repeats
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        faults: dict[str, list[int]] = {way: [] for way in ways}
        for number in range(count + 1):
            order = list(ways)[:: 1 if number % 2 == 0 else -1]
            for way in order:
                between()
                faults_before = _page_faults()
                start = clock()
                result = ways[way]()
                elapsed = clock() - start
                taken = _page_faults() - faults_before
                # What a way returns is let go of outside its time, as a reader would hold on to it.
                del result
                if number:
                    seconds[way].append(max(elapsed, 1e-9))
                    faults[way].append(taken)
        baseline = next(iter(seconds.values()))
        timings = {
            way: Timing(values, [a / b for a, b in zip(values, baseline)], faults[way])
            for way, values in seconds.items()
        }
        self.measurements[case] = {way: timing.as_json() for way, timing in timings.items()}
        return timings

    def evict_caches(self) -> None:
        """Fill the processor's caches with other bytes."""
        if self._other_bytes is None:
            self._other_bytes = torch.zeros(_CACHE_BYTES, dtype=torch.uint8)
        self._other_bytes.add_(1)

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        note: str = "",
    ) -> None:
        """Record a figure; `--target NAME=VALUE` replaces the target that it is given here.

        Quick figures are of small inputs, for which the targets are not made: only one of the command line counts.
        """
        target = self.targets.get(name, at_most if at_most is not None else at_least)
        judged = not self.quick or name in self.targets
        self.figures.append(Figure(name, value, unit, target, at_least is not None, note, judged))

    def report(self, name: str, question: str) -> dict[str, Any]:
        """Return everything as the results file has it.

        Raises:
            SystemExit: a target was given for a figure that there is not.
        """
        unknown = set(self.targets) - {figure.name for figure in self.figures}
        if unknown:
            known = ", ".join(figure.name for figure in self.figures)
            raise SystemExit(f"--target {', '.join(sorted(unknown))}: no such figure; there are: {known}")
        return {
            "benchmark": name,
            "question": question,
            "ok": all(figure.ok for figure in self.figures),
            "quick": self.quick,
            "repeats": self.repeats,
            "figures": [figure.as_json() for figure in self.figures],
            "measurements": self.measurements,
            "notes": self.notes,
            "where": where(),
        }


def where() -> dict[str, Any]:
    """Return hardware, versions, commit, and how busy the machine is."""
    # Whoever copies the files of a commit elsewhere tells which: the history there may be none, or another.
    told = os.environ.get("HEADRACE_COMMIT", "")
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "commit": told or _git("rev-parse", "HEAD"),
        # Results that were written before this one, and the page made of them, change nothing that is measured.
        "uncommitted_changes": not told and bool(_git("status", "--porcelain", "-uno", "--", *_MEASURED)),
        "command": shlex.join([*_launcher(), *sys.argv]),
    }


def _launcher() -> list[str]:
    ranks = os.environ.get("WORLD_SIZE")
    return ["python"] if ranks is None else ["torchrun", "--nproc-per-node", ranks]


def main(measure: Callable[[Bench], None], question: str | None, *, threads: int = 1) -> None:
    """Run one benchmark from its command line; the exit code is 1 if a figure misses its target."""
    name = Path(sys.argv[0]).stem
    options = _options(question)
    torch.set_num_threads(threads)
    bench = Bench(options.quick, options.repeats, dict(options.target))
    measure(bench)
    report = bench.report(name, (question or "").strip().splitlines()[0])
    write_report(report, options.out)
    sys.exit(0 if report["ok"] else 1)


def write_report(report: Mapping[str, Any], out: Path | None) -> None:
    """Write a report to a file; None: print it."""
    text = json.dumps(report, indent=1) + "\n"
    if out is None:
        print(text)
    else:
        out.write_text(text)


def _options(question: str | None) -> argparse.Namespace:
    parser = _parser(question)
    parser.add_argument("--quick", action="store_true", help="smaller inputs, fewer rounds")
    return _with_repeats(parser.parse_args(), QUICK_REPEATS, REPEATS)


def gpu_parser(question: str | None, *, tiny: str) -> argparse.ArgumentParser:
    """Return a parser for a benchmark on CUDA, to which it may add; `tiny` says what it runs on a CPU."""
    parser = _parser(question)
    parser.add_argument("--tiny", "--quick", dest="quick", action="store_true", help=f"{tiny} on the CPU")
    return parser


def gpu_options(
    parser: argparse.ArgumentParser, *, quick_repeats: int = QUICK_REPEATS, repeats: int = REPEATS
) -> argparse.Namespace:
    """Return the options of the command line, `device` and all rounds among them; without CUDA only --tiny will do."""
    options = _with_repeats(parser.parse_args(), quick_repeats, repeats)
    if not options.quick and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --tiny runs every line on the CPU")
    options.device = torch.device("cpu") if options.quick else torch.device("cuda", 0)
    return options


def _parser(question: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=question, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, help="rounds that count")
    parser.add_argument("--target", action="append", default=[], type=_target, metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, help="write the report to this file")
    return parser


def _with_repeats(options: argparse.Namespace, quick: int, full: int) -> argparse.Namespace:
    if options.repeats is None:
        options.repeats = quick if options.quick else full
    return options


def _target(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=NUMBER") from error


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
