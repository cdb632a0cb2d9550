"""Publish which KV blocks each model's engine has, where `server.events` asks for it."""

from collections.abc import Sequence

from server.deployment import ConfigError
from server.engine.event_publisher import EventPublisher, EventsError
from server.service.service import Service


def publish_events(services: Sequence[Service]) -> EventPublisher | None:
    """Return the publisher of the models' events, to be closed; None: nobody asks for them. Raises ConfigError."""
    config = services[0].settings.events
    if config is None:
        return None
    try:
        publisher = EventPublisher(config)
    except EventsError as error:
        raise ConfigError(str(error)) from None
    for service in services:
        count = service.metrics.cache_events_dropped.inc
        service.supervisor.on_blocks = publisher.add_model(service.model_name, service.adapters.names, count)
    return publisher
