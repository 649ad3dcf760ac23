"""The ways through headrace are as short as docs/overview.md says."""

import re
from pathlib import Path

import pytest

from headrace.data_plane import build_data_plane_client
from hops import Step, one_step, put_and_get

PAGE = (Path(__file__).parents[2] / "docs" / "overview.md").read_text()


def said(line: str) -> tuple[int, ...]:
    """Return the numbers of the line of counts that begins with a word."""
    counts = PAGE.split("<!-- counts -->")[1].split("<!-- end -->")[0]
    (found,) = re.findall(rf"^- {line}: (.*)$", counts, re.MULTILINE)
    return tuple(map(int, re.findall(r"\d+", found)))


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Step:
    return one_step(tmp_path_factory.mktemp("run"))


def test_a_put_and_a_get_pass_as_many_functions_and_files_as_the_page_says() -> None:
    store = build_data_plane_client({"enabled": True, "impl": "local", "store_name": "hops"}, bootstrap=True)
    functions = put_and_get(store)
    store.close()
    assert (functions.count, len(functions.seen)) == said("put and get of the local store")
    assert functions.count <= 60
    assert len(functions.seen) <= 8


@pytest.mark.parametrize(
    ("way", "line", "most"),
    [("rollout", "rollout", 3), ("optimizer", "training", 3), ("weights", "weights", 2)],
)
def test_few_files_lie_between_the_step_and_what_it_asks_for(
    step: Step, way: str, line: str, most: int
) -> None:
    assert (len(step.between[way]),) == said(line)
    assert len(step.between[way]) <= most


def test_a_loss_is_read_in_one_file(step: Step) -> None:
    assert (len(step.loss.seen),) == said("loss")
    assert len(step.loss.seen) <= 2


def test_the_table_names_each_form_of_the_ids_with_the_place_where_it_is_first_seen(step: Step) -> None:
    rows = re.findall(r"^\| ([\w ]+) \| `(\S+)`, `(\S+)` \|", PAGE, re.MULTILINE)
    assert [(form, *where.split(" ")) for form, where in step.forms.items()] == rows
    assert (len(rows),) == said("`input_ids`")
    assert len(rows) <= 8


def test_advantages_pass_as_many_functions_as_the_page_says(step: Step) -> None:
    assert (len(step.hops),) == said("advantages")
    assert len(step.hops) <= 9
