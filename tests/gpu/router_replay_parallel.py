# ruff: noqa: E402 - the tests' folder has to be on the path first
"""Router replay on several ranks: torchrun --nproc-per-node N tests/gpu/router_replay_parallel.py [--out FILE.json]

Routes are recorded in a plain forward of one process. Models with other weights replay them: in one process, under
FSDP2 with installation before and after it, and as workers shard them (data, tensor, sequence, context; experts are
shared out over tensor ranks, or over data and context ranks), in every layout of `WORKERS` that N ranks can have, data
parallel in what is left of N. All samples' tokens differ, so the token alone says which experts it has to use: hooks on
routers and experts look at what they give and get, on every rank, in forwards and in recomputation, and are held to it.
With `--device cpu` the same runs over gloo.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src"), str(ROOT / "benchmarks")]

from run import where

from headrace.algorithms.loss import NLLLoss
from headrace.config import GenerationConfig, PolicyConfig
from headrace.data_plane.route_binding import bound_digests
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.errors import ConfigError, HeadraceError
from headrace.models.automodel.data import forward_kwargs, most_of_ranks
from headrace.models.automodel.setup import enable_activation_checkpointing, load_model
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from headrace.models.router_replay import ReplayStats, RouterReplay, Routes, install
from moe_families import tiny_sizes
from tiny_models import CHARACTERS, tiny_tokenizer

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe")
WORKERS: dict[str, dict[str, Any]] = {
    "data": {},
    "data_experts": {"expert": 2},
    "tensor": {"tensor": 2, "expert": 2},
    "sequence": {"tensor": 2, "sequence_parallel": True},
    "context": {"context": 2},
    "context_experts": {"context": 2, "expert": 2},
    "tensor_context": {"tensor": 2, "expert": 2, "context": 2},
    "sequence_context": {"tensor": 2, "context": 2, "sequence_parallel": True},
}
LIBRARY = ("fsdp2_before", "fsdp2_after")
LAYOUTS = ("single", *LIBRARY, *WORKERS)
# What headrace refuses: sequence parallelism of models that it has no plan of its own for.
REFUSED = {
    (family, layout): f"sequence_parallel: not for model_type={family}"
    for family in ("deepseek_v3", "gpt_oss", "olmoe")
    for layout in ("sequence", "sequence_context")
}
MICROBATCHES = 2
LENGTHS = [21, 13, 30, 17, 26, 9, 19, 24, 12, 28, 15, 20, 10, 25, 18, 22]
"""So many rows that each of 8 data ranks has one for every microbatch."""
VOCABULARY = 512
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "sliding_window": 64,
}
_LATENT = {"head_dim": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}


def batch() -> BatchedDataDict:
    """Return rows in which no token occurs twice."""
    sizes = torch.tensor(LENGTHS)
    there = torch.arange(max(LENGTHS)) < sizes[:, None]
    ids = torch.zeros(there.shape, dtype=torch.int64)
    ids[there] = (
        5 + torch.randperm(VOCABULARY - 5, generator=torch.Generator().manual_seed(0))[: sum(LENGTHS)]
    )
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": sizes,
            "token_mask": there.to(torch.uint8),
            "sample_mask": torch.ones(len(sizes)),
            "generation_logprobs": torch.zeros(there.shape),
        }
    )


def policy_config(family: str, precision: str, device: str, **changes: Any) -> PolicyConfig:
    """Return the policy section of a tiny model with grouped_mm experts."""
    names = tiny_sizes(family)
    sizes = {n: v for n, v in _SIZES.items() if n in names} | (_LATENT if family == "deepseek_v3" else {})
    model: dict[str, Any] = {
        "config": {"model_type": family, **tiny_sizes(family, **sizes)},
        "experts_implementation": "grouped_mm",
    }
    if family == "gpt_oss" and not {"tensor", "context"} & changes["parallel"].keys():
        model["attn_implementation"] = "eager"  # It has attention sinks, and rows are padded.
    world = dist.get_world_size() if dist.is_initialized() else 1
    return PolicyConfig.model_validate(
        {
            "model": model,
            "tokenizer": {"builder": "characters", "characters": CHARACTERS[:59]},
            "precision": precision,
            "device": device,
            "workers": world,
            "max_total_sequence_length": 32,
            "train_global_batch_size": len(LENGTHS),
            "train_micro_batch_size": 1,
            "router_replay": {"enabled": True, "min_exact_fraction": 0},
            **changes,
        }
    )


def half(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def perturbed(model: Any) -> dict[str, torch.Tensor]:
    """Return the model's state with noise of three tenths of its size on every weight and selection bias."""
    generator, state = torch.Generator().manual_seed(1), {}
    for name, value in model.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        scale = 0.3 * value.float().std().nan_to_num() if value.numel() > 1 else torch.zeros(())
        state[name] = value + (noise.to(value.device) * scale.clamp(min=0.02)).to(value.dtype)
    return state


