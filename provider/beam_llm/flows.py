"""What the steps of a pipeline say of each other: inputs, outputs, fields, windows, servers.

Names are resolved as Beam resolves them (`yaml_transform.py`): a scope is what stands in one
`transforms:` list, and a step is found by its name or its type.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import yaml

from beam_llm.config import BatchByPrefixConfig, LLMConfig
from beam_llm.providers import BY_LANGUAGE, Ours, Providers, Report
from beam_llm.validation import (
    Fields,
    check,
    field_problems,
    is_keyed,
    kind,
    nearest,
    output_columns,
    server_spec,
    shown,
    warnings,
    written_field_problems,
)
from beam_llm.validation import Path as KnobPath

_MAX_HINTS = 100  # each compares a name with all there are
_NESTING = ("composite", "chain")
_LEAF_KEYS = (
    *("type", "name", "input", "output", "output_schema", "windowing", "resource_hints"),
    "config",
)
_NESTED_KEYS = (
    *("type", "name", "input", "output", "windowing", "resource_hints"),
    *("transforms", "extra_transforms", "source", "sink"),
)
_PIPELINE_KEYS = tuple(key for key in _NESTED_KEYS if key not in ("name", "input", "output"))
_PROVIDER_KEYS = ("type", "transforms", "config")
# Beam takes these out of any configuration, for itself.
_BEAMS_KNOBS = ("output_schema", "dependencies")
_SAME_FIELDS = frozenset(
    (
        *("Filter", "Reshuffle", "WindowInto", "AssignTimestamps", "LogForTesting", "Partition"),
        "ValidateWithSchema",
    )
)
# Beam's own that have one output, and with error_handling another.
_ONE_OUTPUT = frozenset(
    (
        *("AssignTimestamps", "Combine", "Create", "Explode", "Filter", "Flatten"),
        *("LogForTesting", "MapToFields", "Reshuffle", "ValidateWithSchema", "WindowInto"),
    )
)
_LEAF: Fields = {}


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
        return _mapping(self.spec.get("config"))

    @property
    def error_output(self) -> str | None:
        """Name of its output for failed rows."""
        output = _mapping(self.config.get("error_handling")).get("output")
        return output if isinstance(output, str) else None


@dataclass(frozen=True)
class Flow:
    """What is known of the rows between two steps.

    Attributes:
      fields: Their fields, None where they cannot be told.
      sessions: Whether they are in session windows.
    """

    fields: Fields | None = None
    sessions: bool = False


#: Flows of a step or a scope by output; None is the main one.
Outputs = Mapping[str | None, Flow]


@dataclass
class _Scope:
    """A `transforms:` list while it is looked at."""

    path: KnobPath
    members: list[Step]
    inputs: Mapping[str, Flow]
    chain: bool
    names: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    consumed: set[tuple[int, str | None]] = field(default_factory=set[tuple[int, str | None]])

    def __post_init__(self) -> None:
        found: dict[str, dict[int, None]] = defaultdict(dict)
        for i, step in enumerate(self.members):
            for name in (step.spec.get("name"), step.type):
                if isinstance(name, str) and name:
                    found[name][i] = None
            if isinstance(step.spec.get("input"), list) and step.type != "Flatten":
                # Beam flattens such inputs first, by a step of its own.
                found["Flatten"][-1 - i] = None
        self.names = {name: list(at) for name, at in found.items()}


@dataclass(frozen=True)
class _Reference:
    """An input as it is resolved: a member's output, or an input of the scope."""

    member: int | None
    output: str | None


