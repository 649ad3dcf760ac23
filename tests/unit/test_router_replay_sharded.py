"""FSDP2 on two processes, before and after installation, with recompute and two microbatches in flight."""

import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from headrace.models.router_replay import Routes, install, route_digest
from moe_families import checkpoint_layers, random_routes, tiny_moe
from ranks import run_ranks

RANKS = 2
INPUTS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(5))


def gradients(model: Any, seeds: tuple[int, ...]) -> tuple[list[torch.Tensor], list[str]]:
    """Gradients and digests of used routes for one microbatch per seed, all forwards before any backward."""
    replay, losses, digests = install(model), [], []
    for seed in seeds:
        routes = Routes.replay(random_routes(replay, INPUTS.numel(), seed=seed), trace=True)
        logits = model(input_ids=INPUTS.roll(seed, 1), use_cache=False, routes=routes).logits
        losses.append(logits.float().log_softmax(-1)[..., 7].sum())
        digests.append(route_digest(routes.ids))
    for loss in reversed(losses):
        loss.backward()
    return [p.grad for p in model.parameters()], digests


def shard(model: Any) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def run_rank(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    seeds = (10 + rank, 20 + rank)
    found: dict[str, Any] = {}
    for order in ("before", "after"):
        model = tiny_moe("qwen3_moe").train()
        if order == "after":
            install(model)
        shard(model)
        install(model)
        checkpoint_layers(model)
        sharded, digests = gradients(model, seeds)
        with pytest.raises(pickle.PicklingError, match="FSDP"):
            pickle.dumps(model)
        found[order] = ([g.full_tensor() for g in sharded], digests)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.timeout(180)
def test_fsdp2_before_or_after_installation_gives_the_gradients_of_one_process(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_ranks(run_rank, (port, str(tmp_path)), RANKS)
    expected: list[torch.Tensor] = []
    for rank in range(RANKS):
        model = tiny_moe("qwen3_moe").train()
        install(model)
        own, digests = gradients(model, (10 + rank, 20 + rank))
        expected = [a + b for a, b in zip(expected, own)] if expected else own
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["before"][1] == found["after"][1] == digests
    mean = [g / RANKS for g in expected]
    for order in ("before", "after"):
        torch.testing.assert_close(found[order][0], mean)
