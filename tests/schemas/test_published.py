"""The published schemas: what editors and other tools read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import pytest

from beam_llm.cli.schema import text_of
from beam_llm.config import Deprecated, Section, _meta
from beam_llm.knobs import deprecated_in, knobs, walk
from beam_llm.lints import LINTS
from beam_llm.registry import TRANSFORMS, TransformSpec
from beam_llm.schemas import DRAFTS, file_name, published, self_contained
from beam_llm.validation import warnings

ROOT = Path(__file__).parent.parent.parent
EACH = pytest.mark.parametrize("spec", TRANSFORMS.values(), ids=lambda spec: spec.name)
# In both drafts, with one meaning; and annotations of our own, which validators pass over.
SHARED = {
    "$schema", "$id", "title", "description", "type", "properties", "required",
    "additionalProperties", "items", "enum", "pattern", "minLength", "minItems", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "default", "examples",
    "x-unit", "x-urn", "x-deprecated", "deprecated",
}  # fmt: skip


def rules(rule: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield rule
    for inner in rule.get("properties", {}).values():
        yield from rules(inner)
    for key in ("items", "additionalProperties"):
        if isinstance(rule.get(key), dict):
            yield from rules(rule[key])


@EACH
@pytest.mark.parametrize("draft", DRAFTS)
def test_documents_are_schemas_of_their_draft(spec: TransformSpec, draft: str) -> None:
    document = published(spec, draft)
    validator = jsonschema.validators.validator_for(document)
    assert validator.META_SCHEMA["$schema"].rstrip("#") == DRAFTS[draft].rstrip("#")
    validator.check_schema(document)
    assert {key for rule in rules(document) for key in rule} <= SHARED
    for rule in rules(document):
        assert isinstance(rule["type"], str)
        if "properties" in rule:
            assert rule["additionalProperties"] is False


@EACH
def test_drafts_differ_in_their_header_alone(spec: TransformSpec) -> None:
    new, old = (published(spec, draft) for draft in DRAFTS)
    assert {key for key in new if new[key] != old[key]} == {"$schema", "$id"}
    assert new.keys() == old.keys()


def test_identifiers_are_distinct_and_end_in_the_version() -> None:
    found = [published(spec, d)["$id"] for spec in TRANSFORMS.values() for d in DRAFTS]
    assert len(set(found)) == len(found)
    for spec in TRANSFORMS.values():
        version = spec.urn.rpartition(":")[2]
        assert {published(spec, d)["$id"].rpartition(":")[2] for d in DRAFTS} == {version}


@EACH
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_files_are_those_of_the_models(spec: TransformSpec, draft: str) -> None:
    file = ROOT / "schemas" / file_name(spec, draft)
    assert file.read_text("utf-8") == text_of(published(spec, draft))


@EACH
def test_every_knob_is_described(spec: TransformSpec) -> None:
    for knob in walk(spec.config):
        assert knob.description.endswith("."), knob.path
        if not knob.is_section:
            assert knob.example is not None, knob.path
        if knob.name.endswith("_secs"):
            assert knob.unit == "seconds", knob.path
        if knob.rule["type"] in ("integer", "number"):
            assert knob.bounds_words() or knob.name == "seed", knob.path
        if knob.rule["type"] == "integer":
            assert "minimum" in knob.rule, knob.path
            assert "maximum" in knob.rule, knob.path


class _Old(Section, frozen=True):
    """A section with a knob that is on its way out."""

    wait: Annotated[
        int, _meta("Old.", example=1, deprecated=Deprecated("0.3", "requests.timeout_secs"))
    ] = 1
    gone: Annotated[int, _meta("Older.", example=1, deprecated=Deprecated("0.2", None))] = 1
    kept: Annotated[int, _meta("New.", example=1)] = 1


def test_a_deprecated_knob_says_so() -> None:
    rules = self_contained(_Old)["properties"]
    assert rules["wait"]["deprecated"] is True
    assert rules["wait"]["x-deprecated"] == "since 0.3: use requests.timeout_secs"
    assert rules["gone"]["x-deprecated"] == "since 0.2: it has no effect"
    assert "deprecated" not in rules["kept"]
    assert [knob.deprecated for knob in knobs(_Old)] == [
        "since 0.3: use requests.timeout_secs",
        "since 0.2: it has no effect",
        None,
    ]


def test_a_deprecated_knob_is_warned_of() -> None:
    (problem,) = warnings(_Old(wait=2))
    assert str(problem) == "wait: deprecated since 0.3: use requests.timeout_secs"
    assert LINTS[problem.lint].level == "warning"


class _Holder(Section, frozen=True):
    """A configuration around it."""

    one: Annotated[_Old, _meta("One.")] = _Old()
    many: Annotated[tuple[_Old, ...], _meta("Many.")] = ()


def test_deprecated_knobs_are_found_where_they_are_set() -> None:
    assert list(deprecated_in(_Holder())) == []
    found = deprecated_in(_Holder(one=_Old(wait=2, kept=2), many=(_Old(), _Old(gone=2))))
    assert dict(found) == {
        ("one", "wait"): "since 0.3: use requests.timeout_secs",
        ("many", 1, "gone"): "since 0.2: it has no effect",
    }
