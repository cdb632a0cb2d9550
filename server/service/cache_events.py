"""Publish which KV blocks each model's engine has, where `server.events` asks for it."""

from collections.abc import Sequence

from server.deployment import ConfigError
from server.engine.event_publisher import EventPublisher, EventsError
from server.engine.event_wire import AdapterTag
from server.observing_config import MODEL
from server.service.service import Service, join_salts


def publish_events(services: Sequence[Service]) -> EventPublisher | None:
    """Open the publisher of the models' events, which the caller closes; None: not configured. Raises ConfigError."""
    config = services[0].settings.events
    if config is None:
        return None
    topics: dict[str, str] = {}
    for name in (service.model_name for service in services):
        other = topics.setdefault(config.topic_of(name), name)
        if other != name:
            raise ConfigError(
                f"server.events.topic: {config.topic!r} is one topic for {other} and {name}; wanted {MODEL} in it"
            )
    try:
        publisher = EventPublisher(config)
    except EventsError as error:
        raise ConfigError(str(error)) from None
    for service in services:
        count = service.metrics.cache_events_dropped.inc
        adapters = service.adapters
        tags = [
            AdapterTag(name, join_salts("", digest))
            for name, digest in zip(adapters.names, adapters.digests, strict=True)
        ]
        service.supervisor.on_blocks = publisher.add_model(service.model_name, tags, count)
    return publisher
