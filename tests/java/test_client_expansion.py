"""Transforms of the Java client, expanded by our service: channels, mistakes, and its life."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import psutil
import pytest
import trustme
from apache_beam.typehints.row_type import RowTypeConstraint
from driver import Builders
from serving import Service, serving

import beam_llm
from beam_llm.config import CompletionsConfig
from beam_llm.registry import TRANSFORMS
from beam_llm.validation import ConfigError, check, load

COMPLETIONS = TRANSFORMS["VLLMCompletions"]
FIELDS = {"text": "string", "length": "int64", "home": {"city": "string"}, "raw": "bytes"}
MINIMAL = {"model": "m", "prompt": "{text}"}
HANG_SECS = 120.0


@pytest.fixture
def expand(builders: Builders, local_service: Service) -> Any:
    def answer(config: dict[str, Any], fields: Any = FIELDS, spec: Any = COMPLETIONS) -> Any:
        service = {"at": local_service.address}
        return builders(spec, config, service=service, fields=fields)

    return answer


def test_outputs_have_their_schemas_and_the_annotation(expand: Any) -> None:
    config = {**MINIMAL, "error_handling": {"output": "dead"}}
    answer = expand(config)
    assert answer["rows"] == [*FIELDS, "completion", "finish_reason", "usage", "model"]
    assert answer["failures"] == ["element", "msg", "stack"]
    identifier = load(CompletionsConfig, MINIMAL, "T").identifier
    assert answer["annotation_model_identifier"] == identifier
    chat = {"model": "m", "messages": [{"role": "user", "content": "{home.city}"}]}
    answer = expand({**chat, "model_identifier": "tickets"}, spec=TRANSFORMS["VLLMChat"])
    assert answer["rows"] == [*FIELDS, "reply", "finish_reason", "usage", "model"]
    assert answer["annotation_model_identifier"] == "tickets"
    answer = expand({"prompt": "{text}"}, spec=TRANSFORMS["BatchByPrefix"])
    assert answer["rows"] == ["key", "rows"]


def python_refusal(config: dict[str, Any]) -> str:
    """What the transform says of rows with the same fields in Python."""
    city = RowTypeConstraint.from_fields([("city", str)])
    kind = RowTypeConstraint.from_fields(
        [("text", str), ("length", int), ("home", city), ("raw", bytes)]
    )
    rows = beam.Pipeline(runner="FnApiRunner") | beam.Create([]).with_output_types(kind)
    with pytest.raises(ConfigError) as error:
        rows | beam_llm.VLLMCompletions(**config)
    return str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        {**MINIMAL, "prompt": "{txt}"},
        {**MINIMAL, "prompt": "{txt}{txt}{home.citi}{text.x}{nothing_like_it}"},
        {**MINIMAL, "prompt": "{raw}"},
        {**MINIMAL, "per_row": {"max_tokens": "lenght", "seed": "seed"}},
        {**MINIMAL, "prefix_batching": {"key_field": "home_city"}},
        {**MINIMAL, "output_field": "text"},
    ],
)
def test_unknown_fields_are_told_in_the_same_words(expand: Any, config: dict[str, Any]) -> None:
    refusal = python_refusal(config)
    answer = expand(config)
    assert answer["error"].partition(" (request ")[0] == refusal
    assert answer["paths"] == [line.split(": ")[1] for line in refusal.splitlines()]


@pytest.mark.parametrize(
    "knobs",
    [
        {"sampling": {"choices": ["a"], "regex": "b"}},
        {"server": {"args": ["--port=1"]}, "batching": {"max_batch_weight": 5}},
    ],
)
def test_what_the_service_refuses_names_the_knob(expand: Any, knobs: dict[str, Any]) -> None:
    problems, _ = check(CompletionsConfig, {**MINIMAL, **knobs})
    answer = expand({**MINIMAL, **knobs})
    wanted = "\n".join(f"VLLMCompletions: {problem}" for problem in problems)
    assert answer["error"].partition(" (request ")[0] == wanted
    assert answer["paths"] == [str(problem).partition(": ")[0] for problem in problems]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"class": "string"}, "'class' is a word of the Python language"),
        ({"_id": "string"}, "'_id' starts with '_'"),
        ({"a-b": "string"}, "'a-b' is no Python name"),
        ({"a": {"b": {"from": "string"}}}, "'a.b.from' is a word of the Python language"),
        ({"day": "date"}, "'day' is of the logical type 'beam:logical_type:date:v1'"),
        ({"at": "time"}, "'at' is of the logical type 'beam:logical_type:time:v1'"),
        ({"kind": "enum"}, "'kind' is of the logical type 'Enum'"),
    ],
)
def test_fields_that_python_cannot_read_are_told_at_once(
    expand: Any, fields: dict[str, Any], words: str
) -> None:
    answer = expand(MINIMAL, {"text": "string", **fields})
    assert answer["error"] == (
        f"VLLMCompletions: its input has fields that Beam's Python SDK cannot read: {words}."
        " Rename or convert them before this step"
    )


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    found: dict[str, str] = {}
    ours, other = trustme.CA(), trustme.CA()
    for name, authority in (("ours", ours), ("other", other)):
        authority.cert_pem.write_to_path(str(folder / f"{name}.pem"))
        found[name] = str(folder / f"{name}.pem")
    for name, cert in (
        ("service", ours.issue_cert("expansion.test")),
        ("client", ours.issue_cert("client@example.com")),
        ("stranger", other.issue_cert("stranger@example.com")),
    ):
        chain = b"".join(part.bytes() for part in cert.cert_chain_pems)
        (folder / f"{name}.pem").write_bytes(chain)
        # Java reads keys as PKCS #8.
        subprocess.run(
            ["openssl", "pkcs8", "-topk8", "-nocrypt", "-out", str(folder / f"{name}.key")],
            input=cert.private_key_pem.bytes(),
            check=True,
        )
        found[name] = str(folder / f"{name}.pem")
        found[f"{name}_key"] = str(folder / f"{name}.key")
    return found


@pytest.fixture(scope="module")
def tls_service(certificates: dict[str, str]) -> Iterator[Service]:
    with serving(
        f"--tls-cert={certificates['service']}",
        f"--tls-key={certificates['service_key']}",
        f"--tls-client-ca={certificates['ours']}",
    ) as started:
        yield started


def test_tls_and_mutual_tls(
    builders: Builders, certificates: dict[str, str], tls_service: Service
) -> None:
    tls = {"tls": tls_service.address, "authority": "expansion.test"}
    ours = {"trust": certificates["ours"]}
    client = {"certificate": certificates["client"], "key": certificates["client_key"]}
    stranger = {"certificate": certificates["stranger"], "key": certificates["stranger_key"]}

    def answer(**service: str) -> Any:
        return builders(COMPLETIONS, MINIMAL, service=service, fields=FIELDS)

    assert "completion" in answer(**tls, **ours, **client)["rows"]
    unanswered = f"no expansion service answers at {tls_service.address}"
    for refused in (
        {**tls, **ours},  # no certificate of the client
        {**tls, **ours, **stranger},
        {**tls, **client},  # a service that the JVM does not know
        {**tls, "trust": certificates["other"], **client},
        {**tls, **ours, **client, "authority": "another.test"},
        {"at": tls_service.address},  # plaintext
    ):
        assert unanswered in answer(**refused)["error"], refused
    wrong = answer(**tls, **ours, certificate=certificates["client"], key=certificates["client"])
    assert "cannot be read" in wrong["error"] or "cannot be used" in wrong["error"]


# A service of the client's own


def services_of(builders: Builders) -> list[psutil.Process]:
    children = psutil.Process(builders.process.pid).children(recursive=True)
    return [child for child in children if "beam_llm_expansion" in child.cmdline()]


def wait_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=HANG_SECS)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_service_is_started_shared_and_gone_with_the_jvm(java_build: Path, end: str) -> None:
    with Builders(java_build) as builders:

        def expand() -> psutil.Process:
            service = {"python": sys.executable}
            answer = builders(COMPLETIONS, MINIMAL, service=service, fields=FIELDS)
            assert "completion" in answer["rows"], answer
            (started,) = services_of(builders)
            return started

        started = expand()
        assert expand().pid == started.pid
        if end == "exit":  # one that died meanwhile is started again
            started.kill()
            wait_gone([started])
            started = expand()
        processes = [started, *started.children(recursive=True)]
        if end == "exit":
            builders.process.stdin.close()
            assert builders.process.wait(HANG_SECS) == 0
        else:
            builders.process.send_signal(signal.SIGKILL)
        wait_gone(processes)


def test_a_python_without_the_package_is_told(builders: Builders, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    service = {"python": str(tmp_path / "bare/bin/python")}
    answer = builders(COMPLETIONS, MINIMAL, service=service, fields=FIELDS)
    assert "this Python has no beam-llm: install it there" in answer["error"]
    service = {"python": sys.executable, "options": ["--environment-type=EXTERNAL"]}
    answer = builders(COMPLETIONS, MINIMAL, service=service, fields=FIELDS)
    assert "environment_config: needed by environment_type EXTERNAL" in answer["error"]
    assert services_of(builders) == []
