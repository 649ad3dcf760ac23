"""Operations on a store that overlap, and what the journal says of them."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from headrace.data_plane import JournalDataPlaneClient
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.passing_client import PassingClient
from journal_model import restored

SECONDS = 0.1


class Slow(PassingClient):
    """A store that takes its time, before or after it has done something."""

    def __init__(self, inner: LocalDataPlaneClient, before: str, after: str) -> None:
        self.inner, self._before, self._after = inner, before, after

    def _pass(self, name: str, *args: Any, **more: Any) -> Any:
        if name == self._before:
            time.sleep(SECONDS)
        done = super()._pass(name, *args, **more)
        if name == self._after:
            time.sleep(SECONDS)
        return done


def register(client: JournalDataPlaneClient) -> None:
    client.register_partition("train", ["x"], 8, ["train"])


def put(client: JournalDataPlaneClient, *ids: str, x: int = 0) -> None:
    client.put_samples(ids, "train", TensorDict({"x": torch.full((len(ids),), x)}, [len(ids)]))


def at_once(*tasks: Callable[[], None]) -> float:
    """Begin tasks one shortly after the other; return the seconds that all took."""
    threads, start = [threading.Thread(target=task) for task in tasks], time.monotonic()
    for thread in threads:
        thread.start()
        time.sleep(SECONDS / 10)
    for thread in threads:
        thread.join()
    return time.monotonic() - start


OTHERS: dict[str, Callable[[JournalDataPlaneClient], None]] = {
    "clear the partition": lambda client: client.clear_samples(None, "train"),
    "clear its row": lambda client: client.clear_samples(["new"], "train"),
    "register it anew": register,
    "overwrite it": lambda client: put(client, "new", x=1),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("slow", ["before", "after"])
@pytest.mark.parametrize("put_is_first", [True, False])
def test_a_put_that_overlaps_with_something_else_is_restored_as_the_store_has_it(
    other: str, slow: str, put_is_first: bool, tmp_path: Path
) -> None:
    store = LocalDataPlaneClient()
    names = ("put_samples", "") if slow == "before" else ("", "clear_samples")
    # Of one process, as threads of a driver.
    one, two = (JournalDataPlaneClient(Slow(store, *names), tmp_path, fsync="never") for _ in range(2))
    register(one)
    tasks = [lambda: put(one, "new"), lambda: OTHERS[other](two)]
    at_once(*(tasks if put_is_first else tasks[::-1]))
    back = restored(tmp_path)
    ids = store.sample_ids("train")
    assert back.sample_ids("train") == ids
    for sample_id in ids:
        x = store.get_samples([sample_id], "train", ["x"])["x"]
        assert torch.equal(back.get_samples([sample_id], "train", ["x"])["x"], x)


def test_puts_and_clears_of_other_rows_do_not_wait_for_each_other(tmp_path: Path) -> None:
    store = Slow(LocalDataPlaneClient(), "put_samples", "clear_samples")
    client = JournalDataPlaneClient(store, tmp_path, fsync="never")
    register(client)
    puts = [lambda name=name: put(client, name) for name in "abcd"]  # type: ignore[misc]
    assert at_once(*puts, lambda: client.clear_samples(["z"], "train")) < 3 * SECONDS
