"""What do routes cost on the wire, and to pack and unpack, against one copy of the bytes?

Qwen3-30B-A3B's shape: 48 layers, 8 of 128 experts. A copy is `clone` of the uint8 payload; engines also give int16 and
int32, two and four times as many bytes to read. Before any timing, what comes out is held against what went in. Before
each way runs, the caches are filled with other bytes; all results lie in memory that the process has used before.
"""

from collections.abc import Callable, Sequence

import torch
from run import Bench, main

from headrace.data_plane.routes_codec import check_routes, pack_routes, signed_routes
from headrace.models.router_replay import align_jagged, row_digests

LAYERS, TOP_K, EXPERTS = 48, 8, 128
BYTES_PER_TOKEN, COPIES = 385, 4.0


def make_samples(rows: int) -> list[torch.Tensor]:
    """Routes of samples of 64 to 512 tokens, as the recorder writes them (uint8)."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < rows:
        lengths.append(min(int(torch.randint(64, 513, (), generator=generator)), rows - sum(lengths)))
    ids = torch.rand(rows, LAYERS, EXPERTS, generator=generator).topk(TOP_K).indices.to(torch.uint8)
    return list(ids.split(lengths))


def round_trip(samples: Sequence[torch.Tensor], lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Pack samples into a wire column and cut the column into samples again."""
    return torch.split(pack_routes(samples, num_experts=EXPERTS), list(lengths))


def measure(bench: Bench) -> None:
    """Time every way from samples to a batch."""
    tokens = 1024 if bench.quick else 8192
    samples = make_samples(tokens)
    lengths = [len(ids) for ids in samples]
    wire = pack_routes(samples, num_experts=EXPERTS)
    width = max(lengths)
    ways: dict[str, Callable[[], object]] = {"one copy": wire.clone}
    for dtype in (torch.uint8, torch.int16, torch.int32):
        source = [ids.to(dtype) for ids in samples]
        for sample, back in zip(samples, round_trip(source, lengths), strict=True):
            assert torch.equal(sample, back)
        name = f"pack and unpack, from {str(dtype).removeprefix('torch.')}"
        ways[name] = lambda source=source: round_trip(source, lengths)
    aligned = align_jagged(wire, lengths, width, num_experts=EXPERTS)
    assert torch.equal(aligned.ids[~aligned.padding], wire)
    ways["pad into a batch"] = lambda: align_jagged(wire, lengths, width, num_experts=EXPERTS)
    ways["check every id"] = lambda: check_routes(wire, num_experts=EXPERTS, num_layers=LAYERS, top_k=TOP_K)
    ways["digest every row"] = lambda: row_digests(wire)
    ways["widen to int64"] = lambda: [signed_routes(wire[:, layer]) for layer in range(LAYERS)]
    times = bench.race(f"{tokens} tokens", ways, between=bench.evict_caches)
    bench.notes["shape"] = {
        "tokens": tokens,
        "layers": LAYERS,
        "k": TOP_K,
        "experts": EXPERTS,
        "samples": len(samples),
    }
    bench.figure("bytes_per_token", wire.nbytes / tokens, "B", at_most=BYTES_PER_TOKEN)
    for given in ("uint8", "int16", "int32"):
        ratio = times[f"pack and unpack, from {given}"].ratio
        bench.figure(f"pack_and_unpack.{given}", ratio, "copies", at_most=COPIES)
    for way in ("pad into a batch", "check every id", "digest every row", "widen to int64"):
        bench.figure(way.replace(" ", "_"), times[way].ratio, "copies")


if __name__ == "__main__":
    main(measure, __doc__)
