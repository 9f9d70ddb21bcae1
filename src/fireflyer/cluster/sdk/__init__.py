"""Functions by which a script takes part in a platform that suspends jobs and lets them go on later.

    from fireflyer.cluster.sdk import go_suspend, should_suspend

It does not load the launcher. See `fireflyer.runtime.suspension`.
"""

from fireflyer.base.suspension import SUSPENDED_EXIT_CODE
from fireflyer.runtime.suspension import (
    get_whole_life_state,
    go_suspend,
    set_watchdog_time,
    set_whole_life_state,
    should_suspend,
    suspend_deadline_ns,
)

__all__ = [
    "SUSPENDED_EXIT_CODE",
    "get_whole_life_state",
    "go_suspend",
    "set_watchdog_time",
    "set_whole_life_state",
    "should_suspend",
    "suspend_deadline_ns",
]
