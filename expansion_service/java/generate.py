"""Writes the Java builders from the registry of transforms.

    python expansion_service/java/generate.py           # rewrites them
    python expansion_service/java/generate.py --check   # writes nothing; exits 1 where one differs

Each transform and each section of its configuration becomes a class with a typed, documented
setter for every knob. What they share is written by hand, beside them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from beam_llm.config import FORMS, INT64
from beam_llm.registry import TRANSFORMS, TransformSpec
from beam_llm.schemas import json_schema

SOURCES = Path(__file__).parent / "client/src/main/java/io/beamllm"
HEADER = "// Written by expansion_service/java/generate.py: do not edit."

_WIDTH = 100
_TYPES = {"string": "String", "integer": "long", "number": "double", "boolean": "boolean"}
_BOXES = {"long": "Long", "double": "Double", "boolean": "Boolean"}
_RULES = {"string": "string", "integer": "integer", "number": "number", "boolean": "bool"}
_CHECKS = (
    "minimum",
    "exclusiveMinimum",
    "maximum",
    "exclusiveMaximum",
    "minLength",
    "minItems",
    "pattern",
)
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} character(s)",
    "minItems": "at least {} item(s)",
    "pattern": "{}",
}
_PLURALS = {"string": "strings", "integer": "integers", "number": "numbers", "boolean": "booleans"}
_RESERVED = frozenset(
    re.findall(
        r"\w+",
        """
    abstract assert boolean break byte case catch char class const continue default do double
    else enum extends final finally float for goto if implements import instanceof int
    interface long native new package private protected public return short static strictfp
    super switch synchronized this throw throws transient try void volatile while
        """,
    )
)

Rule = dict[str, Any]


def sources() -> dict[str, str]:
    """Gives every generated source by its file's name."""
    files: dict[str, str] = {}
    sections: dict[str, Rule] = {}
    for spec in TRANSFORMS.values():
        definitions = json_schema(spec.config)["$defs"]
        own = definitions[spec.config.__name__]
        for name, definition in definitions.items():
            if definition is own:
                continue
            if sections.setdefault(name, definition) != definition:
                raise ValueError(f"two sections are named {name}")
        files[f"{_transform_class(spec)}.java"] = _transform(spec, own, definitions)
    names = ",\n          ".join(f"{_transform_class(spec)}.class" for spec in TRANSFORMS.values())
    files["Transforms.java"] = _file(f"""
/** Every transform. */
final class Transforms {{
  static final List<Class<? extends LlmTransform>> ALL =
      List.of(
          {names});

  private Transforms() {{}}
}}
""")
    for name, definition in sections.items():
        files[f"{name}.java"] = _section(name, definition, sections)
    return files


def _transform_class(spec: TransformSpec) -> str:
    # VLLMChat is VllmChat: an acronym is a word in Java's names.
    return re.sub(r"[A-Z]+(?=[A-Z][a-z])", lambda acronym: acronym[0].capitalize(), spec.name)


def _transform(spec: TransformSpec, own: Rule, definitions: dict[str, Rule]) -> str:
    name = _transform_class(spec)
    about = [
        _html(spec.doc),
        f"<p>{{@code {spec.name}}} in YAML and in Python. Everything is checked when the transform"
        " is built; what depends on the input's fields, when it is applied.",
    ]
    body = f"""
{_javadoc(about)}
public final class {name} extends LlmTransform {{
  private static final long serialVersionUID = 1L;

{_knobs(own)}

  private {name}(Builder builder) {{
    super({_quoted(spec.name)}, {_quoted(spec.urn)}, {_quoted(spec.outputs[0])}, KNOBS, builder);
  }}

  /**
   * Starts with every knob at its default.
   *
   * @return a builder
   */
  public static Builder builder() {{
    return new Builder();
  }}

{textwrap.indent(_javadoc([f"Collects the knobs of a {{@link {name}}}."]), "  ")}
  public static final class Builder extends LlmTransform.Builder<Builder> {{
    private Builder() {{}}

{_setters(own, definitions)}
    /**
     * Checks the configuration.
     *
     * @return the transform
     * @throws BeamLlmException if it cannot be used; every problem is listed
     */
    public {name} build() {{
      return new {name}(this);
    }}
  }}
{_enums(own)}}}
"""
    return _file(body)


