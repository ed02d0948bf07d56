"""Those who are attached to a detached run: what strangers can do to its agent, and what slow readers do."""

from __future__ import annotations

import array
import contextlib
import os
import pathlib
import random
import select
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from notebook_accel import detach
from notebook_accel.launching import run_folders
from notebook_accel.launching.agent import audience
from notebook_accel.launching.agent.audience import Attachments
from notebook_accel.launching.journal import Journal
from notebook_accel.launching.kernel import detached_link
from notebook_accel.launching.kernel.detached_job import DetachedJob
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from notebook_accel.protocol.channel import ClosedError, Connection, EventLoop
from tests import processes
from tests.launching.test_run_folders import as_nobody, facts
from tests.loopback import Loopback

pytestmark = pytest.mark.usefixtures("state_home")
_HEADER = struct.Struct("!IH")


@pytest.fixture
def job(loopback: Loopback) -> Iterator[DetachedJob]:
    """A run that goes on, also after the test."""
    made: DetachedJob = loopback.launch(detach=True)
    yield made
    assert len(made.stacks()) == 2  # the agent answers
    loopback.train(made, steps=1)
    assert [rank.step for rank in made.ranks] == [0, 0]


def is_closed(loopback: Loopback, stranger: socket.socket) -> bool:
    """Return whether the agent closes the connection after at most an answer to a greeting."""
    loopback.settle()
    stranger.setblocking(False)
    answer = b""
    try:
        while data := stranger.recv(4096):
            answer += data
        return len(answer) < 100
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False


