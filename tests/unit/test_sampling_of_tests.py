"""Which cells of a test function ``make test`` runs (``sampled``)."""

import itertools

from tests.conftest import most_pairs


def cells_of(*counts: int) -> list[set]:
    cells = []
    for numbers in itertools.product(*map(range, counts)):
        values = list(enumerate(numbers))
        cells.append({*values, *itertools.combinations(values, 2)})
    return cells


def test_few_cells_have_all_pairs_of_values() -> None:
    cells = cells_of(2, 2, 2, 2)  # 16 of them
    kept = most_pairs(cells, 6)
    assert set().union(*(cells[number] for number in kept)) == set().union(*cells)


def test_each_value_of_a_parameter_is_there_before_any_comes_twice() -> None:
    cells = cells_of(3, 5)
    kept = most_pairs(cells, 5)
    assert {value for number in kept for value in cells[number]} >= set().union(
        *({(0, number)} for number in range(3)), *({(1, number)} for number in range(5))
    )


def test_the_cells_of_one_parameter_are_spread() -> None:
    assert most_pairs(cells_of(9), 3) == {0, 4, 8}


def test_never_more_than_there_are() -> None:
    assert most_pairs(cells_of(2), 5) == {0, 1}
