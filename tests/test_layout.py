"""The packaging: symlinks, wheel mapping and package directories say the same thing; files stay readable."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def tracked() -> list[str]:
    out = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=False)
    if out.returncode:
        pytest.skip("not a git checkout")
    return [name for name in out.stdout.splitlines() if os.path.exists(os.path.join(ROOT, name))]


def test_links_mapping_and_directories_agree() -> None:
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        targets = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]
    sources = set(targets["wheel"]["sources"]) - {"src"}
    links = {
        name for name in os.listdir(os.path.join(ROOT, "src/weenv")) if os.path.islink(os.path.join(ROOT, "src/weenv", name))
    }
    packages = {
        name
        for name in os.listdir(ROOT)
        if name not in ("tests", "integration", "benchmarks") and os.path.exists(os.path.join(ROOT, name, "__init__.py"))
    }
    assert links == sources == packages
    for target in ("wheel", "sdist"):
        assert {name for name in targets[target]["only-include"] if not name.startswith("src/")} == packages
    for name in links:
        assert os.readlink(os.path.join(ROOT, "src/weenv", name)) == f"../../{name}"


def test_every_package_directory_has_an_init() -> None:
    for name in tracked():
        if name.endswith(".py") and name.split("/")[0] in os.listdir(os.path.join(ROOT, "src/weenv")):
            assert os.path.exists(os.path.join(ROOT, os.path.dirname(name), "__init__.py")), name


def test_source_files_stay_under_about_600_lines() -> None:
    for name in tracked():
        if name.endswith(".py"):
            with open(os.path.join(ROOT, name), encoding="utf-8") as file:
                limit = 750 if name.startswith(("tests/", "integration/")) else 650
                assert sum(1 for _ in file) <= limit, name


def test_the_contract_of_the_registry_client_names_all_of_it() -> None:
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (contract,) = [one for one in contracts if one.get("forbidden_modules") == ["weenv.registry.groupref"]]
    modules = {name for name in os.listdir(os.path.join(ROOT, "registry")) if name.endswith(".py") and name != "__init__.py"}
    assert {f"{name.removeprefix('weenv.registry.')}.py" for name in contract["source_modules"]} == modules


@pytest.mark.slow
def test_the_wheel_holds_every_module(tmp_path: object) -> None:
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import os; os.chdir({ROOT!r}); from hatchling import build; build.build_wheel({str(tmp_path)!r})",
        ],
        check=True,
        capture_output=True,
    )
    (wheel,) = os.listdir(str(tmp_path))
    with zipfile.ZipFile(f"{tmp_path}/{wheel}") as archive:
        names = set(archive.namelist())
    top = set(os.listdir(os.path.join(ROOT, "src/weenv")))
    for name in tracked():
        if name.endswith(".py") and name.split("/")[0] in top:
            assert f"weenv/{name}" in names, name
    assert {"weenv/__init__.py", "weenv/py.typed"} <= names
