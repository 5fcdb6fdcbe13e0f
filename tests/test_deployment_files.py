"""The Compose file, the Kubernetes manifest and the Dockerfile of the docs name commands, files and times that hold."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.management import get_commands

from django_asyncq import conf

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
