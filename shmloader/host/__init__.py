"""What the ranks of one host share: the dataset (:func:`share_on_host`)."""

from shmloader.host.sharing import share_on_host

__all__ = ["share_on_host"]
