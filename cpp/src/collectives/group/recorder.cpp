#include "fireflyer/collectives/group/recorder.hpp"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <stdexcept>

#include "fireflyer/base/clock.hpp"

namespace ff {
namespace {

constexpr int read_tries = 1000;
constexpr std::int64_t sample_unit_ns = 1000;
constexpr std::uint64_t sample_limit = 0xffffffffu;

// Release and acquire order the fields between the two values of the version: whoever reads a field that is being
// written then also sees that the version has moved. On x86 they cost what plain accesses cost.
template <class T>
void put(std::atomic<T>& field, T value) {
  field.store(value, std::memory_order_release);
}

template <class T>
T get(const std::atomic<T>& field) {
  return field.load(std::memory_order_acquire);
}

std::int64_t clock_ns(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

// The wall clock in the middle of two looks at the monotonic one; the closest of a few, as a thread may lose its core.
ClockPair clock_pair() {
  ClockPair best;
  std::int64_t best_gap_ns = 0;
  for (int attempt = 0; attempt < 4; ++attempt) {
    const std::int64_t before = monotonic_ns(), wall = clock_ns(CLOCK_REALTIME), after = monotonic_ns();
    if (attempt == 0 || after - before < best_gap_ns) {
      best_gap_ns = after - before;
      best = {before + best_gap_ns / 2, wall};
    }
  }
  return best;
}

}  // namespace

const char* path_name(Path path) {
  switch (path) {
    case Path::small: return "small";
    case Path::direct: return "direct";
    case Path::vm: return "vm";
    case Path::staged: return "staged";
    case Path::pipeline: return "pipeline";
    case Path::exchange: return "exchange";
    case Path::unknown: break;
  }
  return "";
}

const char* direction_name(Direction direction) {
  switch (direction) {
    case Direction::send: return "send";
    case Direction::receive: return "recv";
    case Direction::none: break;
  }
  return "";
}

const char* record_state_name(RecordState state) {
  switch (state) {
    case RecordState::queued: return "queued";
    case RecordState::running: return "running";
    case RecordState::done: return "done";
    case RecordState::failed: break;
  }
  return "failed";
}

struct Recorder::Slot {
  std::atomic<std::uint64_t> version{0};  // odd: being written; 0: never used
  std::atomic<std::uint64_t> id{0};
  std::atomic<RecordState> state{RecordState::done};
  std::atomic<std::uint64_t> seq{0}, count{0}, bytes{0}, chunks{0}, chunks_done{0}, chunk_bytes{0}, saturated{0};
  std::atomic<std::int64_t> tag{0}, submitted_ns{0}, started_ns{0}, finished_ns{0}, progress_ns{0};
  std::atomic<OpKind> kind{OpKind::barrier};
  std::atomic<std::int32_t> root{-1}, peer{-1};
  std::atomic<FailureKind> failure{FailureKind::none};
  std::atomic<DType> dtype{DType::f32};
  std::atomic<ReduceOp> reduce{ReduceOp::sum};
  std::atomic<Direction> direction{Direction::none};
  std::atomic<Path> path{Path::unknown};
  std::atomic<std::uint8_t> algorithm{0};
  std::atomic<std::uint8_t> samples{0};
  std::atomic<std::uint64_t> next_sample{0}, stride{1};
  std::array<std::atomic<std::uint64_t>, max_samples> sample{};  // chunks done << 32 | microseconds since the start

  // Between the two the record may be written. There is more than one writer only where a record is overwritten while
  // the owner of a handle to its predecessor writes: then one waits for some stores of the other.
  std::uint64_t lock() {
    for (;;) {
      std::uint64_t seen = version.load(std::memory_order_relaxed);
      if (seen % 2 == 0 && version.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire, std::memory_order_relaxed)) return seen + 2;
      if (seen % 2 == 1) sched_yield();
    }
  }
  void unlock(std::uint64_t next) { version.store(next, std::memory_order_release); }

