"""How stages talk: ordered messages between two ranks, made of a small host-side header and tensors.

One interface (`base.Transport`), three implementations: `memory` (threads of one process, for tests), `gloo` (CPU) and `nccl`
(CUDA).
"""

from avgpipe_ds.transport.base import Inbox, LostPeer, Transport
from avgpipe_ds.transport.message import Message

__all__ = ["Inbox", "LostPeer", "Message", "Transport"]
