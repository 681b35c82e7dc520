"""Random configurations, valid and not, from the schemas in the registry."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from typing import Any

#: Values that some knob somewhere must not take, with those at the edge of a type.
ODD: list[Any] = [
    True,
    False,
    0,
    -1,
    1,
    3,
    16.0,
    0.5,
    -0.0,
    5e-324,
    1e300,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63),
    -(2**63) - 1,
    float(2**63),
    10**30,
    10**400,
    "",
    "a",
    "1",
    "true",
    "a b",
    "é",
    "\x00",
    "𝒳" * 3,
    "_",
    "9a",
    "a\n",
    "m:f",
    "m:f\n",
    "m:é",
    "http://h\x1c/v1",
    "http://h/v1\n",
    "http://h/é",
    "30GB",
    "30GB\n",
    "p90\n",
    "http://h/v1",
    "https://",
    [],
    [""],
    ["a"],
    [1],
    [[]],
    {},
    {"a": 1},
    {"a": "b"},
    {"": 0},
    {"a": {}},
]
_STRINGS = [
    "",
    "a",
    "ab",
    "a b",
    "é",
    "𝒳",
    "x\ny",
    "{field}",
    "1",
    "a_1",
    "m.n:f.g",
    "http://h:1/v",
]


def valid(rule: dict[str, Any], rng: random.Random) -> Any:
    """A random value that a schema allows."""
    if "enum" in rule:
        return rng.choice(rule["enum"])
    match rule["type"]:
        case "string":
            fitting = [
                text
                for text in [*_STRINGS, *rule.get("examples", ())]
                if len(text) >= rule.get("minLength", 0)
                and re.search(rule.get("pattern", ""), text)
            ]
            return rng.choice(fitting)
        case "integer":
            low, high = rule.get("minimum", -(2**63)), rule.get("maximum", 2**63 - 1)
            value = rng.choice([low, low + 1, high, rng.randint(low, min(high, 1000))])
            return float(value) if rng.random() < 0.1 and abs(value) < 2**53 else value
        case "number":
            low = rule.get("minimum", rule.get("exclusiveMinimum", -10))
            high = rule.get("maximum", rule.get("exclusiveMaximum", 10_000))
            inside = low + (high - low) * (0.001 + 0.998 * rng.random())
            edges = [rule[k] for k in ("minimum", "maximum") if k in rule]
            return rng.choice([inside, inside, *edges])
        case "boolean":
            return rng.random() < 0.5
        case "array":
            n = rng.randint(rule.get("minItems", 0), 3)
            return [valid(rule["items"], rng) for _ in range(n)]
        case "object" if "properties" in rule:
            required = rule.get("required", ())
            return {
                name: valid(inner, rng)
                for name, inner in rule["properties"].items()
                if name in required or rng.random() < 0.2
            }
        case "object":
            inner = rule["additionalProperties"]
            return {name: valid(inner, rng) for name in rng.sample(_STRINGS, rng.randint(0, 2))}
    raise AssertionError(rule)


def mutated(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A configuration with one thing in it changed, added or removed."""
    config = copy.deepcopy(config)
    places = list(_places(config))
    if not places:
        return {"x": rng.choice(ODD)}
    holder, key = rng.choice(places)
    chance = rng.random()
    if chance < 0.75:
        holder[key] = copy.deepcopy(rng.choice(ODD))
    elif isinstance(holder, dict) and chance < 0.85:
        del holder[key]
    elif isinstance(holder, dict):
        holder[rng.choice(["", "x", str(key) + "s", str(key).upper()])] = holder[key]
    else:
        holder.append(copy.deepcopy(rng.choice(ODD)))
    return config


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)
