"""One real step as a picture: what docs/step.md shows is drawn from a trace of the tiny recipe.

    python tests/step_trace.py     # writes docs/assets/step.json and step.svg, and the table of docs/step.md

The numbers are those of the machine that made the file. A test draws the picture from the file again, and compares
stages, operations and columns with a new trace.
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from string import ascii_lowercase as LETTERS
from types import FrameType
from typing import Any

from headrace.algorithms.observer import STAGES
from headrace.algorithms.run import build_session, start_loop
from headrace.data_plane.observability import DataPlaneEvent, listening
from hops import file_of, traced
from recorder import NeverStop, Recorder
from tiny_recipe import tiny_recipe

DOCS = Path(__file__).parents[1] / "docs"
PAGE, DATA, PICTURE = DOCS / "step.md", DOCS / "assets" / "step.json", DOCS / "assets" / "step.svg"
TABLE = re.compile(r"(<!-- trace -->\n).*?(<!-- end -->)", re.DOTALL)
_LEFT = {
    "register_partition": "opens",
    "put_samples": "writes",
    "get_samples": "reads",
    "clear_samples": "clears",
}

# Words and completions of many lengths.
RAGGED: dict[str, Any] = {
    "policy": {
        "max_total_sequence_length": 40,
        "tokenizer": {"builder": "characters", "characters": LETTERS},
    },
    "generation": {"max_new_tokens": 20},
    "env": {"config": {"min_word_len": 2, "max_word_len": 14}, "lowercase": True},
}


class Trace(Recorder):
    """Stages, store operations, plans and scores of one step, in the order in which they happen."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[dict[str, Any]] = []
        self.plans: dict[str, Any] = {}
        self.rows: dict[str, Any] = {}
        self._stage = "before the rollout"

    def on_stage(self, step: int, stage: str) -> None:
        self._stage = stage

    def on_store(self, event: DataPlaneEvent) -> None:
        found = {"stage": self._stage, "op": event.op, "rows": event.rows, "columns": dict(event.columns)}
        self.operations.append(found)

    def watch(self, frame: FrameType, event: str, arg: Any) -> None:
        """Keep what some functions return."""
        if event != "return" or arg is None or file_of(frame) is None:
            return
        name = frame.f_code.co_name
        if name == "shard_meta_for_dp":
            (shard,) = arg[0]
            if "micro_batch_indices" not in shard.extra_info:
                return  # numbers per row, which need no microbatches
            cuts = [cut for batch in shard.extra_info["micro_batch_indices"] for cut in batch]
            self.plans[self._stage] = [shard.sample_ids[start:stop] for start, stop in cuts]
        elif name == "from_values":
            named = zip(arg.sample_ids, arg.total_tokens, arg.response_tokens, arg.rewards)
            self.rows = {
                sample: {"tokens": int(t), "response": int(r), "reward": round(float(v), 3)}
                for sample, t, r, v in named
            }
        elif name == "score" and self.rows:
            for row, advantage in zip(self.rows.values(), arg.advantages.tolist()):
                row["advantage"] = round(advantage, 2)


def trace_step() -> dict[str, Any]:
    """Trace a step over the local store, packed, of 4 prompts with 4 samples each."""
    trace = Trace()
    with listening(trace.on_store), tempfile.TemporaryDirectory() as folder:
        store = {
            "enabled": True,
            "impl": "local",
            "store_name": "step_trace",
            "observability": {"enabled": True},
        }
        recipe = tiny_recipe(Path(folder), batching="packed", data_plane=store, **RAGGED)
        session = build_session(recipe)
        try:
            loop = start_loop(session, trace, NeverStop())
            traced(lambda: loop._one_step(1, 1), trace.watch)
        finally:
            session.close()
    metrics = trace.steps[0].metrics
    shown = ("reward/mean", "train/loss", "train/grad_norm", "weights/update_bytes")
    return {
        "budget": {
            "prev_logprobs": recipe.policy.sequence_packing.logprob_mb_tokens,
            "train": recipe.policy.sequence_packing.train_mb_tokens,
        },
        "rows": trace.rows,
        "operations": trace.operations,
        "plans": trace.plans,
        "metrics": {name: float(f"{metrics[name]:.4g}") for name in shown},
    }


def structure(data: dict[str, Any]) -> list[tuple[str, str, int, tuple[str, ...]]]:
    """Return what a trace has on every machine: stages, operations, rows and columns."""
    return [(o["stage"], o["op"], o["rows"], tuple(o["columns"])) for o in data["operations"]]


