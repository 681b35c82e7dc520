"""The commit hook and the GitHub Action of the documentation, as far as they run here."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
BLOCKS = re.findall(r"```yml\n(.*?)```", (ROOT / "docs/editors.md").read_text("utf-8"), re.DOTALL)
LOCAL, SHARED, ACTION = (yaml.safe_load(block) for block in BLOCKS)
GOOD = """\
pipeline:
  type: chain
  transforms:
    - type: Create
      config: {elements: [{text: one}]}
    - type: VLLMCompletions
      config: {model: "{{ model | default('m') }}", prompt: "{text}"}
    - type: LogForTesting
"""
BAD = GOOD.replace("prompt:", "promt:")


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{BIN}:{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with a good and a bad pipeline, and YAML that is none."""
    folder = tmp_path / "repository"
    (folder / "pipelines").mkdir(parents=True)
    (folder / "pipelines/good.yaml").write_text(GOOD)
    (folder / "pipelines/bad.yaml").write_text(BAD)
    (folder / "other.yaml").write_text("a: 1\n")
    (folder / ".pre-commit-config.yaml").write_text(BLOCKS[0])
    assert run("git", "init", "--quiet", cwd=folder).returncode == 0
    assert run("git", "add", "--all", cwd=folder).returncode == 0
    return folder


def test_the_hook_finds_mistakes_before_a_commit(repository: Path, tmp_path: Path) -> None:
    home = {"PRE_COMMIT_HOME": str(tmp_path / "home")}
    done = run("pre-commit", "run", "--all-files", "--color=never", cwd=repository, **home)
    assert done.returncode == 1
    assert "Failed" in done.stdout
    assert "pipelines/bad.yaml:7:" in done.stdout
    assert "did you mean 'prompt'?" in done.stdout
    assert "good.yaml:" not in done.stdout
    assert "other.yaml" not in done.stdout

    (repository / "pipelines/bad.yaml").write_text(GOOD)
    done = run("pre-commit", "run", "--all-files", "--color=never", cwd=repository, **home)
    assert done.returncode == 0, done.stdout
    assert "Passed" in done.stdout


def test_the_shared_hook_is_a_manifest_of_the_same_hook(tmp_path: Path) -> None:
    manifest = ROOT / ".pre-commit-hooks.yaml"
    home = {"PRE_COMMIT_HOME": str(tmp_path)}
    done = run("pre-commit", "validate-manifest", str(manifest), cwd=ROOT, **home)
    assert done.returncode == 0, done.stdout
    (hook,) = yaml.safe_load(manifest.read_text())
    ((local,),) = (repo["hooks"] for repo in LOCAL["repos"])
    ((used,),) = (repo["hooks"] for repo in SHARED["repos"])
    for key in ("id", "name", "entry", "types"):
        assert hook[key] == local[key]
    assert used["id"] == hook["id"]
    config = tmp_path / "config.yaml"
    config.write_text(BLOCKS[1])
    assert run("pre-commit", "validate-config", str(config), cwd=ROOT, **home).returncode == 0


def test_the_action_annotates_a_pull_request(repository: Path) -> None:
    steps: list[Any] = ACTION["jobs"]["validate"]["steps"]
    (check,) = (s["run"] for s in steps if s.get("run", "").startswith("beam-llm"))
    done = run(*shlex.split(check), cwd=repository, GITHUB_ACTIONS="true")
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if line.startswith("::error")]
    assert lines
    assert all("file=pipelines/bad.yaml,line=7" in line for line in lines)
    (repository / "pipelines/bad.yaml").unlink()
    assert run(*shlex.split(check), cwd=repository, GITHUB_ACTIONS="true").returncode == 0
