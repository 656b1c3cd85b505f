"""``socket.setdefaulttimeout``, which programs that download set, is not for our sockets."""

import pytest

from tests.process.support import run_program

# A worker has nothing to do for longer than that: the first waits for the dataset, and all
# wait between the epochs.
PROGRAM = """
import socket, time
import torch.utils.data
from shmloader import DataLoader

{module}

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index
    def __getstate__(self):
        time.sleep(2 * {seconds})
        return self.__dict__

def main():
    {main}
    loader = DataLoader(
        Data(), num_workers=2, batch_size=None, persistent_workers=True,
        multiprocessing_context={method!r},
    )
    for _ in range(2):
        print(list(loader))
        time.sleep(2 * {seconds})
    loader.close()

if __name__ == "__main__":
    main()
"""
SECONDS = 0.05
SET = f"socket.setdefaulttimeout({SECONDS})"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("where", ["module", "main"])
def test_workers_wait_for_as_long_as_it_takes(tmp_path, method, where):
    places = {"module": "", "main": "pass", where: SET}
    source = PROGRAM.format(**places, seconds=SECONDS, method=method)
    done = run_program(source, tmp_path / "program.py")
    assert done.out.splitlines() == ["[0, 1, 2, 3]"] * 2, done.err
    done.assert_quiet()
