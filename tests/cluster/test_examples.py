"""The examples of clusters, and the page about them, do what they say; their benchmark runs."""

import re

import pytest

from tests.cluster.needed import needed
from tests.commands import output_of
from tests.docs.test_blocks import ROOT, blocks_of, paste

pytestmark = pytest.mark.timeout(180)

EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "howto" / "cluster.md"
BLOCKS = {
    package: [block for block in blocks_of(PAGE) if f"import {package}\n" in block.code]
    for package in ("distributed", "ray")
}
FIGURE = r"-?[\d.,]+ \(-?[\d.,]+–-?[\d.,]+\)"


@pytest.mark.parametrize(("name", "package"), [("Dask", "distributed"), ("Ray", "ray")])
def test_an_example_has_the_batches_of_local_workers(name, package) -> None:
    needed(package)
    output = output_of(EXAMPLES / f"cluster_{name.lower()}.py", limit_s=60)
    assert f"{name} made the batches that local workers make" in output


@pytest.mark.parametrize("arguments", [(), ("--executor",)])
def test_ranks_of_ray_train_continue_from_their_checkpoint_with_each_sample_once(arguments) -> None:
    needed("ray.train")
    output = output_of(EXAMPLES / "cluster_train.py", *arguments)
    assert re.search(r"^2 ranks, continued in epoch 1 after step 10\.$", output, re.MULTILINE)
    assert "All 512 samples of the last epoch were trained on, each once." in output


@pytest.mark.parametrize("package", BLOCKS)
def test_the_block_of_the_page_runs_as_pasted(package, tmp_path) -> None:
    needed(package)
    (block,) = BLOCKS[package]
    output_of(paste([block], tmp_path), folder=tmp_path, limit_s=120)


@pytest.mark.timeout(600)  # 14 clusters
def test_the_benchmark_of_clusters_replaces_its_section_of_the_results(tmp_path) -> None:
    results, begin = tmp_path / "RESULTS.md", "# Results\n\n<!-- begin cluster.py -->\n"
    results.write_text(f"{begin}old\n<!-- end cluster.py -->\nrest\n")
    options = ("--smallest", f"--record={tmp_path / 'runs.jsonl'}", f"--results={results}")
    output_of(ROOT / "benchmarks" / "cluster.py", *options, limit_s=570)
    page = results.read_text()
    assert page.startswith(f"{begin}## On clusters of Dask and Ray\n")
    assert page.endswith("<!-- end cluster.py -->\nrest\n")
    assert "old" not in page
    for row in (
        rf"JPEG files of [^|]+, to our own processes \| {FIGURE} samples/s \| {FIGURE} \|",
        rf"(3|38) MB on Ray, to Ray Data[^|]* \| {FIGURE} GB/s \| {FIGURE} \| {FIGURE} \|",
        rf"samples that wait, (16|64) a batch, on (Dask|Ray): share of the ideal \| {FIGURE} \|",
        rf"main process beyond submit, [^|]+ \| {FIGURE} \| submit alone: {FIGURE} \|",
    ):
        assert len(re.findall(rf"^\| {row}", page, re.MULTILINE)) >= 2, page
