"""Writes the tables and numbers of `docs/performance.md` from the results files; `plot.py` calls it.

What lies between two markers is replaced, and nothing else is touched:

    <!-- table planner --> ... <!-- end -->                               a table of `TABLES`
    <!-- figure planner seconds.1048576x1024 -->1.7 s<!-- end -->         one figure of a results file
    <!-- figure codec pack_rows.* -->1.4 to 20 copies<!-- end -->         the range of several
"""

import re
from collections.abc import Callable
from pathlib import Path

from cells import (
    NONE,
    Report,
    Reports,
    command,
    figures,
    heading,
    judged,
    load,
    markdown,
    missing,
    number,
    shown,
    size,
    spread,
    table,
    way,
)

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"

_MARKED = re.compile(r"(<!-- (table|figure) ([^>]+?) -->)(.*?)(<!-- end -->)", re.DOTALL)
_KARMARKAR_KARP = re.compile(r"Karmarkar-Karp: ([\d.]+) %, in ([\d.]+) s")


def quoted(reports: Reports, text: str) -> str:
    """Return what a sentence quotes: `NAME PATTERN` as a number, or a range, with its unit."""
    name, _, pattern = text.partition(" ")
    if name not in reports:
        return "(not measured)"
    found = figures(reports[name], pattern)
    if not found:
        raise SystemExit(f"docs/performance.md: {name} has no figure {pattern}")
    unit = found[0]["unit"]
    value = shown(found[0]) if len(found) == 1 else spread(figure["figure"] for figure in found)
    return f"{value} times" if unit == "x" else f"{value} {unit}".rstrip()


Alternative = Callable[[Report], str]


def copies(label: str, path: str, name: str) -> Alternative:
    """Return the range of a way's copies over the codec's batches."""

    def text(report: Report) -> str:
        cases = [ways for case, ways in report["measurements"].items() if case.endswith(f": {path}")]
        return f"{label}: {spread(ways[name]['ratio'] for ways in cases if name in ways)} copies"

    return text


def times(case: str, other: str, own: str) -> Alternative:
    """Return what two ways of one measurement take."""
    return lambda report: " against ".join(
        f"{way(report, case, name, 'median_ms')} ms" for name in (other, own)
    )


def tokens(other: str) -> Alternative:
    """Return the tokens per second of another way's training step, and of packed rows."""
    return lambda report: " against ".join(
        f"{way(report, 'step', name, 'tokens_per_s')} tokens/s" for name in (other, "headrace packed")
    )


def karmarkar_karp(report: Report) -> str:
    """Return how far Karmarkar-Karp stays above the bound."""
    found = [_KARMARKAR_KARP.search(figure["note"]) for figure in report["figures"]]
    return f"Karmarkar-Karp: {spread(float(match[1]) for match in found if match)} %"


def driver_bytes(report: Report) -> str:
    """Return what passes a driver that gathers, and one that does not."""
    counts = report["notes"]["simulated"]["driver_bytes"]
    return f"{size(counts['driver gathers'])} against {size(counts['through the store'])}"


