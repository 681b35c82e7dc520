"""Which transforms a pipeline file has at hand: Beam's, ours, and those of its `providers:`."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from beam_llm.registry import TRANSFORMS, TransformSpec
from beam_llm.validation import Path as KnobPath
from beam_llm.validation import nearest

# What Beam declares in its code; the rest is in the listings beside it.
BEAM_IN_CODE = frozenset(
    (
        *("AnomalyDetection", "AssertEqual", "Create", "Explode", "ExtractWindowingInfo"),
        *("Flatten", "Join", "LogForTesting", "PyTransform", "Reshuffle", "StripErrorMetadata"),
        *("ValidateWithSchema", "WindowInto"),
        *("AssignTimestamps", "Combine", "Filter", "MapToFields", "Partition"),
    )
)
#: Transforms whose name goes with a language, as in ``MapToFields-python``.
BY_LANGUAGE = frozenset(("AssignTimestamps", "Combine", "Filter", "MapToFields", "Partition"))
_LANGUAGES = ("generic", "python", "javascript", "java", "sql", "calcite")
_LISTINGS = ("standard_io.yaml", "standard_providers.yaml")
_MAX_INCLUDES = 20

_URNS = {spec.urn: spec for spec in TRANSFORMS.values()}
_CLASSES = {
    name: spec
    for spec in TRANSFORMS.values()
    for name in (spec.builder.replace(":", "."), "beam_llm." + spec.builder.partition(":")[2])
}

#: Takes a path, the name of a check, and a message.
Report = Callable[[KnobPath, str, str], None]


@dataclass(frozen=True)
class Ours:
    """One of our transforms, under whatever name.

    Attributes:
      spec: Which.
      renamed: Its knobs by the names that the provider gives them.
      defaults: Knobs that the provider sets.
    """

    spec: TransformSpec
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def knobs(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Gives the transform's own configuration."""
        own = {self.renamed.get(name, name): value for name, value in config.items()}
        return {**self.defaults, **own}

    def written(self, path: KnobPath) -> KnobPath:
        """Gives a knob's path as it is written in the pipeline."""
        names = {own: name for name, own in self.renamed.items()}
        return (names.get(str(path[0]), path[0]), *path[1:]) if path else path


@functools.cache
def beam_transforms() -> frozenset[str]:
    """Names of the transforms that the installed Beam has, read without importing it."""
    found = set(BEAM_IN_CODE)
    for base in BY_LANGUAGE:
        found |= {f"{base}-{language}" for language in _LANGUAGES}
    beam = importlib.util.find_spec("apache_beam")
    for folder in (beam.submodule_search_locations or ()) if beam else ():
        for listing in _LISTINGS:
            file = Path(folder) / "yaml" / listing
            if file.is_file():
                for provider in _listing(file):
                    found |= set(map(str, provider.get("transforms", ())))
    return frozenset(found)


def _listing(file: Path) -> list[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    read: Any = yaml.load(file.read_bytes(), Loader=loader)  # noqa: S506 - both are safe
    if not isinstance(read, list) or not all(isinstance(item, dict) for item in cast("Any", read)):
        raise ValueError("not a list of providers")
    return cast("list[dict[str, Any]]", read)


class Providers:
    """The transforms that a pipeline can name."""

    def __init__(self, listing: Any, file: str, report: Report):
        """Reads the file's providers.

        Args:
          listing: What stands under `providers:`.
          file: The pipeline file, from which relative includes start.
          report: Takes problems.
        """
        self._own: dict[str, Ours | None] = {}
        self._complete = True
        self._includes = 0
        for path, provider in _items(listing, ("providers",)):
            self._add(provider, path, file, report)

    def find(self, name: str) -> Ours | None:
        """Gives our transform of that name, or None for somebody else's."""
        if name in self._own:
            return self._own[name]
        spec = TRANSFORMS.get(name)
        return None if spec is None else Ours(spec)

    def is_beams(self, name: str) -> bool:
        """Whether the name means one of Beam's own transforms."""
        return name not in self._own and name not in TRANSFORMS

    def is_known(self, name: str) -> bool:
        """Whether there may be such a transform."""
        return (
            name in self._own
            or name in TRANSFORMS
            or name in BEAM_IN_CODE
            or not self._complete
            or name in beam_transforms()
        )

    def nearest(self, name: str) -> str:
        """Suggests a transform."""
        return nearest(name, sorted({*self._own, *TRANSFORMS, *beam_transforms()}))

    def _add(self, provider: Any, path: KnobPath, file: str, report: Report) -> None:
        if not isinstance(provider, dict):
            return  # its shape is checked with the file's
        given = cast("dict[str, Any]", provider)
        if "include" in given:
            self._include(str(given["include"]), path, file, report)
            return
        self._own |= dict(_provided(given, path, report))

    def _include(self, target: str, path: KnobPath, file: str, report: Report) -> None:
        self._includes += 1
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", target.removeprefix("file://")):
            self._complete = False  # on a network
            return
        listing = Path(file).parent / target.removeprefix("file://")
        try:
            if self._includes > _MAX_INCLUDES:
                raise ValueError(f"more than {_MAX_INCLUDES} listings are included")
            if listing.exists() and not listing.is_file():  # reading a pipe would wait for ever
                raise ValueError("it is not a regular file")
            providers = _listing(listing)
        except (OSError, UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError) as error:
            words = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
            message = f"'{target}' cannot be read here ({words}): unknown transforms are not told"
            report((*path, "include"), "unread-provider", message)
            self._complete = False
            return

        def located(_: KnobPath, lint: str, message: str) -> None:
            report((*path, "include"), lint, f"{target}: {message}")

        for provider in providers:
            self._add(provider, path, str(listing), located)


def _items(listing: Any, path: KnobPath) -> Iterator[tuple[KnobPath, Any]]:
    if isinstance(listing, list):
        for i, item in enumerate(cast("list[Any]", listing)):
            yield (*path, i), item


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _provided(
    provider: Mapping[str, Any], path: KnobPath, report: Report
) -> Iterator[tuple[str, Ours | None]]:
    kind = provider.get("type")
    config = _mapping(provider.get("config"))
    underlying: dict[str, Ours | None] = {}
    if kind == "renaming":
        below = _mapping(config.get("underlying_provider"))
        at = (*path, "config", "underlying_provider")
        underlying = dict(_provided(below, at, report))
    for name, target in _mapping(provider.get("transforms")).items():
        if kind == "renaming":
            found = underlying.get(str(target))
            if found is not None:
                mappings = _mapping(config.get("mappings"))
                renamed = mappings.get(name)
                if isinstance(renamed, str):
                    renamed = mappings.get(renamed)
                defaults = _mapping(_mapping(config.get("defaults")).get(name))
                found = Ours(found.spec, _mapping(renamed), defaults)
            yield str(name), found
        elif isinstance(target, str):
            yield str(name), _ours(target, (*path, "transforms", name), report)
        else:
            yield str(name), None


def _ours(target: str, path: KnobPath, report: Report) -> Ours | None:
    """Our transform behind a URN or a constructor's name."""
    known = _URNS if ":" in target else _CLASSES
    if target in known:
        return Ours(known[target])
    if target.startswith(("beam:schematransform:beam_llm:", "beam_llm.transforms.")):
        hint = nearest(target, known) or f" (there are: {', '.join(sorted(known))})"
        report(path, "unknown-urn", f"'{target}' is none of ours{hint}")
    return None
