"""Mutates requests, and sees that a service stands: no crash, no hang, nothing run or opened.

    python tests/expansion/fuzz.py --requests=50000

Half of the mutations change a field of a request or of the protos within it, so that what is
sent can be parsed; the other half change bytes of the encoded request, which gRPC hands to the
service as they are.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
from apache_beam.portability.api import (
    beam_expansion_api_pb2,
    beam_runner_api_pb2,
    external_transforms_pb2,
    schema_pb2,
)
from attacks import ATTACKS, benign
from serving import CHAT, MINIMAL, STANDIN, Service, request, serving

_EXPAND = "/org.apache.beam.model.expansion.v1.ExpansionService/Expand"
_ARTIFACTS = "/org.apache.beam.model.job_management.v1.ArtifactRetrievalService/"
_TIMEOUT_SECS = 120.0
# What a payload may be, inside which fields are changed as well.
_INNER = (
    external_transforms_pb2.SchemaTransformPayload,
    external_transforms_pb2.ExternalConfigurationPayload,
    schema_pb2.Schema,
    beam_runner_api_pb2.AnyOfEnvironmentPayload,
)


def seeds(canary: Path) -> list[beam_expansion_api_pb2.ExpansionRequest]:
    """Requests to start from: good ones, and each attack."""
    return [
        request(),
        request({**MINIMAL, "sampling": {"max_tokens": 4}, "error_handling": {"output": "bad"}}),
        request({"model": "m"}, urn=CHAT),
        benign(),
        *(attack.make(canary) for attack in ATTACKS.values()),
    ]


def mutated(message: Any, chance: random.Random, depth: int = 0) -> None:
    """Changes one field of a message, or of one inside it."""
    fields = message.ListFields()
    if not fields:
        return
    field, value = chance.choice(fields)
    if chance.random() < 0.05:
        message.ClearField(field.name)
    elif field.is_repeated:
        _mutated_many(message, field, value, chance, depth)
    elif field.message_type is not None:
        mutated(value, chance, depth + 1)
    else:
        setattr(message, field.name, _other(value, field, chance, depth))


def _mutated_many(message: Any, field: Any, value: Any, chance: random.Random, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        if not value:
            return
        key = chance.choice(sorted(value))
        if field.message_type.fields_by_name["value"].message_type is None:
            if chance.random() < 0.5:
                value[_text(key, chance)] = value[key]
            else:
                value[key] = _text(value[key], chance) if isinstance(value[key], str) else b""
        elif chance.random() < 0.2:
            value[_text(key, chance)].CopyFrom(value[key])
        else:
            mutated(value[key], chance, depth + 1)
        return
    at = chance.randrange(len(value))
    if field.message_type is None:
        value[at] = _other(value[at], field, chance, depth)
    elif chance.random() < 0.2:
        value.add().CopyFrom(value[at])
    else:
        mutated(value[at], chance, depth + 1)


def _other(value: Any, field: Any, chance: random.Random, depth: int) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int) and field.enum_type is not None:
        return chance.choice(field.enum_type.values).number
    if isinstance(value, int):
        return chance.choice([0, 1, 2**31 - 1, -(2**31)])
    if isinstance(value, float):
        return chance.choice([0.0, -1.0, float("nan"), float("inf"), 1e308])
    if isinstance(value, str):
        return _text(value, chance)
    for kind in chance.sample(_INNER, len(_INNER)):
        try:
            inner = kind.FromString(value)
        except Exception:
            continue
        if inner.ListFields() and chance.random() < 0.8 and depth < 10:
            mutated(inner, chance, depth + 1)
            return inner.SerializeToString()
    return _bytes(value, chance)


def _text(value: str, chance: random.Random) -> str:
    return chance.choice(
        [
            "",
            value + value,
            value[: len(value) // 2],
            value[::-1],
            "x" * 2_000,
            "../../etc/passwd",
            "a\x00b\nc",
            "__class__",
            "{text.__class__}",
            "😀" * 50,
            f"{value}.{value}",
        ]
    )


def _bytes(value: bytes, chance: random.Random) -> bytes:
    data = bytearray(value)
    for _ in range(chance.choice([1, 2, 8, 16])):
        kind = chance.randrange(4)
        at = chance.randrange(len(data) + 1)
        if kind == 0:
            data[at:at] = chance.randbytes(chance.choice([1, 4, 64]))
        elif kind == 1:
            del data[at : at + chance.choice([1, 4, 64])]
        elif kind == 2 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif at < len(data):
            data[at] = chance.choice([0, 0x7F, 0x80, 0xFF])
    return bytes(data)


def inspected(service: Service, canary: Path) -> int:
    """Checks that a service is well.

    Returns:
      Its resident memory, in bytes.
    """
    assert service.process.poll() is None, service.log.read_text()[-4_000:]
    assert not service.expand(request()).error
    assert not canary.exists(), "something was run"
    process = psutil.Process(service.process.pid)
    assert not process.children(), "a process was started"
    roots = (sys.prefix, sys.base_prefix, str(service.log), "/usr", "/lib", "/dev", str(STANDIN))
    opened = [file.path for file in process.open_files() if not file.path.startswith(roots)]
    assert not opened, f"files were opened: {opened}"
    return process.memory_info().rss


def fuzz(service: Service, count: int, seed: int, canary: Path) -> dict[str, int]:
    """Sends mutated requests.

    Args:
      service: The service.
      count: How many.
      seed: Seed of the mutations.
      canary: What nothing may make.

    Returns:
      How many were answered in which way.
    """
    chance = random.Random(seed)
    starts = seeds(canary)
    outcomes: collections.Counter[str] = collections.Counter()
    slowest, under_way = 0.0, 64
    with service.channel() as channel:
        expand = channel.unary_unary(_EXPAND)
        resolve = channel.unary_unary(f"{_ARTIFACTS}ResolveArtifacts")
        before = inspected(service, canary)
        waiting: collections.deque[Any] = collections.deque()

        def finish() -> None:
            nonlocal slowest
            call, began = waiting.popleft()
            try:
                answer = beam_expansion_api_pb2.ExpansionResponse.FromString(call.result())
                assert "Traceback" not in answer.error
                assert sys.prefix not in answer.error
                outcome = "refused" if answer.error else "expanded"
                if "log says why" in answer.error:
                    outcome = "failed"
            except grpc.RpcError as error:  # the service, or gRPC before it
                outcome = error.code().name
                if outcome in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                    raise
            slowest = max(slowest, time.monotonic() - began)
            outcomes[outcome] += 1

        for number in range(count):
            asked = beam_expansion_api_pb2.ExpansionRequest()
            asked.CopyFrom(chance.choice(starts))
            if chance.random() < 0.5:
                for _ in range(chance.choice([2, 4, 8, 16])):
                    mutated(asked, chance)
                data = asked.SerializeToString()
            else:
                data = _bytes(asked.SerializeToString(), chance)
            method = resolve if number % 50 == 49 else expand
            waiting.append((method.future(data, timeout=_TIMEOUT_SECS), time.monotonic()))
            if len(waiting) >= under_way:
                finish()
            if number % 1_000 == 999:
                while waiting:
                    finish()
                print(f"{number + 1}: {dict(outcomes)}", file=sys.stderr)
                inspected(service, canary)
        while waiting:
            finish()
        grown = inspected(service, canary) - before
    print(f"slowest {slowest:.2f} s, grown by {grown / 2**20:.0f} MiB", file=sys.stderr)
    assert grown < 200 * 2**20
    return dict(outcomes)


def main() -> None:
    """Starts a service, and sends it mutated requests."""
    parser = argparse.ArgumentParser(description="Fuzzes the expansion service.")
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving("--log-level=ERROR") as service:
        print(fuzz(service, arguments.requests, arguments.seed, Path(folder) / "canary"))


if __name__ == "__main__":
    main()
