// A snapshot of the flight recorder as Python sees it, for whoever binds the owner of a recorder.
#pragma once

#include <nanobind/nanobind.h>

#include "fireflyer/collectives/group/recorder.hpp"

// {"records": [{...}, ...], "monotonic_ns", "realtime_ns", "submitted", "finished", "dropped", "sightings": [{...}, ...]}:
// the fields of fireflyer.collectives.flight.Snapshot and of the structs in it, under the same names. Needs the GIL.
nanobind::dict snapshot_to_dict(const ff::Snapshot& snapshot);