_PUT, _GET, _TQ = "512 rows: put", "512 rows: get", "store_transfer_queue"
_GATHERS = times("simulated step", "driver gathers", "through the store")
_SLICES = copies("`as_nested_tensor`", "pack", "as_nested_tensor of slices")
SUMMARY: tuple[tuple[str, str, str, Alternative | None], ...] = (
    ("pack rows that are ragged already", "codec", "pack_ragged.*", _SLICES),
    ("pack padded rows", "codec", "pack_padded.*", copies("NumPy loop", "pack", "NumPy loop")),
    ("materialize to padded", "codec", "pad.*", copies("`to_padded_tensor`", "pad", "to_padded_tensor")),
    ("waits for the GPU in one call of either", "codec_gpu", "*_syncs.*", None),
    ("`local`: put and get, rows of 8 KB and more", "local_store", "put_get.*", None),
    ("... per short row", "local_store", "per_row.*", None),
    ("... an eighth, beyond 1.5 eighths of the time of all", "local_store", "eighth", None),
    (
        "... a million rows put, claimed, cleared: last to first 100,000",
        "million_rows",
        "last_to_first.*",
        None,
    ),
    ("... what Python holds after them, to after the first", "million_rows", "held.*", None),
    (
        "`transfer_queue/simple`: put, to a raw jagged put",
        _TQ,
        "put_*_jagged",
        times(_PUT, "raw jagged", "adapter"),
    ),
    ("... get, to a raw jagged get", _TQ, "get_*_jagged", times(_GET, "raw jagged", "adapter")),
    ("... get, to a raw padded get", _TQ, "get_*_padded", times(_GET, "raw padded", "adapter")),
    ("... a put, or a get, of 65,536 rows", _TQ, "*.65536*", None),
    ("... an eighth of 512 and of 4,096 rows", _TQ, "eighth.*", None),
    ("plan of 1,048,576 rows for 1,024 ranks", "planner", "seconds.*", None),
    ("... memory", "planner", "memory.*", None),
    ("... fullest rank above the mean", "planner", "imbalance.1048576x1024", None),
    ("plans of 512 to 8,192 rows, above the lower bound", "planner", "above_lower_bound.*", karmarkar_karp),
    ("demo: a step over the data plane, to one in memory", "step", "demo_slower", None),
    ("simulated step: bytes through the driver", "step", "simulated_driver_bytes", driver_bytes),
    ("... faster than a driver that gathers", "step", "simulated_faster", _GATHERS),
    ("training: packed to padded", "train", "step.packed_*.headrace padded", tokens("headrace padded")),
    ("... to plain transformers", "train", "step.packed_*.transformers", tokens("transformers")),
    ("... to TRL's update", "train", "step.packed_*.TRL", tokens("TRL")),
    ("routes of 48 layers, 8 of 128 experts: per token", "routes", "bytes_per_token", None),
    ("... pack and unpack", "routes", "pack_and_unpack.*", None),
    ("import beyond torch and tensordict", "imports", "beyond_*", None),
)
"""What is held to a target: its name, its file and figures there, and what a plain alternative takes."""


def summary(reports: Reports) -> str:
    """Return every target with its figures."""
    rows: list[tuple[str, ...]] = []
    for label, name, pattern, alternative in SUMMARY:
        if name not in reports:
            rows.append((label, NONE, "", "", f"`{command(name)}`"))
            continue
        held = [figure for figure in figures(reports[name], pattern) if figure["target"] is not None]
        rows.append(
            (
                label,
                *judged(held, reports[name].get("runs")),
                alternative(reports[name]) if alternative else "",
            )
        )
    return markdown(("path", "figure", "target", "", "plain alternative"), rows)


def codec(reports: Reports) -> str:
    """Return the copies that packing and padding take, batch by batch, with and without the compiled kernel."""
    report, plain = reports["codec"], reports.get("codec_numpy")
    ways = (
        (report, "pack", "from ragged"),
        (report, "pack", "from padded"),
        (plain, "pack", "from padded"),
        (report, "pack", "from a list of rows"),
        (report, "pack", "as_nested_tensor of slices"),
        (report, "pad", "materialize"),
        (plain, "pad", "materialize"),
        (report, "pad", "to_padded_tensor"),
    )
    rows = [
        (batch, *(way(source, f"{batch}: {path}", name) for source, path, name in ways))
        for batch in batches(report)
    ]
    packing = ("copies", "pack: ragged", "padded", "padded, no kernel", "list of rows", "`as_nested_tensor`")
    body = table("codec", report, (*packing, "pad", "no kernel", "`to_padded_tensor`"), rows)
    return body if plain else f"{body}\n\n{missing('codec_numpy')}"


def batches(report: Report) -> list[str]:
    """Return the codec's batches."""
    return [case.partition(":")[0] for case in report["measurements"] if case.endswith(": pack")]


def codec_gpu(reports: Reports) -> str:
    """Return what packing and padding take on a GPU."""
    report = reports["codec_gpu"]
    ways = (
        ("pack", "one copy"),
        ("pack", "from padded"),
        ("pack", "as_nested_tensor of slices"),
        ("pad", "one copy"),
        ("pad", "materialize"),
        ("pad", "to_padded_tensor"),
    )
    rows: list[tuple[str, ...]] = []
    for batch in batches(report):
        syncs = report["notes"][batch]["syncs"]
        times_ms = [way(report, f"{batch}: {path}", name, "median_ms") for path, name in ways]
        rows.append((batch, *times_ms, str(syncs["from padded"]), str(syncs["materialize"])))
    packing = ("ms", "copy, ragged", "pack", "`as_nested_tensor`")
    padding = ("copy, padded", "materialize", "`to_padded_tensor`", "waits: pack", "materialize")
    return table("codec_gpu", report, (*packing, *padding), rows)


