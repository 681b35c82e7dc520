"""`beam-llm validate`: its corpus, its formats and its manners, through the real command.

In tests/corpus/bad each file ends with what the command says of it, as `# expect` comments; a
message that ends with `…` goes on with a list that grows with the knobs. What is in
tests/corpus/good is also constructed by Beam.
"""

import json
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_llm import PROVIDERS_YAML
from beam_llm.config import Section
from beam_llm.documents import DocumentError, read
from beam_llm.lints import LINTS
from beam_llm.pipelines import Checked, check_source
from beam_llm.providers import BEAM_IN_CODE, BY_LANGUAGE, beam_transforms
from beam_llm.registry import TRANSFORMS
from beam_llm.rendering import render, without_leading_comments
from beam_llm.schemas import json_schema

ROOT = Path(__file__).parent.parent
CORPUS = ROOT / "tests/corpus"
GOOD = sorted((CORPUS / "good").glob("*.yaml"))
BAD = sorted((CORPUS / "bad").glob("*.yaml"))
NOT_BEAMS = "# not constructed"
EXPECTED = re.compile(r"^# expect (.*)$", re.MULTILINE)
VARIABLES = {"model": "m", "input": "i", "output": "o", "endpoint": "http://127.0.0.1:1/v1"}

PIPELINE = """\
pipeline:
  type: chain
  transforms:
    - type: Create
      config: {elements: [{text: hello}]}
    - type: VLLMCompletions
      config: {model: m, prompt: "%s"}
"""
CLEAN = PIPELINE % "{text}"
WRONG = PIPELINE % "{txt}"
SAID = (
    "7:26: error: transforms[1].config.prompt: the input has no field 'txt'; did you mean 'text'?"
    " (fields: text) [unknown-field]"
)
ODD = CLEAN.replace("text: hello", "zip: 0123, text: hello")


