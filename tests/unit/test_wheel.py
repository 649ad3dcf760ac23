"""The wheel holds what the package needs, and runs where there is no checkout."""

from pathlib import Path
from zipfile import ZipFile

import headrace
from wheel_session import InstalledWheel


def test_the_wheel_runs_from_an_empty_folder(installed_wheel: InstalledWheel, tmp_path: Path) -> None:
    done = installed_wheel.headrace("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"headrace {headrace.__version__}\n")
    where = installed_wheel.python("-c", "import headrace; print(headrace.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(installed_wheel.site))
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_holds_every_module_and_nothing_of_the_tests(installed_wheel: InstalledWheel) -> None:
    package = Path(headrace.__file__).parent
    with ZipFile(installed_wheel.path) as wheel:
        names = set(wheel.namelist())
    modules = {f"headrace/{file.relative_to(package).as_posix()}" for file in package.rglob("*.py")}
    page = {f.relative_to(package.parent).as_posix() for f in (package / "dashboard/static").iterdir()}
    assert modules | page <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"headrace"}