def local_parts(reports: Reports) -> str:
    """Return where the time of a put and a get goes."""
    report = reports["local_store"]
    books = ("bookkeeping_of_the_put_ms", "bookkeeping_of_the_get_ms", "jagged_tensors_of_the_result_ms")
    keys = ("put_and_get_ms", "two_copies_ms", *books)
    ending = ": where the time goes"
    rows = [
        (case.removesuffix(ending), *(number(parts[key]) for key in keys))
        for case, parts in report["notes"].items()
        if case.endswith(ending)
    ]
    columns = ("ms", "put and get", "two copies", "books of the put", "books of the get", "jagged tensors")
    return table("local_store", report, columns, rows)


STORES = (
    ("`transfer_queue/simple`", "store_transfer_queue", "adapter"),
    ("`mooncake_cpu`", "store_mooncake", "adapter"),
    ("TransferQueue, jagged", "store_transfer_queue", "raw jagged"),
    ("TransferQueue, padded", "store_transfer_queue", "raw padded"),
    ("Ray objects, padded dict", "store_transfer_queue", "Ray, padded dict"),
    ("Ray objects, one buffer", "store_transfer_queue", "Ray, one buffer"),
    ("one copy", "store_transfer_queue", "one copy"),
)
"""Ways to hand rows over: label, file, name in it."""


def stores(reports: Reports) -> str:
    """Return what each way to hand 512 rows over takes, and parts of it."""
    rows = [(label, *store_row(reports.get(name), own)) for label, name, own in STORES]
    if local := reports.get("local_store"):
        rows.insert(0, local_row(local))
    columns = ("ms", "put", "get", "clear", "2 of 8 columns", "eighth of 512", "of 4,096")
    body = markdown((*columns, "65,536 short rows: put", "get"), rows)
    heads = [
        heading(name, reports[name]) if name in reports else missing(name)
        for name in ("store_transfer_queue", "store_mooncake")
    ]
    return "<br>\n".join(heads) + f"\n\n{body}"


def store_row(report: Report | None, own: str) -> list[str]:
    """Return the milliseconds of one way in one results file."""
    two = "two columns" if own == "adapter" else f"{own}, two columns"
    eighth = "an eighth" if own == "adapter" else ""
    cells = [(f"512 rows: {path}", own) for path in ("put", "get", "clear")]
    cells.append(("512 rows: two of eight columns", two))
    cells += [(f"{count} rows: one rank's eighth", eighth) for count in (512, 4096)]
    cells += [(f"65536 rows, 5 columns: {path}", own) for path in ("put", "get")]
    return [way(report, case, name, "median_ms") for case, name in cells]


def local_row(report: Report) -> tuple[str, ...]:
    """Return the local store's row: its put is what the get leaves of both."""
    both = report["measurements"]["512x1500: all rows"]["put + get"]["median_ms"]
    get = report["measurements"]["512x1500: parts of a put and a get"]["get"]["median_ms"]
    return ("`local`, in its own process", number(both - get), number(get), *([NONE] * 6))


def planner(reports: Reports) -> str:
    """Return plans by size."""
    report = reports["planner"]
    by_name = {figure["name"]: figure for figure in report["figures"]}
    found = {*report["measurements"], *(name.partition(".")[2] for name in by_name)}
    cases = sorted(found, key=lambda case: [-int(count) for count in case.split("x")])
    rows = []
    for case in cases:
        count, ranks = case.split("x")

        def value(kind: str, case: str = case) -> str:
            figure = by_name.get(f"{kind}.{case}")
            return NONE if figure is None else number(figure["figure"])

        timing = report["measurements"].get(case, {}).get("plan", {}).get("median_ms")
        flops = report["notes"].get(case, {}).get("attention_flops_imbalance_percent")
        match = _KARMARKAR_KARP.search(by_name.get(f"above_lower_bound.{case}", {}).get("note", ""))
        rows.append(
            (
                f"{int(count):,} rows, {int(ranks):,} rank{'s' * (ranks != '1')}",
                NONE if timing is None else number(timing),
                value("imbalance"),
                NONE if flops is None else number(flops),
                value("fill"),
                value("above_lower_bound"),
                NONE if match is None else f"{number(float(match[1]))} in {number(1e3 * float(match[2]))} ms",
            )
        )
    columns = (
        "",
        "plan, ms",
        "tokens, %",
        "attention, %",
        "fill, %",
        "above the bound, %",
        "Karmarkar-Karp, %",
    )
    return table("planner", report, columns, rows)


