"""Runs an asynchronous run for a given time, kills its processes at random, and keeps an exact ledger of its groups.

    python tests/soak.py --minutes 20 --out benchmarks/results/soak.json

The run is `headrace train` on a model of a few thousand weights, with two collectors, three engines in processes of
their own, and a journal. At random times its driver or an engine is killed (SIGKILL), the driver is stopped for longer
than its lease lasts (SIGSTOP, SIGCONT), or the user stops it (SIGINT). After each death it is started again.

What was made is read from the journal's files, what was trained on from samples.jsonl, and what is in the store from a
restore into another one. Dropped is what the checkpoint counts as used and no step trained on; metrics.jsonl has to say
as much. After each death, and at the end:

    made = trained + dropped + in store + given up + made again

Given up are groups whose weights a crash has lost, and which are to be made again; made again is what was put for the
second time. No group is trained on twice or in part, and none is used that was never put.
"""

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headrace.algorithms.async_utils.producers import worth_restoring
from headrace.config import RecipeConfig
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.journal import segments as files
from headrace.data_plane.journal.records import Undone, Written
from headrace.data_plane.journal.restore import restore
from headrace.data_plane.object_codec import decode
from headrace.report import read_metrics
from headrace.utils.checkpoints import list_checkpoints
from headrace.utils.recipe import dump_recipe
from headrace.utils.run_directory import read_log
from headrace.utils.run_state import Progress, read_state
from tiny_recipe import tiny_recipe

GROUPS, GROUP = 4, 4
LEASE_S, PATIENCE_S, END_S = 6.0, 180.0, 30.0
KINDS = {"driver": 5, "engine": 3, "stall": 1, "stop": 1}
"""How often each fault comes, relative to the others."""


def soak_recipe(run_dir: Path, **asynchrony: Any) -> RecipeConfig:
    section = {
        "enabled": True,
        "max_lag": 1,
        "on_stale": "drop",
        "collectors": 2,
        "prompts_per_call": 2,
        "room": 3 * GROUPS,
        "lease_s": LEASE_S,
    }
    return tiny_recipe(
        run_dir,
        batching="packed",
        generation={"placement": "beside", "engines": 3},
        grpo={
            "max_num_steps": 1_000_000,
            "num_prompts_per_step": GROUPS,
            "num_generations_per_prompt": GROUP,
        },
        loss={"importance_correction": "tis"},
        checkpointing={"save_period": 3, "keep_top_k": 1},
        validation={"at_start": False, "at_end": False},
        logging={"samples_per_step": GROUPS * GROUP},
        data_plane={"journal": {"enabled": True}},
        **{"async": {**section, **asynchrony}},
    )


@dataclass
class Ledger:
    """Numbers of groups, and what was found wrong."""

    made: int = 0
    trained: int = 0
    dropped: int = 0
    in_store: int = 0
    given_up: int = 0
    made_again: int = 0
    steps: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        return self.made == self.trained + self.dropped + self.in_store + self.given_up + self.made_again


