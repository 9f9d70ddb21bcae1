// Waiting for something that another thread is about to do: a switch to that thread and back costs far less than to sleep
// and to be woken, where both share a processor.
#pragma once

#include <sched.h>

#include <cstdint>
#include <optional>

#include "fireflyer/base/clock.hpp"

namespace ff {

// Of one waiting thread. Where somebody else took the processor for long, offers are too dear: none is made until what that
// one has cost is 1 % of the time.
class Yields {
 public:
  // Offers the processor to others and looks whether it is `ready` now, some times. The number of offers before the one after
  // which it was; nothing: it was not.
  template <class Ready>
  std::optional<int> until(Ready ready) {
    std::int64_t now_ns = monotonic_ns();
    for (int offers = 0; offers < most && now_ns >= from_ns_; ++offers) {
      sched_yield();
      if (ready()) return offers;
      const std::int64_t taken_ns = monotonic_ns() - now_ns;
      now_ns += taken_ns;
      if (taken_ns > dear_ns) from_ns_ = now_ns + dearer * taken_ns;
    }
    return std::nullopt;
  }

 private:
  static constexpr int most = 40;  // some 0.3 us each where nobody takes the offer
  static constexpr std::int64_t dear_ns = 100'000;
  static constexpr std::int64_t dearer = 100;

  std::int64_t from_ns_ = 0;
};

}  // namespace ff