class Truth:
    """What one process gives: the experts of every token but the samples' last, and the weights to replay with."""

    def __init__(self, cfg: PolicyConfig, device: torch.device) -> None:
        model = load_model(cfg, seed=0, device=device, tokenizer=tiny_tokenizer())
        replay, data = install(model), batch()
        self.experts = torch.zeros(VOCABULARY, replay.num_moe_layers, replay.top_k, dtype=torch.int64)
        self.known = torch.zeros(VOCABULARY, dtype=torch.bool)
        shape = (*data["input_ids"].shape, replay.num_moe_layers, replay.top_k)
        self.column = torch.full(shape, 255, dtype=torch.uint8)
        digests = []
        for row, length in enumerate(LENGTHS):
            ids, routes = data["input_ids"][row : row + 1, :length], Routes.record()
            with torch.no_grad(), half(device, cfg.precision):
                model(input_ids=ids.to(device), use_cache=False, routes=routes)
            used, tokens = routes.ids[:-1].cpu(), ids[0, :-1]
            self.experts[tokens], self.known[tokens] = used.long(), True
            self.column[row, : length - 1] = used
            digests.append(bound_digests(used, tokens, torch.arange(length - 1)).sum())
        self.digests = torch.stack(digests)
        self.weights = perturbed(model)

    def rows(self) -> BatchedDataDict:
        """Return the batch with its recorded routes."""
        data = batch()
        data["routed_experts"] = self.column.clone()
        return data


class Subject(Protocol):
    """A model on this rank, its microbatches, and how routes get into a forward."""

    model: Any
    handle: RouterReplay

    def score(self, index: int, routes: Routes | None) -> torch.Tensor:
        """Run a microbatch and return logprobs, the same for the same bits."""
        ...

    def recorded(self, index: int) -> Routes:
        """Return the recorded experts of a microbatch, for one forward."""
        ...

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Take over whole weights."""
        ...

    def recompute(self) -> None:
        """From now on keep only the layers' inputs."""
        ...


class Library:
    """A transformers model, sharded by `fully_shard` where there are ranks, with routes as its keyword argument."""

    def __init__(self, cfg: PolicyConfig, device: torch.device, truth: Truth, *, install_first: bool) -> None:
        self.model = load_model(cfg, seed=0, device=device, tokenizer=tiny_tokenizer())
        self._precision = cfg.precision
        self._truth, self._device = truth, device
        if install_first:
            self.handle = install(self.model)
        self._shard(cfg)
        self.handle = install(self.model)
        ids = batch()["input_ids"][:, : min(LENGTHS) - 1]
        self._parts = ids[dist.get_rank() :: dist.get_world_size()].chunk(MICROBATCHES)

    def _shard(self, cfg: PolicyConfig) -> None:
        mesh = init_device_mesh(cfg.device, (dist.get_world_size(),))
        compute = torch.bfloat16 if cfg.precision == "bfloat16" else torch.float32
        policy = MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for layer in self.model.base_model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)

    def score(self, index: int, routes: Routes | None) -> torch.Tensor:
        ids = self._parts[index].to(self._device)
        options = {} if routes is None else {"routes": routes}
        with half(self._device, self._precision):
            logits = self.model(input_ids=ids, use_cache=False, **options).logits
        return logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])

    def recorded(self, index: int) -> Routes:
        ids = self._truth.experts[self._parts[index].flatten()]
        return Routes.replay(ids, trace=True, compare=True)

    @torch.no_grad()
    def load(self, weights: dict[str, torch.Tensor]) -> None:
        for name, target in self.model.state_dict().items():
            whole = weights[name]
            if isinstance(target, DTensor):
                rows = target.to_local().shape[0]
                whole = whole.chunk(dist.get_world_size())[dist.get_rank()] if rows else whole[:0]
                target = target.to_local()
            target.copy_(whole)

    def recompute(self) -> None:
        enable_activation_checkpointing(self.model)


class Handout:
    """Stands in a scorer's place for routes and gives what it holds."""

    def __init__(self, routes: Routes | None) -> None:
        self._routes = routes

    def routes(self, _data: Any, _tokens: Any, *, packed: bool) -> Routes | None:
        return self._routes