def _section(name: str, definition: Rule, sections: dict[str, Rule]) -> str:
    knobs = definition["properties"]
    required = definition.get("required", [])
    factory = ""
    if set(required) == set(knobs):
        arguments = ", ".join(f"{_type(knobs[k], k, name)} {_camel(k)}" for k in knobs)
        calls = "".join(f".{_camel(k)}({_camel(k)})" for k in knobs)
        notes = [f"Gives a section with its {'only knob' if len(knobs) == 1 else 'knobs'}."]
        tags = [f"@param {_camel(k)} see {{@link Builder#{_camel(k)}}}" for k in knobs]
        factory = f"""
{textwrap.indent(_javadoc(notes, [*tags, "@return the section"]), "  ")}
  public static {name} of({arguments}) {{
    return builder(){calls}.build();
  }}
"""
    body = f"""
{_javadoc([_html(definition.get("description", ""))])}
public final class {name} extends Section {{
  private static final long serialVersionUID = 1L;

{_knobs(definition)}

  private {name}(Builder builder) {{
    super(builder);
  }}
{factory}
  /**
   * Starts with every knob at its default.
   *
   * @return a builder
   */
  public static Builder builder() {{
    return new Builder();
  }}

{textwrap.indent(_javadoc([f"Collects the knobs of a {{@link {name}}} section."]), "  ")}
  public static final class Builder extends Section.Builder<Builder> {{
    Builder() {{}}

{_setters(definition, sections)}
    /**
     * Gives the section. Its knobs are checked with the transform that takes it.
     *
     * @return the section
     */
    public {name} build() {{
      return new {name}(this);
    }}
  }}
{_enums(definition)}}}
"""
    return _file(body)


def _file(body: str) -> str:
    imports = [
        name
        for name in (
            "java.util.Collection",
            "java.util.List",
            "java.util.Map",
            "java.util.function.Consumer",
        )
        if re.search(rf"\b{name.rpartition('.')[2]}<", body)
    ]
    lines = [HEADER, "package io.beamllm;", ""]
    if imports:
        lines += [*(f"import {name};" for name in imports), ""]
    text = "\n".join(line.rstrip() for line in body.strip("\n").split("\n"))
    return "\n".join(lines) + "\n" + text + "\n"


# Rules


def _knobs(definition: Rule) -> str:
    required = definition.get("required", [])
    lines = ["  static final Knobs KNOBS =", "      new Knobs()"]
    for name, rule in definition["properties"].items():
        if name in required:
            description = _quoted(rule.get("description", ""))
            lines += [
                "          .required(",
                f"              {_quoted(name)},",
                *_long_text(description, "              "),
                f"              {_rule(rule)})",
            ]
        else:
            lines.append(f"          .optional({_quoted(name)}, {_rule(rule)})")
    return "\n".join(lines) + ";"


def _long_text(literal: str, indent: str) -> Iterator[str]:
    """Breaks a string literal into lines of a bearable length."""
    words = re.findall(r"\S+\s*", literal[1:-1])
    line = ""
    parts: list[str] = []
    for word in words:
        if line and len(line) + len(word) > _WIDTH - len(indent) - 8:
            parts.append(line)
            line = ""
        line += word
    parts.append(line)
    for i, part in enumerate(parts):
        lead = indent if i == 0 else f"{indent}    + "
        yield f'{lead}"{part}"{"," if i == len(parts) - 1 else ""}'


def _rule(rule: Rule) -> str:
    if "$ref" in rule:
        return f"Rule.section({_ref(rule)}.KNOBS)"
    if "enum" in rule:
        return f"Rule.string().oneOf({', '.join(_quoted(word) for word in rule['enum'])})"
    kind = rule["type"]
    if kind == "array":
        text = f"Rule.list({_rule(rule['items'])})"
    elif kind == "object":
        text = f"Rule.map({_rule(rule['additionalProperties'])})"
    else:
        text = f"Rule.{_RULES[kind]}()"
    known = {"type", "items", "additionalProperties", *_CHECKS, *_NOTES}
    if unknown := set(rule) - known:
        raise ValueError(f"no Java for {', '.join(sorted(unknown))}")
    for check in rule:
        if check in _CHECKS:
            limit = rule[check]
            if check == "pattern":
                text += f".pattern({_quoted(limit)}, {_quoted(_pattern_words(limit))})"
            else:
                text += f".{check}({_number(limit)})"
    return text