def validate(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("GITHUB_ACTIONS", "NO_COLOR")}
    return subprocess.run(
        [sys.executable, "-m", "beam_llm", "validate", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=options.pop("cwd", ROOT),
        env={**env, **options.pop("env", {})},
        **options,
    )


def check(text: str, **variables: str) -> Checked:
    return check_source("p.yaml", text, variables)


def said(text: str, **variables: str) -> list[str]:
    return [str(finding).removeprefix("p.yaml:") for finding in check(text, **variables).findings]


# The corpus


def test_the_bad_ones_are_told_with_line_column_and_words() -> None:
    assert len(BAD) >= 150
    done = validate("--var=model=m", "tests/corpus/bad")
    told = validate("--var=model=m", *(str(path.relative_to(ROOT)) for path in BAD))
    assert done.returncode == told.returncode == 2  # one of them lacks a variable
    assert "Traceback" not in told.stderr
    lines = told.stdout.splitlines()
    expected: list[str] = []
    for path in BAD:
        expectations = EXPECTED.findall(path.read_text(encoding="utf-8"))
        assert expectations, f"{path}: no expectation"
        for words in expectations:
            place = "" if words.startswith("parts/") else f"bad/{path.name}:"
            place += " " if words.startswith("error") else ""
            expected.append(f"tests/corpus/{place}{words}")
    assert len(lines) == len(expected)
    for line, words in zip(sorted(lines), sorted(expected), strict=True):
        if words.endswith("…"):
            assert line.startswith(words[:-1])
        else:
            assert line == words
    # A directory is told alike, less what is no pipeline there.
    assert set(done.stdout.splitlines()) <= set(lines)
    assert len(done.stdout.splitlines()) >= len(lines) - 5


def test_every_check_has_a_bad_file() -> None:
    found = {
        name
        for path in BAD
        for name in re.findall(r"\[([\w-]+)\]$", path.read_text(), re.MULTILINE)
    }
    # That of files is tested below; no knob is deprecated yet.
    assert sorted(set(LINTS) - found) == ["deprecated-knob", "file"]


def test_every_section_and_knob_has_a_bad_file() -> None:
    text = "\n".join(line for path in BAD for line in EXPECTED.findall(path.read_text()))
    missing = [
        f"{section}.{knob}"
        for section, knobs in sections().items()
        for knob in knobs
        if not re.search(rf"\b{knob}\b", text)
    ]
    assert missing == []


def sections() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for spec in TRANSFORMS.values():
        for section, definition in json_schema(spec.config)["$defs"].items():
            if section != "PerRow":  # one rule for all of its knobs
                found[section] = list(definition["properties"])
    return found


def test_the_good_ones_are_clean() -> None:
    assert len(GOOD) >= 60
    done = validate("--strict", "--var=model=m", *map(str, GOOD))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"{len(GOOD)} files checked: no problems\n"


def refused_by_beam(path: Path) -> str | None:
    """Beam's words when it constructs a file, or None where that works."""
    import apache_beam as beam
    from apache_beam.yaml import yaml_provider, yaml_transform
    from apache_beam.yaml.yaml_utils import SafeLineLoader

    ours = yaml_provider.merge_providers(yaml_provider.load_providers(PROVIDERS_YAML))
    text = path.read_text(encoding="utf-8")
    try:
        rendered = yaml_transform.expand_jinja(text, {"model": "m"}, [str(path.parent)])
        spec = yaml.load(rendered, Loader=SafeLineLoader)
        yaml_transform.expand_pipeline(
            beam.Pipeline(runner="FnApiRunner"), spec, providers=ours, pipeline_path=str(path)
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# Beam's runner leaves files to the garbage collector.
@pytest.mark.filterwarnings("ignore")
def test_beam_constructs_the_good_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    files = [path for path in GOOD if not path.read_text().startswith(NOT_BEAMS)]
    assert len(files) >= 60
    assert {path.name: words for path in files if (words := refused_by_beam(path))} == {}


@pytest.mark.filterwarnings("ignore")
def test_beam_refuses_what_is_called_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    accepted: set[str] = set()
    for path in BAD:
        errors = re.findall(r"^# expect .* error: .*\[([\w-]+)\]$", path.read_text(), re.MULTILINE)
        # These need a service, or hours.
        if path.stem in ("provider_remote", "aliases_that_explode"):
            continue
        # What one knob says is the same code there and here.
        if errors and set(errors) != {"config"} and refused_by_beam(path) is None:
            accepted |= set(errors)
            assert path.stem == "template_reaching_out" or "template" not in errors
    assert accepted == {"duplicate-key", "identifier-conflict", "template"}


def test_our_examples_are_clean() -> None:
    done = validate("--strict", "yaml_examples", *(f"--var={k}={v}" for k, v in VARIABLES.items()))
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.filterwarnings("ignore")
def test_what_beam_accepts_of_its_own_examples_is_clean() -> None:
    from apache_beam.yaml import yaml_provider, yaml_transform
    from apache_beam.yaml.yaml_utils import SafeLineLoader

    known = set(yaml_provider.standard_providers())
    pages = sorted((Path(yaml_transform.__file__).parent / "docs").glob("*.md"))
    accepted = 0
    for page in pages:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            if not re.search(r"^pipeline:", block, re.MULTILINE):
                continue
            try:
                rendered = yaml_transform.expand_jinja(block, {})
                spec = yaml.load(rendered, Loader=SafeLineLoader)
                yaml_transform.validate_against_schema(spec, "generic")
                own = {name for p in spec.get("providers", []) for name in p.get("transforms", {})}
                yaml_transform.preprocess(
                    yaml_transform.pipeline_as_composite(spec["pipeline"]),
                    known_transforms=known | own,
                )
            except Exception:  # placeholders and parts: not whole pipelines
                logging.debug("not accepted: %s", block)
                continue
            accepted += 1
            assert said(block) == [], block
    assert accepted >= 15


def test_beams_transforms_are_known_without_beam() -> None:
    from apache_beam.yaml import yaml_provider

    assert set(yaml_provider.standard_providers()) <= beam_transforms()
    listed = beam_transforms() - BEAM_IN_CODE
    assert set(yaml_provider.standard_providers()) >= BEAM_IN_CODE - BY_LANGUAGE
    assert {"ReadFromCsv", "WriteToKafka", "MapToFields-python"} <= listed


# The command


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "deep/.hidden").mkdir(parents=True)
    (tmp_path / "clean.yaml").write_text(CLEAN)
    (tmp_path / "deep/wrong.yml").write_text(WRONG)
    (tmp_path / "deep/odd.yaml").write_text(ODD)
    (tmp_path / "deep/other.yaml").write_text("kind: Deployment\nname: {{ .Values.name }}\n")
    (tmp_path / "deep/.hidden/wrong.yaml").write_text(WRONG)
    (tmp_path / "notes.txt").write_text(WRONG)
    return tmp_path


def test_a_directory_is_searched(tree: Path) -> None:
    done = validate(".", cwd=tree)
    assert done.returncode == 1
    assert [line.partition(": ")[0] for line in done.stdout.splitlines()] == [
        "deep/odd.yaml:5:33",
        "deep/wrong.yml:7:26",
    ]
    assert done.stderr == "3 files checked: 1 error, 1 warning\n"


def test_standard_input_is_read() -> None:
    done = validate("-", input=WRONG)
    assert done.returncode == 1
    assert done.stdout == f"<stdin>:{SAID}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "out"),
    [
        (["clean.yaml"], 0, 0),
        (["deep/odd.yaml"], 0, 1),
        (["--strict", "deep/odd.yaml"], 1, 1),
        (["--quiet", "deep/odd.yaml"], 0, 0),
        (["--quiet", "--strict", "deep/odd.yaml"], 1, 1),
        (["deep/wrong.yml"], 1, 1),
        (["deep/wrong.yml", "deep/wrong.yml", "deep"], 1, 2),
        (["nothing.yaml"], 2, 1),
        (["nothing.yaml", "deep/wrong.yml"], 2, 2),
        (["deep/.hidden/none"], 2, 1),
        (["notes.txt"], 1, 1),
        (["deep/other.yaml"], 1, 1),
        (["--var", "novalue", "clean.yaml"], 2, 0),
        (["--frmat=json", "clean.yaml"], 2, 0),
        (["--format=xml", "clean.yaml"], 2, 0),
        ([], 2, 0),
    ],
)
def test_exit_codes(tree: Path, arguments: list[str], code: int, out: int) -> None:
    done = validate(*arguments, cwd=tree)
    assert done.returncode == code, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == out
    assert "Traceback" not in done.stderr
    assert ("checked" in done.stderr) == (
        "--quiet" not in arguments and "usage" not in done.stderr and "novalue" not in arguments
    )


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("name: Größe".encode("latin-1"))
    (tmp_path / "empty").mkdir()
    done = validate("latin.yaml", "none.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout.splitlines() == [
        "latin.yaml: error: cannot be read: it is not UTF-8 [file]",
        "none.yaml: error: cannot be read: No such file or directory [file]",
    ]
    done = validate("empty", cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2, "beam-llm: no pipeline files there"
    )  # fmt: skip


