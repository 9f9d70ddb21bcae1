#include "fireflyer/collectives/executor.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "current.hpp"
#include "fireflyer/base/clock.hpp"
#include "fireflyer/base/placement.hpp"
#include "fireflyer/collectives/p2p/exchange.hpp"
#include "fireflyer/collectives/transport/network.hpp"

namespace ff {
namespace {

constexpr std::size_t max_pending = 4096;
constexpr std::int64_t max_poll_period_ns = 50'000'000;  // how often a sleeping rank looks for the dead and the hung

// A rank with nothing to do polls, where the node has a processor for each rank; then offers its processor to others and
// polls in between (Yields); then sleeps. All of this takes less than 20 us of its processor.
// Where polling does not help but the first offer does, the ranks share a processor: then polling is left out for a while.
constexpr std::int64_t spin_ns = 4'000;
constexpr int oversubscribed_operations = 30;

// Less is copied into slots and back, between caches, sooner than the kernel finds small pages of other processes: half to a
// third of the time for 128 KiB to 1.5 MiB. From here on arrays may lie in huge pages, and then it is the other way round.
constexpr std::size_t copied_bytes = 2 << 20;

constexpr std::int64_t withdrawal_ns = 1'000'000'000;  // how long a broken operation waits for others to let go of its arrays

bool hung_up(int fd) {
  pollfd entry{fd, POLLIN | POLLRDHUP, 0};
  return poll(&entry, 1, 0) > 0 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

int usable_processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : static_cast<int>(std::thread::hardware_concurrency());
}

// Bytes of a rank's input and of its output.
std::pair<std::size_t, std::size_t> sizes_of(const OpDescriptor& op, int world_size) {
  const std::size_t one = op.count * dtype_size(op.dtype), all = one * static_cast<std::size_t>(world_size);
  if (op.kind == OpKind::reduce_scatter) return {all, one};
  if (op.kind == OpKind::allgather) return {one, all};
  return {one, one};
}

}  // namespace

Executor::Executor(Config config) : config_(std::move(config)), group_(config_.group) {
  try {
    group_.check();
    for (int number = 0; number < algorithm_count; ++number) algorithms_[static_cast<std::size_t>(number)] = recorder_.algorithm(algorithm_names[number]);
    window_ = std::make_unique<Window>(config_.window_fd, config_.doorbell_fd);
    local_ = group_.local_index(group_.rank);
    if (window_->ranks() != static_cast<int>(group_.ranks_of(group_.node()).size())) throw std::invalid_argument("the window is for another number of ranks");
    if (config_.local_peers.size() > 1 && all_open(config_.local_peers)) open_.emplace();
    exchange_ = std::make_unique<Exchange>(group_, *window_, config_.leader_fd, &recorder_, config_.cpus, open_.has_value());
    peer_access_ = std::make_unique<PeerAccess>(*window_, local_, config_.arena, config_.local_peers);
    for (auto& peer : config_.local_peers) {  // mapped by now
      if (peer.arena_fd >= 0) ::close(peer.arena_fd);
      peer.arena_fd = -1;
    }
    scratch_ = std::make_unique<Scratch>();
    context_ = std::make_unique<RunContext>(RunContext{group_, *window_, *peer_access_, local_, *scratch_});
    spin_ = window_->ranks() <= usable_processors();
    poll_period_ns_ = std::clamp<std::int64_t>(group_.timeout_ns / 4, 1'000'000, max_poll_period_ns);
    if (local_ == 0) {
      network_ = std::make_unique<Network>(group_, *window_, config_.doorbell_fd, config_.local_fds, config_.connections, config_.fabric);
      const std::string refused = network_->start(config_.network_cpus);
      if (!refused.empty()) placement_warnings_.push_back("network thread: " + refused);
    }
    thread_ = std::thread([this] { work_loop(); });
    const std::string refused = place_thread(thread_, "ff-collectives", config_.cpus);
    if (!refused.empty()) placement_warnings_.push_back("collective thread: " + refused);
  } catch (...) {
    if (network_) network_->stop();
    close_descriptors();
    throw;
  }
}

Executor::~Executor() { close(); }

void Executor::check(const OpDescriptor& op) const {
  const bool parted = op.kind == OpKind::reduce_scatter || op.kind == OpKind::allgather;
  if (parted && static_cast<std::size_t>(group_.world_size()) * 8 > window_->chunk_bytes()) throw std::invalid_argument("a chunk is too small to hold an element of every rank");
  check_reduces(op.reduce, op.dtype);
}

void Executor::admit(Task& task, std::uint64_t bytes) {
  if (closing_) throw std::logic_error("the communicator is closed");
  if (pending_ >= max_pending) throw std::out_of_range("too many operations are pending");
  task.op.seq = next_seq_++;
  const std::int64_t now_ns = monotonic_ns();
  if (pending_++ == 0) busy_since_ns_ = now_ns;
  task.entry = recorder_.begin(task.op, Path::unknown, bytes, now_ns);
}

std::shared_ptr<Work> Executor::submit(const OpDescriptor& op, const void* in, void* out) {
  check(op);
  auto work = std::make_shared<Work>();
  const std::lock_guard lock(mutex_);
  enqueue(Task{op, static_cast<const char*>(in), static_cast<char*>(out), work, nullptr, {}});
  return work;
}

void Executor::enqueue(Task task) {
  admit(task, sizes_of(task.op, group_.world_size()).first);
  queue_.push_back(std::move(task));
  changed_.notify_all();
}

std::shared_ptr<Work> Executor::call(const OpDescriptor& op, const void* in, void* out, std::int64_t patience_ns) {
  check(op);
  std::unique_ptr<Current> current;
  std::unique_lock lock(mutex_);
  if (running_ || !queue_.empty()) {
    auto work = std::make_shared<Work>();
    enqueue(Task{op, static_cast<const char*>(in), static_cast<char*>(out), work, nullptr, {}});
    return work;
  }
  if (!closing_ && group_.world_size() > 1 && fits_small(group_, op) && !window_->failed()) {
    current = call_small(op, static_cast<const char*>(in), static_cast<char*>(out));
    if (!current) return nullptr;
    lock.unlock();
  } else {
    current = std::make_unique<Current>();
    current->task = Task{op, static_cast<const char*>(in), static_cast<char*>(out), nullptr, nullptr, {}};
    admit(current->task, sizes_of(op, group_.world_size()).first);
    running_ = true;
    lock.unlock();
  }
  const bool over = carry_on(*current, patience_ns < 0 ? -1 : monotonic_ns() + patience_ns);
  if (!over || current->failure.kind != FailureKind::none) current->task.work = std::make_shared<Work>();
  const std::shared_ptr<Work> work = current->task.work;
  if (over) settle(*current);
  lock.lock();
  if (!over) inherited_ = std::move(current);
  else running_ = false;
  if (!over || !queue_.empty() || closing_) changed_.notify_all();
  return work;
}

void Executor::abort(const std::string& reason) {
  const std::lock_guard lock(mutex_);  // also keeps `close` from giving the doorbell away meanwhile
  if (closed_) return;
  window_->fail(Failure{FailureKind::aborted, group_.rank, next_seq_, group_.label(group_.rank) + " aborted the group: " + reason});
}

void Executor::close() {
  const std::lock_guard closing(close_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  exchange_->close();
  window_->line(local_).left.store(1);
  if (network_) network_->stop();
  const std::lock_guard lock(mutex_);
  closed_ = true;
  open_.reset();
  close_descriptors();
}

void Executor::abandon() {
  closing_ = closed_ = true;  // no lock: whoever held it at the fork is not here to give it back
  exchange_->abandon();
  close_descriptors();
}

void Executor::close_descriptors() {
  const auto shut = [](int& fd) {  // forgotten first: the child of a fork while this runs must not close what has that number by then
    const int closing = std::exchange(fd, -1);
    if (closing >= 0) ::close(closing);
  };
  shut(config_.window_fd);
  shut(config_.doorbell_fd);
  shut(config_.leader_fd);
  for (auto& [rank, fd] : config_.local_fds) shut(fd);
  for (auto& connection : config_.connections) shut(connection.fd);
  for (auto& peer : config_.local_peers) shut(peer.arena_fd);
}

Stats Executor::stats() {
  const std::lock_guard lock(mutex_);
  Stats now = stats_;
  if (network_) now.saturated += network_->saturated(), now.unrung += network_->unrung();
  if (pending_ > 0) now.in_flight_ns += monotonic_ns() - busy_since_ns_;
  return now;
}

void Executor::work_loop() {
  for (;;) {
    std::unique_ptr<Current> current;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return inherited_ || (!running_ && (closing_ || !queue_.empty())); });
      if (inherited_) {
        current = std::move(inherited_);
      } else if (queue_.empty()) {
        return;
      } else {
        current = std::make_unique<Current>();
        current->task = std::move(queue_.front());
        queue_.pop_front();
        running_ = true;
      }
    }
    if (current->task.parts) {
      current->failure = run_parts(current->task).value_or(Failure{});
    } else {
      carry_on(*current, -1);
    }
    settle(*current);
    const std::lock_guard lock(mutex_);
    running_ = false;
  }
}

