"""Puts that were under way when their process died, beside those of others that went on: which of them come back."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from full_disk import files_of_at_most
from headrace.data_plane import JournalDataPlaneClient, restore
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.passing_client import PassingClient
from headrace.errors import TransportError
from journal_model import bytes_written


class Unreached(PassingClient):
    """A store that a put does not reach, as where its process dies between the journal and the store."""

    def __init__(self, inner: LocalDataPlaneClient) -> None:
        self.inner = inner

    def _pass(self, name: str, *args: Any, **more: Any) -> Any:
        raise TransportError("no answer")


def put(client: JournalDataPlaneClient, *ids: str, tokens: int = 3, once: bool = False) -> None:
    rows = torch.nested.nested_tensor([torch.arange(tokens) for _ in ids], layout=torch.jagged)
    client.put_samples(ids, "train", TensorDict({"input_ids": rows}, [len(ids)]), once=once)


def dies_in_put(client: JournalDataPlaneClient, *ids: str, once: bool = False) -> None:
    store = client.inner
    client.inner = Unreached(client.inner)
    with pytest.raises(TransportError):
        put(client, *ids, tokens=5, once=once)
    client.inner = store


Clients = list[JournalDataPlaneClient]


def others_fill_the_partition(clients: Clients) -> None:
    dies_in_put(clients[0], "a")
    put(clients[1], "b")
    put(clients[1], "c")


def others_fill_the_partition_and_go_on(clients: Clients) -> None:
    others_fill_the_partition(clients)
    clients[1].clear_samples(["b"], "train")
    put(clients[1], "d")


def another_thread_fills_the_partition(clients: Clients) -> None:
    others_fill_the_partition([clients[0], clients[0]])


def another_makes_the_sample_in_its_place(clients: Clients) -> None:
    dies_in_put(clients[0], "a", once=True)
    put(clients[1], "a", once=True)
    logprobs = torch.nested.nested_tensor([torch.zeros(3)], layout=torch.jagged)
    clients[1].put_samples(["a"], "train", TensorDict({"prev_logprobs": logprobs}, [1]))


def the_sample_is_there(clients: Clients) -> None:
    put(clients[0], "a", once=True)
    dies_in_put(clients[0], "a", "b", once=True)
    put(clients[0], "c")


def the_sample_has_gone(clients: Clients) -> None:
    put(clients[0], "a", once=True)
    clients[0].clear_samples(["a"], "train")
    dies_in_put(clients[1], "a", once=True)


def contents(client: LocalDataPlaneClient) -> dict[str, int]:
    ids = client.sample_ids("train")
    rows = client.get_samples(ids, "train", ["input_ids"])["input_ids"].unbind() if ids else ()
    return {sample_id: len(row) for sample_id, row in zip(ids, rows)}


@pytest.mark.parametrize(
    "happens",
    [
        others_fill_the_partition,
        others_fill_the_partition_and_go_on,
        another_thread_fills_the_partition,
        another_makes_the_sample_in_its_place,
        the_sample_is_there,
        the_sample_has_gone,
    ],
)
def test_a_put_that_never_reached_the_store_keeps_none_from_coming_back_that_did(
    happens: Callable[[Clients], None], tmp_path: Path
) -> None:
    store = LocalDataPlaneClient()
    clients = [JournalDataPlaneClient(store, tmp_path, fsync="never") for _ in range(2)]
    clients[0].register_partition("train", ["input_ids"], 2, ["train"])
    happens(clients)
    expected = contents(store)
    back = LocalDataPlaneClient()
    report = restore(JournalDataPlaneClient(back, tmp_path, fsync="never"), tmp_path)
    assert (contents(back), report.total, report.refused > 0) == (expected, len(expected), True)
    # What was refused does not come back later, when there is room.
    back.clear_samples(list(expected), "train")
    assert restore(LocalDataPlaneClient(), tmp_path).refused == 0


def test_a_put_that_nobody_speaks_against_comes_back_after_those_that_had_returned(tmp_path: Path) -> None:
    store = LocalDataPlaneClient()
    one, two = (JournalDataPlaneClient(store, tmp_path, fsync="never") for _ in range(2))
    one.register_partition("train", ["input_ids"], 4, ["train"])
    dies_in_put(one, "a")
    put(two, "b")
    back = LocalDataPlaneClient()
    assert restore(back, tmp_path).refused == 0
    assert contents(back) == {"b": 3, "a": 5}


def test_a_put_has_succeeded_also_where_the_disk_has_no_room_to_note_that(tmp_path: Path) -> None:
    sizes = []
    for name, limit in ("tried", None), ("full", 5):
        client = JournalDataPlaneClient(LocalDataPlaneClient(), tmp_path / name, fsync="never")
        client.register_partition("train", ["input_ids"], 2, ["train"])
        with nullcontext() if limit is None else files_of_at_most(sizes[0] + limit):
            put(client, "a")
        sizes.append(bytes_written(tmp_path / name))
        back = LocalDataPlaneClient()
        assert (restore(back, tmp_path / name).total, contents(back)) == (1, {"a": 3})
    assert sizes[0] == sizes[1]
    (file,) = (tmp_path / "full").glob("*/*")
    assert file.stat().st_size == sizes[0]