def open_sockets() -> int:
    """Return the number of sockets that the agent and the kernel, which are in this process, have open."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return found


def frame(body: bytes) -> bytes:
    return _HEADER.pack(len(body), 0) + body


def test_garbage_changes_nothing(loopback: Loopback, job: DetachedJob) -> None:
    rng = random.Random(7)
    stop = messages.encode(messages.End(job_id=job.folder.id, how="kill"))
    hello = messages.encode(messages.Hello(who="x", follows=False))
    wrong = [
        frame(rng.randbytes(100)),
        frame(b""),
        frame(stop),  # without a word about who it is
        frame(hello) + frame(messages.encode(messages.Quit())),
        frame(hello) + frame(messages.encode(messages.Release(job_id=job.folder.id))),
        _HEADER.pack(0xFFFFFFFF, 0) + rng.randbytes(1 << 17),  # says that four gigabytes follow
        *(rng.randbytes(1 << 17) for _ in range(10)),
    ]
    for data in wrong:
        with job.folder.connect() as stranger:
            stranger.sendall(data)
            # Random bytes may say that much more follows.
            assert is_closed(loopback, stranger) or (len(data) == 1 << 17 and data[0] != 0xFF), data[:50]
    with job.folder.connect() as other:  # an order for another run
        other.sendall(frame(hello) + frame(messages.encode(messages.End(job_id="another", how="kill"))))
        loopback.settle()


def test_descriptors_that_strangers_send_are_not_kept(loopback: Loopback, job: DetachedJob) -> None:
    with job.folder.connect() as stranger:
        loopback.settle()
        held = len(os.listdir("/proc/self/fd"))
        stranger.sendall(_HEADER.pack(50_000, 0))
        for _ in range(20):
            sent = array.array("i", [0, 1, 2])
            stranger.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
        loopback.settle()
        assert len(os.listdir("/proc/self/fd")) == held


def test_too_many_are_refused_and_the_run_goes_on(loopback: Loopback, job: DetachedJob) -> None:
    with contextlib.ExitStack() as connected:
        many = [connected.enter_context(job.folder.connect()) for _ in range(80)]
        assert [is_closed(loopback, stranger) for stranger in many].count(True) == 80 - audience._MOST_ATTACHMENTS + 1


def test_who_comes_and_goes_leaves_nothing_in_the_agent(loopback: Loopback, job: DetachedJob) -> None:
    held = open_sockets()
    for _ in range(20):
        connection = Connection(job.folder.connect())
        connection.send(messages.encode(messages.Hello(who="x", follows=True)))
        [first, *_] = connection.receive()
        os.close(first.descriptors[0])
        connection.close()
    loopback.settle()
    attachments = loopback.agents[0].agent._audience
    assert isinstance(attachments, Attachments)
    assert (open_sockets(), len(attachments._attached)) == (held, 1)


@pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED: only root can become another user")
def test_another_user_who_reaches_the_socket_is_shut_out(loopback: Loopback, job: DetachedJob) -> None:
    hello = messages.encode(messages.Hello(who="x", follows=True))
    stop = messages.encode(messages.End(job_id=job.folder.id, how="kill"))

    def tries() -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect("socket")
            stranger.sendall(frame(hello) + frame(stop))
        return 0

    before = os.getcwd()
    os.chdir(job.folder.path)
    try:
        job.folder.path.chmod(0o711)
        pathlib.Path("socket").chmod(0o777)
        assert as_nobody(tries) == 0
    finally:
        job.folder.path.chmod(0o700)
        os.chdir(before)
    loopback.settle()
    assert job.status == "running"


@pytest.mark.parametrize("patience_s", [600.0, 0.0], ids=["too much", "too long"])
def test_reader_that_takes_nothing_is_dropped_and_holds_nobody_up(
    patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audience, "_PATIENCE_S", patience_s)
    folder, lock = run_folders.make("night")
    folder.write_facts(facts())
    journal, loop = Journal(folder.id, 1), EventLoop()
    attachments = Attachments(folder, journal)
    attachments.begin(loop, lambda *_: None)
    readers = [Connection(folder.connect()) for _ in range(2)]
    for reader in readers:
        reader.set_blocking(False)
        reader.send(messages.encode(messages.Hello(who="x", follows=True)))
    processes.wait_until(
        lambda: loop.wait(0) or [each.follows for each in attachments._attached] == [True, True], "both are attached"
    )
    reads, takes_nothing = readers
    [attached, *_] = processes.wait_until(reads.receive, "it has the journal")
    os.close(attached.descriptors[0])
    told, heard = 0, 0
    said = msgspec.Raw(events.encode(events.Output(text="x" * 50_000)))
    while len(attachments._attached) == 2 and told < 1000:
        message = messages.Said(job_id=folder.id, rank=0, event=said)
        attachments.tell(message, journal.add(message))
        told += 1
        while heard < told:
            attachments.flush()
            heard += len(reads.receive())
    assert len(attachments._attached) == 1
    assert (told < 100) == (patience_s == 0.0)
    left = takes_nothing.receive()
    os.close(left[0].descriptors[0])
    with pytest.raises(ClosedError):
        while True:
            takes_nothing.receive()
    attachments.close()
    for reader in readers:
        reader.close()
    os.close(lock)


def test_end_is_in_the_folder_before_a_kernel_hears_of_it(loopback: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    made: DetachedJob = loopback.launch(ranks=1, detach=True)
    known: list[tuple[bool, bool]] = []

    def is_known(of: Any, message: msgspec.Struct) -> None:
        if isinstance(message, messages.RunEnded):
            latest = (made.folder.path / run_folders.LATEST).read_bytes()
            known.append((b"RunEnded" in latest, (made.folder.path / "result_0").stat().st_size > 0))
        handle(of, message)

    handle = detached_link.Link._handle
    monkeypatch.setattr(detached_link.Link, "_handle", is_known)
    loopback.ranks_of(made)[0].finish(7)
    assert made.results(1.0) == [7]
    assert known == [(True, True)]


def test_results_of_a_run_that_was_detached_later_are_copied_at_its_own_end(loopback: Loopback) -> None:
    """News about a template names no run, and the run goes on after it."""
    made = detach(loopback.launch(ranks=1), "night")
    result = made.folder.path / "result_0"
    told = loopback.agents[0].agent
    told._tell_kernel(messages.Broken(text="There is no template."))
    loopback.ranks_of(made)[0].finish(7)
    assert result.read_bytes() == b""
    assert made.results(1.0) == [7]
    assert result.read_bytes()


def test_agent_outlives_its_kernel_before_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a kernel that ends at once takes the detached run along."""
    ours, theirs = Connection.pair()
    was_told: list[bool] = []
    monkeypatch.setattr(
        audience, "outlive_parent", lambda _: was_told.append(bool(select.select([theirs.fileno()], [], [], 0)[0]))
    )
    kernel = audience.Kernel(ours, os.getpid())
    kernel.begin(EventLoop(), lambda *_: None, lambda: None)
    kernel.tell(messages.Detached(job_id="night", why=""))
    kernel.leave(pathlib.Path("/dev/null"))
    assert was_told == [False]
    assert theirs.receive()
    theirs.close()
