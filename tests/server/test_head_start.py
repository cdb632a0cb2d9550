"""An engine process that is started before its plan is made: taken once, and ended where nobody takes it."""

import asyncio
import os
import sys
from pathlib import Path

import zmq

from server.engine.engine_run import EngineProcess
from server.engine.head_start import HeadStart

# Writes what it was given to the file that its first argument names, as soon as its standard input ends.
READER = (
    sys.executable, "-c",
    "import sys; text = sys.stdin.read(); open(sys.argv[1], 'w').write(text + ' '.join(sys.argv[2:])); sys.exit(7)",
)  # fmt: skip


def test_a_life_takes_the_process_and_hands_over_what_it_is_to_serve(tmp_path):
    said = tmp_path / "said"

    async def live() -> str:
        context: zmq.Context = zmq.Context()
        with HeadStart((*READER, str(said))) as ahead:
            engine = EngineProcess(context, ("not", "a", "command"), b"the plan ", ahead)
            assert ahead.take() is None  # it is taken once: another run of the engine would start its own
            await engine.start()
            folder = Path(engine.folder)
            assert [message async for message in engine.messages()] == []
            ended = await engine.wait()
        engine.close()
        assert not folder.exists()
        context.destroy(linger=0)
        return ended

    assert asyncio.run(live()) == "exited with code 7"
    plan, *addresses = said.read_text().rsplit(" ", 3)
    assert plan == "the plan"
    assert [Path(one).name for one in addresses[:2]] == ["requests", "replies"]
    assert addresses[2] == str(os.getpid())


def test_one_that_nobody_takes_is_killed_and_leaves_no_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with HeadStart((*READER, str(tmp_path / "said"))) as ahead:
        assert ahead._waiting is not None
        process = ahead._waiting[0]
        assert process.poll() is None
        assert [one.name.startswith("tandem-") for one in tmp_path.iterdir()] == [True]
    assert process.poll() == -9
    assert list(tmp_path.iterdir()) == []


def test_where_none_can_be_run_there_is_none_to_take(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with HeadStart() as ahead:
        assert ahead.take() is None
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with HeadStart(("/no/such/program",)) as ahead:
        assert ahead.take() is None
    assert list(tmp_path.iterdir()) == []


def test_another_one_waits_once_it_is_asked_for_and_none_after_the_end(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with HeadStart((*READER, str(tmp_path / "said"))) as ahead:
        first, folder = ahead.take()
        ahead.renew()
        ahead.renew()  # one waits already
        second, other = ahead.take()
        assert first.pid != second.pid
        assert {folder, other} == {str(one) for one in tmp_path.iterdir()}
    ahead.renew()
    assert ahead.take() is None
    for process in (first, second):
        assert process.poll() is None, "who took it ends it"
        process.kill()
        process.communicate()


def test_one_that_has_ended_is_not_taken_and_another_one_may_be_started(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with HeadStart((*READER, str(tmp_path / "said"))) as ahead:
        ahead._waiting[0].kill()
        ahead._waiting[0].wait()
        assert ahead.take() is None
        assert list(tmp_path.iterdir()) == []
        ahead.renew()
        process, _ = ahead.take()
        assert process.poll() is None
        process.kill()
        process.communicate()
