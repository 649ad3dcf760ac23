"""The data plane under a plain PyTorch loop: one process makes samples, another claims and trains on them.

Run: python examples/two_processes.py (needs the extra `ray`: the store is TransferQueue, on this machine)
"""

import multiprocessing

import ray
import torch
from torch import nn

from headrace.data_plane import build_data_plane_client, kv_first_write, read_columns

STORE = {"enabled": True, "impl": "transfer_queue", "num_storage_units": 1}
COLUMNS = ["input_ids", "token_mask", "advantages"]
STEPS, GROUPS, GROUP, VOCABULARY = 3, 4, 4, 32


def make_samples(address: str) -> None:
    """Write rows of different lengths, a group at a time; the trainer may train on a step before the next is made."""
    store = build_data_plane_client({**STORE, "ray_address": address}, bootstrap=False)
    draw = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        for group in range(GROUPS):
            lengths = torch.randint(4, 12, (GROUP,), generator=draw)
            rows = [torch.randint(VOCABULARY, (int(n),), generator=draw) for n in lengths]
            rewards = torch.rand(GROUP, generator=draw)
            columns = {
                "input_ids": rows,
                "token_mask": [torch.ones(len(row), dtype=torch.uint8) for row in rows],
                "advantages": rewards - rewards.mean(),
                "input_lengths": lengths,
            }
            ids = [f"{step}_{group}_g{i}" for i in range(GROUP)]
            kv_first_write(columns, sample_ids=ids, dp_client=store, partition_id=f"step_{step}")
    store.close()


def train(store) -> list[float]:
    """Claim every step's rows as soon as all are there; pad them here and nowhere before."""
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        partition = f"step_{step}"
        meta = store.claim_meta(partition, "train", COLUMNS, batch_size=GROUPS * GROUP)
        batch = read_columns(store, meta, COLUMNS, pad_value_dict={"input_ids": 0, "token_mask": 0})
        ids, mask = batch["input_ids"], batch["token_mask"][:, 1:].bool()  # (N, S), (N, S - 1)
        logprobs = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        loss = -(logprobs * batch["advantages"][:, None])[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        store.clear_samples(meta.sample_ids, partition)
        losses.append(loss.item())
        print(f"step {step}: {len(meta.sample_ids)} rows of {mask.sum()} tokens, loss {losses[-1]:.3f}")
    return losses


def main() -> list[float]:
    if not ray.is_initialized():
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    address = ray.get_runtime_context().gcs_address
    store = build_data_plane_client({**STORE, "ray_address": address}, bootstrap=True)
    for step in range(STEPS):
        store.register_partition(f"step_{step}", COLUMNS, GROUPS * GROUP, ["train"], grpo_group_size=GROUP)
    maker = multiprocessing.get_context("spawn").Process(target=make_samples, args=(address,))
    maker.start()
    try:
        return train(store)
    finally:
        maker.join()
        store.close()


if __name__ == "__main__":
    main()
