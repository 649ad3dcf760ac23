"""The set of ids that are gone, against a set."""

import random

from headrace.data_plane.store.spent import SpentIds


def test_ids_that_were_added_are_known_and_no_others_whatever_the_order() -> None:
    rng, spent, known = random.Random(3), SpentIds(), set[str]()
    for _ in range(60):
        ids = [f"s{rng.randrange(60_000)}" for _ in range(rng.choice([1, 500, 5000]))]
        asked = [f"s{rng.randrange(60_000)}" for _ in range(200)] + ids[:10]
        assert spent.has(asked).tolist() == [sample_id in known for sample_id in asked]
        spent.add(ids)
        known |= set(ids)
    assert len(known) > 30_000
    assert spent.has([]).tolist() == []
    assert len(spent._runs) < 8