def test_json_has_every_part_of_a_problem(tree: Path) -> None:
    done = validate("--format=json", "deep", cwd=tree)
    assert done.returncode == 1
    (odd, wrong) = json.loads(done.stdout)["problems"]
    assert (odd["level"], odd["lint"]) == ("warning", "octal-number")
    assert wrong == {
        "file": "deep/wrong.yml",
        "line": 7,
        "column": 26,
        "level": "error",
        "lint": "unknown-field",
        "path": "transforms[1].config.prompt",
        "message": "the input has no field 'txt'; did you mean 'text'? (fields: text)",
        "rendered": False,
    }
    assert json.loads(validate("--format=json", "clean.yaml", cwd=tree).stdout)["problems"] == []


def test_sarif_is_what_code_scanning_reads(tree: Path) -> None:
    (tree / "a b%.yaml").write_text(WRONG)
    done = validate("--format=sarif", "deep", "a b%.yaml", "none.yaml", cwd=tree)
    assert done.returncode == 2
    log = json.loads(done.stdout)
    # What SARIF 2.1.0 and GitHub want of it.
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == sorted({rule["id"] for rule in rules})
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"] in LINTS
        assert result["level"] in ("error", "warning")
        assert result["message"]["text"]
        (location,) = result["locations"]
        assert not location["physicalLocation"]["artifactLocation"]["uri"].startswith("/")
    places = [r["locations"][0]["physicalLocation"] for r in run["results"]]
    assert places[1] == {
        "artifactLocation": {"uri": "deep/wrong.yml"},
        "region": {"startLine": 7, "startColumn": 26},
    }
    assert places[2]["artifactLocation"]["uri"] == "a%20b%25.yaml"
    assert "region" not in places[3]


def test_github_shows_annotations(tree: Path) -> None:
    (tree / "a,b.yaml").write_text(PIPELINE % "{text}\\n{50%}")
    inside = {"GITHUB_ACTIONS": "true"}
    done = validate("deep/wrong.yml", "a,b.yaml", cwd=tree, env=inside)
    assert done.returncode == 1
    first, second = done.stdout.splitlines()
    assert first == (
        "::error file=deep/wrong.yml,line=7,col=26,title=unknown-field::"
        + re.sub(r"^.*?error: | \[.*$", "", SAID)
    )
    assert second.startswith("::error file=a%2Cb.yaml,line=7,col=26,title=config::")
    assert "'{50%25}' is not a field" in second
    # What is asked for goes first.
    done = validate("--format=text", "deep/wrong.yml", cwd=tree, env=inside)
    assert done.stdout == f"deep/wrong.yml:{SAID}\n"


