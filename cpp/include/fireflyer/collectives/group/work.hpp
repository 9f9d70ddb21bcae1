// An operation that was handed over: whoever handed it over waits for it here.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "fireflyer/collectives/group/operation.hpp"

namespace ff {

class Work {
 public:
  bool wait(std::int64_t timeout_ns);  // false: not yet done; negative waits for ever
  bool done();
  Failure failure();                   // kind none while running and after success
  bool awaited(std::int64_t now_ns);   // a thread waits for it, or did a moment ago
  void finish(const Failure& failure);
  void met(int source) { source_.store(source, std::memory_order_relaxed); }
  int source() const { return source_.load(std::memory_order_relaxed); }  // of what was received, once done; else -1

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  int waiters_ = 0;
  std::atomic<int> source_{-1};
  std::int64_t waited_ns_ = 0;         // when one last stopped waiting
  Failure failure_;
};

}  // namespace ff
