"""How a token bucket (`tc tbf`) is set up so that a link has the bandwidth it is given.

A token bucket is not a wire: what is in the bucket passes at once, and only then the rate holds. Three sizes decide how near it
comes.

- *Burst*, the bucket. A message that follows a pause arrives earlier than over a wire by the time that a bucket is worth, so it
  should be small. But the kernel refills it from a timer, and tokens that find the bucket full are lost, so it has to hold what
  the rate gives between two looks, more so when the cores are busy. A quarter of a millisecond is enough, and makes the error the
  same at every rate from 200 Mbit/s. Below that, what counts is that some frames fit.
- *Segment*. TCP hands the kernel up to 64 KiB in one piece, for the network card to cut into frames. A piece larger than the
  bucket is cut in software, frame by frame, and single frames from the start cost as much: on busy cores either brought 1 Gbit/s
  down to between 0.2 and 0.4. Pieces of half a bucket cost nothing that shows.
- *Queue*. What would wait longer than this is dropped, as in a switch. Two senders of full rate to one host fill it.
"""

import re
from dataclasses import dataclass

__all__ = ["Shaping", "parse_bandwidth"]

_FRAME_BYTES = 1514  # a full Ethernet frame as the kernel counts it: 1,500 and the header
_BURST_S = 250e-6
_MIN_BURST_BYTES = 4 * _FRAME_BYTES
_QUEUE_MS = 50
_MAX_SEGMENT_BYTES = 65536
_UNITS = {"mbit": 10**6, "gbit": 10**9}
_MIN_RATE_BPS, _MAX_RATE_BPS = 10**7, 10**11  # slower, the queue would hold a few frames only


@dataclass(frozen=True, slots=True)
class Shaping:
    """One direction of a link.

    Attributes:
        rate_bps: bits per second, Ethernet headers included.
    """

    rate_bps: int

    def __str__(self) -> str:
        return f"{self.rate_bps / 1e6:g} Mbit/s"

    @property
    def burst_bytes(self) -> int:
        """Size of the bucket: what the rate gives in a quarter of a millisecond, and four frames at least."""
        return max(_MIN_BURST_BYTES, round(self.rate_bps / 8 * _BURST_S))

    @property
    def segment_bytes(self) -> int:
        """The most that TCP may hand down in one piece."""
        return min(_MAX_SEGMENT_BYTES, self.burst_bytes // 2)

    def link_options(self) -> list[str]:
        """For `ip link set`, which counts the segment."""
        return ["gso_max_size", str(self.segment_bytes)]

    def qdisc(self) -> list[str]:
        """For `tc qdisc add`; a plain number is bytes for the burst, but bits per second need their unit."""
        return ["tbf", "rate", f"{self.rate_bps}bit", "burst", str(self.burst_bytes), "latency", f"{_QUEUE_MS}ms"]


def parse_bandwidth(text: str) -> Shaping:
    """The link of a bandwidth such as "1gbit", "2.5gbit" or "200mbit".

    Raises:
        ValueError: it is written in another way, or out of range.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", text.strip().lower())
    if found is None:
        raise ValueError(f"a bandwidth is a number and mbit or gbit (per second), such as 1gbit or 200mbit, got {text!r}")
    rate_bps = round(float(found[1]) * _UNITS[found[2]])
    if not _MIN_RATE_BPS <= rate_bps <= _MAX_RATE_BPS:
        raise ValueError(f"a bandwidth lies between 10mbit and 100gbit, got {text!r}")
    return Shaping(rate_bps)
