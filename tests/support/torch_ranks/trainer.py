"""A rank of a training run from a recipe that a test disturbs: `python -m tests.support.torch_ranks.trainer JSON`.

Its last line is the error with which the run ended, or null.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from typing import Any

from fireflyer.base.errors import FireflyerError
from fireflyer.recipes.trainer import run as trainer
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.core.recipe import identity_of, resolved


def disturb(dies: tuple[int, int] | None, not_finite_at: list[int]) -> None:
    """Rank `dies[0]` is killed as it begins step `dies[1]`; the losses of batches that end at these positions of the
    stream are not finite."""
    take_step, mean_over_ranks = trainer._take_step, trainer._mean_over_ranks

    def take(run: Any, loop: Any, step: int) -> None:
        if dies is not None and (run.env.rank, step) == dies:
            loop.manager.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        take_step(run, loop, step)

    def mean(run: Any, summed: float) -> float:
        loss = mean_over_ranks(run, summed)
        return math.nan if run.data.position in not_finite_at else loss

    trainer._take_step, trainer._mean_over_ranks = take, mean
    trainer._say = lambda run, line: None  # the last line is the result


def main() -> int:
    given = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    disturb(tuple(given["dies"]) if given.get("dies") else None, given.get("not_finite_at", []))
    recipe = recipe_of(given["recipe"] if rank == 0 else given.get("other_recipe", given["recipe"]))
    base = given["base"] if rank == 0 else given.get("other_base", given["base"])
    try:
        trainer.run_recipe(resolved(recipe, base), identity_of(recipe))
    except FireflyerError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
        return 1
    print("null")
    return 0


if __name__ == "__main__":
    sys.exit(main())
