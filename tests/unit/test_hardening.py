"""What runs under compose/ has no more rights than it needs: containers, pods, the systemd unit."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge import config

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"
STACKS = ["compose.yaml", "compose.production.yaml"]
OWNERS_OF_VOLUMES = {"nats-data"}
"""Services that run as root, without a network, give a volume to its user, and end."""
CONSUMERS = {"mirror", "spark"}
EXACT_VERSION = re.compile(
    # PostgreSQL's versions have two numbers, those of the others three.
    r"(?:postgres:\d+\.\d+|[\w./-]+:v?\d+\.\d+\.\d+)(?:-[a-z][\w.]*)*(?:@sha256:[0-9a-f]{64})?\Z"
)

Service = dict[str, Any]


def services(stack: str) -> dict[str, Service]:
    found: dict[str, Service] = yaml.safe_load((COMPOSE / stack).read_text())["services"]
    return found


every_service = pytest.mark.parametrize(
    ("stack", "name"),
    [(stack, name) for stack in STACKS for name in services(stack)],
    ids=lambda value: value.removesuffix(".yaml"),
)


@every_service
def test_a_container_cannot_write_its_image_or_gain_rights(stack: str, name: str) -> None:
    service = services(stack)[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    for key in ("privileged", "devices", "pid", "ipc", "userns_mode", "group_add"):
        assert key not in service
    assert service.get("network_mode") != "host"
    assert not [volume for volume in service.get("volumes", []) if "docker.sock" in volume]


@every_service
def test_a_container_does_not_run_as_root(stack: str, name: str) -> None:
    service = services(stack)[name]
    if name in OWNERS_OF_VOLUMES:
        assert service["network_mode"] == "none"
        assert set(service["cap_add"]) == {"CHOWN", "DAC_READ_SEARCH"}
        assert service["entrypoint"][0] == "chown"
        assert not {"environment", "ports", "restart"} & set(service)
    else:
        assert service["user"].partition(":")[0] not in ("", "0", "root")
        assert "cap_add" not in service


@every_service
def test_a_container_has_limits(stack: str, name: str) -> None:
    service = services(stack)[name]
    assert re.fullmatch(r"\d+[mg]", service["mem_limit"])
    assert 0 < service["pids_limit"] <= 1024
    assert service["ulimits"]["core"] == 0


@every_service
def test_files_of_the_checkout_are_mounted_read_only(stack: str, name: str) -> None:
    for volume in services(stack)[name].get("volumes", []):
        assert not volume.startswith(".") or volume.endswith(":ro"), volume


@every_service
def test_an_image_has_an_exact_version(stack: str, name: str) -> None:
    service = services(stack)[name]
    if "build" in service or service["image"].startswith("${TAILRACE_IMAGE:?"):
        return
    assert EXACT_VERSION.match(service["image"]), service["image"]


def test_images_outside_the_stacks_have_exact_versions_too() -> None:
    stages: set[str] = set()
    for image, stage in re.findall(
        r"^FROM (\S+)(?: AS (\S+))?$", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE
    ):
        assert image in stages or EXACT_VERSION.match(image), image
        stages.add(stage)
    assert EXACT_VERSION.match(_container()["image"])
    example = (COMPOSE / "production.env.example").read_text()
    (image,) = re.findall(r"^TAILRACE_IMAGE=(.*)$", example, re.MULTILINE)
    assert EXACT_VERSION.match(image)


@pytest.mark.parametrize("stack", STACKS)
def test_only_bridges_share_a_network_with_the_source(stack: str) -> None:
    found = services(stack)
    declared = set(yaml.safe_load((COMPOSE / stack).read_text())["networks"])
    members: defaultdict[str, set[str]] = defaultdict(set)
    for name, service in found.items():
        # A service without `networks` is on the network that all others without share.
        assert "networks" in service or service["network_mode"] == "none", name
        for network in service.get("networks", []):
            members[network].add(name)
    assert set(members) == declared
    bridges = {name for name in found if name.startswith("bridge")}
    assert members["source"] == bridges | ({"postgres"} & set(found))
    assert members["broker"] == bridges | {"nats"} | (CONSUMERS & set(found))
    assert members["metrics"] == bridges | {"prometheus"}
    assert members["dashboards"] == {"prometheus", "grafana"}


def test_every_secret_of_the_production_stack_must_be_set() -> None:
    text = (COMPOSE / "compose.production.yaml").read_text()
    for variable, operator in re.findall(r"\$\{(\w+)(:?[-?]?)", text):
        if re.search("PASSWORD|TOKEN|SECRET|DATABASE_URL|KEY", variable):
            assert operator == ":?", variable


def test_the_example_files_hold_no_secret_that_is_taken() -> None:
    """Docker Compose refuses an empty one; the bridge refuses the placeholder by its variable."""
    secrets = {
        name: item
        for item in config.definitions()
        if item.metadata["secret"]
        for name in config.environment_names(item)
    }
    refused: set[str] = set()
    for path in COMPOSE.rglob("*.example"):
        for variable, value in re.findall(r"^(\w+)=(.*)$", path.read_text(), re.MULTILINE):
            if variable in secrets and ("@" in value or "URL" not in variable) and value:
                settings = config.load({}, {variable: value})
                assert config.example_secrets(settings, {}) == [variable], path
                refused.add(variable)
            elif re.search("PASSWORD|TOKEN|SECRET", variable):
                assert value == "", f"{path}: {variable}"
    assert {"DATABASE_URL", "NATS_BRIDGE_PASSWORD", "BRIDGE_ADMIN_TOKEN"} <= refused


def _documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((COMPOSE / "kubernetes/bridge.yaml").read_text()))


def _kind(kind: str) -> dict[str, Any]:
    (found,) = [one for one in _documents() if one["kind"] == kind]
    return found


def _pod() -> dict[str, Any]:
    pod: dict[str, Any] = _kind("Deployment")["spec"]["template"]["spec"]
    return pod


def _container() -> dict[str, Any]:
    (container,) = _pod()["containers"]
    found: dict[str, Any] = container
    return found


def test_pods_satisfy_the_restricted_standard() -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
    pod, container = _pod(), _container()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["runAsGroup"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(pod)
    assert all("hostPort" not in port for port in container["ports"])
    assert all(set(volume) == {"name", "emptyDir"} for volume in pod["volumes"])
    assert all(volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"])
    assert set(container["resources"]["limits"]) == {"cpu", "memory", "ephemeral-storage"}
    assert not any("value" in one and "PASSWORD" in one["name"] for one in container["env"])


def test_the_network_policy_allows_only_dns_postgresql_nats_and_prometheus() -> None:
    policy = _kind("NetworkPolicy")["spec"]
    labels = _kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    for rule in policy["ingress"]:
        assert rule["from"]
        assert rule["ports"] == [{"protocol": "TCP", "port": 9090}]
    (peer,) = policy["ingress"][0]["from"]
    assert peer["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prometheus"}
    reached = {}
    for rule in policy["egress"]:
        # A rule without `to`, or with an empty selector, would allow every destination.
        (peer,) = rule["to"]
        (label,) = peer["podSelector"]["matchLabels"].values()
        reached[label] = {(port["protocol"], port["port"]) for port in rule["ports"]}
    assert reached == {
        "kube-dns": {("UDP", 53), ("TCP", 53)},
        "postgresql": {("TCP", 5432)},
        "nats": {("TCP", 4222)},
    }


def unit_directives() -> dict[str, list[str]]:
    """The [Service] section of the unit; a directive may stand there several times."""
    text = (COMPOSE / "systemd/tailrace-bridge.service").read_text()
    section = text.partition("[Service]\n")[2].partition("\n[")[0]
    found: defaultdict[str, list[str]] = defaultdict(list)
    for key, value in re.findall(r"^(\w+)=(.*)$", section, re.MULTILINE):
        found[key].append(value)
    return dict(found)


@pytest.mark.parametrize(
    ("directive", "value"),
    [
        ("AmbientCapabilities", ""),
        ("CapabilityBoundingSet", ""),
        ("DynamicUser", "yes"),
        ("LimitCORE", "0"),
        ("LockPersonality", "yes"),
        ("MemoryDenyWriteExecute", "yes"),
        ("NoNewPrivileges", "yes"),
        ("PrivateDevices", "yes"),
        ("PrivateMounts", "yes"),
        ("PrivateTmp", "yes"),
        ("PrivateUsers", "yes"),
        ("ProcSubset", "pid"),
        ("ProtectClock", "yes"),
        ("ProtectControlGroups", "yes"),
        ("ProtectHome", "yes"),
        ("ProtectHostname", "yes"),
        ("ProtectKernelLogs", "yes"),
        ("ProtectKernelModules", "yes"),
        ("ProtectKernelTunables", "yes"),
        ("ProtectProc", "invisible"),
        ("ProtectSystem", "strict"),
        ("RemoveIPC", "yes"),
        ("RestrictAddressFamilies", "AF_INET AF_INET6 AF_UNIX"),
        ("RestrictNamespaces", "yes"),
        ("RestrictRealtime", "yes"),
        ("RestrictSUIDSGID", "yes"),
        ("SystemCallArchitectures", "native"),
        ("UMask", "0077"),
    ],
)
def test_the_systemd_unit_takes_away(directive: str, value: str) -> None:
    assert unit_directives().get(directive) == [value]


def test_the_systemd_unit_limits_system_calls_memory_and_tasks() -> None:
    unit = unit_directives()
    # The first entry makes an allow-list; the last gives back what snapshot workers need.
    assert unit["SystemCallFilter"] == [
        "@system-service", "~@privileged @resources", "setpriority",
    ]  # fmt: skip
    assert {"MemoryMax", "TasksMax", "LimitNOFILE"} <= set(unit)
    assert "User" not in unit
    assert not {"ReadWritePaths", "BindPaths", "SupplementaryGroups"} & set(unit)