def _pattern_words(pattern: str) -> str:
    """What the Python package calls a text of this form when it refuses one that is not."""
    return FORMS.get(pattern, f"of the form {pattern}")


_NOTES = frozenset({"description", "default", "examples", "title", "x-unit"})


def _number(limit: float) -> str:
    if isinstance(limit, int) and abs(limit) >= 2**31:
        return f"{limit}L"
    return str(limit)


def _ref(rule: Rule) -> str:
    return rule["$ref"].rpartition("/")[2]


# Setters


def _setters(definition: Rule, definitions: dict[str, Rule]) -> str:
    required = definition.get("required", [])
    return "\n".join(
        _setter(name, rule, name in required, definitions)
        for name, rule in definition["properties"].items()
    )


def _setter(name: str, rule: Rule, required: bool, definitions: dict[str, Rule]) -> str:
    method = _camel(name)
    about = [_html(rule.get("description", "")), "<p>" + _facts(rule, required, definitions)]
    tags = [f"@param {method} {{@code {name}}}", "@return this builder"]

    def write(parameter: str, value: str) -> str:
        return f"""{textwrap.indent(_javadoc(about, tags, width=_WIDTH - 4), "    ")}
    public Builder {method}({parameter}) {{
      return set({_quoted(name)}, {value});
    }}
"""

    if "$ref" in rule:
        section = _ref(rule)
        consumer = f"""{textwrap.indent(_javadoc(about, tags, width=_WIDTH - 4), "    ")}
    public Builder {method}(Consumer<{section}.Builder> {method}) {{
      {section}.Builder section = {section}.builder();
      {method}.accept(section);
      return set({_quoted(name)}, section.build());
    }}
"""
        return write(f"{section} {method}", method) + "\n" + consumer
    if "enum" in rule:
        value = f"{method} == null ? null : {method}.toString()"
        return write(f"{_pascal(name)} {method}", value)
    if rule["type"] == "array":
        item = _item(rule["items"])
        # Varargs and collections: what is at hand.
        return (
            write(f"{item}... {method}", f"(Object[]) {method}")
            + "\n"
            + write(f"Collection<{item}> {method}", method)
        )
    if rule["type"] == "object":
        return write(f"Map<String, {_item(rule['additionalProperties'])}> {method}", method)
    return write(f"{_TYPES[rule['type']]} {method}", method)


def _type(rule: Rule, name: str, section: str) -> str:
    if "enum" in rule:
        return _pascal(name)
    if "type" not in rule or rule["type"] not in _TYPES:
        raise ValueError(f"{section}.{name}: no short form")
    return _TYPES[rule["type"]]


def _item(rule: Rule) -> str:
    if "$ref" in rule:
        return _ref(rule)
    kind = _TYPES[rule["type"]]
    return _BOXES.get(kind, kind)


def _facts(rule: Rule, required: bool, definitions: dict[str, Rule]) -> str:
    """Type, bounds, unit, default and example, in words."""
    sentences = [_kind(rule)]
    if required:
        sentences.append("Required")
    elif "$ref" not in rule and "Default:" not in rule.get("description", ""):
        default = rule.get("default")
        none = default is None or default in ("", [], {})
        sentences.append("Default: " + ("none" if none else _code(_text(default))))
    for example in rule.get("examples", ())[:1]:
        sentences.append("Example: " + _code(_text(example)))
    return ". ".join(sentences) + "."