def step_demo(reports: Reports) -> str:
    """Return the seconds of the demo's stages."""
    report = reports["step"]
    stages = report["notes"]["demo"]["seconds_per_stage"]
    columns = ("ms per step of the demo", *stages["in memory"])
    rows = [(name, *(number(1e3 * seconds) for seconds in loop.values())) for name, loop in stages.items()]
    return table("step", report, columns, rows)


def step_bytes(reports: Reports) -> str:
    """Return the bytes ledger of a step of the demo."""
    counts = reports["step"]["notes"]["demo"]["bytes_per_column_and_step"]
    largest = sorted(counts.items(), key=lambda column: -column[1])
    cells = [size(sum(counts.values())), *(size(count) for _, count in largest)]
    return markdown(
        ("", "all", *(f"`{name}`" for name, _ in largest)), [("bytes per step of the demo", *cells)]
    )


def step_simulated(reports: Reports) -> str:
    """Return the simulated step by a driver that gathers, and over the store."""
    report = reports["step"]
    notes = report["notes"]["simulated"]
    rows = [
        (
            name,
            way(report, "simulated step", name, "median_ms"),
            size(notes["driver_bytes"][name]),
            size(notes["ragged_bytes"]),
            size(padding),
        )
        for name, padding in (("driver gathers", notes["padding_avoided_bytes"]), ("through the store", 0))
    ]
    columns = (
        "simulated step",
        "ms",
        "bytes through the driver",
        "bytes of the rows",
        "padding that travels",
    )
    return markdown(columns, rows)


def train(reports: Reports) -> str:
    """Return tokens per second and memory of every way to train."""
    report = reports["train"]
    step, scoring = report["measurements"]["step"], report["measurements"]["logprobs"]
    best = step.get("headrace packed", {}).get("tokens_per_s")
    rows = [
        (
            name,
            *(number(scoring[name][key]) for key in ("tokens_per_s", "peak_gib")),
            *(number(found[key]) for key in ("tokens_per_s", "peak_gib")),
            NONE if best is None else number(best / found["tokens_per_s"]),
        )
        for name, found in step.items()
    ]
    columns = (
        "",
        "scoring: tokens/s",
        "peak, GiB",
        "step: tokens/s",
        "peak, GiB",
        "packed is … times as fast",
    )
    failed = "".join(f"\n\n*{name} failed: {why}*" for name, why in report["notes"].get("failed", {}).items())
    return table("train", report, columns, rows) + failed


def routes(reports: Reports) -> str:
    """Return what routes take, in copies of their bytes."""
    report = reports["routes"]
    found = [figure for figure in report["figures"] if figure["unit"] == "copies"]
    columns = [figure["name"].replace("_", " ").replace(".", ", ") for figure in found]
    return table("routes", report, ("", *columns), [("copies", *(shown(figure) for figure in found))])


def scale_step(reports: Reports) -> str:
    """Return seconds per step by ranks."""
    report = reports["scale"]
    curves = report["notes"]["step_s_by_ranks"]
    wanted = [n for n in (64, 256, 1024, 4096, 10_000) if n in curves["ranks"]]
    labels = {
        "one driver": "one driver: plans, dispatch, answers",
        "one index": "one index: all its operations",
        "one driver, one index": "both, one after the other",
        "groups of 256 ranks": "a driver and an index per 256 ranks, and a root",
    }
    rows = [
        (label, *(number(curves[name][curves["ranks"].index(n)]) for n in wanted))
        for name, label in labels.items()
    ]
    return table("scale", report, ("seconds per step", *(f"{n:,} ranks" for n in wanted)), rows)


def scale_parts(reports: Reports) -> str:
    """Return what a row costs in each part of driver and index, and how that grows with the ranks."""
    curves = reports["scale"]["notes"]["curves"]
    parts = (
        ("driver", "plan", "plan, three times"),
        ("driver", "dispatch", "dispatch, three times"),
        ("index", "put rollouts", "index: put of rollouts"),
        ("index", "select for logprobs", "index: selects for two scoring stages"),
        ("index", "put logprobs", "index: two write-backs of logprobs"),
        ("index", "select for training", "index: select for training"),
        ("index", "clear", "index: clear"),
    )
    rows = []
    for side, name, label in parts:
        curve = curves[side][name]
        ranks = "1024" if "1024" in curve["seconds"] else max(curve["seconds"], key=int)
        us = 1e6 * curve["seconds"][ranks] / (int(ranks) * 1000)
        rows.append((label, number(us), f"ranks ^ {curve['power']:.1f}"))
    return markdown(("part", "us per row at 1,024 ranks", "grows as"), rows)


