"""Where the compiled copies come from, and what happens where they cannot be built."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from headrace.data_plane.routes_codec import pack_routes
from headrace.distributed.ragged_kernel import load_kernel

PROBE = """
import torch
from headrace.distributed.ragged import pad_ragged
from headrace.distributed.ragged_kernel import load_kernel
print(load_kernel() is not None, pad_ragged(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]), None, 9).tolist())
"""
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def run(code: str, environment: dict[str, str]) -> str:
    here = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**here, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def pad_elsewhere(**environment: str) -> str:
    """Pad rows in a fresh process and return whether it had the kernel, and the rows."""
    return run(PROBE, environment)


@needs_compiler
def test_the_kernel_is_built_once_into_the_cache_folder(tmp_path: Path) -> None:
    for _ in range(2):
        assert pad_elsewhere(XDG_CACHE_HOME=str(tmp_path)) == "True [[1, 9], [2, 3]]"
    (library,) = (tmp_path / "headrace").iterdir()
    assert library.suffix == ".so"


def loads(**environment: str) -> bool:
    """Return whether a fresh process has the kernel."""
    code = "from headrace.distributed.ragged_kernel import load_kernel; print(load_kernel() is not None)"
    return run(code, environment) == "True"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that was built here."""
    folder = tmp_path_factory.mktemp("cache")
    assert loads(XDG_CACHE_HOME=str(folder))
    (library,) = (folder / "headrace").iterdir()
    return library


def put_library(folder: Path, name: str, content: bytes) -> Path:
    library = folder / "headrace" / name
    library.parent.mkdir(mode=0o700)
    library.write_bytes(content)
    return library


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "cut short": lambda whole: whole[:4096],
    "a page less": lambda whole: whole[:-4096],
    "zeros within": lambda whole: whole[:4096] + bytes(4096) + whole[8192:],
    "no library": lambda whole: b"#!/bin/sh\n" * 1000,
}


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_again(damage: str, whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    library = put_library(tmp_path, whole.name, DAMAGES[damage](content))
    assert loads(XDG_CACHE_HOME=str(tmp_path))
    assert [file.read_bytes() for file in library.parent.iterdir()] == [content]
    library.write_bytes(DAMAGES[damage](content))
    assert not loads(XDG_CACHE_HOME=str(tmp_path), PATH="/nowhere")


@needs_compiler
def test_a_library_of_another_system_is_passed_over(whole: Path, tmp_path: Path) -> None:
    content = bytearray(whole.read_bytes())
    content[18:20] = b"\xff\xff"  # The machine in an ELF header.
    source = whole.name.split(".")[1]
    foreign = put_library(tmp_path, f"ragged_kernel.{source}.{sha256(content).hexdigest()[:16]}.so", content)
    assert not loads(XDG_CACHE_HOME=str(tmp_path), PATH="/nowhere")
    for _ in range(2):
        assert loads(XDG_CACHE_HOME=str(tmp_path))
        assert {file.name for file in foreign.parent.iterdir()} == {foreign.name, whole.name}
    assert loads(XDG_CACHE_HOME=str(tmp_path), PATH="/nowhere")


@needs_compiler
@pytest.mark.parametrize("damaged", [False, True])
def test_processes_that_build_at_once_all_get_the_kernel(damaged: bool, whole: Path, tmp_path: Path) -> None:
    if damaged:
        put_library(tmp_path, whole.name, whole.read_bytes()[:4096])
    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(lambda _: loads(XDG_CACHE_HOME=str(tmp_path)), range(6)))
    assert [file.read_bytes() for file in (tmp_path / "headrace").iterdir()] == [whole.read_bytes()]


@pytest.mark.parametrize("environment", [{"HEADRACE_KERNEL": "0"}, {"PATH": "/nowhere"}], ids=str)
def test_without_it_rows_are_padded_all_the_same(environment: dict[str, str], tmp_path: Path) -> None:
    assert pad_elsewhere(XDG_CACHE_HOME=str(tmp_path), **environment) == "False [[1, 9], [2, 3]]"