class Worker:
    """A policy worker, whose own replayer cuts the routes column for its forwards."""

    def __init__(self, cfg: PolicyConfig, truth: Truth) -> None:
        settings = GenerationConfig(max_new_tokens=8)
        self.worker = AutomodelPolicyWorker(cfg, settings, tokenizer=tiny_tokenizer(), seed=0)
        self.model, self._truth = self.worker.model, truth
        self._scorer = self.worker._scorer
        assert self._scorer.replayer is not None
        self.replayer = self._scorer.replayer
        self.handle = self.replayer.handle
        self._parts = list(self.microbatches())

    def microbatches(self) -> Iterator[Any]:
        """Return this rank's microbatches."""
        worker, rows = self.worker, self.rows()
        return rows.to(worker.device, on_host=("input_lengths",)).microbatches(
            worker._cut, rows.size // MICROBATCHES, partial(most_of_ranks, worker.dp_group)
        )

    def rows(self) -> BatchedDataDict:
        """Return this rank's rows."""
        worker = self.worker
        own = dist.get_rank(worker.dp_group) if worker.dp_group else 0
        size = len(LENGTHS) // worker.dp_size
        return self._truth.rows().slice(own * size, (own + 1) * size)

    def score(self, index: int, routes: Routes | None) -> torch.Tensor:
        self._scorer.replayer = Handout(routes)  # type: ignore[assignment]
        try:
            return self._scorer(self._parts[index]).logprobs
        finally:
            self._scorer.replayer = self.replayer

    def recorded(self, index: int) -> Routes:
        if index == 0:
            self.replayer.take()
            self.replayer.begin("train", self.rows())
        packing = self._scorer._packing
        tokens = forward_kwargs(self._parts[index], packing)["input_ids"].flatten()
        routes = self.replayer.routes(self._parts[index], tokens, packed=packing is not None)
        assert routes is not None
        return routes

    @torch.no_grad()
    def load(self, weights: dict[str, torch.Tensor]) -> None:
        if self.worker._sharded is None:
            self.model.load_state_dict(weights)
        else:
            self.worker._sharded.take_full_weights(weights if dist.get_rank() == 0 else None)

    def recompute(self) -> None:
        enable_activation_checkpointing(self.model)


class Probe:
    """Looks at what routers give and experts get, beside the tokens of the forward; knows nothing of routes."""

    def __init__(self, subject: Subject) -> None:
        self.tokens: list[torch.Tensor] = []
        self.seen: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self._hooks = [subject.model.get_input_embeddings().register_forward_pre_hook(self._embedded)]
        for slot, spec in enumerate(subject.handle.routers):
            block = subject.model.get_submodule(spec.name.rpartition(".")[0])
            router = subject.model.get_submodule(spec.name)
            self._hooks.append(router.register_forward_hook(self._routed(slot, spec.top_k)))
            self._hooks.append(
                block.experts.register_forward_pre_hook(self._computed(slot), with_kwargs=True)
            )

    def _embedded(self, _module: Any, args: tuple[Any, ...]) -> None:
        self.tokens.append(args[0].flatten().cpu())

    def _routed(self, slot: int, top_k: int) -> Any:
        def hook(_module: Any, _args: Any, out: Any) -> None:
            ids = [x for x in out if not x.is_floating_point() and x.shape[-1] == top_k]
            self.seen.setdefault("router", []).append((slot, ids[-1].reshape(-1, top_k).cpu()))

        return hook

    def _computed(self, slot: int) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [x for x in (*args, *kwargs.values()) if not x.is_floating_point()]
            self.seen.setdefault("experts", []).append((slot, given[0].cpu()))

        return hook

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def wrong_rows(self, truth: Truth, layers: int, runs: int) -> dict[str, int]:
        """Count rows that are not the recorded ones, and forwards of layers that are missing or too many.

        Every layer runs each microbatch `runs` times, in whatever order.
        """
        calls = wrong = rows = 0
        for place in ("router", "experts"):
            for slot in range(layers):
                given = [ids for at, ids in self.seen[place] if at == slot]
                left = [i for i in range(len(self.tokens)) for _ in range(runs)]
                calls += abs(len(given) - len(left))
                for ids in given:
                    misses = {i: self._misses(i, ids, slot, truth) for i in left}
                    best = min(misses, key=lambda i: misses[i], default=None)
                    if best is not None:
                        left.remove(best)
                        wrong += misses[best]
                        rows += int(truth.known[self.tokens[best]].sum())
        return {"rows": rows, "wrong": wrong, "missing_calls": calls}

    def _misses(self, index: int, ids: torch.Tensor, slot: int, truth: Truth) -> int:
        tokens = self.tokens[index]
        if len(tokens) != len(ids):
            return len(tokens) + len(ids)
        known = truth.known[tokens]
        return int((ids[known] != truth.experts[tokens[known], slot]).any(-1).sum())


