"""The files of the docs for other programs name commands, keys, files and times that hold.

The Compose file, the manifests for Kubernetes, the Dockerfile, the Procfile and the unit of systemd.
"""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.management import get_commands

from django_asyncq import conf
from django_asyncq.contrib import prometheus

from .test_docs import ASYNCQ, ROOT, RUNWORKERS, blocks_of, read

DEPLOYMENT = ROOT / "docs" / "deployment"
PAGE = ROOT / "docs" / "guides" / "containers.md"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOYMENT / "compose.yml").read_text())["services"]
MANIFESTS = {
    (each["kind"], each["metadata"]["name"]): each
    for each in yaml.safe_load_all((DEPLOYMENT / "kubernetes.yml").read_text())
}
POD: dict[str, Any] = MANIFESTS["Deployment", "workers"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
(DOCKERFILE,) = blocks_of(PAGE, "dockerfile")
AUTOSCALER: dict[str, Any] = yaml.safe_load((DEPLOYMENT / "autoscaler.yml").read_text())
(UNIT,) = (text for text in blocks_of(ROOT / "docs" / "guides" / "deployment.md", "ini") if ".service\n" in text)
PROBE_SECONDS = 30


def commands() -> Iterator[list[str]]:
    """Yield each command of `manage.py` in the files and on the page, without `manage.py`."""
    written: list[list[str]] = [service["command"] for service in SERVICES.values() if "command" in service]
    for manifest in MANIFESTS.values():
        pod = manifest["spec"].get("template", {}).get("spec", {})
        written += [container["args"] for container in pod.get("containers", [])]
    written += [json.loads(words) for words in re.findall(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)]
    for block in blocks_of(PAGE, "text", "sh"):
        written += [shlex.split(line) for line in block.splitlines() if "manage.py" in line]
    for words in written:
        if "manage.py" in words:
            yield words[words.index("manage.py") + 1 :]


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_commands_exist_with_their_options(words: list[str]) -> None:
    """In the database's migration, the workers and the probes."""
    name, *rest = words
    assert name in get_commands()
    options = {word for word in rest if word.startswith("--")}
    if name == "runworkers":
        assert options <= RUNWORKERS[""]
    elif name == "asyncq":
        assert options <= ASYNCQ[rest[0]]


def test_files_have_a_migration_workers_and_stores() -> None:
    """All commands were found: a file whose form has changed would be checked for nothing."""
    assert {"db", "redis", "migrate", "workers", "web"} == SERVICES.keys()
    assert [words[0] for words in commands()].count("runworkers") >= 4
    assert [words[0] for words in commands()].count("migrate") >= 3


def test_grace_periods_are_longer_than_the_drain() -> None:
    """By the ten seconds that the guide names."""
    drain = conf.Settings().shutdown_grace_seconds + 10
    assert POD["terminationGracePeriodSeconds"] >= drain
    assert int(SERVICES["workers"]["stop_grace_period"].removesuffix("s")) >= drain
    assert "lifecycle" not in CONTAINER
    assert f"TimeoutStopSec={drain:.0f}" in read("guides/deployment.md")


@pytest.mark.parametrize(
    ("command", "probe"),
    [
        (SERVICES["workers"]["command"], SERVICES["workers"]["healthcheck"]["test"][1:]),
        (CONTAINER["args"], CONTAINER["livenessProbe"]["exec"]["command"]),
        (CONTAINER["args"], CONTAINER["startupProbe"]["exec"]["command"]),
    ],
    ids=["compose", "liveness", "startup"],
)
def test_probes_look_at_the_file_that_is_touched(command: list[str], probe: list[str], tmp_path: Path) -> None:
    """And give the workers time for several beats."""
    file = command[command.index("--liveness-file") + 1]
    assert file in probe[-1]
    limits = re.findall(r"-lt (\d+)", probe[-1])
    assert all(int(limit) >= 3 * conf.Settings().beat_seconds for limit in limits)
    assert limits == [str(PROBE_SECONDS)] or probe[0] == "test"


def test_what_services_name_is_there() -> None:
    """Services that others wait for have a health or an end; volumes are declared; the image keeps its init."""
    volumes = yaml.safe_load((DEPLOYMENT / "compose.yml").read_text())["volumes"]
    for service in SERVICES.values():
        for other, how in service.get("depends_on", {}).items():
            assert other in SERVICES
            assert how["condition"] != "service_healthy" or "healthcheck" in SERVICES[other]
        assert {volume.split(":")[0] for volume in service.get("volumes", [])} <= volumes.keys()
        assert "entrypoint" not in service
    assert SERVICES["workers"]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
    assert 'ENTRYPOINT ["tini", "--"]' in DOCKERFILE and "command" not in CONTAINER


def test_the_environment_is_what_the_settings_read() -> None:
    """Each name of the page's settings is given by Compose, and named for the secret of Kubernetes."""
    (settings,) = blocks_of(PAGE, "python")
    names = set(re.findall(r'os\.environ\["(\w+)"\]', settings)) | {"DATABASE_URL"}
    assert names <= SERVICES["workers"]["environment"].keys()
    comment = (DEPLOYMENT / "kubernetes.yml").read_text().partition("apiVersion")[0]
    assert all(name in comment for name in names)


def test_selectors_find_the_pods() -> None:
    """Of the Deployment and of the PodDisruptionBudget."""
    labels = MANIFESTS["Deployment", "workers"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget"):
        wanted = MANIFESTS[kind, "workers"]["spec"]["selector"]["matchLabels"]
        assert wanted and wanted.items() <= labels.items()


def test_every_manifest_is_validated_in_ci() -> None:
    """Against the schemas of Kubernetes: each file beside the Compose file."""
    (validated,) = re.findall(r"kubernetes-validate --strict --quiet (.*)", (ROOT / ".ci" / "run").read_text())
    wanted = {path.name for path in DEPLOYMENT.iterdir()} - {"compose.yml"}
    assert wanted >= {"kubernetes.yml", "autoscaler.yml"}
    assert {Path(name).name for name in validated.split()} == wanted


def test_autoscalers_scale_the_deployment_of_the_manifest() -> None:
    """That of the file, by a metric that is exported, and that of the page on monitoring, by a key of the answer."""
    page = ROOT / "docs" / "guides" / "monitoring.md"
    (keda,) = (each for each in map(yaml.safe_load, blocks_of(page, "yaml")) if each.get("kind") == "ScaledObject")
    target = AUTOSCALER["spec"]["scaleTargetRef"]
    assert keda["spec"]["scaleTargetRef"]["name"] == target["name"]
    assert MANIFESTS[target["kind"], target["name"]]["apiVersion"] == target["apiVersion"]
    (metric,) = (each["external"]["metric"] for each in AUTOSCALER["spec"]["metrics"])
    labels = metric["selector"]["matchLabels"]
    assert metric["name"] == "asyncq_queue_entries" and labels["state"] in prometheus.ENTRIES
    row = next(line for line in page.read_text().splitlines() if line.startswith(f"| `{metric['name']}`"))
    assert all(f"`{label}`" in row for label in labels)
    (answer,) = map(json.loads, blocks_of(page, "json"))
    assert all(trigger["metadata"]["valueLocation"] in answer for trigger in keda["spec"]["triggers"])


def test_the_procfile_runs_what_the_compose_file_runs() -> None:
    """The migration, the workers, which need `--multi-instance` there, and the web process of the project."""
    (block,) = (text for text in blocks_of(PAGE, "text") if "requirements.txt" not in text)
    processes = {
        name: shlex.split(command) for name, _, command in (line.partition(": ") for line in block.splitlines())
    }
    assert processes == {
        "release": SERVICES["migrate"]["command"],
        "workers": [*SERVICES["workers"]["command"][:3], "--multi-instance"],
        "web": SERVICES["web"]["command"][:2],
    }
    program, module = processes["web"]
    (requirements,) = (text for text in blocks_of(PAGE, "text") if "requirements.txt" in text)
    assert program in requirements.split()
    assert f"startproject {module.removesuffix('.wsgi')} " in read("guides/getting-started.md")


# --- systemd

# What a unit of the docs may say: the keys of each section, and what a value must look like.
TEXT, PROGRAM, SECONDS = r"\S.*", r"/\S+( \S+)*", r"\d+"
UNIT_KEYS = {
    "Unit": {"Description": TEXT, "After": TEXT, "Wants": TEXT, "Requires": TEXT},
    "Service": {
        "User": r"[a-z_][a-z0-9_-]*",
        "WorkingDirectory": PROGRAM,
        "EnvironmentFile": PROGRAM,
        "ExecStart": PROGRAM,
        "Restart": "no|always|on-success|on-failure|on-abnormal|on-abort|on-watchdog",
        "RestartSec": SECONDS,
        "KillMode": "control-group|mixed|process|none",
        "TimeoutStopSec": SECONDS,
    },
    "Install": {"WantedBy": r"[a-z-]+\.target"},
}


def wrong_in_unit(unit: str) -> list[str]:
    """Return what systemd would not understand in a unit; its programs ignore such a line with a warning."""
    parser = configparser.ConfigParser(interpolation=None, delimiters="=", comment_prefixes=("#", ";"))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit)
    return [
        f"[{section}] {key}={value}"
        for section in parser.sections()
        for key, value in parser[section].items()
        if not re.fullmatch(UNIT_KEYS.get(section, {}).get(key, r"(?!)"), value)
    ]


def test_systemd_understands_the_unit() -> None:
    """Each key and each value; it has what the page explains."""
    assert wrong_in_unit(UNIT) == []
    assert all(f"{key}=" in UNIT for key in ("ExecStart", "Restart", "KillMode", "TimeoutStopSec", "WantedBy"))
    kill_mode = re.search(r"^KillMode=.*$", UNIT, re.MULTILINE)
    assert kill_mode and f"`{kill_mode[0]}`" in read("guides/deployment.md")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("KillMode=mixed", "KilMode=mixd"),
        ("KillMode=mixed", "killmode=mixed"),
        ("KillMode=mixed", "KillMode=mixd"),
        ("Restart=always", "Restart=alwayz"),
        ("TimeoutStopSec=30", "TimeoutStopSec="),
        ("[Service]", "[Servcie]"),
        ("[Install]", ""),
    ],
)
def test_a_unit_that_systemd_would_not_understand_is_refused(right: str, wrong: str) -> None:
    """By the table, without systemd."""
    assert right in UNIT
    assert wrong_in_unit(UNIT.replace(right, wrong))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze was not found")
@pytest.mark.parametrize("is_right", [True, False])
def test_systemd_itself_reads_the_unit(is_right: bool, tmp_path: Path) -> None:
    """Without a warning, and with one for a key that it does not know. Its program is one that exists here."""
    file = tmp_path / "workers.service"
    unit = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT, flags=re.MULTILINE)
    file.write_text(unit if is_right else unit.replace("KillMode", "KilMode"))
    command = ["systemd-analyze", "verify", "--man=no", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    warnings = [line for line in done.stderr.splitlines() if file.name in line]
    assert [("KilMode" in line) for line in warnings] == ([] if is_right else [True]), done.stderr
