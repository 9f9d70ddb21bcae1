"""Run by Debian's Python, which has SimGrid: reads networks from standard input, prints when each flow ends.

Input: a JSON list of {"capacities": bytes per second of each link, "flows": [[start in s, bytes, [links]]]}. Output: a
list of lists of seconds. Networks share nothing, so that one engine runs all of them at once. The seconds that it ran,
without those of making the networks, go to standard error.
"""

import json
import sys
import time

from simgrid import Actor, Comm, Engine, LinkInRoute, NetZone, simgrid_version, this_actor

SETTINGS = (
    "network/model:CM02",
    "network/optim:Lazy",
    "network/crosstraffic:0",
    "network/bandwidth-factor:1",
    "network/latency-factor:1",
    "network/weight-S:0",
    "network/TCP-gamma:0",
    "surf/precision:1e-9",
    "maxmin/precision:1e-9",
)


def main() -> None:
    networks = json.load(sys.stdin)
    engine = Engine(["flows", "--log=root.thresh:error", *(f"--cfg={one}" for one in SETTINGS)])
    zone = NetZone.create_full_zone("root")
    flows = []
    for number, network in enumerate(networks):
        links = [
            zone.create_link(f"link-{number}-{at}", capacity).set_latency(0).seal()
            for at, capacity in enumerate(network["capacities"])
        ]
        for at, (start, size, used) in enumerate(network["flows"]):
            ends = [zone.create_host(f"{end}-{number}-{at}", 1e9) for end in ("from", "to")]
            way = [LinkInRoute(links[link]) for link in used]
            zone.add_route(ends[0].netpoint, ends[1].netpoint, None, None, way, False)
            flows.append((start, number, at, size, ends))
    director = zone.create_host("director", 1e9)
    zone.seal()
    finished = [[0.0] * len(network["flows"]) for network in networks]

    def direct() -> None:
        sending = []
        for start, number, at, size, (source, target) in sorted(flows, key=lambda flow: flow[:3]):
            this_actor.sleep_until(start)
            sending.append((number, at, Comm.sendto_async(source, target, size)))
        Comm.wait_all([comm for _, _, comm in sending])
        for number, at, comm in sending:
            finished[number][at] = comm.finish_time

    Actor.create("director", director, direct)
    begun = time.perf_counter()
    engine.run()
    ran_s = time.perf_counter() - begun
    print(f"engine ran for {ran_s:.6f} s, version {simgrid_version}", file=sys.stderr)
    json.dump(finished, sys.stdout)


if __name__ == "__main__":
    main()
