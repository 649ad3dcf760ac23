"""The live page in a real browser: what it draws of a long run, how it follows one, and who can use it."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from headrace.dashboard.palette import colour
from page_runs import PHONE, OpenPage, metrics_of, write_long_run

Dashboard = Callable[..., str]


@pytest.fixture(scope="module")
def long_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_long_run(folder / "long", 2000, 8)
    write_long_run(folder / "other", 300, 2, seed=1, recipe="seed: 1\npolicy: {optimizer: {lr: 0.5}}\n")
    return folder


@pytest.fixture(scope="module")
def address(long_runs: Path, dashboard: Dashboard) -> str:
    return dashboard(long_runs)


def drawn(page: Page, selector: str) -> int:
    """Return how many pixels of the first canvas there have been painted."""
    count: int = page.eval_on_selector(
        selector,
        "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data"
        ".filter((value, at) => at % 4 === 3 && value > 0).length",
    )
    return count


def test_a_run_of_two_thousand_steps_is_drawn_within_two_seconds(address: str, open_page: OpenPage) -> None:
    times_s = []
    for _ in range(3):  # other processes may share the machine
        page = open_page(address)
        page.locator("#samples details").first.wait_for()
        times_s.append(page.evaluate("performance.now()") / 1000)  # since the page was asked for
    assert min(times_s) < 2
    assert drawn(page, "#curves canvas") > 1000
    assert drawn(page, "#time canvas") > 1000
    assert page.locator("#overview dd").first.inner_text() == "2,000"


def test_one_hover_line_goes_through_all_charts(address: str, open_page: OpenPage) -> None:
    page = open_page(address)
    charts = page.locator("#curves figure:visible")
    expect(charts).to_have_count(9)
    box = charts.nth(0).locator(".picture").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_timeout(100)
    overlays = page.locator("#curves figure:visible canvas.over")
    assert [drawn_in(overlay) > 50 for overlay in overlays.all()] == [True] * 9
    before = charts.nth(3).locator("b").inner_text()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
    expect(charts.nth(3).locator("b")).not_to_have_text(before)


def drawn_in(canvas: object) -> int:
    count: int = canvas.evaluate(  # type: ignore[attr-defined]
        "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data"
        ".filter((value, at) => at % 4 === 3 && value > 0).length"
    )
    return count


def test_dragging_zooms_and_a_double_click_goes_back(address: str, open_page: OpenPage) -> None:
    page = open_page(address)
    picture = page.locator("#curves figure:visible .picture").first
    box = picture.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 180, box["y"] + 50, steps=4)
    page.mouse.up()
    first = page.get_by_label("First step shown")
    expect(first).not_to_have_value("")
    picture.dblclick()
    expect(first).to_have_value("")


def test_the_keyboard_moves_the_line_and_what_is_there_is_spoken(address: str, open_page: OpenPage) -> None:
    page = open_page(address)
    chart = page.get_by_role("group", name="Reward")
    chart.focus()
    page.keyboard.press("End")
    spoken = page.locator("[aria-live=polite]")
    expect(spoken).to_contain_text("step 2000: ")
    page.keyboard.press("Shift+ArrowLeft")
    expect(spoken).to_contain_text("step 1990: ")
    page.keyboard.press("Escape")


def test_every_control_and_every_picture_has_a_name(address: str, open_page: OpenPage) -> None:
    page = open_page(address)
    expect(page.locator("#samples details").first).to_be_visible()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, select, button, canvas[role=img], a, section")]
        .filter((node) => ![node.getAttribute("aria-label"), node.innerText, node.labels?.[0]?.innerText]
          .some((name) => name?.trim()))
        .map((node) => node.outerHTML.slice(0, 120))"""
    )
    assert nameless == []
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.locator("h1").count() == 1
    picture = page.get_by_role("img", name="Loss. : from")
    expect(picture).to_have_count(1)


def test_samples_are_searched_filtered_and_opened_by_keyboard_alone(
    address: str, open_page: OpenPage
) -> None:
    page = open_page(address)
    status = page.locator("#samples [role=status]")
    expect(status).to_have_text("16,000 samples.")
    page.get_by_label("Search").fill("1999003")
    expect(status).to_have_text("1 of 16,000 samples match.")
    row = page.locator("#samples summary")
    row.focus()
    page.keyboard.press("Enter")
    opened = page.locator("#samples .opened")
    expect(opened).to_contain_text("p1999@1999.0_g3")
    expect(opened).to_contain_text("expected")
    expect(opened).to_contain_text("format")
    page.get_by_label("Search").fill("")
    page.get_by_label("Verdict").select_option("wrong")
    expect(page.locator("#samples .mark.right")).to_have_count(0)
    expect(page.locator("#samples .mark.wrong")).to_have_count(25)


