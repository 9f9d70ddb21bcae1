"""What a manager's configuration refuses, in one line that says what to do."""

from __future__ import annotations

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.cluster.manager.config import PlatformConfig
from fireflyer.cluster.schema.job import SHIPPED_NODE_CHECK


def config(**settings: object) -> PlatformConfig:
    base = {"name": "m", "cluster": "5eed" * 8, "store": "embedded:/s", "directory": "/d", "secret_file": "/f"}
    return PlatformConfig(**base | settings)  # type: ignore[arg-type]


def test_the_check_that_comes_with_fireflyer_is_on_and_may_have_arguments_be_replaced_or_be_off() -> None:
    assert config().node_check == (SHIPPED_NODE_CHECK,)
    for command in ((), (SHIPPED_NODE_CHECK, "--memory", "4GiB"), ("/opt/site/check", "-q")):
        assert config(node_check=command).node_check == command


def test_a_program_that_each_node_would_look_for_elsewhere_is_refused() -> None:
    with pytest.raises(UsageError) as raised:
        config(node_check=("check-node",))
    assert str(raised.value) == (
        "node_check: 'check-node' is no absolute path; give the one that the program has on the nodes, or "
        "'fireflyer:node-check' for the one that comes with Fire-Flyer"
    )