  bool live() const { return get(state) == RecordState::queued || get(state) == RecordState::running; }
  void keep_sample(std::uint64_t done, std::int64_t now_ns);
  RecordView copy(const std::vector<std::string>& algorithms) const;
};

// When all places are taken, every other one is given up and from then on half as many are kept.
void Recorder::Slot::keep_sample(std::uint64_t done, std::int64_t now_ns) {
  if (done < get(next_sample)) return;
  std::size_t used = get(samples);
  if (used == max_samples) {
    for (std::size_t i = 0; i < max_samples / 2; ++i) put(sample[i], get(sample[2 * i]));
    used = max_samples / 2;
    put(stride, get(stride) * 2);
  }
  const auto since_us = static_cast<std::uint64_t>(std::max<std::int64_t>(0, now_ns - get(started_ns)) / sample_unit_ns);
  put(sample[used], std::min(done, sample_limit) << 32 | std::min(since_us, sample_limit));
  put(samples, static_cast<std::uint8_t>(used + 1));
  put(next_sample, done + get(stride));
}

RecordView Recorder::Slot::copy(const std::vector<std::string>& algorithms) const {
  RecordView view;
  view.id = get(id);
  view.op = {get(seq), get(count), get(kind), get(dtype), get(root), get(reduce)};
  view.direction = get(direction);
  view.peer = get(peer);
  view.tag = get(tag);
  view.bytes = get(bytes);
  view.path = get(path);
  const std::size_t number = get(algorithm);
  if (number > 0 && number <= algorithms.size()) view.algorithm = algorithms[number - 1];
  view.state = get(state);
  view.failure = get(failure);
  view.submitted_ns = get(submitted_ns);
  view.started_ns = get(started_ns);
  view.finished_ns = get(finished_ns);
  view.progress_ns = get(progress_ns);
  view.chunks = get(chunks);
  view.chunks_done = get(chunks_done);
  view.chunk_bytes = get(chunk_bytes);
  view.saturated = get(saturated);
  const std::size_t used = std::min<std::size_t>(get(samples), max_samples);
  for (std::size_t i = 0; i < used; ++i) {
    const std::uint64_t packed = get(sample[i]);
    view.samples.push_back({packed >> 32, view.started_ns + static_cast<std::int64_t>(packed & sample_limit) * sample_unit_ns});
  }
  return view;
}

Recorder::Recorder(std::size_t capacity) : slots_(capacity) {
  if (capacity == 0) throw std::invalid_argument("a recorder needs room for at least one record");
  algorithms_.reserve(max_algorithms);
}

Recorder::~Recorder() = default;

std::size_t Recorder::capacity() const { return slots_.size(); }

Recorder::Entry Recorder::begin(const OpDescriptor& op, Path path, std::uint64_t bytes, std::int64_t submitted_ns) {
  RecordView record;
  record.op = op;
  record.path = path;
  record.bytes = bytes;
  record.submitted_ns = submitted_ns;
  return take(record);
}

Recorder::Entry Recorder::begin(Direction direction, std::int32_t peer, std::int64_t tag, std::uint64_t seq, std::uint64_t count, DType dtype,
                                std::uint64_t bytes, std::int64_t submitted_ns) {
  RecordView record;
  record.op.seq = seq;
  record.op.count = count;
  record.op.dtype = dtype;
  record.direction = direction;
  record.peer = peer;
  record.tag = tag;
  record.path = Path::exchange;
  record.bytes = bytes;
  record.submitted_ns = submitted_ns;
  return take(record);
}

Recorder::Entry Recorder::take(const RecordView& record) {
  const std::lock_guard guard(mutex_);
  const std::uint64_t ends_at = record.direction == Direction::none ? record.op.seq + 1 : 0;
  submitted_ = std::max(submitted_, ends_at);
  std::size_t tried = 0;
  while (tried < slots_.size() && slots_[next_ % slots_.size()].live()) ++tried, ++next_;
  if (tried == slots_.size()) {
    ++dropped_;
    return Entry(this, nullptr, 0, ends_at);
  }
  Slot& slot = slots_[next_++ % slots_.size()];
  const std::uint64_t id = next_id_++;
  const std::uint64_t unlocked = slot.lock();
  put(slot.id, id);
  put(slot.state, RecordState::queued);
  put(slot.seq, record.op.seq);
  put(slot.count, record.op.count);
  put(slot.kind, record.op.kind);
  put(slot.dtype, record.op.dtype);
  put(slot.root, record.op.root);
  put(slot.reduce, record.op.reduce);
  put(slot.direction, record.direction);
  put(slot.peer, record.peer);
  put(slot.tag, record.tag);
  put(slot.bytes, record.bytes);
  put(slot.path, record.path);
  put(slot.submitted_ns, record.submitted_ns);
  put(slot.algorithm, std::uint8_t{0});
  put(slot.failure, FailureKind::none);
  for (auto* field : {&slot.chunks, &slot.chunks_done, &slot.chunk_bytes, &slot.saturated, &slot.next_sample}) put(*field, std::uint64_t{0});
  for (auto* field : {&slot.started_ns, &slot.finished_ns, &slot.progress_ns}) put(*field, std::int64_t{0});
  put(slot.samples, std::uint8_t{0});
  put(slot.stride, std::uint64_t{1});
  slot.unlock(unlocked);
  return Entry(this, &slot, id, ends_at);
}

int Recorder::algorithm(std::string_view name) {
  if (name.empty()) return 0;
  const std::lock_guard guard(mutex_);
  const auto known = std::find(algorithms_.begin(), algorithms_.end(), name);
  if (known != algorithms_.end()) return static_cast<int>(known - algorithms_.begin()) + 1;
  if (algorithms_.size() == max_algorithms) return 0;
  algorithms_.emplace_back(name);
  return static_cast<int>(algorithms_.size());
}

Snapshot Recorder::snapshot() const {
  Snapshot shot;
  std::vector<std::string> algorithms;
  {
    const std::lock_guard guard(mutex_);
    shot.submitted = submitted_;
    shot.dropped = dropped_;
    algorithms = algorithms_;
  }
  shot.finished = finished_.load(std::memory_order_acquire);
  shot.clock = clock_pair();
  for (const Slot& slot : slots_) {
    for (int attempt = 0; attempt < read_tries; ++attempt) {
      const std::uint64_t before = get(slot.version);
      if (before == 0) break;
      if (before % 2 == 0) {
        RecordView view = slot.copy(algorithms);
        if (slot.version.load(std::memory_order_relaxed) == before) {
          shot.records.push_back(std::move(view));
          break;
        }
      } else {
        sched_yield();  // the writer lost its core, or this is the child of a fork that happened while it wrote
      }
    }
  }
  std::sort(shot.records.begin(), shot.records.end(), [](const RecordView& a, const RecordView& b) { return a.id < b.id; });
  return shot;
}

void Recorder::Entry::route(Path path, int algorithm, std::uint64_t chunks, std::uint64_t chunk_bytes) const {
  if (slot_ == nullptr) return;
  const std::uint64_t unlocked = slot_->lock();
  if (get(slot_->id) == id_) {
    put(slot_->path, path);
    put(slot_->algorithm, static_cast<std::uint8_t>(algorithm));
    put(slot_->chunks, chunks);
    put(slot_->chunk_bytes, chunk_bytes);
  }
  slot_->unlock(unlocked);
}

void Recorder::Entry::started(std::int64_t now_ns) const {
  if (slot_ == nullptr) return;
  const std::uint64_t unlocked = slot_->lock();
  if (get(slot_->id) == id_ && get(slot_->state) == RecordState::queued) {
    put(slot_->started_ns, now_ns);
    put(slot_->state, RecordState::running);
  }
  slot_->unlock(unlocked);
}

void Recorder::Entry::progress(std::uint64_t chunks_done, std::int64_t now_ns) const {
  if (slot_ == nullptr) return;
  const std::uint64_t unlocked = slot_->lock();
  if (get(slot_->id) == id_ && get(slot_->state) == RecordState::running && chunks_done > get(slot_->chunks_done)) {
    put(slot_->chunks_done, chunks_done);
    put(slot_->progress_ns, now_ns);
    slot_->keep_sample(chunks_done, now_ns);
  }
  slot_->unlock(unlocked);
}

void Recorder::Entry::met(std::int32_t peer) const {
  if (slot_ == nullptr) return;
  const std::uint64_t unlocked = slot_->lock();
  if (get(slot_->id) == id_) put(slot_->peer, peer);
  slot_->unlock(unlocked);
}

void Recorder::Entry::saturated(std::uint64_t values) const {
  if (slot_ == nullptr || values == 0) return;
  const std::uint64_t unlocked = slot_->lock();
  if (get(slot_->id) == id_) put(slot_->saturated, get(slot_->saturated) + values);
  slot_->unlock(unlocked);
}

void Recorder::Entry::finish(FailureKind kind, std::int64_t now_ns) const {
  if (owner_ != nullptr && kind == FailureKind::none) owner_->count_finished(ends_at_);
  if (slot_ == nullptr) return;
  const std::uint64_t unlocked = slot_->lock();
  if (get(slot_->id) == id_ && slot_->live()) {
    put(slot_->finished_ns, now_ns);
    put(slot_->failure, kind);
    put(slot_->state, kind == FailureKind::none ? RecordState::done : RecordState::failed);
  }
  slot_->unlock(unlocked);
}

void Recorder::count_finished(std::uint64_t upto) {
  std::uint64_t seen = finished_.load(std::memory_order_relaxed);
  while (seen < upto && !finished_.compare_exchange_weak(seen, upto, std::memory_order_release, std::memory_order_relaxed)) {
  }
}

}  // namespace ff
