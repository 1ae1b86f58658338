"""What the links really give: throughput, and the round trip of messages.

Runs on every host of a cluster, as any script does. Host 0 asks and prints; the others answer, each on a port of its own:

    sink         reads to the end, then answers how many bits per second came
    source S     sends for S seconds
    echo SIZE    sends back whatever comes, SIZE bytes at a time
    quit         ends

Plain sockets and nothing of torch, since it is the network that is to be seen and not what is built on it. It is started by its
path, so it imports nothing from the folders around it.
"""

import socket
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import typer
from rich.console import Console
from rich.table import Table

__all__ = ["LinkSpeed", "measure_link", "serve", "table"]

_PORT = 5201
_CHUNK_BYTES = 1 << 18
_PAYLOAD_SHARE = 1448 / 1514  # of a full frame; Ethernet takes 14 bytes, IP 20, TCP with timestamps 32
_MESSAGE_BYTES = 1 << 20
_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What was measured between host 0 and another.

    Attributes:
        there_bps, back_bps: TCP payload in bits per second, one direction at a time.
        both_bps: the two directions at the same time, there and back.
        byte_s: round trip of one byte.
        message_s: round trip of one MiB, each after a pause.
    """

    there_bps: float
    back_bps: float
    both_bps: tuple[float, float]
    byte_s: float
    message_s: float


def serve(address: str) -> None:
    """Answer requests until one says to quit."""
    with socket.create_server((address, _PORT)) as server:
        while True:
            connection, _ = server.accept()
            request = _line(connection)
            if request == "quit":
                connection.close()
                return
            threading.Thread(target=_answer, args=(connection, request), daemon=True).start()


def measure_link(address: str, *, seconds: float) -> LinkSpeed:
    """Measure the way to a host that serves, and back.

    Args:
        address: of the host.
        seconds: that each of the three transfers takes.
    """
    there, back = _send_there(address, seconds), _fetch(address, seconds)
    with ThreadPoolExecutor() as pool:
        both = pool.submit(_send_there, address, seconds), pool.submit(_fetch, address, seconds)
        both_bps = both[0].result(), both[1].result()
    byte_s = _round_trip_s(address, 1, times=300, pause_s=0.0)
    message_s = _round_trip_s(address, _MESSAGE_BYTES, times=7, pause_s=0.02)
    _request(address, "quit").close()
    return LinkSpeed(there, back, both_bps, byte_s, message_s)


def table(speeds: Sequence[LinkSpeed], rate_bps: int) -> Table:
    """One row for each host but the first."""
    best_bps = rate_bps * _PAYLOAD_SHARE
    ideal_ms = 2e3 * 8 * _MESSAGE_BYTES / best_bps
    result = Table(
        title=f"links of {rate_bps / 1e6:g} Mbit/s: TCP payload, at most {best_bps / 1e6:.1f} Mbit/s",
        caption=f"1 MiB there and back takes {ideal_ms:.1f} ms at that rate",
    )
    for column in ("", "there", "back", "both ways at once", "1 byte there and back", "1 MiB there and back"):
        result.add_column(column, justify="right" if column else "left")
    for number, speed in enumerate(speeds, start=1):
        both = " / ".join(f"{bps / 1e6:.1f}" for bps in speed.both_bps)
        times = f"{speed.byte_s * 1e6:.0f} µs", f"{speed.message_s * 1e3:.1f} ms"
        result.add_row(f"host 0 - host {number}", f"{speed.there_bps / 1e6:.1f}", f"{speed.back_bps / 1e6:.1f}", both, *times)
    return result


def main(host: int, rate_bps: int, addresses: list[str], seconds: float = 2.0) -> None:
    """Measure as host 0, or answer it as another one."""
    if host > 0:
        serve(addresses[host])
        return
    speeds = [measure_link(address, seconds=seconds) for address in addresses[1:]]
    Console(width=120).print(table(speeds, rate_bps))


def _request(address: str, text: str) -> socket.socket:
    """A connection on which `text` was asked for, as soon as the other host answers."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection((address, _PORT), timeout=_TIMEOUT_S)
            break
        except ConnectionRefusedError:  # not started yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(f"{text}\n".encode())
    return connection


def _answer(connection: socket.socket, request: str) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        kind, _, argument = request.partition(" ")
        if kind == "sink":
            connection.sendall(f"{_receive_bps(connection)}\n".encode())
        elif kind == "source":
            _send_for(connection, float(argument))
        elif kind == "echo":
            while message := _receive_exactly(connection, int(argument)):
                connection.sendall(message)
        else:
            raise ValueError(f"expected sink, source, echo or quit, got {request!r}")


def _send_there(address: str, seconds: float) -> float:
    with _request(address, "sink") as connection:
        _send_for(connection, seconds)
        return float(_line(connection))


def _fetch(address: str, seconds: float) -> float:
    with _request(address, f"source {seconds}") as connection:
        return _receive_bps(connection)


def _round_trip_s(address: str, size: int, *, times: int, pause_s: float) -> float:
    taken, message = [], bytes(size)
    with _request(address, f"echo {size}") as connection:
        for _ in range(times):
            time.sleep(pause_s)
            start = time.perf_counter()
            connection.sendall(message)
            _receive_exactly(connection, size)
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _send_for(connection: socket.socket, seconds: float) -> None:
    chunk, end = bytes(_CHUNK_BYTES), time.perf_counter() + seconds
    while time.perf_counter() < end:
        connection.sendall(chunk)
    connection.shutdown(socket.SHUT_WR)


def _receive_bps(connection: socket.socket) -> float:
    """Bits per second from the first arrival to the end."""
    buffer, size = bytearray(_CHUNK_BYTES), 0
    connection.recv_into(buffer)
    start = time.perf_counter()
    while received := connection.recv_into(buffer):
        size += received
    return 8 * size / (time.perf_counter() - start)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    """`size` bytes, or fewer if the connection ends."""
    message = bytearray()
    while len(message) < size and (part := connection.recv(min(_CHUNK_BYTES, size - len(message)))):
        message += part
    return bytes(message)


def _line(connection: socket.socket) -> str:
    text = bytearray()
    while (byte := connection.recv(1)) not in (b"\n", b""):
        text += byte
    return text.decode()


if __name__ == "__main__":
    typer.run(main)
