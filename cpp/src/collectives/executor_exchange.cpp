// The operations of a group that run rank to rank: their place in the order of operations, and their checks.
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "fireflyer/base/clock.hpp"
#include "fireflyer/collectives/executor.hpp"
#include "fireflyer/collectives/kernels/kernels.hpp"
#include "fireflyer/collectives/p2p/exchange.hpp"
#include "run.hpp"

namespace ff {
namespace {

constexpr std::size_t max_pending = 4096;
constexpr std::uint64_t max_lead = signature_ring / 2;  // operations; beyond, the others could not read what this rank called

}  // namespace

struct Executor::Parts {
  std::vector<Part> out, in;  // for and from others
  Part mine_out, mine_in;
  std::optional<RowSum> sum;
};

std::shared_ptr<Work> Executor::submit_parts(OpKind kind, std::uint64_t count, DType dtype, int root, std::vector<Part> out, std::vector<Part> in,
                                             std::optional<RowSum> sum) {
  if (!exchanged(kind)) throw std::invalid_argument("no operation that runs rank to rank");
  if (sum && static_cast<int>(sum->rows.size()) != group_.world_size()) throw std::invalid_argument("one row for each rank");
  if (sum) check_reduces(sum->op, dtype);
  auto parts = std::make_shared<Parts>();
  const auto separate = [this](std::vector<Part>& all, Part& mine) {
    std::vector<bool> seen(static_cast<std::size_t>(group_.world_size()));
    for (const Part& part : all) {
      if (part.rank < 0 || part.rank >= group_.world_size()) throw std::invalid_argument("no rank of the group");
      if (seen[static_cast<std::size_t>(part.rank)]) throw std::invalid_argument("one part for each rank");
      seen[static_cast<std::size_t>(part.rank)] = true;
      if (part.rank == group_.rank) mine = part;
    }
    std::erase_if(all, [this](const Part& part) { return part.rank == group_.rank; });
  };
  separate(out, parts->mine_out);
  separate(in, parts->mine_in);
  if (parts->mine_out.bytes != parts->mine_in.bytes) throw std::invalid_argument("a rank's part for itself has two sizes");
  parts->out = std::move(out);
  parts->in = std::move(in);
  parts->sum = std::move(sum);
  auto work = std::make_shared<Work>();
  const std::lock_guard lock(mutex_);
  if (closing_) throw std::logic_error("the communicator is closed");
  if (pending_ >= max_pending) throw std::out_of_range("too many operations are pending");
  const std::int64_t now_ns = monotonic_ns();
  if (pending_++ == 0) busy_since_ns_ = now_ns;
  const ReduceOp reduce = parts->sum ? parts->sum->op : ReduceOp::sum;
  Task task{OpDescriptor{next_seq_++, count, kind, dtype, root, reduce}, nullptr, nullptr, work, nullptr, {}};
  std::uint64_t bytes = parts->mine_out.bytes;
  for (const Part& part : parts->out) bytes += part.bytes;
  task.parts = std::move(parts);
  task.entry = recorder_.begin(task.op, Path::exchange, bytes, now_ns);
  queue_.push_back(std::move(task));
  changed_.notify_all();
  return work;
}

std::optional<Failure> Executor::run_parts(const Task& task) {
  if (window_->failed()) return window_->failure();
  task.entry.started(monotonic_ns());
  const Parts& parts = *task.parts;
  std::uint64_t bytes = parts.mine_in.bytes;
  const auto finish = [&] {
    if (parts.mine_in.bytes > 0) std::memmove(parts.mine_in.data, parts.mine_out.data, parts.mine_in.bytes);
    for (const Part& part : parts.in) bytes += part.bytes;
    const std::lock_guard lock(mutex_);
    stats_.bytes += bytes;
  };
  const auto add_up = [&] {
    if (!parts.sum || parts.sum->count == 0) return;
    const RowSum& sum = *parts.sum;
    const auto divisor = static_cast<std::uint32_t>(sum.op == ReduceOp::mean ? group_.world_size() : 1);
    const std::uint64_t saturated = reduce_to(sum.out, sum.rows.data(), group_.world_size(), sum.count, task.op.dtype, sum.op, divisor);
    const std::lock_guard lock(mutex_);
    stats_.saturated += saturated;
  };
  if (group_.world_size() == 1) {
    finish();
    add_up();
    return std::nullopt;
  }
  if (auto failure = let_others_follow(task.op)) window_->fail(*failure);
  if (window_->failed()) return window_->failure();
  Geometry geometry;
  geometry.op = task.op;
  geometry.base = base_;
  base_ += flat_chunks;
  window_->enter(local_, geometry, Places{});
  const auto work = exchange_->start(task.op, parts.out, parts.in);
  finish();
  std::uint64_t verified = 0;
  for (bool done = false; !done;) {
    done = work->wait(poll_period_ns_);
    window_->line(local_).heartbeat_ns.store(monotonic_ns(), std::memory_order_relaxed);
    if (verified == never) continue;
    if (const auto failure = mismatch(task.op, verified)) window_->fail(*failure);
  }
  Failure failure = work->failure();
  if (failure.kind != FailureKind::none) return failure;
  if (window_->failed()) return window_->failure();
  add_up();
  window_->leave(local_, task.op);
  return std::nullopt;
}

// A rank that only sends may be done before others begin, many times over. Not too many: see signature_ring.
std::optional<Failure> Executor::let_others_follow(const OpDescriptor& op) {
  const auto least = [this] {
    std::uint64_t entered = never;
    for (int local = 0; local < window_->ranks(); ++local) entered = std::min(entered, window_->line(local).entered.load());
    return entered;
  };
  StallDetector stall_detector;
  stall_detector.restart(monotonic_ns());
  std::int64_t next_poll_ns = monotonic_ns() + poll_period_ns_;
  while (least() + max_lead <= op.seq) {
    if (window_->failed()) return std::nullopt;
    poll(nullptr, 0, 1);
    const std::int64_t now_ns = monotonic_ns();
    if (now_ns < next_poll_ns) continue;
    next_poll_ns = now_ns + poll_period_ns_;
    if (auto failure = find_failure(op, stall_detector.idle_ns(window_->fingerprint(), now_ns, group_.timeout_ns / 2))) return failure;
  }
  return std::nullopt;
}

}  // namespace ff
