"""Jinja variables from the command line."""

from __future__ import annotations

from collections.abc import Sequence

from beam_llm.pipelines import PipelineFileError


def parse_variables(given: Sequence[str]) -> dict[str, str]:
    """Reads variables.

    Args:
      given: Each as ``NAME=VALUE``.

    Returns:
      The values by name.

    Raises:
      PipelineFileError: One is not of that form.
    """
    variables: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise PipelineFileError(f"--var {text}: error: not of the form NAME=VALUE", 2)
        variables[name] = value
    return variables
