"""What a restore of a position gives back, and how a journal goes on after a restore."""

from pathlib import Path

from headrace.data_plane import restore
from headrace.data_plane.journal.client import keep_since
from journal_model import journaled, put_group, restored


def test_a_position_gives_back_the_rows_of_then(tmp_path: Path) -> None:
    client = journaled(tmp_path, segment_bytes=3_000)
    client.register_partition("train", ["input_ids"], 100, ["train"], grpo_group_size=2)
    groups = [put_group(client, number, tokens=100) for number in range(4)]
    client.clear_samples(groups[0], "train")
    then = client.journal_position()
    keep_since(client, then)
    client.claim_meta("train", "train", ["input_ids"], 2)
    client.clear_samples([*groups[1], *groups[2]], "train")
    for number in range(10, 20):
        client.clear_samples(put_group(client, number, tokens=100), "train")
    new = put_group(client, 20)
    assert restored(tmp_path).sample_ids("train") == [*groups[3], *new]
    with_later = restored(tmp_path, position=then, later=True)
    late = [f"u{number}_g{i}" for number in range(10, 20) for i in range(2)]
    assert with_later.sample_ids("train") == [*groups[1], *groups[2], *groups[3], *late, *new]
    back = restored(tmp_path, position=then)
    assert back.sample_ids("train") == [*groups[1], *groups[2], *groups[3]]
    meta = back.claim_meta("train", "train", ["advantages"], 6, blocking=False)
    assert meta is not None
    assert meta.sequence_lengths == [100, 101] * 3
    assert back.get_data(meta)["advantages"].tolist() == [0.5, 1, 0.5, 2, 0.5, 3]


def test_rows_that_come_back_with_later_ones_are_in_the_journal_again(tmp_path: Path) -> None:
    client = journaled(tmp_path, segment_bytes=1_000)
    groups = [put_group(client, number) for number in range(3)]
    then = client.journal_position()
    keep_since(client, then)
    client.clear_samples(groups[0], "train")
    second = journaled(tmp_path, segment_bytes=1_000)
    report = restore(second, tmp_path, then, later=True)
    assert (report.total, report.revived > 0) == (6, True)
    second.clear_samples(groups[1], "train")
    assert restored(tmp_path).sample_ids("train") == [*groups[2], *groups[0]]


def test_rows_that_come_back_twice_are_there_once_whatever_was_cleared_between(tmp_path: Path) -> None:
    first = journaled(tmp_path)
    first.register_partition("train", ["input_ids"], 4, ["train"], grpo_group_size=2)
    groups = [put_group(first, 0, once=True), put_group(first, 1, once=True)]
    first.clear_samples(groups[0], "train")
    then = first.journal_position()
    groups.append(put_group(first, 2, once=True))
    first.clear_samples(groups[1], "train")
    groups.append(put_group(first, 3, once=True))
    for _ in range(2):  # a second crash before there is a checkpoint
        client = journaled(tmp_path)
        restore(client, tmp_path, then, later=True)
        assert client.sample_ids("train") == [i for group in groups[1:] for i in group]
    report = client.partition_report("train")
    assert report.num_samples == 4 + report.rows, "what came later fits in"
    assert put_group(client, 0, once=True) == [], "it was trained on before"
    client.clear_samples(groups[1], "train")
    then = client.journal_position()
    client.clear_samples(groups[2], "train")
    last = journaled(tmp_path)
    restore(last, tmp_path, then, later=True)
    assert last.sample_ids("train") == [*groups[2], *groups[3]]
    assert put_group(last, 1, once=True) == []
    assert last.partition_report("train").num_samples == 4 + 4


def test_rows_that_are_not_to_be_kept_may_be_put_again_under_their_ids(tmp_path: Path) -> None:
    first = journaled(tmp_path)
    first.register_partition("train", ["input_ids"], 8, ["train"], grpo_group_size=2)
    ids = [put_group(first, number, once=True, v=number) for number in range(3)]
    client = journaled(tmp_path)
    report = restore(client, tmp_path, {}, later=True, keep=lambda tags: tags["v"] != 1)
    assert (report.unwanted, client.sample_ids("train")) == (2, [*ids[0], *ids[2]])
    again = put_group(client, 1, once=True, v=5, tokens=7)
    assert again == ids[1]
    last = journaled(tmp_path)
    restore(last, tmp_path, {}, later=True)
    assert last.sample_ids("train") == [*ids[0], *ids[2], *ids[1]]
    assert [row.tags["v"] for row in last.partition_report("train").unconsumed] == [0, 0, 2, 2, 5, 5]


def test_a_journal_of_the_same_folder_goes_on_after_a_restore(tmp_path: Path) -> None:
    first = journaled(tmp_path, segment_bytes=1_000)
    first.register_partition("train", ["input_ids"], 100, ["train"])
    groups = [put_group(first, number, tokens=100) for number in range(3)]
    second = journaled(tmp_path, segment_bytes=1_000)
    report = restore(second, tmp_path)
    assert (report.rows, report.revived) == ({"train": 6}, 0)
    size = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    second.clear_samples([*groups[0], *groups[1]], "train")
    for number in range(10, 14):
        second.clear_samples(put_group(second, number, tokens=100), "train")
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) < size, (
        "files of the first have gone, too"
    )
    assert restored(tmp_path).sample_ids("train") == groups[2]
