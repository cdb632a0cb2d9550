"""Cache events on the wire: vLLM's format, an index that a subscriber makes of them, and what it missed."""

import socket
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import msgspec
import pytest
import zmq

from scheduler.block_changes import CPU, DISK, GPU, BlocksCleared, BlocksRemoved, BlocksStored, CacheChanges
from scheduler.engine.engine import Engine
from server.deployment import ConfigError, load_deployment
from server.engine import event_publisher, event_replays
from server.engine.event_publisher import EventPublisher
from server.engine.event_wire import AdapterTag, block_hash, encode_batch
from server.observing_config import EventsConfig
from tests.end_to_end.real_server import free_port
from tests.scheduler.engines import prompt_of
from tests.scheduler.host_engines import ask, make_engine
from tests.server.event_subscriber import AllBlocksCleared, Subscriber
from tests.server.live_server import REFERENCE, fake_command, make_app, make_deployment, running_server

ADAPTERS = (AdapterTag("first", "of the first"), AdapterTag("second", "of the second"))
DIGESTS = [bytes([n]) * 8 + bytes(7) + bytes([n + 1]) for n in range(3)]


def settings(folder: Path, **more: object) -> EventsConfig:
    tree = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay", "pod": "here"} | more
    return EventsConfig.model_validate(tree)


@contextmanager
def following(
    folder: Path, model: str = "model", loses: float = 0.0, count: Callable[[], None] = lambda: None, **more: object
) -> Iterator[tuple[Callable[[CacheChanges], None], Subscriber]]:
    """Return what publishes a model's changes, and who follows it."""
    config = settings(folder, **more)
    publisher = EventPublisher(config)
    publish = publisher.add_model(model, ADAPTERS, count)
    subscriber = Subscriber(config.endpoint, config.replay_endpoint, f"kv@here@{model}", loses)
    try:
        while not subscriber.next:  # until it is known to the publisher
            publish(CacheChanges(time.time(), []))
            subscriber.read(0.05)
        subscriber.num_gaps = 0
        yield publish, subscriber
    finally:
        subscriber.close()
        publisher.close()


def stored(*digests: bytes) -> CacheChanges:
    tokens = array("i", range(len(digests))).tobytes()
    return CacheChanges(time.time(), [BlocksStored(GPU, list(digests), None, tokens, 1)])


def test_a_batch_is_the_arrays_that_vllm_publishes() -> None:
    tokens = array("i", range(4)).tobytes()
    changes = [
        BlocksCleared(),
        BlocksStored(GPU, DIGESTS[:2], None, tokens, 2, 0, "salt"),
        BlocksStored(CPU, DIGESTS[2:], DIGESTS[1], tokens[:8], 2, 2, "of the second"),
        BlocksStored(CPU, DIGESTS[2:], None, tokens[:8], 2, 2, "of the second"),
        BlocksStored(CPU, DIGESTS[2:], None, tokens[:8], 2, 2, "of the second and a key"),
        BlocksStored(DISK, DIGESTS[:1], None, b"", 2),
        BlocksRemoved(GPU, DIGESTS[:2]),
    ]
    assert msgspec.msgpack.decode(encode_batch(CacheChanges(1.5, changes), ADAPTERS)) == [
        1.5,
        [
            ["AllBlocksCleared"],
            ["BlockStored", [1, 2], None, [0, 1, 2, 3], 2, None, "GPU", None, [["salt"], None]],
            ["BlockStored", [3], 2, [0, 1], 2, 2, "CPU", "second", None],
            ["BlockStored", [3], None, [0, 1], 2, 2, "CPU", "second", None],
            ["BlockStored", [3], None, [0, 1], 2, 2, "CPU", "second", [["of the second and a key"]]],
            ["BlockStored", [1], None, [], 2, None, "DISK", None, None],
            ["BlockRemoved", [1, 2], "GPU"],
        ],
        0,
    ]


