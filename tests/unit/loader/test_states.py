"""When a state is as the loader gave it."""

import json

import pytest

from shmloader.loader.states import check_state, sealed

FACTS = {"length": 3, "global_batch": 1, "order": None, "last_batch": "keep", "seed": 3}
STATE = FACTS | {"epoch": 0, "position": 7, "persistent": False, "ahead": [(8, 9)]}


def test_a_state_stays_whole_in_any_order_of_its_keys() -> None:
    state = sealed({**STATE, "sampler": {"seed": 3, "has_started": True}})
    in_order = json.loads(json.dumps(state, sort_keys=True))
    assert list(in_order["sampler"]) == ["has_started", "seed"]
    for whole in (state, in_order, dict(reversed(in_order.items()))):
        assert check_state(whole, FACTS) is whole
    in_order["sampler"]["seed"] = 4
    with pytest.raises(ValueError, match="Its checksum is wrong"):
        check_state(in_order, FACTS)
