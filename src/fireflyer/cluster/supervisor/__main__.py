"""`python -P -m fireflyer.cluster.supervisor CONFIG`: run by a guard, with the configuration as JSON."""

import logging
import sys

import uvloop

from fireflyer.base.decoding import decode_json
from fireflyer.base.errors import FireflyerError
from fireflyer.cluster.schema.wire import SupervisorConfig
from fireflyer.cluster.supervisor.supervisor import run_supervisor


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        return uvloop.run(run_supervisor(decode_json(sys.argv[1], SupervisorConfig)))
    except FireflyerError as error:
        logging.getLogger("supervisor").error("supervisor ends on an error reason=%s", error)
        return 1


sys.exit(main())
