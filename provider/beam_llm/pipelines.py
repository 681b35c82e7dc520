"""Beam YAML pipeline files: read, rendered and checked without Beam."""

from __future__ import annotations

import datetime
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jinja2
import yaml

from beam_llm.config import LLMConfig
from beam_llm.registry import TRANSFORMS
from beam_llm.validation import Path as KnobPath
from beam_llm.validation import check, dotted


class PipelineFileError(Exception):
    """A pipeline file that cannot be used; the message has a line for each problem.

    Attributes:
      exit_code: 2 when the file or the command line is unusable, 1 when its content is.
    """

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Step:
    """One transform of the pipeline.

    Attributes:
      path: Where it stands, such as ``("transforms", 2)``.
      spec: Its mapping as written: ``type``, ``name``, ``input``, ``config``.
    """

    path: KnobPath
    spec: Mapping[str, Any]

    @property
    def type(self) -> str:
        """The transform's type."""
        return str(self.spec.get("type", ""))

    @property
    def name(self) -> str:
        """The name other steps refer to it by."""
        return str(self.spec.get("name") or self.type)

    @property
    def config(self) -> dict[str, Any]:
        """Its configuration, empty where there is none."""
        return self.spec.get("config") or {}


class PipelineFile:
    """A pipeline file, rendered.

    Attributes:
      path: The file.
      text: The YAML text, after Jinja.
      spec: The parsed document.
    """

    def __init__(self, path: Path, variables: Mapping[str, Any]):
        """Reads a file.

        Args:
          path: The file.
          variables: Values for its Jinja variables.

        Raises:
          PipelineFileError: It cannot be read, rendered or parsed, or is no pipeline.
        """
        self.path = path
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise PipelineFileError(f"{path}: error: cannot be read: {reason}", 2) from None
        template = _without_leading_comments(source)
        self.text = _render(path, template, variables)
        # What Jinja changed has other line numbers than the file.
        self._rendered = self.text.strip() != template.strip()
        try:
            self._root = yaml.compose(self.text, Loader=yaml.SafeLoader)
            self.spec: Any = yaml.safe_load(self.text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as a 13th month
            mark = getattr(error, "problem_mark", None)
            words = getattr(error, "problem", None) or str(error)
            raise PipelineFileError(self._located(mark, f"not YAML: {words}")) from None
        if not isinstance(self.spec, dict) or not isinstance(self.spec.get("pipeline"), dict):
            raise PipelineFileError(
                f"{path}:1:1: error: not a Beam YAML pipeline: it has no 'pipeline:' mapping"
            )

    @property
    def options(self) -> dict[str, Any]:
        """Pipeline options that the file sets."""
        options = self.spec.get("options")
        return options if isinstance(options, dict) else {}

    def steps(self) -> Iterator[Step]:
        """Every transform, nested ones included."""
        try:
            yield from _steps(self.spec["pipeline"], ())
        except RecursionError:
            raise PipelineFileError(f"{self.path}: error: transforms nest without end") from None

    def llm_configs(self) -> list[tuple[Step, LLMConfig]]:
        """Checks our transforms.

        Returns:
          Each that asks a model, with its configuration.

        Raises:
          PipelineFileError: Some are wrong; every problem is in the message.
        """
        lines: list[str] = []
        found: list[tuple[Step, LLMConfig]] = []
        for step in self.steps():
            spec = TRANSFORMS.get(step.type)
            if spec is None:
                continue
            problems, config = check(spec.config, step.config)
            for problem in problems:
                path = (*step.path, "config", *problem.path)
                lines.append(self._located(self._mark(path), f"{dotted(path)}: {problem.message}"))
            if isinstance(config, LLMConfig):
                found.append((step, config))
        if lines:
            raise PipelineFileError("\n".join(lines))
        return found

    def _mark(self, path: KnobPath) -> yaml.Mark | None:
        """Where a knob stands, or the innermost thing around it that is there."""
        node: Any = self._root
        mark = node.start_mark
        for step in ("pipeline", *path):
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    if key.value == step:
                        mark, node = key.start_mark, value
                        break
                else:
                    break
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
                node = node.value[step]
                mark = node.start_mark
            else:
                break
        return mark

    def _located(self, mark: yaml.Mark | None, message: str) -> str:
        place = f"{self.path}:{mark.line + 1}:{mark.column + 1}" if mark else str(self.path)
        note = " (line of the rendered template)" if self._rendered and mark else ""
        return f"{place}: error: {message}{note}"


def _steps(block: Any, path: KnobPath) -> Iterator[Step]:
    if not isinstance(block, dict):
        return
    for name in ("source", "sink"):
        if isinstance(block.get(name), dict):
            yield Step((*path, name), block[name])
    transforms = block.get("transforms")
    if isinstance(transforms, list):
        for i, spec in enumerate(cast("list[Any]", transforms)):
            if isinstance(spec, dict):
                at = (*path, "transforms", i)
                yield Step(at, cast("dict[str, Any]", spec))
                yield from _steps(spec, at)


def _without_leading_comments(source: str) -> str:
    """Blanks the comments at the top, which Beam drops before it fills the template."""
    lines = source.splitlines(keepends=True)
    for i, line in enumerate(lines):
        if not line.lstrip().startswith("#"):
            break
        lines[i] = "\n"
    return "".join(lines)


def _render(path: Path, template: str, variables: Mapping[str, Any]) -> str:
    """Fills the Jinja template as Beam does."""
    beam = importlib.util.find_spec("apache_beam")
    folders = [str(path.parent), "."]
    if beam is not None and beam.origin:
        folders.insert(1, str(Path(beam.origin).parent.parent))
    environment = jinja2.Environment(  # noqa: S701 - the output is YAML, not HTML
        undefined=jinja2.StrictUndefined, loader=jinja2.FileSystemLoader(folders)
    )
    try:
        return environment.from_string(template).render({"datetime": datetime, **variables})
    except jinja2.UndefinedError as error:
        name = re.search(r"'([^']*)' is undefined", str(error))
        hint = (
            f": give it with --var {name[1]}=VALUE, or write '{{{name[1]}}}' for a row's field"
            if name
            else ""
        )
        raise PipelineFileError(f"{path}: error: {error}{hint}", 2) from None
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else str(path)
        raise PipelineFileError(f"{place}: error: Jinja: {error}") from None
    except Exception as error:  # an expression of the template may raise anything
        words = f"{type(error).__name__}: {error}"
        raise PipelineFileError(f"{path}: error: Jinja: {words}") from None
