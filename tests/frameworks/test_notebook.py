"""A notebook: classes that are defined in a cell, and `install()` that is run twice."""

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

CELLS = [
    """
import shmloader, torch
report = shmloader.install()

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index**2
""",
    "report = shmloader.install(worker_restarts=1)",
    """
loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2)
ours = shmloader.DataLoader(
    Squares(), batch_size=4, num_workers=1, multiprocessing_context="spawn", seed=1
)
print([batch.tolist() for batch in loader], [batch.tolist() for batch in ours])
print([row.engine for row in report.loaders])
""",
]


def test_loaders_in_a_notebook_run_on_our_engine(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(tmp_path))
    (output,) = notebook.cells[-1].outputs
    batches = "[[0, 1, 4, 9], [16, 25, 36, 49]]"
    assert output.text.splitlines() == [f"{batches} {batches}", "['shmloader', 'shmloader']"]
