"""What does a journal add to a put of the local store, and how fast does a restore give rows back?

Ways put the same batch into stores of their own; between two puts the rows are cleared, untimed, so that files go as
they would in a run. The wall clock is used where a put waits for the disk, and processor time beside it.
"""

import itertools
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from columns import lognormal, make_batch
from run import Bench, main
from tensordict import TensorDict

from headrace.data_plane import DataPlaneClient, JournalDataPlaneClient, pack_jagged_fields, restore
from headrace.data_plane.adapters.local import LocalDataPlaneClient


class Case:
    """One batch, and a store for each way of putting it."""

    def __init__(self, lengths: torch.Tensor, folder: Path, *, routes: bool) -> None:
        batch = make_batch(lengths, routes=routes)
        self.ids, self.names = batch.ids, list(batch.padded)
        self.wire: TensorDict = pack_jagged_fields(
            batch.padded, lengths=batch.lengths, token_aligned_fields=set(self.names)
        )
        self.nbytes = sum(self.wire[name].values().nbytes for name in self.names)
        self.stores: dict[str, DataPlaneClient] = {"put": LocalDataPlaneClient()}
        for way, fsync in (("put, journal, fsync=never", "never"), ("put, journal, fsync=groups", "groups")):
            own = folder / way.rpartition("=")[2]
            self.stores[way] = JournalDataPlaneClient(LocalDataPlaneClient(), own, fsync=fsync)  # type: ignore[arg-type]

    def put(self, way: str) -> None:
        """Write all rows."""
        self.stores[way].put_samples(self.ids, "p", fields=self.wire)

    def clear(self) -> None:
        """Remove all rows of all stores."""
        for store in self.stores.values():
            store.clear_samples(None, "p")

    def check(self, folder: Path) -> float:
        """What is restored is what was put; return the seconds that it took."""
        for way in self.stores:
            self.put(way)
        back = LocalDataPlaneClient()
        start = time.perf_counter()
        restore(back, folder / "groups")
        seconds = time.perf_counter() - start
        got = back.get_samples(self.ids, "p", self.names)
        for name in self.names:
            assert torch.equal(got[name].values(), self.wire[name].values()), name
        self.clear()
        return seconds


def measure(bench: Bench) -> None:
    """Put batches of usual rows, and one with expert routes, which are most of its bytes."""
    shapes = {"64x200": (lognormal(64, 80, 200, shortest=20), False)}
    if not bench.quick:
        shapes["512x1500"] = (lognormal(512, 600, 1500, shortest=200), False)
        shapes["64x1500, routes"] = (lognormal(64, 600, 1500, shortest=200), True)
    for name, (lengths, routes) in shapes.items():
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            case = Case(lengths, Path(folder), routes=routes)
            seconds = case.check(Path(folder))
            ways = {way: partial(case.put, way) for way in case.stores}
            for clock, label in ((time.perf_counter, "wall clock"), (time.thread_time, "processor time")):
                times = bench.race(f"{name}: {label}", ways, clock=clock, between=case.clear)
                for way, timing in itertools.islice(times.items(), 1, None):
                    key = f"{way.rpartition('=')[2]}.{name.replace(', ', '.')}.{label.replace(' ', '_')}"
                    bench.figure(key, timing.ratio, "puts")
            bench.notes[name] = {
                "megabytes": round(case.nbytes / 1e6, 2),
                "restore_mb_per_s": round(case.nbytes / seconds / 1e6, 1),
            }


if __name__ == "__main__":
    main(measure, __doc__)
