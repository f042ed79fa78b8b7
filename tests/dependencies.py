"""The packages that tailrace installs: which are locked, their licences, known vulnerabilities.

python -m tests.dependencies licences | audit
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCKS = {
    "bridge": ROOT / "compose/requirements.lock",
    "spark": ROOT / "compose/requirements-spark.lock",
    "build": ROOT / "compose/requirements-build.lock",
}
USER_EXTRAS = frozenset({"", "arrow", "spark"})
"""What users install; the servers of the demo and the tools of developers are not in an image."""

PROBE_SECONDS = 3.5
AUDIT_SECONDS = 120.0
PYPI = ("--vulnerability-service", "pypi")
OSV = ("--vulnerability-service", "osv")

_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "GNU Lesser General Public License v3 (LGPLv3)": "LGPL-3.0-only",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}


@dataclass(frozen=True)
class Locked:
    """One entry of a lock file."""

    requirement: Requirement
    hashes: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str:
        (only,) = self.requirement.specifier
        assert only.operator == "=="
        return only.version


def read_lock(path: Path) -> list[Locked]:
    """Every entry of a lock file; a line that is not an entry raises ValueError."""
    entries = []
    for text in re.sub(r"\\\n", " ", path.read_text()).splitlines():
        if not text.strip() or text.startswith("#"):
            continue
        requirement, *hashes = re.split(r"\s+--hash=", text.strip())
        entries.append(Locked(Requirement(requirement), tuple(hashes), text))
    return entries


def required(extras: frozenset[str] = USER_EXTRAS) -> dict[str, metadata.Distribution]:
    """Every distribution that tailrace with these extras needs on this machine, by name."""
    found: dict[str, metadata.Distribution] = {}
    todo = [("tailrace", extras)]
    while todo:
        name, wanted = todo.pop()
        distribution = metadata.distribution(name)
        for text in distribution.requires or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": extra}) for extra in wanted):
                continue
            key = canonicalize_name(requirement.name)
            if key not in found:
                found[key] = metadata.distribution(requirement.name)
                todo.append((requirement.name, frozenset({"", *requirement.extras})))
    return found


def licence_of(distribution: metadata.Distribution) -> str:
    """The licence as an SPDX expression, or in the words of the package."""
    about = distribution.metadata
    if about["License-Expression"]:
        return about["License-Expression"]
    classifiers = [
        name.rpartition(" :: ")[2]
        for name in about.get_all("Classifier", [])
        if name.startswith("License ::")
    ]
    named = sorted({_CLASSIFIERS.get(name, name) for name in classifiers} - {"OSI Approved"})
    if named:
        return " OR ".join(named)
    first_line = (about["License"] or "unknown").strip().splitlines()[0]
    return _CLASSIFIERS.get(first_line, first_line)


def print_licences() -> int:
    for name, distribution in sorted(required().items()):
        print(f"{name:<20} {distribution.version:<12} {licence_of(distribution)}")
    return 0


def audit(
    services: tuple[tuple[str, ...], ...] = (PYPI, OSV), probe_seconds: float = PROBE_SECONDS
) -> int:
    """Ask the first advisory source that answers for known vulnerabilities of the locked packages.

    1 if there is one; 0 if there is none, or if no source answers, which is said.
    """
    reasons = []
    for service in services:
        source = service[1]
        probe = _ask(service, [read_lock(LOCKS["bridge"])[0]], probe_seconds)
        if isinstance(probe, str):
            reasons.append(f"{source}: {probe}")
            continue
        packages = {entry.text: entry for lock in LOCKS.values() for entry in read_lock(lock)}
        answer = _ask(service, list(packages.values()), AUDIT_SECONDS)
        if isinstance(answer, str):
            reasons.append(f"{source}: {answer}")
            continue
        for package in answer:
            for found in package["vulns"]:
                repaired = ", ".join(found["fix_versions"]) or "no version"
                print(
                    f"audit: {package['name']} {package['version']} has {found['id']}, "
                    f"repaired in {repaired}; run `make lock`",
                    file=sys.stderr,
                )
        vulnerable = sum(bool(package["vulns"]) for package in answer)
        print(f"audit: {len(answer)} packages, {vulnerable} with known vulnerabilities ({source})")
        return 1 if vulnerable else 0
    print(f"audit: NOT done: no advisory source can be reached ({'; '.join(reasons)})")
    return 0


def _ask(service: tuple[str, ...], packages: list[Locked], limit: float) -> list[Any] | str:
    """What pip-audit found for each package, or why it could not find out."""
    with tempfile.TemporaryDirectory() as directory:
        listed, answer = Path(directory, "requirements.txt"), Path(directory, "answer.json")
        listed.write_text("\n".join(package.text for package in packages) + "\n")
        command = [
            sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--disable-pip",
            "--require-hashes", "--requirement", str(listed), "--timeout", "3", *service,
            "--format", "json", "--output", str(answer), "--cache-dir", directory,
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no answer in {limit:g} s"
        if not answer.exists() or not answer.read_text():
            return (done.stderr.strip() or "no answer").splitlines()[-1].partition(":")[0]
        results: list[Any] = json.loads(answer.read_text())["dependencies"]
    # pip-audit itself counts a package that the source does not know as one without vulnerability.
    unknown = [package for package in results if "vulns" not in package]
    if unknown or not results:
        return f"does not know {len(unknown)} of {len(packages)} packages"
    return results


def main() -> int:
    commands = {"licences": print_licences, "audit": audit}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        print(__doc__, file=sys.stderr)
        return 2
    return commands[sys.argv[1]]()


if __name__ == "__main__":
    sys.exit(main())
