"""The data plane under TRL's GRPOTrainer: completions go to the store without padding, and come back as batches.

Run: python examples/trl_store.py (needs trl)
"""

import itertools
import sys

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from headrace.data_plane import build_data_plane_client, kv_first_write, read_columns
from headrace.models.tokenizers import build_character_tokenizer


class StoreTrainer(GRPOTrainer):
    """Where TRL hands rollouts to training, rows pass through a store; another process could train on them."""

    store = build_data_plane_client({"enabled": True, "impl": "local", "store_name": "trl"}, bootstrap=True)
    numbers = itertools.count()
    padded_tokens = stored_tokens = 0

    def _generate_and_score_completions(self, inputs):
        out = super()._generate_and_score_completions(inputs)
        ids, mask = out["completion_ids"], out["completion_mask"].bool()
        rows = [one[kept] for one, kept in zip(ids, mask)]
        step = next(self.numbers)
        partition = f"step_{step}"
        self.store.register_partition(partition, ["input_ids"], len(rows), ["train"])
        columns = {"input_ids": rows, "input_lengths": torch.tensor([len(row) for row in rows])}
        ids_of_rows = [f"{step}_{i}" for i in range(len(rows))]
        meta = kv_first_write(columns, sample_ids=ids_of_rows, dp_client=self.store, partition_id=partition)
        pad = self.processing_class.pad_token_id
        batch = read_columns(self.store, meta, ["input_ids"], pad_value_dict={"input_ids": pad})
        self.store.clear_samples(None, partition)
        self.padded_tokens += ids.numel()
        self.stored_tokens += sum(len(row) for row in rows)
        width = batch["input_ids"].shape[1]
        return {
            **out,
            "completion_ids": batch["input_ids"],
            "completion_mask": out["completion_mask"][:, :width],
        }


def main(folder: str, steps: int = 2) -> StoreTrainer:
    tokenizer = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    args = GRPOConfig(
        folder, max_steps=steps, per_device_train_batch_size=8, num_generations=4, max_completion_length=8,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = StoreTrainer(
        LlamaForCausalLM(config),
        reward_funcs=lambda completions, **_: [text.count("e") / 8 for text in completions],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["river", "stone", "wheel", "brook"]}),
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    done = main(sys.argv[1] if len(sys.argv) > 1 else "runs/trl")
    print(f"{done.stored_tokens} tokens stored in place of {done.padded_tokens} with padding")