@pytest.mark.parametrize("loses", [0.0, 0.3])
def test_an_index_made_from_the_wire_is_the_engines_also_where_messages_are_lost(loses: float, tmp_path: Path) -> None:
    engine, _ = make_engine(num_pages=60, limit_blocks=60, is_adaptive=True, max_running=3)
    events, random = engine.scheduler.residence.tell_blocks(), Random(3)
    with following(tmp_path, loses=loses) as (publish, subscriber):

        def check(seconds: float) -> None:
            """Read until the index is what the engine has."""
            wanted = {medium: {block_hash(one) for one in events.blocks_in(medium)} for medium in (GPU, CPU)}
            ends = time.monotonic() + seconds
            while any(subscriber.index[one] != wanted[one] for one in wanted) and time.monotonic() < ends:
                subscriber.read(0.02)
                if loses:
                    subscriber.replay()  # the last message may be the one that was lost
            assert {medium: subscriber.index[medium] for medium in wanted} == wanted

        history = prompt_of(300)
        for number in range(8):
            profile = random.choice(["exact", "whole", "offloaded"])
            prompt = history[: random.randint(50, 300)] + prompt_of(40, number)
            engine.submit([ask(f"r{number}", prompt, random.randint(10, 90), profile=profile)])
            for _ in range(random.randint(40, 300)):
                engine.step()
                if changes := events.take():
                    publish(CacheChanges(time.time(), changes))
            check(20)
        finish(engine)
        publish(CacheChanges(time.time(), events.take()))
        check(20)
        assert (subscriber.num_gaps > 3) == (loses > 0)
        names = {type(event).__name__ for event in subscriber.events}
        assert names == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_a_message_that_finds_no_room_is_counted_seen_as_a_gap_and_had_by_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "MOST_QUEUED", 4)
    dropped: list[int] = []
    with following(tmp_path, count=lambda: dropped.append(1)) as (publish, subscriber):
        publish(stored(DIGESTS[0]))
        subscriber.await_index("GPU", 1)
        encode, begun = event_publisher.encode_batch, []

        def encode_slowly(*message: object) -> bytes:
            if not begun:
                begun.append(1)
                time.sleep(1.0)
            return encode(*message)

        monkeypatch.setattr(event_publisher, "encode_batch", encode_slowly)
        for number in range(200):
            publish(stored((1000 + number).to_bytes(8, "big")))
        assert 150 < len(dropped) < 200
        ends = time.monotonic() + 20
        while len(subscriber.index["GPU"]) < 201 and time.monotonic() < ends:
            publish(CacheChanges(time.time(), []))  # what comes behind shows the gap
            subscriber.read(0.1)
        assert len(subscriber.index["GPU"]) == 201
        assert subscriber.num_gaps >= 1


def test_models_have_topics_and_numbers_of_their_own_and_what_is_too_old_is_let_go(tmp_path: Path) -> None:
    config = settings(tmp_path, replay_mib=0.001)
    publisher = EventPublisher(config)
    publishes = [publisher.add_model(name, (), lambda: None) for name in ("one", "two")]
    one, two = (Subscriber(config.endpoint, config.replay_endpoint, f"kv@here@{name}") for name in ("one", "two"))
    try:
        for number in range(6):
            publishes[0](stored(bytes([number]) * 8))
        publishes[1](stored(DIGESTS[0]))
        two.replay()
        assert (two.next, len(two.index["GPU"])) == (1, 1)
        one.replay()
        assert (one.next, len(one.index["GPU"])) == (6, 6)
        for number in range(6, 40):
            publishes[0](stored(bytes([number]) * 8))
        one.next = 0
        one.replay()
        assert one.next == 0, "the first ones are not kept any more"
    finally:
        one.close()
        two.close()
        publisher.close()


def test_one_address_of_a_subscriber_may_hear_of_many_servers(tmp_path: Path) -> None:
    """As llm-d's indexer binds, and vLLM's servers connect to it."""
    context = zmq.Context()
    indexer = context.socket(zmq.SUB)
    indexer.subscribe(b"kv@")
    port = indexer.bind_to_random_port("tcp://127.0.0.1")
    address = {"endpoint": f"tcp://localhost:{port}", "replay_endpoint": None}
    publishers = [EventPublisher(settings(tmp_path, **address, pod=pod)) for pod in ("a", "b")]
    publishes = [one.add_model("model", (), lambda: None) for one in publishers]
    heard: set[bytes] = set()
    ends = time.monotonic() + 20
    while len(heard) < 2 and time.monotonic() < ends:
        for publish in publishes:
            publish(stored(DIGESTS[0]))
        while indexer.poll(20):
            heard.add(indexer.recv_multipart()[0])
    for one in publishers:
        one.close()
    context.destroy(linger=0)
    assert heard == {b"kv@a@model", b"kv@b@model"}


def test_what_one_model_keeps_is_let_go_for_anothers_and_nothing_is_lost_on_the_way(tmp_path: Path) -> None:
    config, dropped = settings(tmp_path, replay_mib=0.01), [0]

    def count() -> None:
        dropped[0] += 1

    publisher = EventPublisher(config)
    publish_one, publish_two = (publisher.add_model(name, (), count) for name in ("one", "two"))
    one, two = (Subscriber(config.endpoint, config.replay_endpoint, f"kv@here@{name}") for name in ("one", "two"))
    try:
        for number in range(200):
            publish_one(stored(number.to_bytes(8, "big")))
        ends = time.monotonic() + 10
        while not two.next and time.monotonic() < ends:
            publish_two(CacheChanges(time.time(), []))
            two.read(0.05)
        two.num_gaps = 0
        for number in range(200):
            publish_two(stored(number.to_bytes(8, "big")))
        two.await_index("GPU", 200)
        assert (two.num_gaps, dropped) == (0, [0])
        kept = [
            len(list(asker.ask(bytes(8), f"kv@here@{name}".encode()))) for asker, name in ((one, "one"), (two, "two"))
        ]
        assert min(kept) > 0.4 * sum(kept), "either keeps about a half"
    finally:
        one.close()
        two.close()
        publisher.close()