// True: it is over.
bool Executor::carry_on(Current& current, std::int64_t until_ns) {
  try {
    if (!current.begun) begin(current);
    current.begun = true;
    return drive(current, until_ns);
  } catch (const std::bad_alloc&) {
    window_->fail(Failure{FailureKind::peer_failed, group_.rank, current.task.op.seq, group_.label(group_.rank) + " has no memory left for " + current.task.op.name()});
    return drive(current, -1);
  }
}

void Executor::settle(const Current& current) {
  const OpDescriptor& op = current.task.op;
  {
    const std::lock_guard lock(mutex_);
    if (current.failure.kind == FailureKind::none) {
      if (!current.task.parts) stats_.bytes += op.count * dtype_size(op.dtype);
      stats_.saturated += current.run ? current.run->saturated() : 0;
      ++stats_.operations[static_cast<std::size_t>(op.kind)];
    }
    stats_.unrung += current.unrung;
    if (--pending_ == 0) stats_.in_flight_ns += monotonic_ns() - busy_since_ns_;
  }
  if (current.run) current.task.entry.saturated(current.run->saturated());
  current.task.entry.finish(current.failure.kind, monotonic_ns());
  if (current.task.work) current.task.work->finish(current.failure);
}

Snapshot Executor::flight() {
  Snapshot shot = recorder_.snapshot();
  if (network_) shot.peer_progress = network_->peer_progress(), shot.links = network_->links();
  {
    const std::lock_guard lock(mutex_);
    log_.add_to(shot);
  }
  for (int local = 0; local < window_->ranks(); ++local) {
    const Line& line = window_->line(local);
    if (local == local_) continue;
    shot.peer_progress.push_back({group_.local_rank_at(local), line.entered.load(), line.finished.load(), line.left.load() != 0, monotonic_ns()});
  }
  return shot;
}

