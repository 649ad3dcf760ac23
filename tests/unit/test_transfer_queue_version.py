"""A TransferQueue that nobody has tested is refused by name, before anything starts."""

from pathlib import Path

import pytest

from headrace.data_plane import build_data_plane_client
from headrace.data_plane.adapters import check_version
from headrace.data_plane.factory import transfer_queue
from headrace.errors import ConfigError


@pytest.fixture
def newer_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another TransferQueue is installed, as far as its metadata says."""
    folder = tmp_path / "transferqueue-0.1.99.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: TransferQueue\nVersion: 0.1.99\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("bootstrap", [True, False])
def test_an_untested_transfer_queue_is_refused_with_its_version_and_the_remedy(
    newer_version: None, bootstrap: bool
) -> None:
    says = (
        r"TransferQueue 0\.1\.99 is installed on .*tested with 0\.1\.11 alone.*pip install 'TransferQueue=="
    )
    with pytest.raises(ConfigError, match=says):
        build_data_plane_client({"impl": "transfer_queue"}, bootstrap=bootstrap)
    with pytest.raises(ConfigError, match=says):
        transfer_queue()
    build_data_plane_client({"impl": "local"}, bootstrap=True).close()


def test_the_transfer_queue_that_is_installed_here_is_taken() -> None:
    pytest.importorskip("transfer_queue", reason="needs headrace[ray]")
    check_version()