@pytest.mark.parametrize(
    ("arguments", "env", "colored"),
    [
        ([], {}, False),  # not on a terminal
        (["--color=always"], {}, True),
        (["--color=always"], {"NO_COLOR": "1"}, True),
        (["--color=never"], {}, False),
    ],
)
def test_colors(tree: Path, arguments: list[str], env: dict[str, str], colored: bool) -> None:
    done = validate("deep", *arguments, cwd=tree, env=env)
    assert ("\x1b[" in done.stdout) == colored
    plain = re.sub(r"\x1b\[\d+m", "", done.stdout)
    assert f"deep/wrong.yml:{SAID}\n" in plain


@pytest.mark.parametrize(("env", "colored"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_has_colors(tree: Path, env: dict[str, str], colored: bool) -> None:
    import pty

    ours, theirs = pty.openpty()
    try:
        clean = {k: v for k, v in os.environ.items() if k not in ("GITHUB_ACTIONS", "NO_COLOR")}
        subprocess.run(
            [sys.executable, "-m", "beam_llm", "validate", "--quiet", "deep/wrong.yml"],
            stdout=theirs,
            cwd=tree,
            env={**clean, **env},
            check=False,
        )
        shown = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert ("\x1b[31m" in shown) == colored


def test_neither_beam_nor_vllm_nor_a_socket_is_used() -> None:
    code = """
import sys, socket
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("apache_beam", "vllm", "torch", "openai", "aiohttp"):
            if path is not None or name != "apache_beam":
                raise AssertionError(f"{name} is imported")
sys.meta_path.insert(0, Refuse())
def refuse(*args, **kwargs):
    raise AssertionError("a socket is opened")
socket.socket = refuse
from beam_llm.cli import main
code = main(["validate", "--strict", "yaml_examples", "tests/corpus/bad", *sys.argv[1:]])
loaded = {"apache_beam", "vllm", "torch", "rich"} & set(sys.modules)
sys.exit(f"loaded: {loaded}" if loaded else code)
"""
    variables = [f"--var={name}={value}" for name, value in VARIABLES.items()]
    done = subprocess.run(
        [sys.executable, "-c", code, *variables],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr


def test_a_clean_file_needs_no_slow_import() -> None:
    code = (
        "import sys\nfrom beam_llm.cli import main\n"
        "assert main(['validate', 'tests/corpus/good/chat_minimal.yaml']) == 0\n"
        "print({'jsonschema', 'jinja2', 'difflib', 'asyncio'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "set()"


# What reports survive


STRANGE = WRONG.replace("config: {model", 'config: {"a\\ud800\\n\\e[31m\\u2028b": 1, model')


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("style", ["text", "github", "json", "sarif"])
def test_no_name_breaks_a_report(tmp_path: Path, style: str, encoding: str) -> None:
    strange = os.fsdecode(b"lat\xfc\n\x1b[1m.yaml")
    (tmp_path / "é.yaml").write_text(STRANGE)
    (tmp_path / strange).write_text(STRANGE)
    env = {"PYTHONIOENCODING": encoding}
    done = validate(f"--format={style}", "é.yaml", strange, cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    if style in ("text", "github"):
        assert len(done.stdout.splitlines()) == 4  # two problems in each file
        assert "\x1b" not in done.stdout
        assert "\\ud800" in done.stdout
    else:
        read = json.loads(done.stdout)
        problems = read["problems"] if style == "json" else read["runs"][0]["results"]
        assert len(problems) == 4
        json.dumps(problems, ensure_ascii=False).encode()  # no halves of characters


@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        (">&-", "beam-llm: standard output is closed"),
        (">/dev/full", "beam-llm: standard output cannot be written: No space left on device"),
        ("2>&- >&-", ""),
        ("2>/dev/full >/dev/full", ""),
    ],
)
def test_output_that_nobody_takes_is_said_in_a_line(
    tree: Path, redirection: str, said: str
) -> None:
    done = subprocess.run(
        f'"{sys.executable}" -m beam_llm validate deep {redirection}',
        shell=True,
        capture_output=True,
        text=True,
        cwd=tree,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (2, "", said)


def test_a_reader_that_leaves_ends_it_quietly(tree: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "beam_llm", "validate", "deep"],
            stdout=theirs,
            stderr=subprocess.PIPE,
            cwd=tree,
            check=False,
        )
    finally:
        os.close(theirs)
    assert (done.returncode, done.stderr) == (2, b"")


def test_a_closed_standard_input_is_said() -> None:
    done = subprocess.run(
        f'"{sys.executable}" -m beam_llm validate --format=text - <&-',
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    said = "<stdin>: error: cannot be read: it is closed [file]\n"
    assert (done.returncode, done.stdout) == (2, said)
    assert "Traceback" not in done.stderr


def test_a_pipe_is_not_waited_for(tree: Path) -> None:
    os.mkfifo(tree / "deep/pipe.yaml")
    assert validate("deep", cwd=tree, timeout=60).stderr == "2 files checked: 1 error, 1 warning\n"
    done = validate("deep/pipe.yaml", cwd=tree, timeout=60)
    assert (done.returncode, done.stdout) == (
        2,
        "deep/pipe.yaml: error: cannot be read: it is not a regular file"
        " (what a pipe holds goes to '-') [file]\n",
    )


@pytest.mark.parametrize("statement", ["include '{}'", "import '{}' as x", "extends '{}'"])
@pytest.mark.parametrize("target", ["../secret", "{root}/secret", "link", "../p/../secret"])
def test_templates_read_nothing_elsewhere(tmp_path: Path, statement: str, target: str) -> None:
    (tmp_path / "secret").write_text("hunter2: [")
    (tmp_path / "p").mkdir()
    (tmp_path / "p/link").symlink_to("../secret")
    target = target.format(root=tmp_path)
    (tmp_path / "p/p.yaml").write_text(f"{{% {statement.format(target)} %}}")
    done = validate("p.yaml", cwd=tmp_path / "p")
    assert (done.returncode, done.stdout) == (
        1,
        f"p.yaml:1: error: Jinja: '{target}' leads out of the pipeline's folder and the working"
        " directory [template]\n",
    )
    if target == "../secret":  # what the working directory holds may be read
        assert "leads out" not in validate("p/p.yaml", cwd=tmp_path).stdout


# Places


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_line_endings_and_marks_of_order_do_not_move_places(
    tmp_path: Path, newline: str, mark: str
) -> None:
    (tmp_path / "p.yaml").write_bytes((mark + WRONG.replace("\n", newline)).encode())
    assert validate("p.yaml", cwd=tmp_path).stdout == f"p.yaml:{SAID}\n"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_places_survive_a_template(data: st.DataObject) -> None:
    """Loops, conditions, comments and includes around a step do not move what is said of it."""
    before = "".join(
        data.draw(
            st.lists(
                st.sampled_from(
                    [
                        "# {{ 'a comment' }}\n",
                        "{# a comment\n   of two lines #}\n",
                        "{% if true %}\n{% endif %}\n",
                        "{%- if false %}\nx: 1\n{%- endif %}\n",
                        "{% set x = 1 %}\n",
                        "{% for i in range(3) %}\n# {{ i }}\n{% endfor -%}\n",
                        "{{ '# a line' }}\n",
                        "{{ '# two' }}{{ ' parts' }}\n",
                        "\n",
                    ]
                ),
                max_size=6,
            )
        )
    )
    text = "x: 1\n" + before + WRONG
    line = text[: text.index("txt")].count("\n") + 1
    (problem,) = said(text)
    assert problem == f"{line}{SAID[1:]}"


names = st.sampled_from(["a", "b_c", "x1"])
values = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=5)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            names.map(lambda name: f"{{{{ {name} }}}}"),
            names.map(lambda name: f"{{{{- {name} -}}}}"),
            st.sampled_from(["\n", " ", "text", "# x", "{a}", "}", "{", "\n\n", "{{ a | upper }}"]),
        ),
        max_size=12,
    ),
    st.fixed_dictionaries({"a": values, "b_c": values, "x1": values}),
)
def test_templates_are_filled_as_jinja_fills_them(
    parts: list[str], variables: dict[str, str]
) -> None:
    import jinja2

    text = "x" + "".join(parts)
    try:
        expected = jinja2.Template(text, undefined=jinja2.StrictUndefined).render(variables)
    except jinja2.TemplateError:
        return
    if re.search(r"\{[{%#]", text):
        assert render("p", text, variables).text == expected
    else:
        assert render("p", text, variables).text == text


