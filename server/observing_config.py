"""Settings of what a server tells other programs of itself beside its routes: cache events, and traces."""

import os
import re
import socket

from pydantic import Field, field_validator

from transfer.settings_model import Settings

POD, MODEL = "{pod}", "{model}"
_LAST_PORT = 65535
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class EventsConfig(Settings):
    """Which KV blocks the cache has, for routers, as vLLM's cache events over ZeroMQ. They have the tokens of prompts:
    only routers should reach these addresses.
    """

    endpoint: str = Field(
        description="where events are published: tcp://HOST:PORT, with an IPv6 address in brackets, or ipc://PATH",
    )
    bind: bool | None = Field(
        None,
        description="whether subscribers connect to `endpoint`, or the server connects to a subscriber's; default: "
        "`tcp://*:5557`, 0.0.0.0, an address of IPv6 and ipc:// are bound, another is connected to",
    )
    replay_endpoint: str | None = Field(
        None, description="bound: whoever has missed events asks for them here; default: nobody can"
    )
    topic: str = Field("kv@{pod}@{model}", description="of a model's events")
    pod: str | None = Field(
        None, description="the name that routers have for this server, in which ${NAME} is an environment variable; "
        "default: the host's name",
    )  # fmt: skip
    replay_mib: float = Field(64.0, gt=0, description="events that are kept for whoever missed them, of all models")

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _know_transport(cls, endpoint: str | None) -> str | None:
        if endpoint is None or re.fullmatch(r"ipc://.+", endpoint):
            return endpoint
        found = re.fullmatch(r"tcp://(?:[^:\[\]]+|\[[0-9a-fA-F:.%\w]+\]):(\d+)", endpoint)
        if found is None:
            raise ValueError("wanted tcp://HOST:PORT or ipc://PATH, an IPv6 address in brackets")
        if not 1 <= int(found[1]) <= _LAST_PORT:
            raise ValueError(f"the port is {found[1]}; wanted 1 to {_LAST_PORT}")
        return endpoint

    @field_validator("pod")
    @classmethod
    def _fill_in(cls, pod: str | None) -> str | None:
        """Put environment variables in. Raises ValueError for one that is not set."""
        missing = [] if pod is None else [name for name in _VARIABLE.findall(pod) if name not in os.environ]
        if missing:
            raise ValueError(f"the environment has no variable {missing[0]}")
        return None if pod is None else _VARIABLE.sub(lambda found: os.environ[found[1]], pod)

    @property
    def is_bound(self) -> bool:
        """Return whether subscribers connect to `endpoint`, or it connects to one of theirs."""
        if self.bind is not None:
            return self.bind
        return self.endpoint.startswith("ipc://") or any(part in self.endpoint for part in ("*", "::", "//0.0.0.0:"))

    def topic_of(self, model: str) -> str:
        return self.topic.replace(POD, self.pod or socket.gethostname()).replace(MODEL, model)


class TracingConfig(Settings):
    """Traces of calls by OpenTelemetry, with the extra `otel`. The variables OTEL_* of its library hold as well, and
    OTEL_EXPORTER_OTLP_ENDPOINT alone asks for traces.
    """

    endpoint: str | None = Field(
        None,
        description="where spans are sent, OTLP over HTTP; without a path, /v1/traces; default: as variables say, or "
        "http://localhost:4318",
    )

    @field_validator("endpoint")
    @classmethod
    def _is_address(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.match(r"https?://.", endpoint):
            raise ValueError("wanted http://HOST:PORT or https://HOST:PORT")
        return endpoint