void Executor::begin(Current& current) {
  Task& task = current.task;
  const int world = group_.world_size();
  const std::size_t chunk_bytes = group_.route(task.op).chunk_bytes;
  current.geometry = Geometry(task.op, base_, chunk_bytes > 0 ? chunk_bytes : window_->chunk_bytes(), world);
  const auto [in_bytes, out_bytes] = sizes_of(task.op, world);
  if (world == 1) {
    task.entry.started(monotonic_ns());
    if (task.op.kind != OpKind::barrier && task.in != task.out && in_bytes > 0) std::memmove(task.out, task.in, in_bytes);
    return;
  }
  const std::int64_t now_ns = monotonic_ns();
  if (oversubscribed_ > 0) --oversubscribed_;
  current.stall_detector.restart(now_ns);
  current.next_poll_ns = now_ns + poll_period_ns_;
  current.small = fits_small(group_, task.op);
  if (window_->failed()) return;
  task.entry.started(now_ns);
  if (current.small) {
    base_ += flat_chunks;
    const EagerMessages messages(*context_, task.op, task.in, task.out, turn_++);
    messages.post();
    current.run = small_run(messages, current.geometry.base);
    note_route(current, Path::small);
    window_->enter(local_, current.geometry, Places{});
    return;
  }
  const Places places = current.mine = peer_access_->locate(task.in, in_bytes, task.out, out_bytes);
  if (peer_access_->everywhere() && window_->ranks() > 1) {
    if (places.in_arena == never) huge_pages_.seen(task.in, in_bytes);
    if (places.out_arena == never && task.out != task.in) huge_pages_.seen(task.out, out_bytes);
  }
  if (group_.nodes() > 1) {
    const bool receives = task.op.kind == OpKind::allreduce || task.op.kind == OpKind::broadcast || (task.op.kind == OpKind::reduce && task.op.root == group_.rank);
    if (window_->ranks() == 1 && receives) {
      current.geometry.home = task.out;
      if (current.geometry.sums() && current.geometry.unit != current.geometry.accum_unit) current.geometry.own = task.in;
    }
    base_ = current.geometry.end;
    window_->enter(local_, current.geometry, places);
    current.rules = std::make_unique<Rules>(*window_, group_, current.geometry);
    if (network_) network_->post(current.geometry);
    if (!may_pool(task.op)) start_pipeline(current, Path::pipeline);
    return;
  }
  window_->enter(local_, current.geometry, places);
}

