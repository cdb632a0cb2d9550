"""Streams that say what the computing stream is told to wait for, with events that can be told apart."""

import torch

from transfer.copies import Event, Streams


class Point:
    """An event that can be told from others."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class LoggedStreams(Streams):
    """Says what the computing stream is told to wait for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.waited: list[Event] = []

    def record(self) -> Event:
        return Point()

    def wait_for(self, event: Event) -> None:
        self.waited.append(event)
