"""What arrives, and how the failures of other ranks are told."""

from __future__ import annotations

import threading

import pytest
import torch

from avgpipe_ds.errors import PeerLost, RemoteError
from avgpipe_ds.execution import mailbox as module
from avgpipe_ds.execution.mailbox import Mailbox
from avgpipe_ds.transport.base import LostPeer
from avgpipe_ds.transport.memory import memory_world


def mailboxes(world_size: int = 2) -> list[Mailbox]:
    return [Mailbox(transport, lambda rank: f"rank {rank} (stage {rank})") for transport in memory_world(world_size)]


def test_channels_keep_their_order_and_do_not_mix() -> None:
    here, there = mailboxes()
    for number in range(3):
        there.send(0, "numbers", number)
        there.send(0, ("letters", 1), "abc"[number])
    here.drain()
    assert [here.take("numbers").payload for _ in range(3)] == [0, 1, 2]
    assert [here.take(("letters", 1)).payload for _ in range(3)] == ["a", "b", "c"]
    assert not here.has("numbers") and not here.has(("letters", 1)) and not here.has(("letters", 0))


def test_tensors_are_not_shared_with_the_sender() -> None:
    here, there = mailboxes()
    sent = torch.ones(2, requires_grad=True)
    there.send(0, "tensors", tensors=(sent,), requires_grad=(True,))
    with torch.no_grad():
        sent.zero_()
    here.drain()
    message = here.take("tensors")
    assert message.tensors[0].tolist() == [1, 1] and message.requires_grad == (True,) and message.source == 1


def test_forget_drops_what_was_sent_before_and_keeps_what_comes_after() -> None:
    here, there = mailboxes()
    there.send(0, "work", "old, arrived before")
    here.drain()
    there.send(0, "work", "old, arrives after")
    there.forget()
    there.send(0, "work", "new")  # this rank has not forgotten yet
    here.drain()
    here.forget()
    here.drain()
    assert here.take("work").payload == "new"
    assert not here.has("work")


def test_a_message_of_the_next_generation_waits_for_it() -> None:
    here, there = mailboxes()
    there.forget()
    there.send(0, "work", "new")
    here.drain()
    assert not here.has("work")
    here.forget()
    assert here.has("work")


@pytest.mark.parametrize(
    ("left_after", "begun", "lost"),
    [
        (3, 3, False),  # it has sent everything that call 3 needs
        (4, 3, False),  # it is a call further already
        (2, 3, True),  # it never came to call 3
        (-1, 0, True),  # it died
    ],
)
def test_a_peer_is_lost_only_if_it_left_before_the_present_call(left_after: int, begun: int, lost: bool) -> None:
    here, _ = mailboxes()
    here.calls = begun
    here.transport.inbox.put(LostPeer(1, "it ended", left_after))
    if not lost:
        here.drain()
        here.calls = left_after + 1
    with pytest.raises(PeerLost, match=r"rank 1 \(stage 1\) is gone: it ended"):
        here.drain()


def test_the_first_that_is_known_of_a_peer_counts() -> None:
    here, _ = mailboxes()
    here.calls = 1
    here.transport.inbox.put(LostPeer(1, "it ended", 1))
    here.transport.inbox.put(LostPeer(1, "connection reset"))  # what its exit looks like afterwards
    here.drain()


def test_abort_reaches_everybody_and_waits_until_they_know() -> None:
    failing, *others = mailboxes(3)
    seen: list[BaseException] = []

    def other(mailbox: Mailbox) -> None:
        try:
            while True:
                mailbox.wait()
        except RemoteError as error:
            seen.append(error)
            mailbox.abort(error)

    threads = [threading.Thread(target=other, args=(mailbox,)) for mailbox in others]
    for thread in threads:
        thread.start()
    failing.abort(ValueError("bad layer"))
    for thread in threads:
        thread.join(timeout=10)
    assert len(seen) == 2
    for error in seen:
        assert isinstance(error, RemoteError) and error.rank == 0
        assert "rank 0 failed: ValueError: bad layer" in str(error)
    with pytest.raises(RemoteError):  # again and again
        others[0].drain()


def test_abort_gives_up_on_those_who_do_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    failing, _ = mailboxes()
    failing.abort(ValueError("bad layer"))


def test_all_fail_at_once_and_each_knows_of_the_others() -> None:
    threads = [threading.Thread(target=box.abort, args=(ValueError(f"{i}"),)) for i, box in enumerate(mailboxes(3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=module.PATIENCE_S / 2)  # nobody needed its patience
        assert not thread.is_alive()


def test_a_broken_connection_is_put_down_to_the_rank_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = mailboxes()
    broken = RuntimeError("Connection closed by peer")
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    assert here.cause_of(broken) is broken
    monkeypatch.setattr(here.transport, "broke", lambda error: error is broken)
    assert here.cause_of(broken) is broken  # nobody told of a failure
    there.abort(OSError("disk full"))
    cause = here.cause_of(broken)
    assert isinstance(cause, RemoteError) and "disk full" in str(cause)
    own = ValueError("my own")
    assert here.cause_of(own) is own
