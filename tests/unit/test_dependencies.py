"""The image contains the packages of the lock files and nothing else of the checkout or network."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.dependencies import LOCKS, ROOT, licence_of, read_lock, required

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (ROOT / "compose/Dockerfile").read_text()
PYTHONS = ["3.11", "3.12", "3.13"]
PLATFORMS = [("linux", "Linux"), ("darwin", "Darwin")]
ALLOWED_LICENCES = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MIT-0",
    "PSF-2.0", "Zlib",
    # psycopg: used unchanged and replaceable, which is what this licence asks for.
    "LGPL-3.0-only",
}  # fmt: skip

REQUIRED = required()

every_lock = pytest.mark.parametrize("lock", LOCKS)


def wanted(lock: str) -> list[Requirement]:
    """What pyproject.toml asks for and the lock has to satisfy."""
    if lock == "build":
        texts = PROJECT["build-system"]["requires"]
    else:
        extras = PROJECT["project"]["optional-dependencies"]
        texts = [*PROJECT["project"]["dependencies"], *extras["arrow"]]
        texts += extras["spark"] if lock == "spark" else []
    return [Requirement(text) for text in texts]


@every_lock
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda pair: pair[0])
def test_the_lock_satisfies_the_ranges_of_the_project(
    lock: str, python: str, platform: tuple[str, str]
) -> None:
    machine = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": platform[0],
        "platform_system": platform[1],
    }
    chosen: dict[str, str] = {}
    for entry in read_lock(LOCKS[lock]):
        marker = entry.requirement.marker
        if marker is None or marker.evaluate(machine):
            assert entry.name not in chosen, f"{entry.name} twice"
            chosen[entry.name] = entry.version
    for requirement in wanted(lock):
        name = canonicalize_name(requirement.name)
        assert requirement.specifier.contains(chosen[name]), (requirement, chosen[name])


@every_lock
def test_every_locked_package_has_an_exact_version_and_hashes(lock: str) -> None:
    entries = read_lock(LOCKS[lock])
    assert entries
    for entry in entries:
        assert entry.version
        assert entry.hashes, entry.name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in entry.hashes), entry.name


@every_lock
def test_a_lock_names_no_package_index(lock: str) -> None:
    assert not re.search(r"://|^\s*-(?!-hash)", LOCKS[lock].read_text(), re.MULTILINE)


def test_everything_that_an_installed_tailrace_needs_is_locked() -> None:
    locked = {entry.name for entry in read_lock(LOCKS["spark"])}
    assert set(REQUIRED) <= locked
    assert {entry.name for entry in read_lock(LOCKS["bridge"])} <= locked | {"tzdata"}


def test_both_images_hold_the_same_versions() -> None:
    spark = {(entry.name, entry.version) for entry in read_lock(LOCKS["spark"])}
    assert {(entry.name, entry.version) for entry in read_lock(LOCKS["bridge"])} <= spark


def test_the_image_installs_only_what_is_locked() -> None:
    """Each pip of the Dockerfile checks hashes, or takes our own wheel and nothing from outside."""
    commands = re.findall(r"\bpip (install|wheel) (.*)", re.sub(r"\\\n", " ", DOCKERFILE))
    assert len(commands) == 5
    locks = set()
    built = []
    for verb, arguments in commands:
        if "--require-hashes" in arguments:
            assert "--only-binary :all:" in arguments
            locks |= set(re.findall(r"--requirement (\S+)", arguments))
            built.append(set(re.findall(r"--no-binary (\S+)", arguments)))
        else:
            assert "--no-deps" in arguments
            assert "--no-index" in arguments or (verb == "wheel" and arguments.endswith(" ."))
        if verb == "wheel" or "--no-binary" in arguments:
            assert "--no-build-isolation" in arguments
    assert locks == {"requirements-build.lock", "/requirements.lock"}
    # A package with a single hash has no wheel.
    for lock, names in zip(("build", "bridge", "spark"), built, strict=True):
        alone = sorted({one.name for one in read_lock(LOCKS[lock]) if len(one.hashes) == 1})
        assert names == ({",".join(alone)} if alone else set())
    for lock in LOCKS.values():
        assert f"compose/{lock.name}" in DOCKERFILE


def test_the_build_receives_only_the_files_that_the_image_needs() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {
        name
        for sources in re.findall(r"^COPY (?!--)(.+) \S+$", DOCKERFILE, re.MULTILINE)
        for name in sources.split()
    }
    mounted = set(re.findall(r"type=bind,source=([^,]+)", DOCKERFILE))
    locks = {name for name in copied | mounted if name.endswith(".lock")}
    assert let_in == (copied | mounted) - locks | {"compose/requirements*.lock"}
    assert {"**/__pycache__", "**/*.env"} <= set(rules)
    assert all((ROOT / name).exists() for name in copied | mounted)


def test_files_with_secrets_of_a_deployment_are_not_committed() -> None:
    assert "*.env" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_the_licence_of_a_dependency_is_one_that_we_allow(name: str) -> None:
    licence = licence_of(REQUIRED[name])
    # One of the alternatives is enough, all of a conjunction are needed.
    alternatives = [set(re.split(r"\s+AND\s+", one.strip("() "))) for one in licence.split(" OR ")]
    assert any(parts <= ALLOWED_LICENCES for parts in alternatives), licence