// Once all of the node have said what they call and where their arrays are, everybody comes to the same choice.
bool Executor::open(Current& current) {
  if (window_->value(counter_entered) <= current.geometry.base) return false;
  if (const auto failure = mismatch(current.task.op, current.verified)) {
    window_->fail(*failure);
    return true;
  }
  if (current.verified != never) return false;
  if (group_.nodes() > 1) {
    if (!in_arenas(current)) {
      start_pipeline(current, Path::pipeline);
      return true;
    }
    current.run = pool_run(*context_, current.geometry, *current.rules, current.mine);
    current.shared = true;
    note_route(current, Path::pipeline);
    return true;
  }
  if (flat(current)) {
    base_ += flat_chunks;
    for (const Counter which : {counter_reduced, counter_out}) window_->raise_pool(which, base_);
    current.run = flat_run(*context_, current.geometry, current.mine);
    note_route(current, in_arenas(current) ? Path::direct : Path::vm);
    return true;
  }
  base_ = current.geometry.end;
  current.rules = std::make_unique<Rules>(*window_, group_, current.geometry);
  start_pipeline(current, Path::staged);
  return true;
}

// Whether all ranks of this node come to the same decision only when they know where the others' arrays are.
bool Executor::may_pool(const OpDescriptor& op) const { return op.kind == OpKind::allreduce && window_->ranks() > 1; }

void Executor::start_pipeline(Current& current, Path path) {
  for (const Counter which : {counter_reduced, counter_out}) window_->raise_pool(which, current.geometry.end);
  current.run = pipeline_run(*context_, current.geometry, *current.rules, current.task.in, current.task.out);
  note_route(current, path);
}

// For the record: small and flat operations are not cut as `geometry` says.
void Executor::note_route(const Current& current, Path path) {
  const Geometry& geometry = current.geometry;
  const bool cut = path == Path::staged || path == Path::pipeline;
  const std::size_t chunk_bytes = cut ? geometry.chunk_elems * geometry.parts * geometry.unit : 0;
  const int algorithm = path == Path::pipeline ? algorithms_[static_cast<std::size_t>(group_.route(geometry.op).algorithm)] : 0;
  current.task.entry.route(path, algorithm, current.run->chunks(), chunk_bytes);
}

