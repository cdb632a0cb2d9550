"""Define the settings of cache events and traces, by which a server reports to other programs."""

import os
import re
import socket

from pydantic import Field, field_validator

from transfer.settings_model import Settings

POD, MODEL = "{pod}", "{model}"
_LAST_PORT = 65535
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class EventsConfig(Settings):
    """Events about the KV blocks in the cache, for routers, in the format of vLLM's cache events over ZeroMQ. They
    contain the tokens of prompts, so only routers should reach these addresses.
    """

    endpoint: str = Field(
        description="address where events are published: tcp://HOST:PORT (IPv6 in brackets) or ipc://PATH",
    )
    bind: bool | None = Field(
        None,
        description="true: subscribers connect to `endpoint`; false: the server connects to a subscriber there; "
        "default: true for `*`, 0.0.0.0, an IPv6 address and ipc://, else false",
    )
    replay_endpoint: str | None = Field(
        None, description="address where subscribers can ask for events that they missed; default: there is none"
    )
    topic: str = Field("kv@{pod}@{model}", description="topic of a model's events")
    pod: str | None = Field(
        None, description="the name by which routers know this server; ${NAME} is replaced by an environment variable; "
        "default: the host's name",
    )  # fmt: skip
    replay_mib: float = Field(64.0, gt=0, description="memory for events that can be asked for again, of all models")

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
        """Insert environment variables into the pod's name. Raises ValueError for one that is not set."""
        missing = [] if pod is None else [name for name in _VARIABLE.findall(pod) if name not in os.environ]
        if missing:
            raise ValueError(f"the environment has no variable {missing[0]}")
        return None if pod is None else _VARIABLE.sub(lambda found: os.environ[found[1]], pod)

    @property
    def is_bound(self) -> bool:
        """Return whether the server binds `endpoint`, so that subscribers connect; else it connects to theirs."""
        if self.bind is not None:
            return self.bind
        return self.endpoint.startswith("ipc://") or any(part in self.endpoint for part in ("*", "::", "//0.0.0.0:"))

    def topic_of(self, model: str) -> str:
        return self.topic.replace(POD, self.pod or socket.gethostname()).replace(MODEL, model)


class TracingConfig(Settings):
    """Traces of calls by OpenTelemetry; they need the extra `otel`. The library's environment variables OTEL_* apply as
    well, and OTEL_EXPORTER_OTLP_ENDPOINT alone turns traces on.
    """

    endpoint: str | None = Field(
        None,
        description="address to which spans are sent by OTLP over HTTP; its default path is /v1/traces; default: from "
        "environment variables, or http://localhost:4318",
    )

    @field_validator("endpoint")
    @classmethod
    def _is_address(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.match(r"https?://.", endpoint):
            raise ValueError("wanted http://HOST:PORT or https://HOST:PORT")
        return endpoint