def test_leading_comments_go_as_beam_lets_them_go() -> None:
    from apache_beam.yaml.yaml_transform import strip_leading_comments

    for text in ("", "# a", "# a\n\n  # b\nx: 1\n# c\n", "\n\nx: 1", "x: 1\n# a"):
        assert without_leading_comments(text)[0] == strip_leading_comments(text)


# Mutations


def knobs_of(model: type[Section]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    schema = json_schema(model)
    definitions = schema["$defs"]

    def walk(name: str, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        for knob, rule in definitions[name]["properties"].items():
            yield (*path, knob), rule
            if "$ref" in rule:
                yield from walk(rule["$ref"].rpartition("/")[2], (*path, knob))

    yield from walk(schema["$ref"].rpartition("/")[2], ())


STEPS: dict[str, dict[str, Any]] = {
    "VLLMChat": {"model": "m", "messages": [{"role": "user", "content": "{text}"}]},
    "VLLMCompletions": {"model": "m", "prompt": "{text}"},
    "BatchByPrefix": {"prompt": "{text}"},
}
KNOBS = [(name, *knob) for name, spec in TRANSFORMS.items() for knob in knobs_of(spec.config)]


def pipeline_of(name: str, config: dict[str, Any], seed: int) -> str:
    steps = [
        {"type": "Create", "config": {"elements": [{"id": 1, "text": "x"}]}},
        {"type": name, "config": config},
    ]
    flow = [None, True, False][seed % 3]
    return yaml.safe_dump(
        {"pipeline": {"type": "chain", "transforms": steps}},
        default_flow_style=flow,
        sort_keys=False,
        allow_unicode=True,
        width=[40, 1000][seed % 2],
    )


def test_mutations_know_every_transform() -> None:
    assert set(STEPS) == set(TRANSFORMS)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(KNOBS), st.integers(0, 5), st.data())
def test_one_wrong_value_is_one_problem_at_its_path(
    knob: tuple[str, tuple[str, ...], dict[str, Any]], seed: int, data: st.DataObject
) -> None:
    name, path, rule = knob
    kinds: dict[str, list[Any]] = {
        "string": [7, True, ["x"], {"a": {"b": 1}}],
        "integer": ["x", True, [1], 1.5],
        "number": ["x", True, [1]],
        "boolean": ["x", 3, [True]],
        "array": ["x", 3, True, {"a": 1}],
        "object": ["x", 3, True, ["x"]],
    }
    wrong = data.draw(st.sampled_from(kinds[rule.get("type", "object")]))
    if isinstance(wrong, dict) and len(path) == 1 and path[0] == "error_handling":
        return
    config = json.loads(json.dumps(STEPS[name]))
    at = config
    for step in path[:-1]:
        at = at.setdefault(step, {})
    at[path[-1]] = wrong
    text = pipeline_of(name, config, seed)
    findings = check(text).findings
    assert [f.path for f in findings] == ["transforms[1].config." + ".".join(path)], text
    (finding,) = findings
    assert finding.line is not None
    assert finding.column is not None
    # The place is that of the knob's key.
    assert text.splitlines()[finding.line - 1][finding.column - 1 :].startswith(path[-1])


PIECES = [
    *("", " ", "\n", "{", "}", "[", "]", ":", "- ", "*a", "&a ", "!!set ", "null", "{{", "%}"),
    *("{% for", "<<: ", "? ", "|\n", "'", '"', "\t", "#", ",", "1e3", "~", "\x00", "é", "config"),
]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([*GOOD, *BAD]))
def test_mangled_files_never_make_a_traceback(seed: int, path: Path) -> None:
    dice = random.Random(seed)
    text = path.read_text(encoding="utf-8")
    for _ in range(dice.randrange(1, 4)):
        i = dice.randrange(len(text) + 1)
        j = min(len(text), i + dice.randrange(12))
        piece = dice.choice(PIECES)
        text = text[:i] + piece + text[j:]
    checked = check_source(str(path), text, {"model": "m"})
    for finding in checked.findings:
        assert finding.message
        assert str(finding)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