bool Executor::flat(const Current& current) const {
  const Geometry& geometry = current.geometry;
  const std::size_t least = std::min(copied_bytes, 2 * window_->slots() * window_->chunk_bytes());  // ranks wait for slots that are used again
  const bool copied = geometry.op.kind == OpKind::allreduce && geometry.op.count < least / geometry.unit;
  return in_arenas(current) || (peer_access_->everywhere() && !copied);
}

bool Executor::in_arenas(const Current& current) const {
  const OpDescriptor& op = current.task.op;
  for (int local = 0; local < window_->ranks(); ++local) {
    const Places places = window_->places(local, op.seq);
    const bool is_root = op.root == group_.local_rank_at(local);
    const bool read = op.kind != OpKind::broadcast || is_root;
    const bool written = op.kind == OpKind::allreduce || (op.kind == OpKind::reduce && is_root);
    if ((read && places.in_arena == never) || (written && places.out_arena == never)) return false;
  }
  return true;
}

// True: it is over, well or not. False: the time is up.
bool Executor::drive(Current& current, std::int64_t until_ns) {
  if (group_.world_size() == 1) return true;
  const bool between_nodes = network_ && group_.nodes() > 1;
  NetworkDriver driver(between_nodes && network_->is_short(current.geometry) ? network_.get() : nullptr);
  if (!driver.take_over() && between_nodes) network_->wake();
  for (;;) {
    if (window_->failed()) {
      driver.hand_back();
      withdraw(current);
      current.failure = window_->failure();
      return true;
    }
    const bool advanced = advance(current), moved = driver.turn() || advanced;
    if (moved && !std::exchange(current.rung, true)) ++current.unrung;
    if (moved) continue;
    if (current.run && current.run->finished()) {
      conclude(current);
      if (!window_->failed()) return true;
      continue;
    }
    pause(current, driver);
    const std::int64_t now_ns = monotonic_ns();
    window_->line(local_).heartbeat_ns.store(now_ns, std::memory_order_relaxed);
    if (now_ns >= current.next_poll_ns) check_peers(current, now_ns);
    if (until_ns >= 0 && now_ns >= until_ns) return false;
  }
}

bool Executor::advance(Current& current) {
  if (!current.run) return open(current);
  if (!current.small && current.verified != never) {
    if (const auto failure = mismatch(current.task.op, current.verified)) {
      window_->fail(*failure);
      return true;
    }
  }
  if (!current.run->step()) return false;
  if (!current.small && current.run->done_chunks() != current.recorded) {
    current.recorded = current.run->done_chunks();
    current.task.entry.progress(current.recorded, monotonic_ns());
  }
  return true;
}

void Executor::conclude(Current& current) {
  if (!current.small && current.verified != never) {
    if (const auto failure = mismatch(current.task.op, current.verified)) window_->fail(*failure);
  }
  if (window_->failed()) return;
  window_->leave(local_, current.task.op);
  if (current.small) window_->ring_for(local_, counter_entered);  // whoever began to wait after this rank had entered
}

void Executor::pause(Current& current, NetworkDriver& driver) {
  Wants wants;
  if (current.run) {
    wants = current.run->wants();
  } else {
    wants.fill(never);
    wants[counter_entered] = current.geometry.base + 1;
  }
  if (current.small && window_->met(wants)) {  // all are here, and yet this rank cannot go on
    if (const auto failure = mismatch(current.task.op, current.verified)) window_->fail(*failure);
    return;
  }
  const auto ready = [&] { return (current.small ? current.run->step() : window_->met(wants)) || window_->failed(); };
  current.rung = true;  // what a look finds from now on may have come after the last sleep
  if (driver.take_over()) {
    const auto moves = [&] { return driver.turn() || ready(); };
    current.rung = yields_.until(moves).has_value() || driver.sleep(wants, poll_period_ns_);
    return;
  }
  const bool polls = spins();
  if (polls) {
    for (const std::int64_t until_ns = monotonic_ns() + spin_ns; monotonic_ns() < until_ns;) {
      for (int i = 0; i < 64; ++i) {
        if (ready()) return;
        relax();
      }
    }
  }
  if (const auto offers = yields_.until(ready)) {
    if (*offers == 0 && polls) oversubscribed_ = oversubscribed_operations;
    return;
  }
  current.rung = window_->wait(local_, wants, poll_period_ns_);
}

