"""YAML text as data with the place of every value, and what YAML 1.1 silently makes of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import yaml

from beam_llm.validation import Path

# libyaml is twenty times as fast as PyYAML's own parser, which Beam uses.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MAX_CHARS = 10_000_000
_MAX_NODES = 300_000
_MAX_TOKENS = 5 * _MAX_NODES
_MAX_DOCUMENTS = 1_000
_MAX_DEPTH = 150  # recursion would end a little above
_SMALL = 200_000  # characters that cannot hold too many nodes
_RETRIED = 200_000  # characters that PyYAML's own parser reads within seconds
_TOO_DEEP = "values nest too deep"


class DocumentError(Exception):
    """Text that is not YAML, or too much of it.

    Attributes:
      place: Line and column, from 0, where known.
    """

    def __init__(self, message: str, place: tuple[int, int] | None = None):
        super().__init__(message)
        self.place = place


@dataclass(frozen=True)
class Trap:
    """Something that YAML reads otherwise than people do.

    Attributes:
      path: Keys and indices that lead there.
      place: Line and column, from 0.
      lint: The check (``beam_llm.lints``).
      message: What is read, and what to write.
    """

    path: Path
    place: tuple[int, int]
    lint: str
    message: str


class Document:
    """One YAML document.

    Attributes:
      data: What it says, exactly as Beam's loader reads it.
      traps: What that loader silently makes of it.
      start: Line and column of its first value, from 0.
    """

    def __init__(self, node: yaml.Node, loader: Any, text: str):
        self._root = node
        self.start = _place(node)
        self.traps = _survey(node)
        try:
            self.data: Any = loader.construct_document(node)
        except (yaml.YAMLError, ValueError, OverflowError) as error:  # such as a 13th month
            raise _not_yaml(error, text, _culprit(node)) from None

    def place(self, path: Path) -> tuple[int, int]:
        """Where a value's key stands, or the innermost thing around it that is there.

        Args:
          path: Keys and indices from the top.

        Returns:
          Line and column, from 0.
        """
        node = self._root
        found = _place(node)
        for step in path:
            if isinstance(node, yaml.MappingNode):
                # Merged keys come first, and the last of one name counts.
                for key, value in reversed(cast("list[tuple[yaml.Node, yaml.Node]]", node.value)):
                    if isinstance(key, yaml.ScalarNode) and _key(key) == str(step):
                        found, node = _place(key), value
                        break
                else:
                    break
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
                node = node.value[step]
                found = _place(node)
            else:
                break
        return found


def read(text: str) -> Iterator[Document]:
    """Reads the documents of a text.

    Args:
      text: The text.

    Yields:
      Each document that holds anything.

    Raises:
      DocumentError: It is not YAML, or too much of it.
    """
    if len(text) > _MAX_CHARS:
        raise DocumentError(f"it has {len(text):,} characters, and {_MAX_CHARS:,} are the limit")
    if len(text) > _SMALL:
        _count(text)
    loader, nodes, failed = _composed(text)
    try:
        for node in nodes:
            yield Document(node, loader, text)
    finally:
        loader.dispose()
    if failed is not None:
        raise failed


def scalars(text: str) -> Iterator[tuple[int, int]]:
    """Finds what is text of the document and no comment, whatever it looks like.

    Args:
      text: YAML, as far as it is right.

    Yields:
      Start and end of each scalar in the text, in their order.
    """
    if len(text) > _MAX_CHARS:
        return
    try:
        for token in itertools.islice(yaml.scan(text, Loader=_LOADER), _MAX_TOKENS):
            if isinstance(token, yaml.ScalarToken):
                start: int = token.start_mark.index
                if token.style in ("|", ">"):  # a comment may stand beside the sign
                    start = text.find("\n", start)
                yield start, token.end_mark.index
    except (yaml.YAMLError, RecursionError):
        return


def _composed(text: str) -> tuple[Any, list[yaml.Node], DocumentError | None]:
    """Reads as many documents as can be, and says what is wrong with the next."""
    loader, nodes, failed = _composed_by(_LOADER, text)
    # Where libyaml differs from Beam's parser, that one's word counts.
    if failed is None or len(text) > _RETRIED or str(failed).endswith(_TOO_DEEP):
        return loader, nodes, failed
    loader.dispose()
    return _composed_by(yaml.SafeLoader, text)


def _composed_by(kind: Any, text: str) -> tuple[Any, list[yaml.Node], DocumentError | None]:
    nodes: list[yaml.Node] = []
    try:
        loader = kind(text)
    except yaml.YAMLError as error:
        return kind(""), [], _not_yaml(error, text)
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is None:
                continue
            nodes.append(node)
            if len(nodes) > _MAX_DOCUMENTS:
                words = f"it has more than {_MAX_DOCUMENTS:,} documents"
                return loader, [], DocumentError(words, _place(node))
    except (yaml.YAMLError, RecursionError) as error:
        return loader, nodes, _not_yaml(error, text)
    return loader, nodes, None


def _count(text: str) -> None:
    """Refuses what has too many values, before they fill the memory."""
    nodes = 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            nodes += isinstance(event, yaml.NodeEvent | yaml.DocumentStartEvent)
            if nodes > _MAX_NODES:
                raise DocumentError(
                    f"it has more than {_MAX_NODES:,} values", _place_of(event.start_mark)
                )
    except yaml.YAMLError as error:
        raise _not_yaml(error, text) from None


def _not_yaml(error: Exception, text: str, node: yaml.Node | None = None) -> DocumentError:
    mark = getattr(error, "problem_mark", None)
    words = getattr(error, "problem", None) or str(error)
    place = _place(node) if node is not None else None if mark is None else _place_of(mark)
    if isinstance(error, RecursionError) or "nesting depth" in words:
        words = _TOO_DEEP
    elif isinstance(error, yaml.reader.ReaderError):
        code: Any = error.character  # a number, whatever its type says
        words = f"the character U+{code:04X} is not allowed"
        at = text.find(chr(code))
        place = text.count("\n", 0, at), at - text.rfind("\n", 0, at) - 1
    elif isinstance(error, ValueError):
        words = words.partition(": ")[0]
    return DocumentError(f"not YAML: {_shortened(words)}", place)


def _shortened(words: str, limit: int = 200) -> str:
    return words if len(words) <= limit else words[:limit] + "…"


def _culprit(root: yaml.Node) -> yaml.Node | None:
    """The value that cannot be one of its kind."""
    loader = yaml.SafeLoader("")
    for node in _nodes(root):
        if isinstance(node, yaml.ScalarNode) and node.tag != _STR:
            try:
                loader.construct_object(node, deep=True)
            except yaml.YAMLError:
                return None  # it knows its place
            except (ValueError, OverflowError):
                return node
    return None


def _nodes(root: yaml.Node) -> Iterator[yaml.Node]:
    stack, seen = [root], {id(root)}
    while stack:
        node = stack.pop()
        yield node
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        for child in children:
            if id(child) not in seen:
                seen.add(id(child))
                stack.append(child)


def _place(node: yaml.Node) -> tuple[int, int]:
    return _place_of(node.start_mark)


def _place_of(mark: Any) -> tuple[int, int]:
    return mark.line, mark.column


# Traps

_STR, _INT, _FLOAT, _BOOL, _MERGE = (
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "merge")
)
_BOOLEANS = ("true", "false")
_EXPONENT = re.compile(r"([-+]?)(\d[\d_]*)?(\.\d*)?[eE]([-+]?)(\d+)\Z")
_OCTAL = re.compile(r"[-+]?0[0-7_]+\Z")


def _survey(root: yaml.Node) -> list[Trap]:
    """Walks a document once: depth, expansion of aliases, traps."""
    traps: list[Trap] = []
    shared = False
    seen: set[int] = set()
    stack: list[tuple[Any, Path]] = [(root, ())]
    while stack:
        node, path = stack.pop()
        if isinstance(node, yaml.ScalarNode):
            if not node.style and (trap := _trap(node)):
                traps.append(Trap(path, _place(node), *trap))
            continue
        if id(node) in seen:
            shared = True
            continue
        seen.add(id(node))
        if len(path) > _MAX_DEPTH:
            raise DocumentError(f"values nest deeper than {_MAX_DEPTH} levels", _place(node))
        if isinstance(node, yaml.SequenceNode):
            stack += [(child, (*path, i)) for i, child in enumerate(node.value)]
            continue
        keys: set[tuple[str, str]] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                stack.append((key, path))
                stack.append((value, path))
                continue
            at = (*path, _key(key))
            if (key.tag, key.value) in keys and key.tag != _MERGE:
                message = f"'{key.value}' stands here twice, and YAML takes the last"
                traps.append(Trap(at, _place(key), "duplicate-key", message))
            keys.add((key.tag, key.value))
            if key.tag == _BOOL and key.value.lower() not in _BOOLEANS:
                message = f"the key {key.value} is {_word(key.value)} in YAML 1.1: quote it"
                traps.append(Trap(at, _place(key), "word-as-boolean", message))
            stack.append((value, at))
    if shared:
        _check_aliases(root)
    return traps


def _key(node: yaml.ScalarNode) -> str:
    """A key as paths have it."""
    if node.tag == _BOOL:
        return _word(node.value).capitalize()
    return cast("str", node.value)


def _word(text: str) -> str:
    return "true" if text.lower() in ("yes", "on", "true") else "false"


def _trap(node: yaml.ScalarNode) -> tuple[str, str] | None:
    text: str = node.value
    if node.tag == _STR:
        number = _EXPONENT.match(text)
        if number and (number[2] or len(number[3] or "") > 1):
            sign, whole, rest, power_sign, power = (part or "" for part in number.groups())
            better = f"{sign}{whole or '0'}{rest or '.0'}e{power_sign or '+'}{power}"
            return "float-as-text", f"{text} is text in YAML 1.1: quote it, or write {better}"
    elif node.tag == _INT:
        if _OCTAL.match(text):
            value = int(text.replace("_", ""), 8)
            plain = text.replace("_", "").lstrip("+-0") or "0"
            return (
                "octal-number",
                f"{text} is {value}, an octal number in YAML 1.1: quote it, or write {plain}",
            )
        if ":" in text:
            return "base-60-number", _base_60(text)
    elif node.tag == _FLOAT:
        if ":" in text:
            return "base-60-number", _base_60(text)
    elif node.tag == _BOOL and text.lower() not in _BOOLEANS:
        value = _word(text)
        return "word-as-boolean", f"{text} is {value} in YAML 1.1: quote it, or write {value}"
    return None


def _base_60(text: str) -> str:
    value = 0.0
    for part in text.replace("_", "").lstrip("+-").split(":"):
        value = value * 60 + float(part)
    shown = f"{value:g}" if value < 1e6 else f"{value:.0f}"
    sign = "-" if text.startswith("-") else ""
    return f"{text} is {sign}{shown}, a number of base 60 in YAML 1.1: quote it"


def _check_aliases(root: yaml.Node) -> None:
    """Refuses aliases that lead back to themselves, or that stand for very much."""
    sizes: dict[int, int] = {}
    depths: dict[int, int] = {}
    open_nodes: set[int] = set()
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        key = id(node)
        children: list[Any] = []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        if done:
            open_nodes.discard(key)
            sizes[key] = 1 + sum(sizes[id(child)] for child in children)
            depths[key] = 1 + max((depths[id(child)] for child in children), default=0)
            if sizes[key] > _MAX_NODES:
                raise DocumentError(
                    f"it has more than {_MAX_NODES:,} values once its aliases are followed",
                    _place(node),
                )
            if depths[key] > _MAX_DEPTH:
                raise DocumentError(
                    f"values nest deeper than {_MAX_DEPTH} levels once aliases are followed",
                    _place(node),
                )
        elif key not in sizes:
            if key in open_nodes:
                raise DocumentError(
                    "an alias leads back to itself: values nest without end", _place(node)
                )
            open_nodes.add(key)
            stack.append((node, True))
            stack += [(child, False) for child in children]