@contextmanager
def probing(subject: Subject) -> Iterator[Probe]:
    """Probe all forwards inside."""
    probe = Probe(subject)
    try:
        yield probe
    finally:
        probe.close()


def check_identity(subject: Subject) -> bool:
    """Return whether the stock forward, record and replay give the same bits, and the same experts."""
    same = True
    with torch.no_grad():
        for index in range(MICROBATCHES):
            record = Routes.record()
            stock = subject.score(index, None)
            same &= torch.equal(subject.score(index, record), stock)
            replay = Routes.replay(record.ids, trace=True)
            same &= torch.equal(subject.score(index, replay), stock)
            same &= torch.equal(replay.ids, record.ids)
            same &= sum(replay.stats.native) == 0 < sum(replay.stats.replayed)
    return bool(same)


def gradients(subject: Subject) -> tuple[list[torch.Tensor], list[Routes]]:
    """Return the gradients of all microbatches, every forward before any backward, and their routes."""
    subject.model.zero_grad(set_to_none=True)
    losses, used = [], []
    for index in range(MICROBATCHES):
        used.append(subject.recorded(index))
        losses.append(subject.score(index, used[-1]).mean())
    for loss in reversed(losses):
        loss.backward()
    return [_local(p.grad).clone() for p in subject.model.parameters() if p.grad is not None], used


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_replay(subject: Subject, truth: Truth) -> dict[str, Any]:
    """Replay with other weights, all microbatches in flight, without and with recomputation."""
    layers = subject.handle.num_moe_layers
    subject.load(truth.weights)
    with probing(subject) as probe:
        plain, used = gradients(subject)
    seen = probe.wrong_rows(truth, layers, runs=1)
    stats = sum((r.stats for r in used), ReplayStats())
    own_choice = torch.cat([(r.native != r.ids).any(-1).flatten() for r in used]).float().mean()
    routers = router_gradients(subject)
    subject.recompute()
    with probing(subject) as probe:
        again, _ = gradients(subject)
    recomputed = probe.wrong_rows(truth, layers, runs=2)
    subject.model.zero_grad(set_to_none=True)
    sums = torch.stack([(a - b).float().norm() ** 2 for a, b in zip(plain, again, strict=True)]).sum()
    total = torch.stack([a.float().norm() ** 2 for a in plain]).sum()
    tokens = stats.tokens - stats.padding
    return {
        "seen": seen,
        "seen_with_recompute": recomputed,
        "tokens": tokens,
        "complete": stats.replayed == (tokens,) * layers and not sum(stats.native),
        "would_choose_otherwise": float(own_choice),
        "router_gradient": routers,
        "recompute_bit_identical": all(torch.equal(a, b) for a, b in zip(plain, again)),
        "recompute_gradient_gap": float((sums / total).sqrt()),
    }


def router_gradients(subject: Subject) -> float:
    """Return the smallest of the routers' largest gradients, over all ranks' parts."""
    found = []
    for spec in subject.handle.routers:
        grad = _local(subject.model.get_submodule(spec.name).weight.grad)
        found.append(grad.abs().max() if grad.numel() else torch.zeros((), device=grad.device))
    largest = torch.stack(found)
    if dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest.min())


def check_stages(subject: Worker, truth: Truth) -> dict[str, Any]:
    """Score and train as a run does; every stage has to prove its replay, and the probe has to agree."""
    worker, layers = subject.worker, subject.handle.num_moe_layers
    subject.replayer.take()
    # The worker recomputes by now, which concerns training only.
    with probing(subject) as probe:
        worker.get_logprobs(subject.rows(), micro_batch_size=1)
    scored = probe.wrong_rows(truth, layers, runs=1)
    with probing(subject) as probe:
        norm = float(worker.train(subject.rows(), NLLLoss(), mbs=1)["grad_norm"][0])
    trained = probe.wrong_rows(truth, layers, runs=2)
    taken = worker.take_replay_stats()
    everyone: list[Any] = [taken]
    if worker.dp_group is not None:
        everyone = [None] * dist.get_world_size(worker.dp_group)
        dist.all_gather_object(everyone, taken, group=worker.dp_group)
    lengths = torch.tensor(LENGTHS)
    for stage in ("prev_logprobs", "train"):
        stats = sum((part[stage] for part in everyone), ReplayStats())
        stats.check(stage, digests=truth.digests, total_tokens=lengths)
    return {"seen_scoring": scored, "seen_training": trained, "stages_proven": True, "grad_norm": norm}