def test_a_peer_that_does_not_read_its_replay_holds_a_bounded_part_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_replays, "PATIENCE_SECONDS", 0.5)
    encode, num_encoded = event_replays.encode_batch, [0]

    def count(*message: object) -> bytes:
        num_encoded[0] += 1
        return encode(*message)

    monkeypatch.setattr(event_replays, "encode_batch", count)
    with following(tmp_path) as (publish, subscriber), zmq.Context() as context:
        digests = [number.to_bytes(8, "big") for number in range(1000)]
        for _ in range(500):
            publish(stored(*digests))
        subscriber.await_index("GPU", 1000)
        idle = context.socket(zmq.DEALER)
        idle.set_hwm(1)
        idle.connect(f"ipc://{tmp_path}/replay")
        for _ in range(3):
            idle.send_multipart((b"", bytes(8)))
        ends = time.monotonic() + 5
        while not num_encoded[0] and time.monotonic() < ends:
            time.sleep(0.01)
        publish(stored(*digests, (5000).to_bytes(8, "big")))
        subscriber.await_index("GPU", 1001, seconds=2)
        assert len(list(subscriber.ask(bytes(8)))) == subscriber.next, "who reads has all of it"
        time.sleep(0.6)
        of_idle = num_encoded[0] - subscriber.next
        assert 0 < of_idle < 450, "one that does not has what sockets hold"
        assert caplog.text.count("cache_replay_dropped") == 1, "it asked three times"
        idle.close(linger=0)


def test_who_asks_while_it_is_answered_is_answered_once(tmp_path: Path) -> None:
    with following(tmp_path) as (publish, subscriber), zmq.Context() as context:
        digests = [number.to_bytes(8, "big") for number in range(1000)]
        for _ in range(500):
            publish(stored(*digests))
        subscriber.await_index("GPU", 1000)
        with context.socket(zmq.DEALER) as asker:
            asker.set_hwm(1)
            asker.connect(f"ipc://{tmp_path}/replay")
            asker.send_multipart((b"", bytes(8)))
            assert asker.poll(10_000)
            asker.send_multipart((b"", bytes(8)))
            time.sleep(0.1)  # it is on its way while the answer has no room
            numbers = []
            while not numbers or numbers[-1] >= 0:
                assert asker.poll(10_000)
                numbers.append(int.from_bytes(asker.recv_multipart()[1], "big", signed=True))
        assert numbers == [*range(len(numbers) - 1), -1]
        assert len(numbers) > 500


@pytest.mark.parametrize(("kind", "place"), [("SUB", "endpoint"), ("DEALER", "replay_endpoint")])
def test_a_peer_that_goes_without_a_word_is_let_go(kind: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "_HEARTBEAT_MS", 50)
    monkeypatch.setattr(event_publisher, "_SILENCE_MS", 100)
    addresses = {key: f"tcp://127.0.0.1:{free_port()}" for key in ("endpoint", "replay_endpoint")}
    publisher = EventPublisher(settings(Path(), bind=True, **addresses))
    said = b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind.encode()
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)  # of ZMTP 3.1, then its command READY
    try:
        with socket.create_connection(("127.0.0.1", int(addresses[place].rpartition(":")[2])), timeout=5) as peer:
            peer.sendall(greeting + b"\x04" + bytes([6 + len(said)]) + b"\x05READY" + said)
            heard, part, ends = b"", b"-", time.monotonic() + 10
            while part and time.monotonic() < ends:
                heard += (part := peer.recv(4096))
        assert (part, b"\x04PING" in heard) == (b"", True)
    finally:
        publisher.close()


def test_a_subscriber_follows_a_server_that_begins_again(tmp_path: Path) -> None:
    with following(tmp_path) as (publish, subscriber):
        for number in range(50):
            publish(stored(bytes([number]) * 8))
        subscriber.await_index("GPU", 50)
        ahead = subscriber.next + 100
    config = settings(tmp_path)
    publisher = EventPublisher(config)
    follower = Subscriber(config.endpoint, config.replay_endpoint, "kv@here@model")
    try:
        publish = publisher.add_model("model", (), lambda: None)
        publish(stored(DIGESTS[0]))
        assert [number[-1] for number, _ in follower.ask(ahead.to_bytes(8, "big"))] == [0], "as from the first on"
        follower.next, follower._last_live, follower.index["GPU"] = ahead, ahead - 1, {1, 2, 3, 4}
        publish(stored(DIGESTS[1]))
        follower.take(1, encode_batch(stored(DIGESTS[1]), ()))
        assert follower.index["GPU"] == {block_hash(one) for one in DIGESTS[:2]}
    finally:
        follower.close()
        publisher.close()


