"""The files under compose/ agree with the code: ports, variables, subjects, metrics, commands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bridge import cli, config
from bridge.preflight.permissions import READER_INBOX, reader_permissions, server_configuration
from bridge.telemetry.metrics import registry_for, render
from bridge.telemetry.stats import BridgeStats
from consumer_sdk.wire import Subjects

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"
STACKS = ["compose.yaml", "compose.production.yaml"]
BRIDGE_PORT = 9090


def load(name: str) -> Any:
    return yaml.safe_load((COMPOSE / name).read_text())


def services(stack: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = load(stack)["services"]
    return found


def bridges(stack: str) -> dict[str, dict[str, Any]]:
    return {name: one for name, one in services(stack).items() if name.startswith("bridge")}


def bridge_variables() -> set[str]:
    return {name for item in config.definitions() for name in config.environment_names(item)}


def exported_metrics() -> set[str]:
    """Every sample name the bridge exports once everything has happened."""
    stats = BridgeStats()
    stats.safe_wal_size, stats.wal_headroom_seconds = 1, 1.0
    stats.table("t")
    stats.begin_snapshot("s", "t").total_estimate = 1
    text = render(registry_for(stats)).decode()
    families = text_string_to_metric_families(text)
    return {sample.name for family in families for sample in family.samples}


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:bridge|process)_[a-z0-9_]+", expression))


def all_yaml() -> list[Path]:
    return sorted([*COMPOSE.rglob("*.yml"), *COMPOSE.rglob("*.yaml")])


@pytest.mark.parametrize("path", all_yaml(), ids=lambda path: str(path.relative_to(COMPOSE)))
def test_yaml_file_parses(path: Path) -> None:
    assert all(document for document in yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("stack", STACKS)
def test_bridge_variables_are_ones_the_bridge_reads(stack: str) -> None:
    assert bridges(stack)
    for one in bridges(stack).values():
        assert set(one["environment"]) <= bridge_variables()


@pytest.mark.parametrize("stack", STACKS)
def test_bridge_flags_are_ones_the_bridge_takes(stack: str) -> None:
    for one in bridges(stack).values():
        options = cli._parser("run").parse_args(filled(one["command"]))
        assert options.slot
        assert options.pub


def filled(command: list[str]) -> list[str]:
    """Variables replaced by their defaults, as docker compose does."""
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in command]


@pytest.mark.parametrize("stack", STACKS)
def test_no_two_services_want_the_same_port_of_the_host(stack: str) -> None:
    published = [port for one in services(stack).values() for port in one.get("ports", [])]
    host_ports = [re.sub(r"\$\{[^}]*\}", "x", port).split(":")[1] for port in published]
    assert len(host_ports) == len(set(host_ports))
    assert all(re.match(r"127\.0\.0\.1:|\$\{NATS_LISTEN:-127\.0\.0\.1\}:", p) for p in published)


@pytest.mark.parametrize("stack", STACKS)
def test_prometheus_listens_beside_the_bridge_and_grafana_finds_it(stack: str) -> None:
    default_port = next(item.default for item in config.definitions() if item.name == "port")
    assert default_port == BRIDGE_PORT
    (listen,) = [word for word in services(stack)["prometheus"]["command"] if "listen" in word]
    port = listen.rpartition(":")[2]
    assert int(port) != BRIDGE_PORT
    assert services(stack)["prometheus"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    source = load("grafana/provisioning/datasources/prometheus.yml")["datasources"][0]
    assert source["url"] == f"http://prometheus:{port}"


@pytest.mark.parametrize("stack", STACKS)
def test_prometheus_scrapes_every_bridge_of_the_stack(stack: str) -> None:
    (job,) = load("prometheus/prometheus.yml")["scrape_configs"]
    (discovery,) = job["dns_sd_configs"]
    assert set(bridges(stack)) <= set(discovery["names"])
    assert discovery["port"] == BRIDGE_PORT
    for one in bridges(stack).values():
        assert one["ports"][0].endswith(f":{BRIDGE_PORT}")


@pytest.mark.parametrize("stack", STACKS)
def test_prometheus_sends_the_token_for_reading_that_the_bridges_expect(stack: str) -> None:
    (job,) = load("prometheus/prometheus.yml")["scrape_configs"]
    (secret,) = services(stack)["prometheus"]["secrets"]
    assert job["authorization"] == {"credentials_file": f"/run/secrets/{secret}"}
    file = load(stack)["secrets"][secret]["file"]
    for one in bridges(stack).values():
        token = one["environment"]["BRIDGE_READ_TOKEN"]
        if token.startswith("$"):
            assert file == "./bridge-read-token"
        else:
            assert token == (COMPOSE / file).read_text().strip()


@pytest.mark.parametrize("stack", STACKS)
def test_a_bridge_on_all_addresses_has_tokens_and_is_not_open_to_everyone(stack: str) -> None:
    for one in bridges(stack).values():
        assert one["environment"]["BRIDGE_HOST"] == "0.0.0.0"
        assert {"BRIDGE_ADMIN_TOKEN", "BRIDGE_READ_TOKEN"} <= set(one["environment"])
        assert "BRIDGE_HTTP_OPEN" not in one["environment"]


def test_the_pod_monitor_reads_with_the_token_that_the_manifest_asks_for() -> None:
    monitor = load("kubernetes/pod-monitor.yaml")
    documents = list(yaml.safe_load_all((COMPOSE / "kubernetes/bridge.yaml").read_text()))
    deployment = next(one for one in documents if one["kind"] == "Deployment")
    pod = deployment["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (container,) = pod["spec"]["containers"]
    assert endpoint["port"] == container["ports"][0]["name"]
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["name"] == container["envFrom"][0]["secretRef"]["name"]
    assert credentials["key"] in bridge_variables()


@pytest.mark.parametrize("stack", STACKS)
def test_mounted_files_exist(stack: str) -> None:
    for one in services(stack).values():
        for volume in one.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE / source).exists(), source


@pytest.mark.parametrize("stack", STACKS)
def test_services_wait_only_for_services_of_the_stack(stack: str) -> None:
    found = services(stack)
    for one in found.values():
        assert set(one.get("depends_on", [])) <= set(found)
        for volume in one.get("volumes", []):
            name = volume.split(":")[0]
            assert name.startswith(".") or name in load(stack)["volumes"]


def test_every_variable_of_the_production_stack_is_in_the_example_file() -> None:
    text = (COMPOSE / "compose.production.yaml").read_text()
    needed = set(re.findall(r"\$\{(\w+):\?", text))
    optional = set(re.findall(r"\$\{(\w+):-", text))
    given = set(
        re.findall(r"^(\w+)=", (COMPOSE / "production.env.example").read_text(), re.MULTILINE)
    )
    assert needed <= given
    assert given <= needed | optional


def test_no_password_is_on_a_command_line() -> None:
    for stack in STACKS:
        for name, one in services(stack).items():
            words = " ".join([*one.get("entrypoint", []), *map(str, one.get("command", []))])
            assert not re.search(r"://[^/@\s]*:[^/@\s]*@|password", words, re.IGNORECASE), name


def test_nats_accounts_are_those_that_check_prints() -> None:
    text = (COMPOSE / "nats/nats.conf").read_text()
    assert text.endswith(f"{server_configuration(Subjects(), '_INBOX')}\n")


def test_consumers_have_the_inbox_that_their_account_lets_them_hear() -> None:
    spark = services("compose.yaml")["spark"]["environment"]
    assert spark["NATS_INBOX_PREFIX"] == READER_INBOX


def test_consumers_cannot_write_changes_snapshots_or_schemas() -> None:
    allowed = reader_permissions(Subjects(), READER_INBOX).publish
    assert not [one for one in allowed if one.startswith(("cdc.", "init.", "$KV.", "$O."))]
    assert not [one for one in allowed if re.search(r"STREAM\.(CREATE|UPDATE|DELETE|PURGE)", one)]


def test_passwords_of_nats_come_from_variables_both_stacks_set() -> None:
    wanted = set(re.findall(r"\$(NATS_\w+)", (COMPOSE / "nats/nats.conf").read_text()))
    assert wanted == {"NATS_BRIDGE_PASSWORD", "NATS_CONSUMER_PASSWORD"}
    for stack in STACKS:
        assert wanted <= set(services(stack)["nats"]["environment"])


def test_every_metric_in_an_alert_is_exported() -> None:
    exported = exported_metrics()
    for rule in load("prometheus/alerts.yml")["groups"][0]["rules"]:
        assert metrics_in(rule["expr"]) <= exported, rule["alert"]


def test_every_metric_in_the_grafana_dashboard_is_exported() -> None:
    exported = exported_metrics()
    dashboard = json.loads((COMPOSE / "grafana/dashboards/tailrace.json").read_text())
    used: set[str] = set()
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == "tailrace-prometheus"
        for target in panel["targets"]:
            used |= metrics_in(target["expr"])
    assert used <= exported
    assert len(used) > 15


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    text = (ROOT / "OPERATIONS.md").read_text()
    runbooks = set(re.findall(r"^### (\w+)$", text.partition("## Runbooks")[2], re.MULTILINE))
    rules = load("prometheus/alerts.yml")["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} == runbooks
    for rule in rules:
        assert rule["annotations"]["runbook"] == f"OPERATIONS.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_thresholds_of_the_alerts_are_those_of_the_bridge() -> None:
    rules = {r["alert"]: r["expr"] for r in load("prometheus/alerts.yml")["groups"][0]["rules"]}
    defaults = {item.name: item.default for item in config.definitions()}
    for alert, setting in (("WalLagHigh", "wal_warning"), ("WalLagCritical", "wal_critical")):
        product = rules[alert].rpartition(">")[2]
        factors = [int(part) for part in product.split("*")]
        assert factors[0] * factors[1] * factors[2] == defaults[setting]


def test_every_metric_the_operations_page_names_is_exported() -> None:
    named = set(re.findall(r"`(bridge_[a-z0-9_]+)", (ROOT / "OPERATIONS.md").read_text()))
    exported = exported_metrics()
    assert named
    assert {name for name in named if not any(one.startswith(name) for one in exported)} == set()


def test_every_flag_and_variable_the_operations_page_names_exists() -> None:
    text = re.sub(r"`(?:aws|gcloud|az) [^`]*`", "", (ROOT / "OPERATIONS.md").read_text())
    flags = {config.flag_name(item) for item in config.definitions()}
    others = {"--fix-sql", "--permissions", "--yes", "--rebootstrap"}
    assert set(re.findall(r"--[a-z][a-z-]+", text)) <= flags | others
    assert set(re.findall(r"\bBRIDGE_\w+", text)) <= bridge_variables()


def test_the_operations_page_explains_every_exit_code() -> None:
    text = (ROOT / "OPERATIONS.md").read_text()
    section = text.partition("### Exit codes")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (\d) \|", section, re.MULTILINE) == ["0", "1", "2", "3", "4"]


def test_no_file_that_restarts_the_bridge_decides_on_gaps() -> None:
    """Restarts after exit code 4 are harmless only as long as each of them refuses again."""
    for path in COMPOSE.rglob("*"):
        if path.is_file():
            text = path.read_text(errors="replace").lower().replace("_", "-")
            assert "on-gap" not in text, path


def test_the_image_runs_as_nobody_special_and_checks_its_health() -> None:
    text = (COMPOSE / "Dockerfile").read_text()
    final = text.rpartition("\nFROM ")[2]
    assert "USER root" not in final
    assert "USER 10001" in text
    assert "HEALTHCHECK" in final
    assert f"127.0.0.1:{BRIDGE_PORT}/health" in final
    assert "BRIDGE_HTTP_CERT" in final
    assert 'ENTRYPOINT ["bridge"]' in final
    for source in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists(), name


def test_the_systemd_unit_starts_the_bridge_with_variables_it_reads() -> None:
    unit = (COMPOSE / "systemd/tailrace-bridge.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.+)$", unit, re.MULTILINE)
    program, *flags = shlex.split(start)
    assert program.endswith("/bin/bridge")
    assert cli._parser("run").parse_args(flags).slot == "${BRIDGE_SLOT}"
    example = (COMPOSE / "systemd/bridge.env.example").read_text()
    assert set(re.findall(r"^(\w+)=", example, re.MULTILINE)) <= bridge_variables()
    assert re.search(r"^RestartPreventExitStatus=2 4$", unit, re.MULTILINE)


def test_the_kubernetes_manifest_asks_for_pages_and_flags_that_exist() -> None:
    documents = list(yaml.safe_load_all((COMPOSE / "kubernetes/bridge.yaml").read_text()))
    deployment = next(one for one in documents if one["kind"] == "Deployment")
    pod = deployment["spec"]["template"]
    assert pod["spec"]["enableServiceLinks"] is False
    (container,) = pod["spec"]["containers"]
    cli._parser("run").parse_args(container["args"])
    assert {one["name"] for one in container["env"]} <= bridge_variables()
    assert container["ports"][0]["containerPort"] == BRIDGE_PORT
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/health"
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert all(
        selector.items() <= labels.items()
        for labels in (pod["metadata"]["labels"], deployment["metadata"]["labels"])
    )