class Checker:
    """Checks one pipeline.

    Attributes:
      configs: Our language-model transforms that are right, each with its configuration.
    """

    def __init__(self, providers: Providers, report: Report):
        self.configs: list[tuple[Step, LLMConfig]] = []
        self._providers = providers
        self._report = report
        self._servers: dict[str, tuple[Step, Any]] = {}
        self._hints = 0

    def check(self, spec: Mapping[str, Any]) -> None:
        """Checks a whole document.

        Args:
          spec: The document.
        """
        self._check_listing(spec.get("providers"))
        if "options" in spec and not isinstance(spec["options"], dict):
            self._wrong(("options",), spec["options"], "a mapping")
        block = spec["pipeline"]
        at: KnobPath = ("pipeline",)
        if not isinstance(block, dict):
            self._wrong(at, block, "a mapping with 'transforms:'")
            return
        block = cast("dict[str, Any]", block)
        style = block.get("type", "composite")
        if style not in _NESTING:
            self._report(
                (*at, "type"), "pipeline", f'{shown(style)} is not one of "chain", "composite"'
            )
            return
        self._check_keys(block, at, _PIPELINE_KEYS)
        self._nested(Step(at, block), {}, _is_sessions(block.get("windowing")))

    # Shapes

    def _wrong(self, path: KnobPath, value: Any, wanted: str) -> None:
        self._report(path, "pipeline", f"{shown(value)} is {kind(value)}, not {wanted}")

    def _check_keys(self, block: Mapping[str, Any], path: KnobPath, allowed: Sequence[str]) -> None:
        for key in block:
            if key not in allowed:
                hint = self._nearest(str(key), allowed)
                words = f"unknown key{hint} (allowed: {', '.join(allowed)})"
                self._report((*path, key), "pipeline", words)

    def _check_listing(self, providers: Any) -> None:
        if providers is None:
            return
        if not isinstance(providers, list):
            self._wrong(("providers",), providers, "a list")
            return
        for i, provider in enumerate(cast("list[Any]", providers)):
            at: KnobPath = ("providers", i)
            if not isinstance(provider, dict):
                self._wrong(at, provider, "a mapping")
            elif "include" in provider:
                self._check_keys(cast("dict[str, Any]", provider), at, ("include",))
            else:
                self._check_keys(cast("dict[str, Any]", provider), at, _PROVIDER_KEYS)
                for key in _PROVIDER_KEYS:
                    if key not in provider:
                        example = " (it may be empty: config: {})" if key == "config" else ""
                        words = f"required, and missing{example}"
                        self._report((*at, key), "pipeline", words)
                for key in ("transforms", "config"):
                    if key in provider and not isinstance(provider[key], dict):
                        self._wrong((*at, key), provider[key], "a mapping")
                for name, target in _mapping(provider.get("transforms")).items():
                    if not isinstance(target, str):
                        wanted = "a string (put such a provider into a listing, and include that)"
                        self._wrong((*at, "transforms", name), target, wanted)

    def _is_step(self, spec: Any, path: KnobPath, chain: bool) -> bool:
        """Checks the shape of a step, and whether it can be looked at further."""
        if not isinstance(spec, dict):
            self._wrong(path, spec, "a mapping with 'type:'")
            return False
        step = cast("dict[str, Any]", spec)
        if "type" not in step:
            self._report((*path, "type"), "pipeline", "required, and missing")
            return False
        if not isinstance(step["type"], str):
            self._wrong((*path, "type"), step["type"], "a string")
            return False
        self._check_keys(step, path, _NESTED_KEYS if step["type"] in _NESTING else _LEAF_KEYS)
        if "name" in step and not isinstance(step["name"], str):
            self._wrong((*path, "name"), step["name"], "a string")
        config = step.get("config", {})
        if not isinstance(config, dict):
            self._wrong((*path, "config"), config, "a mapping")
        elif config.get("error_handling", {}) is None:
            self._wrong((*path, "config", "error_handling"), None, "a mapping with 'output:'")
        for key in ("input", "output"):
            if chain and key in step:
                words = "a step of a chain reads what stands before it: leave it out"
                self._report((*path, key), "pipeline", words)
        return True

    def _members(self, block: Step, chain: bool) -> Iterator[Step]:
        spec = block.spec
        candidates: list[tuple[KnobPath, Any, bool]] = []
        if "source" in spec:
            candidates.append(((*block.path, "source"), spec["source"], chain))
        for key in ("transforms", "sink", "extra_transforms"):
            if key not in spec:
                continue
            at = (*block.path, key)
            value = spec[key]
            if key == "sink":
                candidates.append((at, value, chain))
            elif isinstance(value, list):
                items = cast("list[Any]", value)
                implicit = chain and key == "transforms"
                candidates += [((*at, i), item, implicit) for i, item in enumerate(items)]
            else:
                self._wrong(at, value, "a list")
        if "transforms" not in spec and not ("source" in spec and "sink" in spec):
            self._report((*block.path, "transforms"), "pipeline", "required, and missing")
        for at, item, implicit in candidates:
            if self._is_step(item, at, implicit):
                yield Step(at, cast("dict[str, Any]", item))

    # Scopes

    def _nested(self, block: Step, outer: Mapping[str, Flow], sessions: bool) -> Outputs:
        """Checks a chain or a composite, and gives what comes out of it."""
        chain = block.spec.get("type") == "chain"
        scope = _Scope(block.path, list(self._members(block, chain)), outer, chain)
        implicit = self._implicit(scope, block, chain)
        references = [
            implicit[i] if implicit[i] is not None else list(self._references(scope, i))
            for i in range(len(scope.members))
        ]
        produced: list[Outputs] = [{} for _ in scope.members]
        for i in self._in_order(scope, references):
            flows = [self._flow(r, scope, produced) for r in references[i] or ()]
            produced[i] = self._step(scope.members[i], flows, scope, sessions)
        outputs = self._scope_outputs(scope, block, produced)
        self._check_error_outputs(scope)
        return outputs

    def _implicit(self, scope: _Scope, block: Step, chain: bool) -> list[list[_Reference] | None]:
        """Inputs that are not written; None where they are."""
        members = scope.members
        extra = len(block.spec.get("extra_transforms") or ()) if chain else 0
        has_io = any(s.spec.get("input") or s.spec.get("output") for s in members)
        if not chain and (has_io or not scope.inputs or not block.spec.get("input")):
            return [None] * len(members)
        first = [_Reference(None, name) for name in scope.inputs]
        found: list[list[_Reference] | None] = []
        for i in range(len(members)):
            if i >= len(members) - extra:
                found.append(None)
            else:
                found.append(first if i == 0 else [_Reference(i - 1, None)])
        return found

    def _references(self, scope: _Scope, i: int) -> Iterator[_Reference]:
        step = scope.members[i]
        path = (*step.path, "input")
        given = step.spec.get("input")
        for at, name in self._named(given, path):
            found = self._resolve(scope, name, at)
            if found is None:
                continue
            if found.member == i:
                self._report(at, "bad-input", f"'{name}' is this step itself")
                continue
            if found.member is not None:
                scope.consumed.add((found.member, found.output))
            yield found
        ours = self._providers.find(step.type)
        if not given and given != {} and ours is not None and not scope.inputs:
            words = "it reads rows: name the step that gives them, input: NAME"
            self._report(path, "bad-input", words)

    def _named(self, given: Any, path: KnobPath) -> Iterator[tuple[KnobPath, str]]:
        """The references that an `input` or `output` holds."""
        if given is None:
            return
        if isinstance(given, str):
            yield path, given
            return
        items: list[tuple[KnobPath, Any]]
        if isinstance(given, list) and path[-1] == "input":
            items = [((*path, i), item) for i, item in enumerate(cast("list[Any]", given))]
        elif isinstance(given, dict):
            items = [((*path, k), v) for k, v in cast("dict[str, Any]", given).items()]
        else:
            self._wrong(path, given, "the name of a step, or a mapping of such names")
            return
        for at, item in items:
            if isinstance(item, str):
                yield at, item
            else:
                self._wrong(at, item, "the name of a step")

    def _resolve(self, scope: _Scope, name: str, path: KnobPath) -> _Reference | None:
        if name in scope.inputs:
            return _Reference(None, name)
        step, dot, output = name.rpartition(".") if "." in name else (name, "", "")
        members = scope.names.get(step, ())
        if len(members) == 1 and members[0] < 0:
            return _Reference(None, None)
        if len(members) == 1:
            reference = _Reference(members[0], output if dot else None)
            return reference if self._has_output(scope, reference, path) else None
        if members:
            words = f"'{step}' may mean any of {len(members)} steps here: give them names"
        else:
            known = [*scope.inputs, *scope.names]
            listed = ", ".join(known[:10]) + (", …" if len(known) > 10 else "")
            words = f"there is no step '{step}' here{self._nearest(step, known)} (there: {listed})"
        self._report(path, "bad-input", words)
        return None

    def _has_output(self, scope: _Scope, reference: _Reference, path: KnobPath) -> bool:
        step = scope.members[reference.member or 0]
        ours = self._providers.find(step.type)
        base, dash, _ = step.type.partition("-")
        name = base if dash and base in BY_LANGUAGE else step.type
        one = ours is not None or (name in _ONE_OUTPUT and self._providers.is_beams(step.type))
        if reference.output is None or not one:
            return True
        error = step.error_output
        known = ["good" if ours is None else "output", error] if error else ["out"]
        # Whatever a provider makes of it, the main output goes by these.
        if reference.output in (*known, "out", "output", "good"):
            return True
        listed = " and ".join(f"'{output}'" for output in known)
        remedy = "" if error else ": with error_handling: {output: NAME} it has another"
        words = f"'{step.name}' has no output '{reference.output}', only {listed}{remedy}"
        self._report(path, "bad-input", words)
        return False

    def _in_order(
        self, scope: _Scope, references: Sequence[Sequence[_Reference] | None]
    ) -> Iterator[int]:
        """The members, each after those it reads; the rest goes in a circle."""
        waiting = [
            {r.member for r in (found or ()) if r.member is not None} for found in references
        ]
        readers: dict[int, list[int]] = defaultdict(list)
        for i, producers in enumerate(waiting):
            for producer in producers:
                readers[producer].append(i)
        ready = deque(i for i, producers in enumerate(waiting) if not producers)
        left = set(range(len(waiting)))
        while ready:
            i = ready.popleft()
            left.discard(i)
            yield i
            for reader in readers[i]:
                waiting[reader].discard(i)
                if not waiting[reader]:
                    ready.append(reader)
        if left:
            circle = _circle({i: waiting[i] & left for i in left})
            step = scope.members[circle[0]]
            names = [scope.members[i].name for i in [*circle, circle[0]]]
            names = " → ".join(names if len(names) < 10 else [*names[:9], "…"])
            self._report(
                (*step.path, "input"), "bad-input", f"it reads its own output, in a circle: {names}"
            )
            yield from sorted(left)  # their configurations are checked all the same

    def _flow(self, reference: _Reference, scope: _Scope, produced: Sequence[Outputs]) -> Flow:
        if reference.member is None:
            return scope.inputs.get(reference.output or "", Flow())
        outputs = produced[reference.member]
        if reference.output in outputs:
            return outputs[reference.output]
        return Flow(sessions=outputs.get(None, Flow()).sessions)

    def _scope_outputs(self, scope: _Scope, block: Step, produced: Sequence[Outputs]) -> Outputs:
        given = block.spec.get("output")
        path = (*block.path, "output")
        if given is None or scope.path == ("pipeline",):
            return produced[-1] if produced else {}
        outputs: dict[str | None, Flow] = {}
        for at, name in self._named(given, path):
            if scope.chain:
                continue  # the last transform's own outputs
            found = self._resolve(scope, name, at)
            if found is None:
                continue
            if found.member is not None:
                scope.consumed.add((found.member, found.output))
            outputs[str(at[-1])] = self._flow(found, scope, produced)
        if len(outputs) == 1:
            outputs[None] = next(iter(outputs.values()))
        return outputs

    def _check_error_outputs(self, scope: _Scope) -> None:
        for i, step in enumerate(scope.members):
            output = step.error_output
            if step.type in _NESTING or output is None or (i, output) in scope.consumed:
                continue
            remedy = f"give a step `input: {step.name}.{output}`"
            if scope.chain:
                remedy += ", in a pipeline that is no chain"
            self._report(
                (*step.path, "config", "error_handling", "output"),
                "unconsumed-errors",
                f"nothing reads '{step.name}.{output}', and Beam refuses that: {remedy}",
            )

    # Steps

    def _step(self, step: Step, flows: Sequence[Flow], scope: _Scope, sessions: bool) -> Outputs:
        """Checks a step, and gives what comes out of it."""
        own = step.spec.get("windowing")
        if own is not None and step.type != "WindowInto":
            sessions = _is_sessions(own)
            flows = [replace(flow, sessions=sessions) for flow in flows]
        if step.type in _NESTING:
            return self._nested(step, self._inner(step, flows, scope), sessions)
        into = _merged(flows) if flows else Flow(sessions=sessions)
        ours = self._providers.find(step.type)
        if ours is not None:
            return self._ours(step, ours, into)
        if not self._providers.is_known(step.type):
            hint = self._nearest_transform(step.type)
            words = f"there is no transform '{step.type}'{hint}"
            self._report((*step.path, "type"), "unknown-transform", words)
        if not self._providers.is_beams(step.type):
            return {None: Flow(sessions=into.sessions)}
        outputs: dict[str | None, Flow] = {None: _after(step, into, flows)}
        if step.error_output is not None:
            outputs[step.error_output] = _failed(into)
        return outputs

    def _inner(self, step: Step, flows: Sequence[Flow], scope: _Scope) -> Mapping[str, Flow]:
        """The inputs that a nested scope's steps can name."""
        given = step.spec.get("input")
        if not given:
            merged = {"input": _merged(flows)} if flows else {}
            return {**scope.inputs, **merged}
        if isinstance(given, dict):
            return dict(zip(map(str, cast("Any", given)), flows, strict=False))
        return {"input": _merged(flows)}

    def _ours(self, step: Step, ours: Ours, into: Flow) -> Outputs:
        config = {k: v for k, v in step.config.items() if k not in _BEAMS_KNOBS}
        problems, checked = check(ours.spec.config, ours.knobs(config))
        if checked is not None:
            problems = list(warnings(checked))
        if isinstance(checked, LLMConfig):
            self.configs.append((step, checked))
        if into.fields is not None:
            problems += (
                written_field_problems(ours.spec.config, ours.knobs(config), into.fields)
                if checked is None
                else field_problems(checked, into.fields)
            )
        for problem in problems:
            at = (*step.path, "config", *ours.written(problem.path))
            self._report(at, problem.lint, problem.message)
        outputs: dict[str | None, Flow] = {None: Flow(sessions=into.sessions)}
        if checked is not None and into.sessions and is_keyed(checked):
            words = "rows in session windows are not batched by prefix: window them otherwise"
            if isinstance(checked, LLMConfig):
                words += ", or say prefix_batching: {mode: none}"
            self._report((*step.path, "config", "prefix_batching"), "session-windows", words)
        if isinstance(checked, BatchByPrefixConfig):
            outputs[None] = Flow({"key": _LEAF, "rows": _LEAF}, into.sessions)
        if isinstance(checked, LLMConfig):
            self._check_server(step, checked)
            if into.fields is not None:
                usage: Fields = dict.fromkeys(
                    ("prompt_tokens", "cached_tokens", "completion_tokens"), _LEAF
                )
                added: dict[str, Fields | None] = dict.fromkeys(output_columns(checked), _LEAF)
                added[f"{checked.details_prefix}usage"] = usage
                outputs[None] = Flow({**into.fields, **added}, into.sessions)
        if step.error_output is not None:
            outputs[step.error_output] = _failed(into)
        return outputs

    def _check_server(self, step: Step, config: LLMConfig) -> None:
        endpoint = config.server.endpoint
        wanted: Any = endpoint
        if endpoint is None:
            server = server_spec(config)
            wanted = (server.model, server.args, dict(server.env), server.env_from_worker)
        first, others = self._servers.setdefault(config.identifier, (step, wanted))
        if others == wanted:
            return
        words = f"'{first.name}' has this identifier too, and another model or server"
        at = (*step.path, "config", "model_identifier")
        self._report(at, "identifier-conflict", f"{words}: give each its own")

    # Suggestions

    def _nearest(self, word: str, known: Sequence[str]) -> str:
        self._hints += 1
        return nearest(word, known[:1_000]) if self._hints <= _MAX_HINTS else ""

    def _nearest_transform(self, name: str) -> str:
        self._hints += 1
        return self._providers.nearest(name) if self._hints <= _MAX_HINTS else ""


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _circle(reads: Mapping[int, set[int]]) -> list[int]:
    """Some circle among members of which each reads another."""
    # Members that only read a circle have no part in it, and are passed on the way.
    seen: dict[int, int] = {}
    way: list[int] = []
    i = min(reads)
    while i not in seen:
        seen[i] = len(way)
        way.append(i)
        i = min(reads[i])
    circle = way[seen[i] :][::-1]
    first = circle.index(min(circle))
    return [*circle[first:], *circle[:first]]


