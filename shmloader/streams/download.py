"""Brings one file to this machine, by fsspec, and tries again when the network fails.

fsspec is an extra. Only its public interface is used: ``url_to_fs``, ``info`` and ``get_file``.
"""

import errno
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shmloader.errors import ShardError
from shmloader.interruptions import is_interruption

#: A download is tried so many times. The waits between them are 12 seconds at most, in all.
ATTEMPTS = 8
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0

# A server that sends nothing for so long has failed. aiohttp's own limit is five minutes a file.
_SILENCE_S = 60

#: What a disk says that is full.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def download(url: str, path: Path, options: Mapping[str, Any]) -> None:
    """Write a file to ``path``.

    Args:
        url: What fsspec opens.
        path: Where the file is written. It may be there, and is there in part after an error.
        options: Arguments for the file system.

    Raises:
        ShardError: If the last try failed.
        OSError: If the disk is full.
        ImportError: If fsspec is not installed, or what it needs for this kind of address.
    """
    try:
        import fsspec  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(f"reading {url} takes fsspec: pip install 'fsspec[http]'") from error
    for attempt in range(ATTEMPTS):
        try:
            files, remote = fsspec.url_to_fs(url, **_with_defaults(url, options))
            size = files.info(remote).get("size")
            files.get_file(remote, str(path))
            received = path.stat().st_size
            if size is not None and received != size:
                raise EOFError(f"{received:,} of {size:,} bytes came")
        except ImportError:
            raise
        except Exception as error:
            if is_interruption(error) or getattr(error, "errno", None) in NO_SPACE:
                raise
            if attempt == ATTEMPTS - 1:
                raise _failed(url, error) from error
            # Other processes have failed at the same time, and shall not all come back at once.
            wait_s = min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S)
            time.sleep(wait_s * random.SystemRandom().uniform(0.5, 1))
        else:
            return


def _with_defaults(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for the file system. Those of the user come first."""
    if not url.startswith(("http://", "https://")):
        return dict(options)
    import aiohttp  # noqa: PLC0415 - an extra

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE_S, sock_read=_SILENCE_S)
    # The bytes of the file, and not of what the server or aiohttp make of them.
    headers = {"Accept-Encoding": "identity"}
    return {"client_kwargs": {"timeout": timeout}, "headers": headers, **options}


def _failed(url: str, error: BaseException) -> ShardError:
    # fsspec says that a file is not found also if the server could not be asked.
    cause = isinstance(error, FileNotFoundError) and error.__cause__
    problem = f"{type(cause or error).__name__}: {cause or error}"
    return ShardError(
        f"shard {url} could not be downloaded in {ATTEMPTS} tries ({problem}). Check the address, "
        "the server and the network, or leave the shard out with on_error='skip'",
        url,
    )