def test_a_replay_that_cannot_be_read_is_answered_with_its_end(tmp_path: Path) -> None:
    with following(tmp_path) as (publish, subscriber):
        publish(stored(DIGESTS[0]))
        for asked in ([b"short"], [bytes(8), b"kv@here@other"], [bytes(8), b"kv@here@model", b"more"]):
            assert list(subscriber.ask(*asked)) == []
        numbers = [number[-1] for number, _ in subscriber.ask(bytes(8))]  # as vLLM's subscribers ask
        assert numbers == list(range(subscriber.next + 1))
        subscriber.replay()
        assert len(subscriber.index["GPU"]) == 1


async def test_a_model_that_is_unloaded_has_its_blocks_cleared_under_its_own_topic(tmp_path: Path) -> None:
    events = settings(tmp_path).model_dump()
    first, other = (make_deployment(events=events) for _ in range(2))
    other = other.model_copy(update={"model": other.model.model_copy(update={"name": "other"})})
    async with running_server(first, fake_command(), others=[other]) as live:
        follower = Subscriber(events["endpoint"], events["replay_endpoint"], "kv@here@reference")
        try:
            body = {"model": "other", "prompt": "hello", "max_tokens": 2}
            assert (await live.http.post("/v1/completions", json=body)).status_code == 200
            follower.replay()
            assert [type(event) for event in follower.events] == [AllBlocksCleared]
            assert await live.metric("tandem_cache_events_total") == 1
            assert await live.metric("tandem_cache_events_dropped_total") == 0
        finally:
            follower.close()


def test_settings_that_cannot_be_used_are_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(text: str) -> str:
        file = tmp_path / "deployment.yaml"
        file.write_text(f"model: {{path: {REFERENCE}}}\n{text}")
        with pytest.raises(ConfigError) as raised:
            load_deployment(file)
        return str(raised.value)

    wanted = "server.events.endpoint: Value error, wanted tcp://HOST:PORT or ipc://PATH"
    assert wanted in load("server: {events: {endpoint: 'localhost:5557'}}")
    wanted = "server.events.pod: Value error, the environment has no variable NO_SUCH"
    assert wanted in load("server: {events: {endpoint: 'tcp://*:5557', pod: '${NO_SUCH}:8000'}}")
    wanted = "server.events: without scheduler.prefix_cache there are no events"
    assert wanted in load("server: {events: {endpoint: 'tcp://*:5557'}}\nscheduler: {prefix_cache: false}")
    wanted = r"server.events.endpoint: ipc:///no/such/folder cannot be used: No such file"
    with pytest.raises(ConfigError, match=wanted):
        make_app(make_deployment(events={"endpoint": "ipc:///no/such/folder"}), fake_command())
    for address, told in (
        ("tcp://*:99999", "the port is 99999; wanted 1 to 65535"), ("tcp://*:0", "the port is 0; wanted 1 to 65535"),
        ("tcp://::1:5557", "an IPv6 address in brackets"),
    ):  # fmt: skip
        assert told in load(f"server: {{events: {{endpoint: '{address}'}}}}")
        assert told in load(f"server: {{events: {{endpoint: 'tcp://*:5557', replay_endpoint: '{address}'}}}}")
    several = make_deployment(events=settings(tmp_path, topic="kv").model_dump())
    other = several.model_copy(update={"model": several.model.model_copy(update={"name": "other"})})
    with pytest.raises(ConfigError, match=r"^server.events.topic: 'kv' is one topic for reference and other; wanted"):
        make_app(several, fake_command(), others=[other])
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    assert settings(tmp_path, pod="${POD_IP}:8000").topic_of("org/model") == "kv@10.0.0.7:8000@org/model"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_one_address_of_several_can_be_bound(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as tried:
            tried.bind((host.strip("[]"), 0))
    except OSError as error:
        pytest.skip(f"{host} cannot be bound here: {error}")
    ports = [free_port(), free_port()]
    config = settings(
        Path(), endpoint=f"tcp://{host}:{ports[0]}", replay_endpoint=f"tcp://{host}:{ports[1]}", bind=True
    )
    publisher = EventPublisher(config)
    publisher.add_model("model", (), lambda: None)(stored(DIGESTS[0]))
    try:
        for port in ports:
            with socket.socket(family) as asker:
                assert asker.connect_ex((host.strip("[]"), port)) == 0
    finally:
        publisher.close()
    assert not EventsConfig(endpoint="tcp://127.0.0.1:5557").is_bound
    assert not EventsConfig(endpoint="tcp://*:5557", bind=False).is_bound
