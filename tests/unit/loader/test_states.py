"""When a state is as the loader gave it."""

import json

from shmloader.loader.states import is_whole, sealed


def test_a_state_stays_whole_in_any_order_of_its_keys() -> None:
    state = sealed({"position": 7, "sampler": {"seed": 3, "is_begun": True}, "ahead": [(8, 9)]})
    in_order = json.loads(json.dumps(state, sort_keys=True))
    assert list(in_order["sampler"]) == ["is_begun", "seed"]
    assert is_whole(state)
    assert is_whole(in_order)
    assert is_whole(dict(reversed(in_order.items())))
    in_order["sampler"]["seed"] = 4
    assert not is_whole(in_order)
