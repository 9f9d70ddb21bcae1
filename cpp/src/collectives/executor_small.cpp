// Small operations in the calling thread, as long as nobody keeps it waiting. Every nanosecond between a rank's own call
// and its message, and between the last message and the return, is one of the operation; what lies in between costs
// nothing while the messages of others are on their way. So the message goes first, then everything is written down.
#include "current.hpp"
#include "fireflyer/base/clock.hpp"

namespace ff {
namespace {

constexpr int quick_looks = 80;  // some 2 us, in which other threads of the program wait for the lock
constexpr int eager_looks = 20;   // of which so many without a pause in between

}  // namespace

// Under `lock`, with nothing else pending. Null where it is over; otherwise it is begun, and to be driven on.
std::unique_ptr<Executor::Current> Executor::call_small(const OpDescriptor& what, const char* in, char* out) {
  OpDescriptor op = what;
  op.seq = next_seq_++;
  EagerMessages messages(*context_, op, in, out, turn_++);
  messages.post();
  const std::int64_t now_ns = monotonic_ns();
  const std::uint64_t bytes = op.count * dtype_size(op.dtype);
  window_->enter_quietly(local_, op, base_, Places{}, now_ns);
  if (oversubscribed_ > 0) --oversubscribed_;
  const int looks = spins() ? quick_looks : 1;
  for (int look = 0; look < looks; ++look) {
    if (look > eager_looks) relax();
    if (messages.arrived()) {
      const std::uint64_t saturated = messages.read();
      base_ += flat_chunks;
      window_->leave(local_, op);
      window_->ring_for(local_, counter_entered);
      const std::int64_t over_ns = monotonic_ns();
      log_.keep(op, bytes, saturated, now_ns, over_ns);
      stats_.bytes += bytes;
      stats_.saturated += saturated;
      ++stats_.operations[static_cast<std::size_t>(op.kind)];
      stats_.in_flight_ns += over_ns - now_ns;
      return nullptr;
    }
  }
  auto current = std::make_unique<Current>();
  current->task = Task{op, in, out, nullptr, nullptr, recorder_.begin(op, Path::small, bytes, now_ns)};
  current->task.entry.started(now_ns);
  current->task.entry.route(Path::small, 0, 1);
  current->geometry.op = op;
  current->geometry.base = base_;
  current->geometry.end = base_ += flat_chunks;
  current->run = small_run(messages, current->geometry.base);
  current->begun = current->small = true;
  current->stall_detector.restart(now_ns);
  current->next_poll_ns = now_ns + poll_period_ns_;
  pending_ = 1;
  busy_since_ns_ = now_ns;
  running_ = true;
  return current;
}

}  // namespace ff