def fits(layout: str, world: int) -> bool:
    """Return whether `world` ranks make whole replicas of a layout."""
    parallel = WORKERS.get(layout, {})
    replica = parallel.get("tensor", 1) * parallel.get("context", 1)
    return bool(world % replica == 0 and world % parallel.get("expert", 1) == 0)


def run_case(family: str, layout: str, precision: str, device: torch.device) -> dict[str, Any]:
    """Return what was found, on this rank."""
    parallel = WORKERS.get(layout, {})
    cfg = policy_config(family, precision, device.type, parallel=parallel)
    truth = Truth(cfg, device)
    if layout in LIBRARY:
        library = Library(cfg, device, truth, install_first=layout == "fsdp2_before")
        return {"identical": check_identity(library), **check_replay(library, truth)}
    refusal = REFUSED.get((family, layout))
    try:
        worker = Worker(cfg, truth)
    except ConfigError as error:
        return {"refused": str(error), "expected": refusal is not None and refusal in str(error)}
    found = {"identical": check_identity(worker), **check_replay(worker, truth)}
    return {**found, **check_stages(worker, truth)}


def compare_norms(cases: Sequence[dict[str, Any]]) -> None:
    """Hold the gradient norms of sharded workers to that of one process, where both ran: the same loss and routes."""
    single = {(c["family"], c["precision"]): c["ranks"][0] for c in cases if c["layout"] == "single"}
    for case in cases:
        expected = single.get((case["family"], case["precision"]), {}).get("grad_norm")
        found = case["ranks"][0].get("grad_norm")
        if expected is not None and found is not None:
            case["grad_norm_gap"] = abs(found / expected - 1)
            case["ok"] &= case["grad_norm_gap"] < (1e-4 if case["precision"] == "float32" else 5e-2)


def passed(found: dict[str, Any], precision: str) -> bool:
    """Return whether a rank's findings are what they must be."""
    if "refused" in found or "error" in found:
        return bool(found.get("expected"))
    probes = [value for name, value in found.items() if name.startswith("seen")]
    exact = all(p["rows"] > 0 and p["wrong"] == 0 and p["missing_calls"] == 0 for p in probes)
    limit = 1e-5 if precision == "float32" else 1e-2
    return (
        exact
        and found["identical"]
        and found["complete"]
        and found["would_choose_otherwise"] > 0.05
        and found["router_gradient"] > 0
        and found["recompute_gradient_gap"] < limit
    )


def run_all(cases: Sequence[tuple[str, str, str]], device: torch.device) -> list[dict[str, Any]]:
    """Run cases and return what all ranks found; rank 0 tells the terminal."""
    results = []
    for family, layout, precision in cases:
        start = time.perf_counter()
        try:
            found = run_case(family, layout, precision, device)
        except (HeadraceError, RuntimeError):
            # Most errors are alike on all ranks; the other cases still tell something.
            found = {"error": traceback.format_exc()}
        ranks: list[Any] = [found]
        if dist.is_initialized():
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, found)
        ok = all(passed(r, precision) for r in ranks)
        seconds = round(time.perf_counter() - start, 2)
        case = {"family": family, "layout": layout, "precision": precision, "ok": ok, "seconds": seconds}
        results.append({**case, "ranks": ranks})
        if int(os.environ["RANK"]) == 0:
            shown = ranks[0].get("refused", "")[:90] or ("" if ok else ranks)
            print(family, layout, precision, "ok" if ok else "FAILED", f"{seconds} s", shown, flush=True)
    return results


def main() -> int:
    """Run what the command line names and write the result; the exit status is 1 where a case fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--precisions", nargs="+", default=("bfloat16", "float32"))
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", rank)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    layouts = [layout for layout in args.layouts if fits(layout, int(os.environ["WORLD_SIZE"]))]
    names = [(f, layout, p) for f in args.families for layout in layouts for p in args.precisions]
    # A worker is alone where there is no process group yet.
    alone = run_all([n for n in names if n[1] == "single"], device)
    if args.device == "cuda":
        dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=90))
    else:
        dist.init_process_group("gloo")
    cases = [*alone, *run_all([n for n in names if n[1] != "single"], device)]
    compare_norms(cases)
    good = all(case["ok"] for case in cases)
    if dist.get_rank() == 0:
        report = {
            "ranks": dist.get_world_size(),
            "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
            "where": where(),
            "passed": good,
            "cases": cases,
        }
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print("passed" if good else "FAILED", f"{sum(c['ok'] for c in cases)} of {len(cases)}", flush=True)
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
