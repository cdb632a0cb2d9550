"""Fixtures: a live server on the fake engine, and the reference tokenizer."""

from collections.abc import AsyncIterator

import pytest

from server.tokenizer import Tokenizer
from tests.server.live_server import REFERENCE, Running, fake_command, make_deployment, running_server


@pytest.fixture
async def live() -> AsyncIterator[Running]:
    async with running_server(make_deployment(), fake_command()) as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(REFERENCE, REFERENCE)
