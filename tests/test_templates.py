import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_llm.templates import Template, TemplateError

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)


def escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


@given(st.text(), st.lists(st.tuples(names, st.text(), st.text())))
def test_renders_as_pythons_format_does(start: str, pieces: list[tuple[str, str, str]]) -> None:
    text = escaped(start) + "".join("{" + name + "}" + escaped(after) for name, _, after in pieces)
    template = Template.parse(text)
    assert template.fields == tuple(name for name, _, _ in pieces)
    values = {name: value for name, value, _ in pieces}
    rendered = template.render([values[name] for name in template.fields])
    assert rendered == text.format(**values)


@given(st.text())
def test_reads_any_text_or_says_what_is_wrong(text: str) -> None:
    try:
        template = Template.parse(text)
    except TemplateError as error:
        assert "{" in text or "}" in text
        assert "brace" in str(error)  # noqa: PT017
    else:
        assert template.render(["x"] * len(template.fields)) is not None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "single '{'"),
        ("a } b", "Single '}'"),
        ("{}", "'{}' is not a field"),
        ("{0}", "'{0}' is not a field"),
        ("{a[0]}", "'{a[0]}' is not a field"),
        ("{a.b.}", "is not a field"),
        ("{a!r}", "'{a!r}' is not a field"),
        ("{a:>10}", "'{a:>10}' is not a field"),
        ("{a b}", "is not a field"),
        ("{a\n}", "is not a field"),
        ('{"k": 1}', "is not a field"),
    ],
)
def test_says_what_is_wrong(text: str, part: str) -> None:
    with pytest.raises(TemplateError) as error:
        Template.parse(text)
    assert part.lower() in str(error.value).lower()
    assert "twice" in str(error.value)


def test_nested_fields() -> None:
    assert Template.parse("{usage.prompt_tokens} {x}").fields == ("usage.prompt_tokens", "x")


@pytest.mark.parametrize(
    ("text", "length", "delimiters", "varies"),
    [
        ("no field", 100, (), False),
        ("{x}", 1, (), True),
        ("literal {x}", 8, (), False),
        ("literal {x}", 9, (), True),
        ("head\n\n{x}", 100, ("\n\n",), False),
        ("head\n{x}", 100, ("\n\n",), True),
        ("{x}\n\ntail", 100, ("\n\n",), True),
    ],
)
def test_knows_whether_the_prefix_varies(
    text: str, length: int, delimiters: tuple[str, ...], varies: bool
) -> None:
    assert Template.parse(text).varies_within(length, delimiters) is varies
