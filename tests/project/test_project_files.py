"""Files for GitHub and Zenodo parse, and name files and commands that exist."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import tapax

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
DOCUMENTS = ["SECURITY.md", "CODE_OF_CONDUCT.md", ".github/pull_request_template.md"]

PATH = re.compile(r"(?<![\w/.-])((?:scripts|tests|docs|tapax|\.ci|constraints)/[\w./*-]*\w/?)")


def read(path):
    return yaml.safe_load(path.read_text())


def list_commands():
    """Return the targets of the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_citation_names_this_version_and_license():
    citation = read(ROOT / "CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"] == project["name"] == "tapax"
    assert citation["version"] == tapax.__version__
    assert citation["authors"] == project["authors"]
    assert citation["license"] == project["license"]
    assert citation["repository-code"] == project["urls"]["Source"]
    assert citation["url"] == project["urls"]["Documentation"]
    assert {"message", "type", "date-released"} < citation.keys()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_commands_that_exist(path):
    workflow = read(path)
    assert workflow["permissions"]["contents"] == "read"
    commands = list_commands()
    for job in workflow["jobs"].values():
        assert job["runs-on"] == "ubuntu-latest"
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            for command in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                assert command in commands


def test_there_is_a_workflow_for_each_purpose():
    names = {path.stem for path in WORKFLOWS}
    assert names == {"docs", "nightly", "release", "test"}
    triggers = {path.stem: read(path)[True] for path in WORKFLOWS}  # YAML reads `on` as true
    assert "schedule" in triggers["nightly"] and "pull_request" in triggers["test"]
    assert triggers["release"] == {"push": {"tags": ["v*"]}}


@pytest.mark.parametrize("path", [*WORKFLOWS, *DOCUMENTS], ids=str)
def test_files_name_files_that_exist(path):
    for name in PATH.findall((ROOT / path).read_text()):
        assert list(ROOT.glob(name)), name


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_issue_templates_have_what_github_requires(path):
    template = read(path)
    if path.stem == "config":
        assert all({"name", "url", "about"} == link.keys() for link in template["contact_links"])
        return
    assert {"name", "description", "body"} <= template.keys()
    fields = [field for field in template["body"] if field["type"] != "markdown"]
    assert fields and all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)


def test_a_bug_report_asks_for_versions_program_and_expectation():
    template = read(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug_report.yml")
    required = [f["id"] for f in template["body"] if f.get("validations", {}).get("required")]
    assert {"versions", "program", "expected"} <= set(required)
    assert "`tapax --version`" in str(template)


def test_hooks_run_commands_that_exist():
    for repository in read(ROOT / ".pre-commit-config.yaml")["repos"]:
        for hook in repository["hooks"]:
            assert hook["entry"].removeprefix("make --silent ") in list_commands()


def test_every_command_of_the_makefile_is_listed_as_phony():
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert list_commands() == set(phony)