def test_a_cache_folder_that_cannot_be_made_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert pad_elsewhere(XDG_CACHE_HOME=str(tmp_path / "file")) == "False [[1, 9], [2, 3]]"


@needs_compiler
@pytest.mark.parametrize("experts", [128, 256, 300, 32_768])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_narrowing_gives_what_a_cast_gives_and_finds_every_id_out_of_range(
    experts: int, dtype: torch.dtype
) -> None:
    kernel = load_kernel()
    assert kernel is not None
    ids = torch.randint(-1, experts, (5001,), dtype=dtype, generator=torch.Generator().manual_seed(experts))
    ids[0], ids[-1] = -1, experts - 1
    row = (len(ids), 1)
    out = torch.empty(len(ids), dtype=torch.uint8 if experts <= 256 else torch.int16)
    sizes = ids.element_size(), out.element_size()
    if not kernel.can_narrow(*sizes, 1):
        pytest.skip("nothing to narrow")
    for wrong, place in (
        (None, 0),
        (-2, 0),
        (-2, 5000),
        (experts, 17),
        (torch.iinfo(dtype).min, 4999),
        (torch.iinfo(dtype).max, 1),
    ):
        given = ids.clone()
        if wrong is not None and wrong <= torch.iinfo(dtype).max:
            given[place] = wrong
        fits = bool(((given >= -1) & (given < experts)).all())
        assert kernel.narrow(given.data_ptr(), sizes[0], *row, experts, out.data_ptr(), sizes[1]) is fits
        if fits:
            assert torch.equal(out, given.to(out.dtype))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_missing_rows_keep_their_mark_when_routes_are_narrowed(dtype: torch.dtype) -> None:
    routes = torch.tensor([[[3, 1]], [[-1, -1]], [[0, 255]]], dtype=dtype)
    assert pack_routes([routes[:2], routes[2:]], num_experts=256).tolist() == [
        [[3, 1]],
        [[255, 255]],
        [[0, 255]],
    ]


@needs_compiler
@pytest.mark.parametrize("width", [2, 3, 8, 2048])
def test_narrowing_finds_every_row_that_is_partly_missing(width: int) -> None:
    kernel = load_kernel()
    assert kernel is not None
    rows = 3 + 6000 // width
    ids = torch.arange(rows * width, dtype=torch.int32).remainder_(250).view(rows, width)
    ids[1] = ids[-1] = -1
    out = torch.empty(rows, width, dtype=torch.uint8)
    sizes = (rows, width, 256, out.data_ptr(), 1)
    assert kernel.can_narrow(4, 1, width)
    assert not kernel.can_narrow(4, 1, 2049)
    assert kernel.narrow(ids.data_ptr(), 4, *sizes)
    assert torch.equal(out, ids.to(torch.uint8))
    for row, place in ((0, 0), (0, width - 1), (1, 0), (rows - 2, width // 2), (rows - 1, width - 1)):
        given = ids.clone()
        given[row, place] = 7 if given[row, place] < 0 else -1
        assert not kernel.narrow(given.data_ptr(), 4, *sizes)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 63, 64, 65, 1000, 70_003])
@pytest.mark.parametrize("shift", [0, 1, 7, 16])
def test_a_streamed_copy_writes_these_bytes_and_no_others(size: int, shift: int) -> None:
    kernel = load_kernel()
    if kernel is None:
        pytest.skip("there is no C compiler")
    source = torch.randint(0, 256, (size + 64,), dtype=torch.uint8)
    out = torch.full((size + 64,), 7, dtype=torch.uint8)
    kernel.copy(source[3:].data_ptr(), size, out[shift:].data_ptr())
    assert torch.equal(out[shift : shift + size], source[3 : 3 + size])
    assert torch.all(out[:shift] == 7)
    assert torch.all(out[shift + size :] == 7)
