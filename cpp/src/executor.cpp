#include "fireflyer/executor.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "fireflyer/exchange.hpp"
#include "fireflyer/kernels.hpp"
#include "fireflyer/network.hpp"

namespace ff {
namespace {

constexpr std::size_t max_pending = 4096;
constexpr std::int64_t glance_ns = 50'000'000;  // how often a sleeping rank looks for the dead and the hung
constexpr std::int64_t spin_ns = 20'000;
constexpr std::size_t slice_align = 64;         // elements; keeps slices apart by at least a cache line

struct Slice {
  std::size_t first, count;
};

Slice slice_of(std::size_t elems, int parts, int part) {
  const std::size_t each = (elems / static_cast<std::size_t>(parts) + slice_align) / slice_align * slice_align;
  const std::size_t first = std::min(elems, each * static_cast<std::size_t>(part));
  return {first, std::min(elems, first + each) - first};
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

bool hung_up(int fd) {
  pollfd entry{fd, POLLIN | POLLRDHUP, 0};
  return poll(&entry, 1, 0) > 0 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

}  // namespace

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

Executor::Executor(Config config) : config_(std::move(config)), group_(config_.group) {
  try {
    group_.check();
    window_ = std::make_unique<Window>(config_.window_fd, config_.doorbell_fd);
    local_ = group_.local_index(group_.rank);
    if (window_->ranks() != static_cast<int>(group_.ranks_of(group_.node()).size())) throw std::invalid_argument("the window is for another number of ranks");
    exchange_ = std::make_unique<Exchange>(group_, *window_, config_.leader_fd);
    spin_ = window_->ranks() <= static_cast<int>(std::thread::hardware_concurrency());
    if (local_ == 0) {
      network_ = std::make_unique<Network>(group_, *window_, config_.doorbell_fd, config_.local_fds, config_.connections);
      network_->start();
    }
    thread_ = std::thread([this] { work_loop(); });
  } catch (...) {
    if (network_) network_->stop();
    close_descriptors();
    throw;
  }
}

Executor::~Executor() { close(); }

std::shared_ptr<Work> Executor::submit(OpKind kind, void* data, std::uint64_t count, DType dtype, int root) {
  auto work = std::make_shared<Work>();
  const std::lock_guard lock(mutex_);
  if (closing_) throw std::logic_error("the communicator is closed");
  if (pending_ >= max_pending) throw std::length_error("too many operations are pending");
  OpDescriptor op{next_seq_++, count, kind, dtype, root};
  if (pending_++ == 0) busy_since_ns_ = monotonic_ns();
  queue_.push_back(Task{op, static_cast<char*>(data), work, nullptr});
  changed_.notify_one();
  return work;
}

void Executor::abort(const std::string& reason) {
  const std::lock_guard lock(mutex_);  // also keeps `close` from giving the doorbell away meanwhile
  if (closed_) return;
  window_->fail(Failure{FailureKind::aborted, group_.rank, next_seq_, group_.label(group_.rank) + " gave up: " + reason});
}

void Executor::close() {
  const std::lock_guard closing(close_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closing_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
  exchange_->close();
  window_->line(local_).left.store(1);
  if (network_) network_->stop();
  const std::lock_guard lock(mutex_);
  closed_ = true;
  close_descriptors();
}

void Executor::abandon() {
  closing_ = closed_ = true;  // no lock: whoever held it at the fork is not here to give it back
  exchange_->abandon();
  close_descriptors();
}

void Executor::close_descriptors() {
  const auto shut = [](int fd) {
    if (fd >= 0) ::close(fd);
  };
  shut(config_.window_fd);
  shut(config_.doorbell_fd);
  shut(config_.leader_fd);
  for (const auto& [rank, fd] : config_.local_fds) shut(fd);
  for (const auto& connection : config_.connections) shut(connection.fd);
}

Stats Executor::stats() {
  const std::lock_guard lock(mutex_);
  Stats now = stats_;
  if (pending_ > 0) now.in_flight_ns += monotonic_ns() - busy_since_ns_;
  return now;
}

void Executor::work_loop() {
  for (;;) {
    Task task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    settle(task, (task.parts ? run_parts(task) : run(task)).value_or(Failure{}));
  }
}

void Executor::settle(const Task& task, const Failure& failure) {
  {
    const std::lock_guard lock(mutex_);
    if (failure.kind == FailureKind::none) {
      if (!task.parts) stats_.bytes += task.op.count * dtype_size(task.op.dtype);
      ++stats_.operations[static_cast<std::size_t>(task.op.kind)];
    }
    if (--pending_ == 0) stats_.in_flight_ns += monotonic_ns() - busy_since_ns_;
  }
  task.work->finish(failure);
}

std::optional<Failure> Executor::run(const Task& task) {
  if (window_->failed()) return window_->failure();
  if (group_.world_size() == 1) return std::nullopt;
  const Geometry geometry(task.op, base_, window_->chunk_bytes(), group_.world_size());
  const Rules rules(*window_, group_, geometry);
  base_ = geometry.end;
  window_->enter(local_, geometry);
  if (network_ && rules.multi()) network_->post(geometry);
  std::array<std::uint64_t, 3> next{};
  for (int stage = 0; stage < 3; ++stage) {
    const bool mine = rules.takes(static_cast<Stage>(stage), local_);
    next[static_cast<std::size_t>(stage)] = mine ? geometry.base : geometry.end;
    if (!mine) window_->advance(local_, static_cast<Counter>(stage), geometry.end);
  }
  Watch watch;
  watch.restart(monotonic_ns());
  std::int64_t glance_at_ns = monotonic_ns() + glance_ns;
  std::uint64_t verified = 0, unrung = 0;
  bool rung = true;
  while (std::any_of(next.begin(), next.end(), [&](std::uint64_t n) { return n < geometry.end; })) {
    if (window_->failed()) return window_->failure();
    if (verified != never) {
      if (const auto failure = mismatch(geometry, verified)) window_->fail(*failure);
    }
    if (step(task, geometry, rules, next)) {
      if (!rung) ++unrung;
      rung = true;
      continue;
    }
    rung = sleep(geometry, rules, next);
    const std::int64_t now_ns = monotonic_ns();
    if (now_ns < glance_at_ns) continue;
    glance_at_ns = now_ns + glance_ns;
    if (const auto failure = trouble(task.op, watch.idle_ns(window_->fingerprint(), now_ns, group_.timeout_ns / 2))) window_->fail(*failure);
  }
  if (verified != never) {
    if (const auto failure = mismatch(geometry, verified)) {
      window_->fail(*failure);
      return window_->failure();
    }
  }
  window_->leave(local_, task.op);
  if (unrung > 0) {
    const std::lock_guard lock(mutex_);
    stats_.unrung += unrung;
  }
  return std::nullopt;
}

// Finishing comes first: it frees slots that others wait for, and its data are still in the cache.
bool Executor::step(const Task& task, const Geometry& geometry, const Rules& rules, std::array<std::uint64_t, 3>& next) {
  for (const Stage stage : {Stage::out, Stage::reduce, Stage::in}) {
    std::uint64_t& chunk = next[static_cast<std::size_t>(stage)];
    if (chunk >= geometry.end || !rules.holds(rules.needs(stage, chunk))) continue;
    perform(stage, task, geometry, rules, chunk);
    ++chunk;
    if (chunk == geometry.base + geometry.chunks) chunk = geometry.end;
    window_->advance(local_, static_cast<Counter>(stage), chunk);
    return true;
  }
  return false;
}

void Executor::perform(Stage stage, const Task& task, const Geometry& geometry, const Rules& rules, std::uint64_t chunk) {
  const std::size_t elems = geometry.elems(chunk);
  if (elems == 0) return;
  char* mine = task.data + geometry.offset_bytes(chunk);
  if (stage == Stage::out) {
    std::memcpy(mine, rules.result(chunk), elems * geometry.unit);
    return;
  }
  if (!geometry.sums()) {
    std::memcpy(rules.result(chunk), mine, elems * geometry.unit);
    return;
  }
  const int ranks = window_->ranks();
  const Slice own = slice_of(elems, ranks, local_);
  if (stage == Stage::in) {  // all but the slice that this rank sums itself: that is read where it lies
    char* there = window_->input(chunk, local_);
    std::memcpy(there, mine, own.first * geometry.unit);
    const std::size_t after = own.first + own.count;
    std::memcpy(there + after * geometry.unit, mine + after * geometry.unit, (elems - after) * geometry.unit);
    return;
  }
  if (own.count == 0) return;
  std::array<const void*, max_local_ranks> inputs{};
  for (int r = 0; r < ranks; ++r) {
    const char* from = r == local_ ? mine : window_->input(chunk, r);
    inputs[static_cast<std::size_t>(r)] = from + own.first * geometry.unit;
  }
  if (rules.multi()) {
    reduce_to_accum(rules.sum(chunk) + own.first * geometry.accum_unit, inputs.data(), ranks, own.count, geometry.op.dtype);
  } else {
    reduce_to(rules.result(chunk) + own.first * geometry.unit, inputs.data(), ranks, own.count, geometry.op.dtype);
  }
}

std::optional<Failure> Executor::mismatch(const Geometry& geometry, std::uint64_t& verified) const {
  bool all = true;
  for (int local = 0; local < window_->ranks(); ++local) {
    if ((verified >> local & 1) != 0) continue;
    if (window_->line(local).entered.load() <= geometry.op.seq) {
      all = false;
      continue;
    }
    verified |= std::uint64_t{1} << local;
    const OpDescriptor theirs = window_->signature(local, geometry.op.seq, group_.world_size()).op;
    if (theirs == geometry.op) continue;
    const int other = group_.local_rank_at(local);
    return Failure{FailureKind::usage, -1, geometry.op.seq,
                   "rank " + std::to_string(other) + " called " + theirs.describe() + ", but rank " + std::to_string(group_.rank) + " called " +
                       geometry.op.describe() + "; all ranks must make the same calls in the same order"};
  }
  if (all) verified = never;
  return std::nullopt;
}

bool Executor::sleep(const Geometry& geometry, const Rules& rules, const std::array<std::uint64_t, 3>& next) const {
  Wants wants;
  wants.fill(never);
  for (const Stage stage : {Stage::in, Stage::reduce, Stage::out}) {
    const std::uint64_t chunk = next[static_cast<std::size_t>(stage)];
    if (chunk >= geometry.end) continue;
    const Wants needs = rules.needs(stage, chunk);
    bool possible = true;
    for (int which = 0; which < counters; ++which) {
      const auto w = static_cast<std::size_t>(which);
      if (needs[w] == 0 || window_->value(static_cast<Counter>(which)) >= needs[w]) continue;
      wants[w] = std::min(wants[w], needs[w]);
      possible = false;
    }
    if (possible) return true;  // it has become so since this rank looked last
  }
  if (spin_) {
    const std::int64_t until_ns = monotonic_ns() + spin_ns;
    while (monotonic_ns() < until_ns) {
      if (window_->met(wants) || window_->failed()) return true;
      for (int i = 0; i < 16; ++i) relax();
    }
  }
  return window_->wait(local_, wants, glance_ns);
}

std::optional<Failure> Executor::trouble(const OpDescriptor& op, std::int64_t idle_ns) const {
  if (auto failure = local_culprit(*window_, group_, op, idle_ns, local_)) return failure;
  const int leader = group_.local_rank_at(0);
  const Line& network = window_->line(window_->network());
  if (config_.leader_fd >= 0 && hung_up(config_.leader_fd) && window_->line(0).left.load() == 0) {
    return Failure{FailureKind::peer_failed, leader, op.seq, group_.label(leader) + " died during " + op.name() + ": its connection broke"};
  }
  if (idle_ns >= group_.timeout_ns && monotonic_ns() - network.beat_ns.load() > group_.timeout_ns && window_->line(0).left.load() == 0) {
    return Failure{FailureKind::peer_failed, leader, op.seq, group_.label(leader) + " stopped in the middle of " + op.name() + ": no sign of life for " + seconds(idle_ns)};
  }
  if (idle_ns >= 10 * group_.timeout_ns) {
    return Failure{FailureKind::peer_failed, leader, op.seq, op.name() + " has made no progress for " + seconds(idle_ns) + " and no rank is to blame"};
  }
  return std::nullopt;
}

}  // namespace ff