def table(data: dict[str, Any]) -> str:
    """Return the store operations of a trace as a table in Markdown."""
    lines = ["| stage | the store | rows | columns |", "| --- | --- | ---: | --- |"]
    for o in data["operations"]:
        columns = ", ".join(f"`{name}`" for name in o["columns"])
        stage = f"`{o['stage']}`" if o["stage"] in STAGES else o["stage"]
        lines.append(f"| {stage} | {_LEFT.get(o['op'], o['op'])} | {o['rows']} | {columns} |")
    return "\n".join(lines) + "\n"


# The picture.

WIDTH, MARGIN, ROW, CELL = 960, 24, 13, 11
INK, SOFT, FRAME = "#1b2733", "#5b6b7a", "#c9d3dc"
PROMPT, COLORS = "#c3ccd4", ("#1f6fb2", "#d9822b", "#3a9a6b", "#8b5fbf")


class Canvas:
    """Collects shapes from top to bottom."""

    def __init__(self, samples: Iterable[str]) -> None:
        self.parts: list[str] = []
        self._groups = list(dict.fromkeys(sample.rpartition("_g")[0] for sample in samples))

    def group(self, sample: str) -> int:
        return self._groups.index(sample.rpartition("_g")[0])

    def color(self, sample: str) -> str:
        return COLORS[self.group(sample) % len(COLORS)]

    def text(self, x: float, y: float, text: str, size: int = 13, fill: str = INK, **more: str) -> None:
        extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
        text = text.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{extra}>{text}</text>')

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, stroke: str = "none", rx: float = 1.5
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{rx:g}" fill="{fill}" stroke="{stroke}"/>'
        )

    def heading(self, y: float, number: int, title: str, *lines: str) -> None:
        self.parts.append(f'<circle cx="{MARGIN + 13}" cy="{y + 10}" r="13" fill="{INK}"/>')
        self.text(MARGIN + 13, y + 15, str(number), 14, "#fff", text_anchor="middle", font_weight="bold")
        self.text(MARGIN + 36, y + 15, title, 16, font_weight="bold")
        for i, line in enumerate(lines):
            self.text(MARGIN + 36, y + 36 + 18 * i, line, 13, SOFT)


def draw(data: dict[str, Any]) -> str:
    """Return the picture of a trace as SVG."""
    canvas, y = Canvas(data["rows"]), 24.0
    for panel in (_rollout, _put, _scoring, _advantages, _training, _clearing):
        y = panel(canvas, y, data) + 26
    body = "\n".join(canvas.parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" role="img" '
        'font-family="Helvetica, Arial, sans-serif">\n<title>One step of a tiny run, from rollout to cleared rows'
        f'</title>\n<rect width="{WIDTH}" height="{y:g}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _bar(
    canvas: Canvas, x: float, y: float, row: dict[str, Any], color: str, height: float = ROW - 3
) -> float:
    """Draw a row of tokens, prompt and completion; return where it ends."""
    prompt = row["tokens"] - row["response"]
    canvas.box(x, y, prompt * CELL - 1, height, PROMPT)
    canvas.box(x + prompt * CELL, y, row["response"] * CELL - 1, height, color)
    return x + row["tokens"] * CELL


def _rollout(canvas: Canvas, y: float, data: dict[str, Any]) -> float:
    rows = data["rows"]
    canvas.heading(
        y,
        1,
        "Rollout",
        "The generator completes each of 4 prompts 4 times. The environment scores every completion.",
        "Grey: prompt tokens. Colour: sampled tokens, one colour a group. At the right: the reward.",
    )
    y += 68
    for sample, row in rows.items():
        end = _bar(canvas, MARGIN + 36, y, row, canvas.color(sample))
        canvas.text(end + 8, y + 9, f"{row['reward']:g}", 10, SOFT)
        y += ROW
    return y