class Books:
    """What the files of a run say of its groups; read after each death, since a journal's files go in time."""

    def __init__(self, recipe: RecipeConfig, run_dir: Path) -> None:
        self.recipe, self.run_dir = recipe, run_dir
        # The times at which each group was made, by its id, and its place in the stream of prompts.
        self.made: dict[str, set[float]] = {}
        self.position: dict[str, int] = {}
        self.has_stopped = False

    def read_journal(self) -> None:
        folder, undone, written = (
            self.run_dir / "journal",
            set[tuple[str, int]](),
            list[tuple[str, Written]](),
        )
        for segment in files.segments(folder):
            for record in files.records(folder, segment, 0, files.size_of(folder, segment)):
                if isinstance(record.head, Undone):
                    undone.add((segment.writer, record.head.of))
                elif isinstance(record.head, Written) and record.head.once and record.head.tags:
                    written.append((segment.writer, record.head))
        for writer, head in written:
            if (writer, head.at) in undone:
                continue
            for sample_id, tags in zip(head.ids, decode(head.tags)):
                uid = sample_id.rpartition("_g")[0]
                self.made.setdefault(uid, set()).add(tags["made_at_s"])
                self.position[uid] = tags["position"]

    def progress(self) -> tuple[Progress, Any]:
        found = list_checkpoints(self.run_dir / "checkpoints")
        if not found:
            return Progress.at_start(), {}
        state = read_state(found[-1])
        return state.progress, state.journal or {}

    def balance(self) -> Ledger:
        """Return the books of the newest checkpoint, from which a run would go on now."""
        self.read_journal()
        progress, position = self.progress()
        trained: Counter[str] = Counter()
        for line in read_log(self.run_dir / "samples.jsonl") if progress.step else ():
            sample_id = line.value.get("sample_id", "")
            if line.value["step"] <= progress.step:
                trained[sample_id] += 1
        uids = {sample_id.rpartition("_g")[0] for sample_id in trained}
        reported = sum(
            round(line["async/dropped_groups"])
            for line in (read_metrics(self.run_dir) if progress.step else ())
            if line["step"] <= progress.step and "async/dropped_groups" in line
        )
        there = self._in_store(position, progress) if progress.step else set()
        first, ahead = progress.prompt_position, set(progress.prompts_ahead)
        used = {uid for uid, at in self.position.items() if at < first or at in ahead}
        books = Ledger(
            made=sum(map(len, self.made.values())),
            trained=len(uids),
            dropped=len(used - uids),
            in_store=len(there),
            given_up=len(self.made.keys() - used - there),
            made_again=sum(len(times) - 1 for times in self.made.values()),
            steps=progress.step,
        )
        wrong = {
            "trained on twice": [sample_id for sample_id, count in trained.items() if count > 1],
            "trained on in part": [
                uid for uid in uids if sum(f"{uid}_g{i}" in trained for i in range(GROUP)) < GROUP
            ],
            "trained on and never put": sorted(uids - self.made.keys()),
            "trained on and not counted as used": sorted(uids - used),
            "in store and used": sorted(there & used),
            "places used and never made": sorted(({*range(first)} | ahead) - set(self.position.values())),
        }
        books.faults = [f"{what}: {which[:4]}" for what, which in wrong.items() if which]
        if len(trained) != progress.step * GROUPS * GROUP:
            books.faults.append(f"{len(trained)} samples were trained on in {progress.step} steps")
        # What a step dropped that was stopped while it waited is in no step's metrics.
        if not (reported == books.dropped or (reported < books.dropped and self.has_stopped)):
            books.faults.append(f"{books.dropped} groups were dropped, and the metrics say {reported}")
        if not books.is_exact:
            books.faults.append("the sum is not exact")
        return books

    def _in_store(self, position: Any, progress: Progress) -> set[str]:
        """Return what a run would have in store that goes on from its newest checkpoint, and cut nothing off."""
        store, keep = LocalDataPlaneClient(), worth_restoring(self.recipe, progress)
        restore(store, self.run_dir / "journal", position, later=True, keep=keep)
        ids = store.sample_ids("train")
        store.close()
        return {sample_id.rpartition("_g")[0] for sample_id in ids}