keys = st.sampled_from(
    [
        *("pipeline", "transforms", "type", "name", "input", "output", "config", "source", "sink"),
        *("providers", "options", "windowing", "extra_transforms", "error_handling", "elements"),
    ]
)
trees = st.recursive(
    scalars | st.sampled_from(["chain", "composite", "Create", "VLLMChat", "Flatten", "x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys | scalars, inner, max_size=4),
    max_leaves=25,
)


@settings(max_examples=500, deadline=None)
@given(st.lists(trees, max_size=4), trees, st.sampled_from(["chain", "composite"]))
def test_any_shape_is_checked_without_a_traceback(
    transforms: list[Any], providers: Any, kind: str
) -> None:
    spec = {"pipeline": {"type": kind, "transforms": transforms}, "providers": providers}
    check(yaml.safe_dump(spec, allow_unicode=True))


def test_data_is_what_beams_parser_reads() -> None:
    for path in [*GOOD, *BAD]:
        text = path.read_text(encoding="utf-8")
        try:
            expected = list(yaml.safe_load_all(text))
        except (yaml.YAMLError, ValueError, RecursionError):
            continue
        try:
            assert [d.data for d in read(text)] == [d for d in expected if d is not None]
        except DocumentError:
            assert "deep" in path.name or "alias" in path.name


# What would take for ever


def bomb(levels: int, item: str = "*{}", around: str = "[{}]") -> str:
    lines = ["a0: &a0 {k: 1, l: 2}" if "<<" in around else "a0: &a0 [x, x, x]"]
    for i in range(levels):
        inner = ", ".join([item.format(f"a{i}")] * 9)
        lines.append(f"a{i + 1}: &a{i + 1} " + around.format(inner))
    return "\n".join([*lines, f"pipeline: {{transforms: *a{levels}}}", ""])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (bomb(9), "it has more than 300,000 values once its aliases are followed"),
        (bomb(30), "it has more than 300,000 values once its aliases are followed"),
        (bomb(20, around="{{<<: [{}]}}"), "300,000 values once its aliases are followed"),
        ("[" * 10_000, "values nest too deep"),
        ("pipeline: " + "{a: " * 10_000 + "}" * 10_000, "values nest too deep"),
        ("\n".join(" " * i + "a:" for i in range(3_000)), "values nest too deep"),
        ("- " * 10_000 + "x", "values nest too deep"),
        ("[" * 500 + "]" * 500, "values nest deeper than 150 levels"),
        ("a: &a [" + "[" * 140 + "x" + "]" * 140 + "]\nb: " + "[" * 140 + "*a" + "]" * 140,
         "values nest deeper than 150 levels"),
        ("{" + "a," * 2_000_000, "it has more than 300,000 values"),
        ("\n".join(f"k{i}: 1" for i in range(400_000)), "it has more than 300,000 values"),
        ("---\n" * 5_000, "it has more than 1,000 documents"),
        ("k" * 10_000_001, "it has 10,000,001 characters, and 10,000,000 are the limit"),
        ("a: &a [*a]", "an alias leads back to itself"),
        ("{% for i in range(100000) %}{% for j in range(99) %}xxxxxxxxxx{% endfor %}{% endfor %}",
         "it makes more than 10,000,000 characters"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "Range too big"),
        ("x: {{ 'a' * 10**10 }}", "an expression's value is too large"),
        ("x: {{ 10 ** 10000000000 }}", "an expression's value is too large"),
    ],
    ids=lambda value: value[:12].replace("\n", " ") if isinstance(value, str) else None,
)  # fmt: skip
def test_endless_text_ends_in_an_error(text: str, words: str) -> None:
    findings = check(text).findings
    assert len(findings) == 1
    assert words in findings[0].message


