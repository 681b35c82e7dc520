"""The documentation says what the code does, as far as a machine can tell."""

import ast
import doctest
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jinja2.meta
import pytest
import yaml

from beam_llm.pipelines import PipelineFile
from beam_llm.registry import TRANSFORMS
from beam_llm.rows import RowError
from beam_llm.validation import check
from beam_llm.vllm.client import RequestError

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
ENDPOINT = "http://127.0.0.1:8000/v1"
MINIMAL: dict[str, dict[str, Any]] = {
    "VLLMChat": {"model": "m", "messages": [{"role": "user", "content": "{text}"}]},
    "VLLMCompletions": {"model": "m", "prompt": "{text}"},
    "BatchByPrefix": {"prompt": "{text}"},
}


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        body = re.sub(f"^{match[1]}", "", match[3], flags=re.MULTILINE)
        yield Block(page, text.count("\n", 0, match.start()) + 1, match[2], body)


def of(language: str) -> list[Any]:
    found = [block for page in PAGES for block in blocks(page) if block.language == language]
    return [pytest.param(block, id=block.id) for block in found]


def problems(transform: str, config: Any) -> list[str]:
    return [str(problem) for problem in check(TRANSFORMS[transform].config, config)[0]]


# The examples of lints.md are wrong, each in its way: test_validate.py has them.
@pytest.mark.parametrize("block", [b for b in of("yaml") if not b.id.startswith("lints.md")])
def test_yaml_is_valid(block: Block, tmp_path: Path) -> None:
    if re.search(r"^pipeline:", block.text, re.MULTILINE):
        names = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(block.text))
        file = tmp_path / "pipeline.yaml"
        file.write_text(block.text, encoding="utf-8")
        PipelineFile(
            file, {name: ENDPOINT if "endpoint" in name else name for name in names}
        ).llm_configs()
        return
    parsed = yaml.safe_load(block.text)
    steps = parsed if isinstance(parsed, list) else [parsed] if "type" in parsed else []
    for step in steps:
        if step["type"] in TRANSFORMS:
            assert problems(step["type"], step.get("config")) == []
    if not steps and set(parsed) != {"providers"}:  # part of a configuration
        name = "VLLMCompletions" if "prompt" in parsed else "VLLMChat"
        assert problems(name, {**MINIMAL[name], **parsed}) == []


@pytest.mark.parametrize("block", of("python"))
# Beam's runner leaves files and sockets to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_python_runs_or_compiles(block: Block) -> None:
    if not block.text.startswith(">>>"):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("beam_llm"):
                module = importlib.import_module(node.module or "")
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []
        compile(block.text, block.id, "exec")
        # None of them runs a pipeline: handlers and transforms check their arguments.
        exec(block.text, {"__name__": "documentation"})
        return
    # What is imported once in a page need not be imported again.
    earlier = [
        line.removeprefix(">>> ")
        for other in blocks(block.page)
        if other.language == "python" and other.line < block.line
        for line in other.text.splitlines()
        if re.match(r">>> (import|from) ", line)
    ]
    names: dict[str, Any] = {}
    exec("\n".join(earlier), names)
    test = doctest.DocTestParser().get_doctest(block.text, names, block.id, None, None)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower())
        found.add(words.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    broken: list[str] = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if re.match(r"\w+:", target):
            continue
        file = (page.parent / target) if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def test_tables_of_knobs_are_those_of_the_models() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs/generate.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_knob_and_section_has_its_table() -> None:
    page = (ROOT / "docs/transforms.md").read_text(encoding="utf-8")
    tables = re.findall(r"<!-- generated (\w+) -->", page)
    from beam_llm.schemas import json_schema

    sections = {s for spec in TRANSFORMS.values() for s in json_schema(spec.config)["$defs"]}
    sections -= {spec.config.__name__ for spec in TRANSFORMS.values()}
    assert sorted(tables) == sorted([*sections, *TRANSFORMS, "shared"])


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    named: set[str] = set()
    for file in (ROOT / "provider/beam_llm").rglob("*.py"):
        code = file.read_text(encoding="utf-8")
        named |= set(re.findall(r'Metrics\.\w+\(\s*\w+, "(\w+)"', code))
        named |= set(re.findall(r'Metrics\.\w+\("beam_llm", "(\w+)"', code))
        named |= set(re.findall(r'self\.count\("(\w+)"', code))
    assert {"rows_read", "batch_size", "failed_examples"} <= named
    runs = (ROOT / "provider/beam_llm/runs.py").read_text(encoding="utf-8")
    reasons = re.search(r"for reason in \(([^)]*)\)", runs)
    assert reasons is not None
    named |= {f"flush_{reason}" for reason in re.findall(r'"(\w+)"', reasons[1])}
    assert sorted(name for name in named if f"`{name}`" not in page) == []


@pytest.mark.parametrize("error", [RowError, RequestError])
def test_every_kind_of_failure_is_documented(error: type[Exception]) -> None:
    kinds = re.findall(
        r"``(\w+)``", (error.__doc__ or "").partition("kind:")[2].partition("\n\n")[0]
    )
    kinds = [kind for kind in kinds if kind != "None"]
    assert len(kinds) >= 5
    for page in ("failures.md", "metrics.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert [kind for kind in kinds if f"`{kind}`" not in text] == []