def test_several_runs_are_compared_in_curves_results_and_recipe(address: str, open_page: OpenPage) -> None:
    page = open_page(f"{address}?run=long")
    page.get_by_label("other").check()
    table = page.get_by_role("table", name="Results")
    expect(table.locator("tbody tr")).to_have_count(3)  # and what lies between them
    expect(page.locator("#recipe")).to_contain_text("policy.optimizer.lr")
    expect(page.locator("#recipe tbody tr")).to_have_count(2)
    expect(page.get_by_role("group", name="Reward").locator(".entry")).to_have_count(2)
    assert page.url.endswith("?run=long&run=other")
    page.get_by_label("From here on of run").select_option("other")
    expect(page.locator("#samples [role=status]")).to_have_text("600 samples.")


def test_what_the_run_has_not_written_is_named_with_its_key_and_no_panel_is_empty(
    address: str, open_page: OpenPage
) -> None:
    page = open_page(address)
    expect(page.locator(".missing")).to_contain_text("loss.kl_coefficient")
    expect(page.locator(".missing")).to_contain_text("logging.detail_every")
    for section in page.locator("section:visible").all():
        assert section.locator(".body > *").count() > 0


def test_a_page_at_390_pixels_is_as_wide_as_the_screen(address: str, open_page: OpenPage) -> None:
    page = open_page(address, PHONE)
    expect(page.locator("#samples details").first).to_be_visible()
    page.locator("#samples summary").first.click()
    page.locator("#recipe summary").click()
    page.locator("details.all > summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert (
        page.evaluate(
            "Math.min(...[...document.querySelectorAll('#samples summary')].map(s => s.offsetHeight))"
        )
        >= 30
    )


def test_a_running_run_is_followed_without_a_reload(
    tmp_path: Path, dashboard: Dashboard, open_page: OpenPage
) -> None:
    run = write_long_run(tmp_path / "run", 5, 1)
    page = open_page(dashboard(run))
    step = page.locator("#overview dd").first
    expect(step).to_have_text("5")
    rng = random.Random(3)
    with (run / "metrics.jsonl").open("a") as file:
        for number in (6, 7):
            file.write(json.dumps({"kind": "step", "step": number, **metrics_of(number, rng)}) + "\n")
    expect(step).to_have_text("7", timeout=4000)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 8, "train/kl": 0.25}) + "\n")
    expect(page.get_by_role("group", name="KL to the reference")).to_be_visible()
    (run / "summary.json").write_text('{"completed": true}')
    expect(page.locator("#overview")).to_contain_text("finished")


def test_a_run_that_is_opened_before_its_first_step_gets_its_recipe_and_colours_as_they_come(
    tmp_path: Path, dashboard: Dashboard, open_page: OpenPage
) -> None:
    run = write_long_run(tmp_path / "run", 0, 0)
    recipe = run / "config.yaml"
    recipe.unlink()
    with (run / "metrics.jsonl").open("a") as file:
        for number in (20, 40):
            line = {"kind": "phase", "step": number, "phase": "warm_start", "warm_start/loss": 1 / number}
            file.write(json.dumps(line) + "\n")
    page = open_page(dashboard(run))
    warm = page.get_by_role("group", name="Loss of the warm start")
    expect(warm).to_be_visible()
    expect(page.locator(".missing")).to_have_text("Everything else comes with the first step.")
    recipe.write_text("grpo: {max_num_steps: 9}\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 3, **metrics_of(3, random.Random(3))}) + "\n")
    expect(page.locator("#overview dd").first).to_have_text("3 of 9", timeout=4000)
    expect(warm).to_be_hidden()
    column = page.locator("#time .entry", has_text="token_mask").locator(".swatch")
    assert column.evaluate("node => node.style.getPropertyValue('--colour')") == colour("token_mask")


def test_a_run_that_begins_anew_is_shown_anew(
    tmp_path: Path, dashboard: Dashboard, open_page: OpenPage
) -> None:
    run = write_long_run(tmp_path / "run", 9, 1)
    page = open_page(dashboard(run))
    step = page.locator("#overview dd").first
    expect(step).to_have_text("9")
    write_long_run(tmp_path / "fresh", 4, 1)
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / "fresh" / name).replace(run / name)
    expect(step).to_have_text("4", timeout=4000)


def test_texts_of_a_model_are_shown_as_texts(
    tmp_path: Path, dashboard: Dashboard, open_page: OpenPage
) -> None:
    run = write_long_run(tmp_path / "run", 2, 0)
    evil = "<img src=x onerror=\"document.title='gone'\"><script>document.title='gone'</script>"
    messages = [{"role": "user", "content": evil}, {"role": "assistant", "content": evil}]
    line = {"step": 1, "split": "train", "messages": messages, "expected": evil, "reward": 1.0}
    (run / "samples.jsonl").write_text(json.dumps(line) + "\n")
    page = open_page(dashboard(run))
    page.locator("#samples summary").click()
    expect(page.locator("#samples .opened pre").first).to_have_text(evil)
    assert page.title() == "headrace"


def test_the_theme_can_be_chosen_and_pictures_follow(address: str, open_page: OpenPage) -> None:
    page = open_page(address, scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    button = page.get_by_role("button", name="theme")
    button.click()
    assert button.inner_text() == "theme: light"
    assert page.evaluate(background) != dark
    page.reload()
    expect(page.get_by_role("button", name="theme: light")).to_be_visible()
