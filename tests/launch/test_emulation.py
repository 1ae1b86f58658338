"""Parts of the emulated cluster that need neither root nor a network."""

from __future__ import annotations

import base64
import os
import signal
import threading
from collections.abc import Sequence

import cluster
import pytest
import typer.testing
from emulation import measure, network, requirements
from emulation.commands import CommandError, run
from emulation.hosts import StopSignals, cores_of_hosts
from emulation.shaping import Shaping, parse_bandwidth


@pytest.mark.parametrize(("text", "rate_bps"), [("1gbit", 10**9), ("200mbit", 2 * 10**8), (" 2.5Gbit ", 2_500_000_000)])
def test_bandwidth(text: str, rate_bps: int) -> None:
    assert parse_bandwidth(text).rate_bps == rate_bps


@pytest.mark.parametrize("text", ["", "1", "gbit", "1 gbit", "-1gbit", "1gbps", "1e3mbit", "0mbit", "9mbit", "101gbit"])
def test_bandwidth_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a bandwidth") as error:
        parse_bandwidth(text)
    assert repr(text) in str(error.value)


def test_bucket_is_a_quarter_of_a_millisecond_in_two_segments() -> None:
    gigabit = Shaping(10**9)
    assert (gigabit.burst_bytes, gigabit.segment_bytes) == (31_250, 15_625)
    assert gigabit.qdisc() == ["tbf", "rate", "1000000000bit", "burst", "31250", "latency", "50ms"]
    slow, fast = Shaping(10**7), Shaping(10**11)
    assert slow.burst_bytes == 4 * 1514, "some frames must fit"
    assert fast.segment_bytes == 65536, "the kernel's limit"


def test_both_ends_of_every_link_are_shaped_and_nothing_is_put_into_the_machines_network() -> None:
    plan = network.Network(3, Shaping(10**9))
    commands = list(plan.commands())
    namespaces = {plan.switch, *(host.namespace for host in plan.hosts)}
    shaped = {(command[2], command[6]) for command in commands if command[0] == "tc"}
    assert shaped == {(host.namespace, "eth0") for host in plan.hosts} | {(plan.switch, f"port{i}") for i in range(3)}
    for command in commands:
        if command[:3] == ["ip", "link", "add"]:
            ends = [command[i + 1] for i, word in enumerate(command) if word == "netns"]
            assert len(ends) == 2 and set(ends) <= namespaces
        else:
            assert command[1] == "-n" and command[2] in namespaces or command[1] == "netns"


def test_hosts_have_addresses_of_their_own() -> None:
    hosts = network.Network(network.MAX_HOSTS, Shaping(10**9)).hosts
    assert [hosts[0].address, hosts[-1].address] == ["10.0.0.1", "10.0.0.254"]
    assert len({host.address for host in hosts}) == len({host.namespace for host in hosts}) == network.MAX_HOSTS


def test_a_failing_command_removes_what_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    present: list[str] = []

    def fake(command: Sequence[str]) -> str:
        match list(command):
            case ["ip", "netns", "add", name]:
                present.append(name)
            case ["ip", "netns", "delete", name]:
                present.remove(name)
            case ["ip", "netns", "list"]:
                return "\n".join(f"{name} (id: 0)" for name in present)
            case ["tc", *_]:
                assert len(present) == 2
                raise CommandError("no tbf")
        return ""

    monkeypatch.setattr(network, "run", fake)
    with pytest.raises(CommandError, match="no tbf"), network.Network(2, Shaping(10**9)):
        pytest.fail("it was entered")
    assert present == []


def test_leftovers_are_those_of_dead_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = network.Network(1, Shaping(10**9)).switch
    _, pid, start, _ = own.split("-")
    reused = f"avgpipe-{pid}-{int(start) - 1}-host0"  # a dead process whose number this one has now
    dead = f"avgpipe-{2**22 + 1}-1-switch"  # above the kernel's highest number
    present = [own, reused, dead, "somebody-elses", "avgpipe-x", f"avgpipe-{2**22 + 1}-1-host0-not"]
    deleted = []

    def fake(command: Sequence[str]) -> str:
        if command[:3] == ["ip", "netns", "delete"]:
            present.remove(command[3])
            deleted.append(command[3])
        return "\n".join(present) if command[2] == "list" else ""

    monkeypatch.setattr(network, "run", fake)
    assert sorted(network.remove_leftovers()) == sorted(deleted) == sorted([reused, dead])


def test_what_cannot_be_deleted_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = f"avgpipe-{2**22 + 1}-1-switch"
    monkeypatch.setattr(network, "run", lambda command: dead if command[2] == "list" else "")
    with pytest.raises(CommandError, match=f"{dead}.*by hand"):
        network.remove_leftovers()


