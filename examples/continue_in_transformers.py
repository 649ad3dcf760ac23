"""Load what a run has trained in transformers, and go on. Run: python examples/continue_in_transformers.py RUN"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.utils.checkpoints import list_checkpoints


def main(run: Path, prompt: str = "river", answer: str = "revir", steps: int = 5) -> list[float]:
    """Return the losses of `steps` supervised updates on one answer."""
    folder = list_checkpoints(run / "checkpoints")[-1].path / "policy" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    asked = torch.tensor([tokenizer.encode(prompt)])
    ids = torch.tensor([tokenizer.encode(prompt) + tokenizer.encode(answer)])
    labels = ids.clone()
    labels[:, : asked.shape[1]] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(tokenizer.decode(model.generate(asked, max_new_tokens=6, do_sample=False)[0]), losses)
    return losses


if __name__ == "__main__":
    main(Path(sys.argv[1]))