class Soak:
    """Lives of one run, one after the other."""

    def __init__(self, folder: Path, seed: int, **asynchrony: Any) -> None:
        self.run_dir, self._draws = folder / "run", random.Random(seed)
        self.recipe = soak_recipe(self.run_dir, **asynchrony)
        self._path, self._output = folder / "recipe.yaml", folder / "output.txt"
        self._path.write_text(dump_recipe(self.recipe))
        self.books = Books(self.recipe, self.run_dir)
        self.faults: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest_end_s = 0.0

    def run(self, seconds: float) -> Ledger:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._live(until)
            books = self.books.balance()
            self.wrong += books.faults
            print(
                json.dumps({"ended": self.ended, "sent": self.faults, **asdict(books)}),
                flush=True,
            )
        return books

    def _live(self, until: float) -> None:
        command = [sys.executable, "-m", "headrace", "train", str(self._path), "logging.progress=off"]
        begun = bool(list_checkpoints(self.run_dir / "checkpoints"))
        with self._output.open("w") as output:
            driver = subprocess.Popen(
                [*command, *([] if begun else ["overwrite=true"])],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        engines: list[int] = []
        while driver.poll() is None:
            if not self._wait_for_step(driver, self._steps() + 1):
                break
            engines = sorted({*engines, *children(driver.pid)})
            time.sleep(self._draws.uniform(0, 6))
            is_over = time.monotonic() >= until
            kind = "stop" if is_over else self._draws.choices(list(KINDS), KINDS.values())[0]
            self.faults[kind] += 1
            self._do(kind, driver)
            if kind in ("driver", "stop"):
                break
        self._end(driver, engines)

    def _do(self, kind: str, driver: "subprocess.Popen[bytes]") -> None:
        own = children(driver.pid)
        if driver.poll() is not None:
            return
        if kind == "engine" and own:
            os.kill(self._draws.choice(own), signal.SIGKILL)
        elif kind == "stall":
            os.kill(driver.pid, signal.SIGSTOP)
            time.sleep(1.5 * LEASE_S)
            os.kill(driver.pid, signal.SIGCONT)
        elif kind == "driver":
            os.kill(driver.pid, signal.SIGKILL)
        elif kind == "stop":
            os.kill(driver.pid, signal.SIGINT)

    def _wait_for_step(self, driver: "subprocess.Popen[bytes]", count: int) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while self._steps() < count and driver.poll() is None:
            if time.monotonic() > deadline:
                self.wrong.append(f"no step within {PATIENCE_S:g} s: {self._output.read_text()[-500:]}")
                os.kill(driver.pid, signal.SIGKILL)
            time.sleep(0.1)
        return driver.poll() is None

    def _end(self, driver: "subprocess.Popen[bytes]", engines: list[int]) -> None:
        """Wait for the end of the driver and of its engines, and note how it ended."""
        started = time.monotonic()
        try:
            code = driver.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.wrong.append(f"the driver did not end within {PATIENCE_S:g} s")
            driver.kill()
            code = driver.wait()
        while any(map(lives, engines)):
            if time.monotonic() - started > PATIENCE_S + END_S:
                self.wrong.append(f"engines outlive the driver: {[pid for pid in engines if lives(pid)]}")
                break
            time.sleep(0.05)
        self.slowest_end_s = max(self.slowest_end_s, time.monotonic() - started)
        text = self._output.read_text()
        errors = [line for line in text.splitlines() if line.startswith("headrace: error")]
        how = {-signal.SIGKILL: "killed", 130: "stopped", 0: "completed"}.get(code, "error")
        if how == "error":
            known = [
                name for name in ("no longer in force", "no engine is left") if errors and name in errors[-1]
            ]
            how = known[0] if known else f"error {code}: {text[-300:]}"
            if not known:
                self.wrong.append(how)
        if "Traceback" in text:
            self.wrong.append(f"a traceback: {text[-2000:]}")
        self.ended[how] += 1
        self.books.has_stopped |= how == "stopped"

    def _steps(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def children(pid: int) -> list[int]:
    """Return the engines of a driver."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                command = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(parent) == pid and b"engine_process" in command:
                found.append(int(entry.name))
    return sorted(found)


def lives(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--on-stale", choices=["drop", "wait"], default="drop")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), arguments.seed, on_stale=arguments.on_stale)
        books = soak.run(60 * arguments.minutes)
    report = {
        "soak": __doc__.splitlines()[0],
        "ok": not soak.wrong,
        "on_stale": arguments.on_stale,
        "seed": arguments.seed,
        "minutes": round((time.monotonic() - started) / 60, 2),
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
        "faults": dict(soak.faults),
        "lives": {"total": soak.ended.total(), **soak.ended},
        "slowest_end_s": round(soak.slowest_end_s, 2),
        "groups": {name: value for name, value in asdict(books).items() if name not in ("steps", "faults")},
        "exact": books.is_exact,
        "steps": books.steps,
        "wrong": soak.wrong,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    return int(bool(soak.wrong))


if __name__ == "__main__":
    sys.exit(main())