def test_cores() -> None:
    assert cores_of_hosts(2, 1, available=[3, 5, 7]) == [[3], [5]]
    assert cores_of_hosts(2, 2, available=[0, 1, 2, 3]) == [[0, 1], [2, 3]]
    assert cores_of_hosts(2, 2, available=[0, 1, 2]) is None


def _works(command: Sequence[str]) -> str:
    return ""


def test_nothing_is_missing() -> None:
    assert requirements.missing(platform="linux", user_id=lambda: 0, find=str, attempt=_works) == []


def test_missing_platform_user_and_tool_are_named_without_an_attempt() -> None:
    def attempt(command: Sequence[str]) -> str:
        pytest.fail(f"tried {command}")

    def find(tool: str) -> str | None:
        return None if tool == "tc" else tool

    found = requirements.missing(platform="linux", user_id=lambda: 1000, find=find, attempt=attempt)
    assert len(found) == 2
    assert "root" in found[0] and "sudo" in found[0]
    assert "`tc`" in found[1] and "apt-get install iproute2" in found[1]
    (other,) = requirements.missing(platform="darwin", user_id=lambda: 0, find=find, attempt=attempt)
    assert "Linux" in other and "darwin" in other


def test_missing_kernel_parts_and_rights_are_named() -> None:
    def no_bucket(command: Sequence[str]) -> str:
        if "tbf" in command:
            raise CommandError("Specified qdisc kind is unknown.")
        return ""

    (found,) = requirements.missing(platform="linux", user_id=lambda: 0, find=str, attempt=no_bucket)
    assert "tbf" in found and "sch_tbf" in found and "CONFIG_NET_SCH_TBF" in found and "qdisc kind is unknown" in found

    def no_right(command: Sequence[str]) -> str:
        raise CommandError("Operation not permitted")

    (found,) = requirements.missing(platform="linux", user_id=lambda: 0, find=str, attempt=no_right)
    assert "--privileged" in found and "Operation not permitted" in found


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "expected one of a script, --measure and --clean, got none"),
        (["--measure", "--clean"], "got --measure and --clean"),
        (["--measure", "--bandwidth", "fast"], "--bandwidth: a bandwidth is a number and mbit or gbit"),
        (["--measure", "--hosts", "0"], "--hosts"),
        (["--measure", "--hosts", "1"], "at least 2 hosts, got 1"),
        (["--measure", "--hosts", "255"], "--hosts"),
        (["--measure", "--pin", "--hosts", "254", "--accelerators", "999"], "--pin needs 253746 cores"),
        (["no-such-script.py", "--hosts", "2"], "there is no script 'no-such-script.py'"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], reason: str, untouchable: None) -> None:
    result = typer.testing.CliRunner().invoke(cluster.app, arguments)
    assert result.exit_code == 2
    assert reason in " ".join(result.output.split())


def test_an_unprivileged_user_is_refused(monkeypatch: pytest.MonkeyPatch, untouchable: None) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    result = typer.testing.CliRunner().invoke(cluster.app, [__file__])
    assert result.exit_code == 2
    assert "the emulated cluster needs" in result.output and "sudo" in result.output


@pytest.fixture
def untouchable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which every change fails the test."""

    def change(*args: object) -> None:
        pytest.fail("it went on")

    for name in ("Network", "remove_leftovers", "run_on_hosts"):
        monkeypatch.setattr(cluster, name, change)


def test_launchers_number_hosts_and_accelerators() -> None:
    plan = network.Network(2, Shaping(10**9))
    commands = cluster._launchers(plan, 2, ["train.py", "--steps", "3"])
    assert [command[-4:] for command in commands] == [[f"--node_rank={i}", "train.py", "--steps", "3"] for i in range(2)]
    assert all("--master_addr=10.0.0.1" in command for command in commands)
    (encoded,) = {word for command in commands for word in command if word.startswith("--world_info=")}
    assert base64.urlsafe_b64decode(encoded.partition("=")[2]) == b'{"host0": [0, 1], "host1": [2, 3]}'


def test_signals_are_noted_and_then_as_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_failing_tool_is_quoted() -> None:
    with pytest.raises(CommandError, match=r"`sh -c echo why >&2; exit 3` failed with exit code 3: why"):
        run(["sh", "-c", "echo why >&2; exit 3"])
    with pytest.raises(CommandError, match="no-such-tool"):
        run(["no-such-tool"])


def test_measuring_over_the_loopback() -> None:
    address = "127.83.41.7"  # its port is free whatever else measures on this machine
    server = threading.Thread(target=measure.serve, args=(address,), daemon=True)
    server.start()
    speed = measure.measure_link(address, seconds=0.05)
    server.join(timeout=10)
    assert not server.is_alive()
    assert min(speed.there_bps, speed.back_bps, *speed.both_bps) > 1e8
    assert 0 < speed.byte_s < speed.message_s