def scaling(reports: Reports) -> str:
    """Return rates by GPUs and layout, of every machine that there is a file of, and the plot."""
    found = scaling_reports(reports)
    if not found:
        return missing("scaling")
    columns = ("step of", "GPUs", "layout", "by", "tokens/s", "of linear", "exposed, %", "peak, GiB")
    parts = ["![tokens per second by GPUs, beside the ideal](performance_scaling.png)"]
    for name, report in found.items():
        efficiency = {figure["name"]: shown(figure) for figure in report["figures"]}
        rows = []
        for case in report["notes"]["cases"].values():
            if case["kind"] != "speed" or "failed" in case:
                continue
            keys = [str(case[key]) for key in ("model", "gpus", "layout", "way")]
            linear, scored = (
                efficiency.get(f"{kind}.efficiency.{'.'.join(keys)}", NONE) for kind in ("step", "score")
            )
            numbers = (
                number(case["step_tokens_per_s"]),
                linear,
                number(100 * case["exposed_share"]),
                number(case["peak_gib"]),
                number(case["score_tokens_per_s"]),
                scored,
            )
            rows.append((*keys, *numbers))
        parts.append(table(name, report, (*columns, "scoring: tokens/s", "of linear"), rows))
    return "\n\n".join(parts)


def scaling_spread(reports: Reports) -> str:
    """Return how far ranks are apart in a step, planned by cost and dealt round; measured, and by the model."""
    found = scaling_reports(reports)
    if not found:
        return missing("scaling")
    rows: list[tuple[str, ...]] = []
    for name, report in found.items():
        for case in report["notes"]["cases"].values():
            if case["kind"] == "spread" and "failed" not in case:
                apart = [number(case[f"{way}_max_to_mean"], 3) for way in ("planned", "dealt")]
                times = [number(case[f"{way}_step_s"]) for way in ("planned", "dealt")]
                rows.append((f"{name.removeprefix('scaling_')}, {case['gpus']} ranks", *apart, *times))
    last = list(found.values())[-1]
    for ranks, ways in last["notes"]["spread_modelled"].items():
        apart = [number(ways[way]["max_to_mean"], 3) for way in ("planned", "dealt")]
        lockstep = [f"{number(ways[way]['lockstep'], 3)} of the mean" for way in ("planned", "dealt")]
        rows.append((f"by cost, {ranks}", *apart, *lockstep))
    columns = ("", "busiest rank to the mean: planned", "dealt", "step, s: planned", "dealt")
    return markdown(columns, rows)


def scaling_reports(reports: Reports) -> Reports:
    return {name: report for name, report in reports.items() if name.startswith("scaling_")}


TABLES: dict[str, tuple[Callable[[Reports], str], str | None]] = {
    "summary": (summary, None),
    "codec": (codec, "codec"),
    "codec gpu": (codec_gpu, "codec_gpu"),
    "local": (local_parts, "local_store"),
    "stores": (stores, None),
    "planner": (planner, "planner"),
    "step demo": (step_demo, "step"),
    "step bytes": (step_bytes, "step"),
    "step simulated": (step_simulated, "step"),
    "train": (train, "train"),
    "scaling": (scaling, None),
    "scaling spread": (scaling_spread, None),
    "routes": (routes, "routes"),
    "scale step": (scale_step, "scale"),
    "scale parts": (scale_parts, "scale"),
}
"""Every table, and the file that it cannot do without."""


def fill(text: str, reports: Reports) -> str:
    """Return the page with everything between its markers renewed."""

    def renew(match: re.Match[str]) -> str:
        begin, kind, name, _, end = match.groups()
        if kind == "figure":
            return f"{begin}{quoted(reports, name)}{end}"
        if name not in TABLES:
            raise SystemExit(f"docs/performance.md: no table {name}; there are: {', '.join(TABLES)}")
        build, needed = TABLES[name]
        body = build(reports) if needed is None or needed in reports else missing(needed)
        return f"{begin}\n{body}\n{end}"

    return _MARKED.sub(renew, text)


def main() -> None:
    """Renew the page."""
    PAGE.write_text(fill(PAGE.read_text(), load()))


if __name__ == "__main__":
    main()
