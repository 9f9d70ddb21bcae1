// The operation that an executor has under way, and may be driven on by another thread. Private to the executor.
#pragma once

#include <cstdint>
#include <memory>

#include "fireflyer/collectives/executor.hpp"
#include "run.hpp"

namespace ff {

struct Executor::Current {
  Task task;
  Geometry geometry;
  Places mine;                    // where this rank's arrays lie
  std::unique_ptr<Rules> rules;
  std::unique_ptr<Run> run;       // null while the others are awaited to choose it
  StallDetector stall_detector;
  std::int64_t next_poll_ns = 0;
  std::uint64_t verified = 0;     // a bit for each local rank whose call is known to be the same; `never`: all
  bool begun = false;
  bool small = false;
  bool shared = false;            // others write into this rank's arrays
  bool rung = true;
  std::uint64_t unrung = 0;
  Failure failure;
  std::uint64_t recorded = 0;     // chunks that the record knows of
};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace ff
