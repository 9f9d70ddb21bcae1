"""`python -P -m fireflyer.cluster.agent CONFIG`: run by a guard, with the configuration as JSON."""

import logging
import sys

import msgspec
import uvloop

from fireflyer.base.errors import FireflyerError
from fireflyer.cluster.agent.agent import run_agent
from fireflyer.cluster.schema.wire import AgentConfig


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        return uvloop.run(run_agent(msgspec.json.decode(sys.argv[1], type=AgentConfig)))
    except FireflyerError as error:
        logging.getLogger("agent").error("agent ends on an error reason=%s", error)
        return 1


sys.exit(main())
