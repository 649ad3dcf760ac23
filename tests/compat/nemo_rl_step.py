"""One GRPO step over a store, written in NeMo-RL's names: run it with `local` or `transfer_queue`.

python tests/compat/nemo_rl_step.py local
"""

# isort: off
import headrace.compat.nemo_rl  # noqa: F401  (the one line that is new)
# isort: on

import sys
from typing import Any

import torch
from nemo_rl.data.llm_message_utils import (
    add_loss_mask_to_message_log,
    attach_message_log_view,
    batched_message_log_to_flat_message,
    decompose_message_log,
)
from nemo_rl.data_plane import KVBatchMeta, build_data_plane_client
from nemo_rl.data_plane.column_io import kv_first_write, read_columns, write_columns
from nemo_rl.data_plane.interfaces import DataPlaneClient, DataPlaneConfig
from nemo_rl.data_plane.preshard import shard_meta_for_dp
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS, LP_SEED_FIELDS
from nemo_rl.data_plane.worker_mixin import TQWorkerMixin
from nemo_rl.distributed.batched_data_dict import BatchedDataDict, SequencePackingArgs

VOCABULARY, PROMPTS, GENERATIONS, WORKERS = 16, 4, 2, 2
ROWS = PROMPTS * GENERATIONS
PACKING: SequencePackingArgs = {
    "algorithm": "modified_first_fit_decreasing",
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
    "sequence_length_pad_multiple": 1,
    "max_tokens_per_microbatch": 24,
    "microbatch_order": "largest_first",
}


class BigramWorker(TQWorkerMixin):
    """A policy worker whose model scores a token by the one before it."""

    def __init__(self, cfg: DataPlaneConfig, table: torch.Tensor) -> None:
        self.table, self.reference = table, table.detach().clone()
        self.setup_data_plane(cfg)

    def score(self, table: torch.Tensor, data: BatchedDataDict[Any]) -> torch.Tensor:
        ids = data["input_ids"]
        logprobs = torch.log_softmax(table, -1)[ids[:, :-1], ids[:, 1:]]
        return torch.nn.functional.pad(logprobs, (1, 0))

    def get_logprobs(self, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> Any:
        return BatchedDataDict({"logprobs": self.score(self.table, data).detach()})

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> Any:
        return BatchedDataDict({"reference_logprobs": self.score(self.reference, data)})

    def begin_train_step(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        self.loss_fn, self.losses = loss_fn, list[float]()

    def train_microbatch(self, data: BatchedDataDict[Any]) -> None:
        for microbatch in data.make_microbatch_iterator_for_packable_sequences():
            loss = self.loss_fn(self.score(self.table, microbatch), microbatch)
            loss.backward()
            self.losses.append(float(loss.detach()))

    def finish_train_step(self) -> dict[str, Any]:
        return {"loss": sum(self.losses), "microbatches": len(self.losses)}

    def abort_train_step(self) -> None:
        self.table.grad = None


def clipped_policy_gradient(logprobs: torch.Tensor, data: BatchedDataDict[Any]) -> torch.Tensor:
    ratio = (logprobs - data["prev_logprobs"]).exp()
    gap = data["reference_policy_logprobs"] - logprobs
    kl = gap.exp() - gap - 1
    advantages = data["advantages"].reshape(len(logprobs), -1)
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) - 0.1 * kl
    weight = data["token_mask"].float() * data["sample_mask"].float().unsqueeze(-1)
    return -(gain * weight).sum() / ROWS


def roll_out(generator: torch.Generator) -> tuple[list[Any], torch.Tensor]:
    """Return conversations of random tokens, and a reward for each: the share of even tokens in its answer."""
    logs = []
    for prompt in range(PROMPTS):
        question = torch.randint(VOCABULARY, (2 + prompt,), generator=generator)
        for answer in range(GENERATIONS):
            tokens = torch.randint(VOCABULARY, (3 + 2 * answer,), generator=generator)
            logs.append(
                [
                    {"role": "user", "content": f"question {prompt}", "token_ids": question},
                    {"role": "assistant", "content": f"answer {answer}", "token_ids": tokens},
                ]
            )
    return logs, torch.stack([(log[1]["token_ids"] % 2 == 0).float().mean() for log in logs])


def first_write(client: DataPlaneClient, logs: list[Any]) -> KVBatchMeta:
    add_loss_mask_to_message_log(logs)
    flat, lengths = batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": 0})
    batch = BatchedDataDict[Any](
        {
            "input_ids": flat["token_ids"],
            "input_lengths": lengths,
            "token_mask": flat["token_loss_mask"],
            "sample_mask": torch.ones(ROWS),
            "generation_logprobs": torch.zeros(flat["token_ids"].shape),
            **decompose_message_log(logs),
        }
    )
    ids = [f"step0-p{row // GENERATIONS}_g{row % GENERATIONS}" for row in range(ROWS)]
    return kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id="train")


def write_advantages(client: DataPlaneClient, meta: KVBatchMeta, rewards: torch.Tensor) -> None:
    groups = rewards.view(PROMPTS, GENERATIONS)
    write_columns(client, meta, {"advantages": (groups - groups.mean(1, keepdim=True)).flatten()})


def run_step(cfg: DataPlaneConfig, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCABULARY, VOCABULARY, generator=generator).requires_grad_()
    client = build_data_plane_client(cfg)
    workers = [BigramWorker(cfg, table) for _ in range(WORKERS)]
    tasks = ["prev_lp", "ref_lp", "train"]
    client.register_partition("train", DP_TRAIN_FIELDS, ROWS, tasks, grpo_group_size=GENERATIONS)

    logs, rewards = roll_out(generator)
    meta = first_write(client, logs)
    shards, _ = shard_meta_for_dp(
        meta.with_fields(LP_SEED_FIELDS), dp_world=WORKERS, sequence_packing_args=PACKING
    )
    for worker, shard in zip(workers, shards):
        worker.get_logprobs_presharded(shard)
        worker.get_reference_policy_logprobs_presharded(shard)
    write_advantages(client, meta, rewards)

    shards, _ = shard_meta_for_dp(
        meta.with_fields(DP_TRAIN_FIELDS), dp_world=WORKERS, sequence_packing_args=PACKING
    )
    for worker, shard in zip(workers, shards):
        worker.begin_train_step_presharded(clipped_policy_gradient, gbs=ROWS)
        worker.train_microbatch_presharded(shard)
    results = [worker.finish_train_step_presharded() for worker in workers]
    assert table.grad is not None
    gradient = table.grad.clone()

    names = ["input_ids", "turn_lengths", "turn_roles", "turn_contents", "prev_logprobs", "advantages"]
    seen = read_columns(client, meta, names)
    attach_message_log_view(seen)
    client.clear_samples(meta.sample_ids, "train")
    snapshot = client.snapshot() if hasattr(client, "snapshot") else {}
    for worker in workers:
        worker.close_data_plane()
    client.close()
    loss = sum(result["loss"] for result in results)
    return {
        "loss": loss,
        "gradient": gradient,
        "logs": logs,
        "seen": seen,
        "snapshot": snapshot,
        "results": results,
    }


if __name__ == "__main__":
    outcome = run_step({"enabled": True, "impl": sys.argv[1] if len(sys.argv) > 1 else "local"})
    print(f"loss {outcome['loss']:.6f}, gradient norm {float(outcome['gradient'].norm()):.6f}")
