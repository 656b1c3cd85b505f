"""Shares a dataset between the ranks of one host: :func:`share_on_host`."""

from shmloader.host.sharing import share_on_host

__all__ = ["share_on_host"]