def test_a_template_that_fills_the_memory_ends_in_an_error() -> None:
    done = validate("-", input="x: {{ 'a'.center(10 ** 11) }}")
    assert done.returncode == 1
    assert done.stdout.startswith("<stdin>:1: error: Jinja: MemoryError")
    assert "Traceback" not in done.stderr


def test_a_chain_of_thousands_is_checked() -> None:
    step = '    - type: VLLMCompletions\n      config: {model: m, prompt: "{completion}"}\n'
    text = CLEAN + step * 2_000
    findings = check(text).findings
    assert len(findings) == 2_000 * 4  # each clashes with the one before
    backwards = "pipeline:\n  transforms:\n" + "".join(
        f"    - {{type: LogForTesting, name: s{i}, input: s{i + 1}}}\n" for i in range(5_000)
    )
    (problem,) = said(backwards)
    assert problem.startswith("5002:42: error: transforms[4999].input: there is no step 's5000'")


# Comments


def test_a_comment_silences_its_line_alone() -> None:
    lines = ODD.splitlines()
    silent = "\n".join(
        line + "  # beam-llm: ignore[octal-number]" if "0123" in line else line for line in lines
    )
    assert said(ODD) != []
    assert said(silent) == []
    elsewhere = "\n".join([lines[0] + "  # beam-llm: ignore[octal-number]", *lines[1:]])
    assert len(said(elsewhere)) == 1


def test_a_text_that_looks_like_a_comment_silences_nothing() -> None:
    for text in ('"# beam-llm: ignore[octal-number]"', "'a # beam-llm: ignore[octal-number]'"):
        looks = ODD.replace("hello", text)
        assert any("octal-number" in line for line in said(looks)), looks
    block = "    - type: LogForTesting\n      config:\n        prefix: |{}\n          {}\n"
    mark = "# beam-llm: ignore[nonsense]"
    assert said(CLEAN + block.format("", mark)) == []
    assert len(said(CLEAN + block.format(f" {mark}", "x"))) == 1