def _is_sessions(windowing: Any) -> bool:
    if isinstance(windowing, str) and len(windowing) < 10_000:
        try:
            windowing = yaml.safe_load(windowing)
        except (yaml.YAMLError, ValueError, RecursionError):
            return False
    return _mapping(windowing).get("type") == "sessions"


# Fields


def _merged(flows: Sequence[Flow]) -> Flow:
    """What several inputs are together."""
    fields = flows[0].fields if flows else None
    if any(flow.fields is None or set(flow.fields) != set(fields or ()) for flow in flows):
        fields = None
    elif fields is not None and len(flows) > 1:
        fields = dict.fromkeys(fields)
    return Flow(fields, any(flow.sessions for flow in flows))


def _failed(into: Flow) -> Flow:
    return Flow({"element": into.fields, "msg": _LEAF, "stack": _LEAF}, into.sessions)


def _after(step: Step, into: Flow, flows: Sequence[Flow]) -> Flow:
    """What comes out of one of Beam's own transforms."""
    config = step.config
    name = step.type
    base, dash, _ = name.partition("-")
    if dash and base in BY_LANGUAGE:
        name = base
    if name == "WindowInto":
        windowing = config.get("windowing", step.spec.get("windowing"))
        return replace(into, sessions=_is_sessions(windowing))
    if name in _SAME_FIELDS:
        return into
    if name == "Flatten":
        return _merged(flows)
    fields: Fields | None = None
    if name == "Create":
        fields = _created(config.get("elements"))
    elif name == "ReadFromText":
        fields = {"line": _LEAF}
    elif name == "MapToFields":
        fields = _mapped(config, into.fields)
    elif name == "Explode" and into.fields is not None:
        exploded = config.get("fields")
        names = [exploded] if isinstance(exploded, str) else exploded
        if isinstance(names, list):
            fields = {k: None if k in names else v for k, v in into.fields.items()}
    elif name == "Combine":
        fields = _combined(config)
    return Flow(fields, into.sessions)


