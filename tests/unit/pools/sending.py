"""Sends a payload as to a worker that is already running, but to this process."""

import socket

from shmloader.batch.payload import receive_payload


def sent(payload):
    """Return the payload that arrives, not loaded yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for data, numbers in payload.messages():
            socket.send_fds(ours, [data], numbers)
        return receive_payload(theirs)