void Executor::check_peers(Current& current, std::int64_t now_ns) {
  current.next_poll_ns = now_ns + poll_period_ns_;
  if (current.small) {
    if (const auto failure = mismatch(current.task.op, current.verified)) window_->fail(*failure);
  }
  const std::int64_t idle_ns = current.stall_detector.idle_ns(window_->fingerprint(), now_ns, group_.timeout_ns / 2);
  if (const auto failure = find_failure(current.task.op, idle_ns)) window_->fail(*failure);
}

// Others may be reading and writing this rank's arrays when an operation breaks: the caller gets them back when all have
// let go. A rank that is stopped or dead cannot say so, and is not waited for; others do within a block's time.
void Executor::withdraw(const Current& current) {
  const std::uint64_t mine = current.task.op.seq + 1;
  if (network_ && group_.nodes() > 1) network_->wait_until_harmless();
  window_->line(local_).withdrawn.store(mine, std::memory_order_release);
  if (group_.nodes() > 1 && !current.shared && !peer_access_->everywhere()) return;
  const Failure failure = window_->failure();
  const std::int64_t until_ns = monotonic_ns() + std::min(withdrawal_ns, group_.timeout_ns);
  for (int local = 0; local < window_->ranks(); ++local) {
    const Line& line = window_->line(local);
    if (failure.kind == FailureKind::peer_failed && group_.local_rank_at(local) == failure.culprit) continue;
    const auto inside = [&] { return line.entered.load() == mine && line.finished.load() < mine && line.withdrawn.load() < mine; };
    while (inside() && monotonic_ns() < until_ns) sched_yield();
  }
}

std::optional<Failure> Executor::mismatch(const OpDescriptor& op, std::uint64_t& verified) const {
  bool all = true;
  for (int local = 0; local < window_->ranks(); ++local) {
    if ((verified >> local & 1) != 0) continue;
    if (window_->line(local).entered.load() <= op.seq) {
      all = false;
      continue;
    }
    verified |= std::uint64_t{1} << local;
    const OpDescriptor theirs = window_->signature(local, op.seq);
    if (theirs == op) continue;
    const int other = group_.local_rank_at(local);
    return Failure{FailureKind::usage, -1, op.seq,
                   "rank " + std::to_string(other) + " called " + theirs.describe() + ", but rank " + std::to_string(group_.rank) + " called " +
                       op.describe() + "; all ranks must make the same calls in the same order"};
  }
  if (all) verified = never;
  return std::nullopt;
}

std::optional<Failure> Executor::find_failure(const OpDescriptor& op, std::int64_t idle_ns) const {
  if (auto failure = local_culprit(*window_, group_, op, idle_ns, local_)) return failure;
  const int leader = group_.local_rank_at(0);
  const Line& network = window_->line(window_->network());
  if (config_.leader_fd >= 0 && hung_up(config_.leader_fd) && window_->line(0).left.load() == 0) {
    return Failure{FailureKind::peer_failed, leader, op.seq, group_.label(leader) + " died during " + op.name() + ": its connection broke"};
  }
  if (idle_ns >= group_.timeout_ns && monotonic_ns() - network.heartbeat_ns.load() > group_.timeout_ns && window_->line(0).left.load() == 0) {
    return Failure{FailureKind::peer_failed, leader, op.seq, group_.label(leader) + " stopped in the middle of " + op.name() + ": no heartbeat for " + seconds(idle_ns)};
  }
  if (idle_ns >= 10 * group_.timeout_ns) {
    return Failure{FailureKind::peer_failed, -1, op.seq, op.name() + " has made no progress for " + seconds(idle_ns) + " and the cause is unknown"};
  }
  return std::nullopt;
}

}  // namespace ff