def _created(elements: Any) -> Fields | None:
    if not isinstance(elements, list) or not elements:
        return None
    return _fields_of([e if isinstance(e, dict) else {"element": e} for e in elements])


def _fields_of(rows: Sequence[Any]) -> Fields | None:
    """The fields of rows written as mappings."""
    values: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in cast("dict[Any, Any]", row).items():
            if not isinstance(name, str):
                return None
            values.setdefault(name, []).append(value)
    found: dict[str, Fields | None] = {}
    for name, given in values.items():
        if all(isinstance(value, dict) for value in given):
            found[name] = _fields_of(given)
        elif any(value is None or isinstance(value, dict) for value in given):
            found[name] = None
        else:
            found[name] = _LEAF
    return found


def _mapped(config: Mapping[str, Any], into: Fields | None) -> Fields | None:
    given = config.get("fields")
    if not isinstance(given, dict):
        return None
    made: dict[str, Fields | None] = {}
    for name, value in cast("dict[str, Any]", given).items():
        if isinstance(value, dict):
            value = cast("dict[str, Any]", value).get("expression")
        made[name] = into.get(value) if into and isinstance(value, str) else None
    if not config.get("append"):
        return made
    if into is None:
        return None
    drop = config.get("drop") or ()
    dropped = {drop} if isinstance(drop, str) else {d for d in drop if isinstance(d, str)}
    return {**{k: v for k, v in into.items() if k not in dropped}, **made}


def _combined(config: Mapping[str, Any]) -> Fields | None:
    groups = config.get("group_by")
    names = [groups] if isinstance(groups, str) else groups
    combine = config.get("combine")
    if not isinstance(names, list) or not isinstance(combine, dict):
        return None
    if not all(isinstance(name, str) and name.isidentifier() for name in names):
        return None
    return dict.fromkeys([*names, *combine])
