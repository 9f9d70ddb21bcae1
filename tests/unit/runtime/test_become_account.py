"""What a process of an account knows of the process of root that started it."""

from __future__ import annotations

from fireflyer.runtime.processes.become_account import environment_of

ANN = {"name": "ann", "home": "/home/ann", "shell": "/bin/bash"}


def test_a_task_is_told_where_the_file_system_is_and_nothing_secret_of_roots() -> None:
    given = {
        "FIREFLYER_FS": "ff://a:7000,b:7000",
        "FIREFLYER_FS_TOKEN_FILE": "/root/ops-token",
        "FF_JOB_TOKEN": "token",
        "HOME": "/root",
        "PGPASSWORD": "secret",
    }
    found = environment_of(ANN, given)
    assert found["FIREFLYER_FS"] == "ff://a:7000,b:7000"
    assert found["HOME"] == "/home/ann"
    assert not {"FIREFLYER_FS_TOKEN_FILE", "PGPASSWORD"} & set(found)
