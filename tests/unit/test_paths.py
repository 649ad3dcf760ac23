"""Paths that a person writes: what cannot name a file is a mistake with the key, wherever the path is used."""

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.utils.paths import user_path


def test_a_path_is_taken_whether_something_is_there_or_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for text in (str(tmp_path), str(tmp_path / "nothing"), str(tmp_path / "file" / "below"), " odd #name "):
        assert user_path(text, "run_dir") == Path(text)
    assert user_path("~/x", "run_dir") == Path.home() / "x"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("~nosuchuser/x", "no home directory is known for '~nosuchuser'"),
        ("x" * 300, "File name too long"),
        ("a\0b", "embedded null byte"),
    ],
)
def test_a_path_that_names_no_file_is_a_mistake(text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        user_path(text, "env.path")
    message = str(caught.value)
    assert message.startswith("env.path=")
    assert fault in message
    assert len(message) < 300
    assert message.isprintable()
