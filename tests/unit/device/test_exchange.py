"""What the user's thread does for the engine's."""

from __future__ import annotations

import pytest

from shmloader.device.exchange import UserThreadCall
from tests.process.support import Bad


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_is_made_before_the_thread_that_asked_goes_on(fails: bool) -> None:
    """That thread may be told to end just then, and has to note what was done."""

    def function() -> None:
        if fails:
            raise Bad(0)

    call = UserThreadCall(function)
    seen: list[bool] = []
    call.over.set = lambda: seen.append(call.is_made)  # type: ignore[method-assign]
    assert not call.is_made
    call.make()
    assert seen == [True]
    if fails:
        with pytest.raises(Bad):
            call.raise_error()
    call.raise_error()
