"""Read a server's gauges: what it serves, what it holds, and whether it frees everything at rest."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.soak.requests import Served

# Beside the prefix cache, whose pages, bytes and contexts have gauges of their own.
_AT_REST = (
    "tandem_requests_running", "tandem_requests_prefilling", "tandem_requests_waiting", "tandem_pages_used",
    "tandem_host_leases",
)  # fmt: skip
_ONCE_FORGOTTEN = ("tandem_host_contexts", "tandem_host_bytes_promised", "tandem_host_bytes_used")
REST_S = 30.0
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Gauges:
    """Gauges by name. engine_bytes: the part of the engine's resident memory that they account for: committed pages, if
    the device's memory is the host's, contexts in host memory, and document chunks.
    """

    values: dict[str, float]
    page_bytes: float

    @property
    def engine_bytes(self) -> int:
        of_host = self.values["tandem_host_bytes_used"] + self.values["tandem_chunks_memory_bytes"]
        return int(self.values["tandem_pages_committed"] * self.page_bytes + of_host)


async def read_served(client: httpx.AsyncClient) -> Served:
    """Return what the server serves. Raises ValueError if it does not serve, or is another program."""
    try:
        answer = await client.get("/v1/activity")
    except httpx.TransportError as error:
        raise ValueError(f"{client.base_url}: {error or type(error).__name__}; is the server up?") from None
    if answer.status_code != httpx.codes.OK:
        raise ValueError(f"{client.base_url}: /v1/activity has status {answer.status_code}; is Tandem up there?")
    tree = answer.json()
    if tree["status"] != "ready":
        raise ValueError(f"{client.base_url}: the engine is {tree['status']}, wanted ready")
    return Served(
        tree["model"], tree["profiles"], tree["default_profile"], tree["has_chat"], tree["has_documents"]
    )  # fmt: skip


async def read_gauges(client: httpx.AsyncClient) -> Gauges:
    """Return the current gauges of /metrics and /v1/activity."""
    text = (await client.get("/metrics")).text
    values = {one.name: one.value for family in text_string_to_metric_families(text) for one in family.samples
              if not one.labels}  # fmt: skip
    return Gauges(values, _page_bytes((await client.get("/v1/activity")).json(), values["tandem_pages_capacity"]))


async def read_drafted(client: httpx.AsyncClient) -> tuple[int, int]:
    """Return how many tokens drafts have proposed, and how many of these were drawn."""
    values = (await read_gauges(client)).values
    return int(values.get("tandem_draft_proposed_total", 0)), int(values.get("tandem_draft_accepted_total", 0))


def _page_bytes(activity: dict[str, Any], num_pages: float) -> float:
    """Return the bytes of a KV page in host memory; 0 if pages are on a GPU."""
    items = [item for place in activity["memory"] if place["place"] == "host" for item in place["items"]]
    return sum(item["bytes"] for item in items if item["name"] == "KV pages") / max(1.0, num_pages)


async def wait_for_rest(client: httpx.AsyncClient, sessions: list[str]) -> dict[str, float]:
    """Wait until only the prefix cache holds anything, delete all sessions, and wait until their memory is freed.

    Returns gauges, each of which should be 0 by then.
    """
    found = await _wait_for_zeros(client, _AT_REST)
    for session_id in sessions:
        await client.delete(f"/v1/sessions/{session_id}")  # an engine that was killed may have had the only one
    return found | await _wait_for_zeros(client, _ONCE_FORGOTTEN)


async def _wait_for_zeros(client: httpx.AsyncClient, names: tuple[str, ...]) -> dict[str, float]:
    ends = time.monotonic() + REST_S
    while True:
        values = (await read_gauges(client)).values
        found = {name: values[name] for name in names}
        if not any(found.values()) or time.monotonic() > ends:
            return found
        await asyncio.sleep(_POLL_S)