def test_one_wrong_knob_hides_no_other() -> None:
    wrong = WRONG.replace('prompt: "{txt}"', 'prompt: "{txt}", sampling: {temperature: warm}')
    assert [line.rpartition("[")[2] for line in said(wrong)] == ["unknown-field]", "config]"]
    broken = wrong.replace("{txt}", "{txt")
    assert [line.rpartition("[")[2] for line in said(broken)] == ["config]", "config]"]
    chat = """\
pipeline:
  type: chain
  transforms:
    - {type: Create, config: {elements: [{text: hello}]}}
    - type: VLLMChat
      config:
        messages: [{role: user, content: "{txt}"}, 7, {role: usr, content: "{text"}]
        per_row: {seed: sed}
        prefix_batching: {key_field: kye, mode: 7}
"""
    found = [
        (f.path.removeprefix("transforms[1].config."), f.lint.name) for f in check(chat).findings
    ]
    assert sorted(found) == [
        ("messages[0].content", "unknown-field"),
        ("messages[1]", "config"),
        ("messages[2].content", "config"),
        ("messages[2].role", "config"),
        ("model", "config"),
        ("per_row.seed", "unknown-field"),
        ("prefix_batching.key_field", "unknown-field"),
        ("prefix_batching.mode", "config"),
    ]


@pytest.mark.parametrize("step", ["Map", "Ask"])
def test_an_output_that_a_step_lacks_is_told(step: str) -> None:
    text = """\
pipeline:
  transforms:
    - {type: Create, config: {elements: [{text: hello}]}}
    - type: MapToFields
      name: Map
      input: Create
      config: {language: python, fields: {text: text}MAP}
    - {type: VLLMCompletions, name: Ask, input: Map, config: {model: m, prompt: "{text}"ASK}}
    - {type: LogForTesting, input: STEP.errors}
""".replace("STEP", step)
    handled = {step.upper(): ", error_handling: {output: errors}"}
    right, wrong = text, text
    for name in ("MAP", "ASK"):
        right = right.replace(name, handled.get(name, ""))
        wrong = wrong.replace(name, "")
    assert said(right) == []
    assert said(wrong) == [
        f"9:29: error: transforms[3].input: '{step}' has no output 'errors', only 'out': with"
        " error_handling: {output: NAME} it has another [bad-input]"
    ]


# The same words from everywhere


@pytest.mark.filterwarnings("ignore")
def test_yaml_python_and_the_command_say_the_same() -> None:
    import beam_llm

    config = {
        "model": "m",
        "prompt": "{text",
        "sampling": {"max_token": 3, "seed": "x"},
        "requests": {"max_in_flight": 0},
        "resource_hints": {"min_ram": "lots"},
    }
    with pytest.raises(beam_llm.ConfigError) as caught:
        beam_llm.VLLMCompletions(**config)
    constructed = sorted(
        line.removeprefix("VLLMCompletions: ") for line in str(caught.value).splitlines()
    )
    told = [
        f"{f.path.removeprefix('transforms[1].config.')}: {f.message}"
        for f in check(pipeline_of("VLLMCompletions", config, 0)).findings
    ]
    assert sorted(told) == constructed
    assert len(told) == 5


def test_constructing_logs_warnings(caplog: pytest.LogCaptureFixture) -> None:
    import beam_llm

    with caplog.at_level(logging.WARNING, "beam_llm"):
        beam_llm.VLLMCompletions(model="m", prompt="{text}", server={"env": {"HF_TOKEN": "abc"}})
    assert "VLLMCompletions: server.env.HF_TOKEN: looks like a secret" in caplog.text
    assert "[secret-in-config]" in caplog.text
    assert "abc" not in caplog.text


# The documentation


def test_every_check_has_a_section() -> None:
    page = (ROOT / "docs/lints.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## ([\w-]+)$", page, re.MULTILINE)
    assert sections == list(LINTS)
    for name, lint in LINTS.items():
        section = page[page.index(f"## {name}\n") :].split("\n## ")[0]
        assert lint.summary in section
        assert f"({lint.level}" in section


def test_examples_of_the_sections_do_what_they_say() -> None:
    page = (ROOT / "docs/lints.md").read_text(encoding="utf-8")
    shown = 0
    for section in page.split("\n## ")[1:]:
        name = section.partition("\n")[0]
        for block in re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
            if re.search(r"^pipeline:", block, re.MULTILINE):
                shown += 1
                found = {finding.lint.name for finding in check(block).findings}
                assert found == {name} or (not found and "# right" in block), block
    assert shown >= 10


def test_the_process_keeps_its_memory_limit(tmp_path: Path) -> None:
    import resource

    from beam_llm.cli import main

    before = resource.getrlimit(resource.RLIMIT_AS)
    assert main(["validate", str(tmp_path)]) == 2
    assert resource.getrlimit(resource.RLIMIT_AS) == before
