// An executor's thread in place of the network thread.
#include <exception>

#include "fireflyer/base/clock.hpp"
#include "fireflyer/collectives/transport/network.hpp"

namespace ff {

bool NetworkDriver::take_over() {
  if (network_ == nullptr) return false;
  if (drives()) return true;
  lock_ = std::unique_lock(network_->driving_, std::try_to_lock);
  if (drives()) ++network_->taken_over_;
  return drives();
}

bool NetworkDriver::turn() {
  if (!drives()) return false;
  try {
    return network_->turn().value_or(false);
  } catch (const std::exception& error) {
    network_->fail_here(error);
    return false;
  }
}

bool NetworkDriver::sleep(const Wants& wants, std::int64_t timeout_ns) { return network_->sleep(wants, monotonic_ns() + timeout_ns, nullptr); }

// The network thread may be asleep over what it knew before: it is woken where there is anything left to do.
void NetworkDriver::hand_back() {
  if (!drives()) return;
  while (turn()) {
  }
  const bool left = network_->has_work() || network_->window_.failed();
  lock_.unlock();
  if (left) network_->wake();
}

}  // namespace ff
