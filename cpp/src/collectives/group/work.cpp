#include "fireflyer/collectives/group/work.hpp"

#include <chrono>

#include "fireflyer/base/clock.hpp"

namespace ff {

bool Work::wait(std::int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  ++waiters_;
  if (timeout_ns < 0) {
    changed_.wait(lock, [this] { return done_; });
  } else {
    changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] { return done_; });
  }
  if (--waiters_ == 0 && !done_) waited_ns_ = monotonic_ns();
  return done_;
}

bool Work::awaited(std::int64_t now_ns) {
  const std::lock_guard lock(mutex_);
  return waiters_ > 0 || (waited_ns_ != 0 && now_ns - waited_ns_ < 100'000'000);  // whoever waits in turns is here again soon
}

bool Work::done() {
  const std::lock_guard lock(mutex_);
  return done_;
}

Failure Work::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Work::finish(const Failure& failure) {
  const std::lock_guard lock(mutex_);
  done_ = true;
  failure_ = failure;
  changed_.notify_all();
}

}  // namespace ff