def _kind(rule: Rule) -> str:
    if "$ref" in rule:
        return "A section; absent, its knobs have their defaults"
    if "enum" in rule:
        return "One of " + ", ".join(_code(word) for word in rule["enum"])
    kind = rule["type"]
    if kind == "array":
        words = f"A list of {_many(rule['items'])}"
    elif kind == "object":
        words = f"A mapping of names to {_many(rule['additionalProperties'])}"
    else:
        words = {"string": "Text", "integer": "An integer", "number": "A number"}.get(
            kind, "True or false"
        )
    if "x-unit" in rule:
        words += f" ({_html(rule['x-unit'])})"
    return ", ".join([words, *_bounds(rule)])


def _many(rule: Rule) -> str:
    if "$ref" in rule:
        return f"{{@link {_ref(rule)}}}"
    bounds = " and ".join(_bounds(rule))
    return _PLURALS[rule["type"]] + (f" of {bounds}" if bounds else "")


def _bounds(rule: Rule) -> list[str]:
    return [
        re.sub(
            r"\((\w)\)",
            "" if rule[key] == 1 else r"\1",
            words.format(_html(_pattern_words(rule[key])) if key == "pattern" else rule[key]),
        )
        for key, words in _BOUNDS.items()
        if key in rule and rule[key] not in INT64  # what a long holds says nothing
    ]


def _enums(definition: Rule) -> str:
    text = ""
    for name, rule in definition["properties"].items():
        if "enum" not in rule:
            continue
        about = _javadoc([f"Values of {{@code {name}}}."])
        constants = ",\n\n".join(
            f"    /** {{@code {word}}}. */\n    {_constant(word)}({_quoted(word)})"
            for word in rule["enum"]
        )
        kind = _pascal(name)
        text += f"""
{textwrap.indent(about, "  ")}
  public enum {kind} {{
{constants};

    private final String word;

    {kind}(String word) {{
      this.word = word;
    }}

    /** The value as it is published. */
    @Override
    public String toString() {{
      return word;
    }}
  }}
"""
    return text


# Text


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    word = first + "".join(part.capitalize() for part in rest)
    return f"{word}Value" if word in _RESERVED else word


def _pascal(name: str) -> str:
    word = _camel(name)
    return word[0].upper() + word[1:]


def _constant(word: str) -> str:
    return re.sub(r"\W", "_", word).upper()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) and "\n" not in value else json.dumps(value)


def _code(text: str) -> str:
    """Writes text as code; braces that do not pair would end an inline tag."""
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            break
    if depth == 0 and "@" not in text and "*/" not in text:
        return f"{{@code {text}}}"
    return f"<code>{_escaped(text)}</code>"


def _html(text: str) -> str:
    """Writes Markdown's words and code as Javadoc."""
    parts = re.split(r"`([^`]*)`", text)
    return "".join(_code(part) if i % 2 else _escaped(part) for i, part in enumerate(parts))


def _escaped(text: str) -> str:
    return re.sub("[&<>{}@*]", lambda character: f"&#{ord(character[0])};", text)


def _javadoc(paragraphs: list[str], tags: list[str] | None = None, width: int = _WIDTH) -> str:
    lines: list[str] = []
    for i, paragraph in enumerate(paragraphs):
        lines += [""] if i else []
        lines += textwrap.wrap(paragraph, width - 3, break_long_words=False, break_on_hyphens=False)
    if tags:
        lines += ["", *tags]
    if len(lines) == 1:
        return f"/** {lines[0]} */"
    return "\n".join(["/**", *(f" * {line}".rstrip() for line in lines), " */"])


def main() -> int:
    """Rewrites the sources, or checks them."""
    parser = argparse.ArgumentParser(description="Writes the Java builders.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on drift")
    check = parser.parse_args().check
    wanted = sources()
    found = {
        path.name: text
        for path in SOURCES.glob("*.java")
        if (text := path.read_text(encoding="utf-8")).startswith(HEADER)
    }
    drifted = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    for name in drifted:
        path = SOURCES / name
        if check:
            print(f"{path}: differs from the models: run python expansion_service/java/generate.py")
        elif name in wanted:
            path.write_text(wanted[name], encoding="utf-8")
            print(f"{path}: rewritten")
        else:
            path.unlink()
            print(f"{path}: removed")
    return int(check and bool(drifted))


if __name__ == "__main__":
    sys.exit(main())
