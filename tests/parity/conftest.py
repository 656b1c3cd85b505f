"""What all parity tests need before the first of them runs."""

from multiprocessing import forkserver

# A worker that the fork server starts then needs 20 ms, not the 2 s that importing torch takes.
# The server is started by the fixtures of all tests, after this line.
forkserver.set_forkserver_preload(["torch"])
