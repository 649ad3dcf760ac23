"""Panels of a real run, the same in its report, and a search among a hundred thousand samples."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from headrace.dashboard.html_report import html_report
from headrace.dashboard.runs import find_runs
from headrace.training import run_recipe
from page_runs import PHONE, OpenPage, write_long_run
from tiny_recipe import tiny_recipe

Dashboard = Callable[..., str]
REPLAYED = {"router_replay": {"enabled": True}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    for name, lr in (("slow", 1e-3), ("fast", 2e-3)):
        changes = {"policy": {**REPLAYED, "optimizer": {"lr": lr}}, "grpo": {"max_num_steps": 3}}
        run_recipe(tiny_recipe(folder / name, batching="packed", **changes))
    return folder


@pytest.fixture(scope="module")
def report(runs: Path) -> str:
    path = runs / "both.html"
    path.write_text(html_report(find_runs([runs / "slow", runs / "fast"])))
    return path.as_uri()


def check_panels(page: Page) -> None:
    expect(page.locator("#time")).to_contain_text("The last 3 steps: who works, who waits")
    expect(page.get_by_role("img", name="Time line of steps 1 to 3: rollout works")).to_be_visible()
    matrix = page.get_by_role("table", name="Rows that have a column")
    expect(matrix.get_by_role("row", name="advantages").get_by_role("cell")).to_have_text(
        ["0 %", "0 %", "100 %", "100 %", "64 B"]
    )
    expect(page.locator("#packing")).to_contain_text("Step 3, train: packed microbatches")
    expect(page.locator("#packing")).to_contain_text("of the budget of 64 tokens is not used")
    expect(page.get_by_role("img", name="Agreement of routes by layer")).to_be_visible()


def test_an_asynchronous_run_shows_who_makes_samples_how_old_they_are_and_what_was_lost(
    tmp_path: Path, dashboard: Dashboard, open_page: OpenPage
) -> None:
    changes = {"loss": {"importance_correction": "tis"}, "grpo": {"max_num_steps": 4}}
    run_recipe(tiny_recipe(tmp_path / "run", **{"async": {"enabled": True, "max_lag": 1}}, **changes))
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"async/failed_calls": 0.0', '"async/failed_calls": 1.0'))
    page = open_page(dashboard(tmp_path / "run"))
    for title in ("Lag of samples, in steps", "Seconds of waiting", "Groups in the store", "Lost work"):
        expect(page.get_by_role("group", name=title)).to_be_visible()
    expect(page.locator("#time canvas[aria-label*='collector-0 works']")).to_be_visible()
    lost = page.locator("#overview dl > div", has_text="Failed calls").locator("dd").first
    expect(lost).to_have_text("4")
    expect(page.locator("#plane")).to_contain_text("lease of")
    expect(page.locator("#plane")).to_contain_text("16 rows by collector-0")


def check_tokens(page: Page) -> None:
    page.locator("#samples details").filter(has_text="step 3").last.locator("summary").click()
    page.get_by_label("Search").fill("_g0")
    # The list is made anew a moment after the last key, and the sample that was open is open again.
    expect(page.locator("#samples").get_by_role("status")).to_contain_text("match")
    opened = page.locator("#samples [open] .opened").first
    expect(opened.locator(".token").first).to_be_visible()
    opened.get_by_label("advantage").check()
    coloured = opened.locator(".token.above, .token.below")
    assert coloured.count() == opened.locator(".token:not(.none)").count() > 0


def test_the_panels_of_a_run_are_drawn(runs: Path, dashboard: Dashboard, open_page: OpenPage) -> None:
    page = open_page(dashboard(runs / "slow"))
    check_panels(page)
    check_tokens(page)
    expect(page.locator(".missing")).not_to_contain_text("logging.")


def test_what_is_under_the_pointer_is_told(runs: Path, dashboard: Dashboard, open_page: OpenPage) -> None:
    page = open_page(dashboard(runs / "slow"))
    for section, text in (
        ("#packing", "rank 0, microbatch 0"),
        ("#routes", "layer 0, step 1"),
        ("#time", "step 1: "),
    ):
        canvas = page.locator(f"{section} canvas").first
        canvas.scroll_into_view_if_needed()
        canvas.hover(position={"x": 70, "y": 10 if section == "#routes" else 60})
        expect(page.locator(f"{section} .tip:visible")).to_contain_text(text)


def test_a_report_opens_from_a_file_and_shows_what_differs(report: str, open_page: OpenPage) -> None:
    page = open_page(report)
    check_panels(page)
    check_tokens(page)
    expect(page.locator("#recipe h3")).to_have_text("1 key of the recipes differs")
    expect(page.locator("#recipe tbody")).to_contain_text("policy.optimizer.lr")
    rows = page.get_by_role("table", name="Results").locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.last).to_contain_text("difference")
    page.get_by_label("From here on of run").select_option("fast")
    expect(page.locator("#samples [role=status]")).to_have_text("6 samples.")


def test_a_report_is_usable_at_390_pixels_and_in_the_dark(report: str, open_page: OpenPage) -> None:
    page = open_page(report, PHONE, "dark")
    expect(page.locator("#samples details").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 28)"


def test_a_search_among_a_hundred_thousand_samples_takes_under_a_second(
    tmp_path: Path, dashboard: Dashboard, open_page: OpenPage
) -> None:
    page = open_page(dashboard(write_long_run(tmp_path / "run", 500, 200)))
    status = page.locator("#samples [role=status]")
    expect(status).to_have_text("100,000 samples.", timeout=20_000)
    times_s = []
    for text, found in (("499000", "1 of"), ("turbine stone", ""), ("naïve gr", "")):
        begun = time.perf_counter()
        with page.expect_response(lambda answer: "samples?" in answer.url):
            page.get_by_label("Search").fill(text)
        expect(status).to_contain_text(f"{found} 100,000 samples match.".strip())
        times_s.append(time.perf_counter() - begun)
    assert min(times_s) < 1