def _put(canvas: Canvas, y: float, data: dict[str, Any]) -> float:
    rows = list(data["rows"].values())
    tokens, longest = sum(r["tokens"] for r in rows), max(r["tokens"] for r in rows)
    put = next(o for o in data["operations"] if o["op"] == "put_samples")
    canvas.heading(
        y,
        2,
        "One put",
        f"All {put['rows']} rows go to the store in one call, values back to back: {tokens} tokens a column.",
        f"Padded to the longest row they would be {len(rows) * longest}. The driver gets back ids and lengths.",
    )
    y += 68
    x = MARGIN + 36.0
    scale = (WIDTH - 2 * MARGIN - 40) / tokens
    for sample, row in data["rows"].items():
        canvas.box(x, y, row["tokens"] * scale - 1, 16, canvas.color(sample))
        x += row["tokens"] * scale
    canvas.text(MARGIN + 36, y + 36, "  ".join(put["columns"]), 12, INK, font_family="monospace")
    return y + 40


def _bins(canvas: Canvas, y: float, data: dict[str, Any], stage: str) -> float:
    budget = data["budget"][stage]
    scale = (WIDTH - 2 * MARGIN - 204) / max(data["budget"].values())
    for number, samples in enumerate(data["plans"][stage]):
        x = MARGIN + 36.0
        canvas.box(x, y, budget * scale, 18, "#f2f5f8", FRAME)
        used = sum(data["rows"][sample]["tokens"] for sample in samples)
        for sample in samples:
            width = data["rows"][sample]["tokens"] * scale
            canvas.box(x + 0.5, y + 2, width - 1, 14, canvas.color(sample))
            x += width
        canvas.text(
            MARGIN + 44 + budget * scale,
            y + 13,
            f"microbatch {number + 1}: {used} of {budget} tokens",
            11,
            SOFT,
        )
        y += 23
    return y


def _columns_of(data: dict[str, Any], stage: str, op: str) -> str:
    found: dict[str, None] = {}
    for o in data["operations"]:
        if o["stage"] == stage and o["op"] == op:
            found |= dict.fromkeys(o["columns"])
    return ", ".join(found)


def _scoring(canvas: Canvas, y: float, data: dict[str, Any]) -> float:
    stage = "prev_logprobs"
    canvas.heading(
        y,
        3,
        "Scoring",
        "The driver plans microbatches from lengths alone. The worker fetches its rows, packs them, runs the model,",
        f"and writes {_columns_of(data, stage, 'put_samples')} back under the same ids.",
    )
    return _bins(canvas, y + 68, data, stage)


def _advantages(canvas: Canvas, y: float, data: dict[str, Any]) -> float:
    canvas.heading(
        y,
        4,
        "Advantages",
        "The driver compares each reward with those of its group, and writes one number per sample.",
        "A group whose rewards are all equal gets 0: it teaches nothing.",
    )
    y += 110
    x, middle = MARGIN + 60.0, y
    canvas.box(MARGIN + 36, middle - 0.5, WIDTH - 2 * MARGIN - 60, 1, FRAME)
    previous = 0
    for sample, row in data["rows"].items():
        x += 18 if canvas.group(sample) != previous else 0
        previous = canvas.group(sample)
        height = abs(row["advantage"]) * 18
        top = middle - height if row["advantage"] > 0 else middle
        canvas.box(x, top, 26, max(height, 1), canvas.color(sample))
        below = middle + 12 if row["advantage"] > 0 else middle - 5
        canvas.text(
            x + 13, below, f"{row['advantage']:+.2f}".replace("+0.00", "0"), 10, SOFT, text_anchor="middle"
        )
        x += 48
    return middle + 34


def _training(canvas: Canvas, y: float, data: dict[str, Any]) -> float:
    metrics = data["metrics"]
    canvas.heading(
        y,
        5,
        "Training",
        "The worker fetches what the loss reads. Its microbatches have a smaller budget, since gradients need memory.",
        f"Loss {metrics['train/loss']:g}, gradient norm {metrics['train/grad_norm']:g}: one update.",
    )
    return _bins(canvas, y + 68, data, "train")


def _clearing(canvas: Canvas, y: float, data: dict[str, Any]) -> float:
    canvas.heading(
        y,
        6,
        "The end of the step",
        "The rows are cleared; one that is left behind is an error that names it.",
        f"The generator gets the new weights: {data['metrics']['weights/update_bytes']:,.0f} bytes.",
    )
    return y + 50


def with_table(page: str, data: dict[str, Any]) -> str:
    """Return the page with the table of a trace between its marks."""
    return TABLE.sub(lambda match: match[1] + "\n" + table(data) + "\n" + match[2], page)


def main() -> None:
    data = trace_step()
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    PICTURE.write_text(draw(data))
    PAGE.write_text(with_table(PAGE.read_text(), data))


if __name__ == "__main__":
    sys.exit(main())
