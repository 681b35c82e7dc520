"""What a supervisor and its holders say to each other: lines of JSON on a Unix socket."""

from typing import Literal

import msgspec

PROTOCOL = 1


class Launch(msgspec.Struct, frozen=True):
    """What to run. Two holders of one identifier must agree on it."""

    identifier: str
    model: str
    args: tuple[str, ...]
    env: dict[str, str]

    def difference(self, other: "Launch") -> str:
        """Says where two launches differ; the values of variables may be secrets."""
        found: list[str] = []
        if self.model != other.model:
            found.append(f"model {self.model!r} against {other.model!r}")
        if self.args != other.args:
            found.append(f"args {list(self.args)} against {list(other.args)}")
        names = {name for name, _ in self.env.items() ^ other.env.items()}
        if names:
            found.append(f"the variables {', '.join(sorted(names))}")
        return "; ".join(found)


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A holder's first message."""

    launch: Launch
    startup_timeout_secs: float
    last_generation: int = 0
    protocol: int = PROTOCOL


class Check(msgspec.Struct, frozen=True, tag="check"):
    """A holder saw a request fail: tell it when the server has answered a new probe."""

    number: int


class State(msgspec.Struct, frozen=True):
    """What the supervisor tells its holders. Which fields count depends on `state`."""

    state: Literal["starting", "ready", "restarting", "failed"]
    phase: str = ""
    elapsed_secs: float = 0.0
    port: int = 0
    generation: int = 0
    startup_secs: float = 0.0
    attempt: int = 0
    delay_secs: float = 0.0
    message: str = ""
    checked: int = 0
    supervisor_pid: int = 0
