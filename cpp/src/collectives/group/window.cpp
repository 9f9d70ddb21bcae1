#include "fireflyer/collectives/group/window.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "fireflyer/base/clock.hpp"
#include "fireflyer/base/placement.hpp"

namespace ff {
namespace {

constexpr std::uint64_t window_magic = 0x31574655'48524546ULL;
constexpr std::size_t page = 4096;
constexpr int nobody = -1;

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

struct Sizes {
  std::size_t control, eager, stride, slot, total;
  Sizes(int ranks, std::uint32_t slots, std::size_t chunk_bytes)
      : control(round_up(sizeof(Control), page)), eager(round_up(eager_stride * 2 * static_cast<std::size_t>(ranks), page)),
        stride(round_up(chunk_bytes, page)), slot(stride * (static_cast<std::size_t>(ranks) + 2)), total(control + eager + slot * slots) {}
};

[[noreturn]] void raise(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

bool futex_wait(std::atomic<std::uint32_t>* word, std::uint32_t expected, std::int64_t timeout_ns) {
  timespec limit{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), FUTEX_WAIT, expected, &limit, nullptr, 0) == 0 || errno != ETIMEDOUT;
}

void futex_wake(std::atomic<std::uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

// Bytes of the character that begins here; 0 where there is none of valid UTF-8.
std::size_t character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const std::size_t length = byte(0) < 0x80 ? 1 : byte(0) >> 5 == 6 ? 2
                                              : byte(0) >> 4 == 14  ? 3
                                              : byte(0) >> 3 == 30  ? 4
                                                                    : 0;
  if (length == 0 || length > text.size()) return 0;
  std::uint32_t code = length == 1 ? byte(0) : byte(0) & (0x7fU >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if (byte(i) >> 6 != 2) return 0;
    code = code << 6 | (byte(i) & 0x3fU);
  }
  constexpr std::array<std::uint32_t, 5> least{0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  return code >= least[length] && code < 0x110000 && !surrogate ? length : 0;
}

// What was said, fit to be shown: valid UTF-8 without control characters, cut between two characters.
std::string one_line(std::string_view text) {
  std::string line;
  while (!text.empty()) {
    const std::size_t length = character(text), taken = std::max<std::size_t>(length, 1);
    const bool shown = length > 1 || (length == 1 && text[0] >= ' ' && text[0] != 0x7f);
    if (line.size() + (shown ? taken : 1) >= max_failure_text) break;
    if (shown) line += text.substr(0, taken);
    else line += text[0] == '\n' ? ' ' : '?';
    text.remove_prefix(taken);
  }
  return line;
}

}  // namespace

int Window::create(int local_ranks, std::uint32_t slots, std::size_t chunk_bytes) {
  if (local_ranks < 1 || local_ranks > max_local_ranks) throw std::invalid_argument("a node has 1 to 64 ranks");
  if (slots < 2 || slots > max_slots || slots % 2 != 0) throw std::invalid_argument("the window must be even and 2 to 32 chunks");
  if (chunk_bytes < 1 || chunk_bytes > max_chunk_bytes) throw std::invalid_argument("a chunk has at least a byte and at most 64 MiB");
  const Sizes sizes(local_ranks, slots, chunk_bytes);
  const int fd = memfd_create("fireflyer-window", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) raise("cannot create shared memory");
  void* map = MAP_FAILED;
  if (ftruncate(fd, static_cast<off_t>(sizes.total)) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0) {
    map = mmap(nullptr, sizes.control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (map == MAP_FAILED) {
    const int error = errno;
    close(fd);
    errno = error;
    raise("cannot size shared memory");
  }
  auto* control = static_cast<Control*>(map);  // a fresh memory file is zeros, which is what every counter starts from
  control->magic = window_magic;
  control->local_ranks = static_cast<std::uint32_t>(local_ranks);
  control->slots = slots;
  control->chunk_bytes = chunk_bytes;
  control->total_bytes = sizes.total;
  munmap(map, sizes.control);
  return fd;
}

std::string Window::interleave(int fd, const std::vector<int>& nodes) {
  struct stat info{};
  if (fstat(fd, &info) != 0) return std::strerror(errno);
  const auto total = static_cast<std::size_t>(info.st_size);
  void* map = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) return std::strerror(errno);
  std::string refused = interleave_nodes(map, total, nodes);  // kept by the memory file, not by this mapping
  munmap(map, total);
  return refused;
}

Window::Window(int fd, int doorbell) : doorbell_(doorbell) {
  struct stat info{};
  if (fstat(fd, &info) != 0) raise("cannot examine shared memory");
  const auto total = static_cast<std::size_t>(info.st_size);
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) throw std::runtime_error("a window that can shrink under its users is refused");
  if (total < sizeof(Control)) throw std::runtime_error("shared memory is too small to be a window");
  // Its beginning first: of what is no window, no more memory is used than that.
  void* head = mmap(nullptr, sizeof(Control), PROT_READ, MAP_SHARED, fd, 0);
  if (head == MAP_FAILED) raise("cannot map shared memory");
  const volatile Control& said = *static_cast<Control*>(head);  // each word is read once: what was checked is what is used from now on
  const std::uint64_t magic = said.magic, chunk = said.chunk_bytes, all = said.total_bytes;
  const std::uint32_t local_ranks = said.local_ranks, in_ring = said.slots;
  munmap(head, sizeof(Control));
  const bool sane = magic == window_magic && all == total && local_ranks >= 1 && local_ranks <= max_local_ranks && in_ring >= 2 && in_ring <= max_slots &&
                    in_ring % 2 == 0 && chunk >= 1 && chunk <= max_chunk_bytes && Sizes(static_cast<int>(local_ranks), in_ring, chunk).total == total;
  if (!sane) throw std::runtime_error("shared memory is not a window of this version");
  void* map = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (map == MAP_FAILED) raise("cannot map shared memory");
  control_ = static_cast<Control*>(map);
  ranks_ = static_cast<int>(local_ranks);
  slots_ = in_ring;
  chunk_bytes_ = chunk;
  total_bytes_ = total;
  const Sizes sizes(ranks_, slots_, chunk_bytes_);
  stride_ = sizes.stride;
  slot_bytes_ = sizes.slot;
  eager_messages_ = static_cast<char*>(map) + sizes.control;
  data_ = eager_messages_ + sizes.eager;
}

Window::~Window() { munmap(control_, total_bytes_); }

std::uint64_t Window::value(Counter which) const {
  if (which >= counter_done0) return line(network()).count[which].load();
  std::uint64_t least = never;
  for (int r = 0; r < ranks(); ++r) least = std::min(least, line(r).count[which].load());
  return which == counter_reduced || which == counter_out ? std::min(least, pool_value(which)) : least;
}

void Window::raise_pool(Counter which, std::uint64_t to) const {
  std::atomic<std::uint64_t>& count = line(network()).count[which];
  std::uint64_t now = count.load();
  while (now < to) {
    if (count.compare_exchange_weak(now, to)) return ring_for(nobody, which);
  }
}

void Window::ring(int index) const {
  Line& target = line(index);
  target.bell.fetch_add(1);
  if (index != network()) {
    futex_wake(&target.bell);
  } else if (doorbell_ >= 0) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = write(doorbell_, &one, sizeof one);  // full means that it rings already
  }
}

void Window::advance(int index, Counter which, std::uint64_t to) const {
  line(index).count[which].store(to);
  ring_for(index, which);
}

void Window::ring_for(int self, Counter which) const {
  std::uint64_t now = never;
  for (int other = 0; other <= ranks(); ++other) {
    Line& target = line(other);
    if (other == self || target.waiting.load() == 0) continue;
    const std::uint64_t wanted = target.wants[which].load(std::memory_order_relaxed);
    if (wanted == never) continue;
    if (now == never) now = value(which);
    if (now >= wanted && target.waiting.exchange(0) != 0) ring(other);  // once is enough
  }
}

bool Window::met(const Wants& wants) const {
  for (int which = 0; which < counters; ++which) {
    if (wants[which] != never && value(static_cast<Counter>(which)) >= wants[which]) return true;
  }
  return false;
}

void Window::announce(int index, const Wants& wants) const {
  Line& mine = line(index);
  for (int which = 0; which < counters; ++which) mine.wants[which].store(wants[which], std::memory_order_relaxed);
  mine.waiting.store(1);
}

void Window::retract(int index) const { line(index).waiting.store(0, std::memory_order_relaxed); }

bool Window::wait(int rank, const Wants& wants, std::int64_t timeout_ns) const {
  Line& mine = line(rank);
  const std::uint32_t bell = mine.bell.load();
  announce(rank, wants);
  const bool rung = met(wants) || failed() || futex_wait(&mine.bell, bell, timeout_ns);
  retract(rank);
  return rung;
}

void Window::enter(int rank, const Geometry& geometry, const Places& places) const {
  enter_quietly(rank, geometry.op, geometry.base, places, monotonic_ns());
  ring_for(rank, counter_entered);
}

void Window::enter_quietly(int rank, const OpDescriptor& op, std::uint64_t base, const Places& places, std::int64_t now_ns) const {
  Line& mine = line(rank);
  const std::uint64_t said[6] = {op.count, call_of(op), places.in, places.out, places.in_arena, places.out_arena};
  auto& words = mine.signature[op.seq % signature_ring];
  for (std::size_t i = 0; i < words.size(); ++i) words[i].store(said[i], std::memory_order_relaxed);
  mine.heartbeat_ns.store(now_ns, std::memory_order_relaxed);
  mine.entered.store(op.seq + 1, std::memory_order_release);
  mine.count[counter_entered].store(base + 1);
}

void Window::leave(int rank, const OpDescriptor& op) const { line(rank).finished.store(op.seq + 1, std::memory_order_release); }

Places Window::places(int rank, std::uint64_t seq) const {
  const auto& words = line(rank).signature[seq % signature_ring];
  const auto at = [&](std::size_t i) { return words[i].load(std::memory_order_relaxed); };
  return Places{at(2), at(3), at(4), at(5)};
}

OpDescriptor Window::signature(int rank, std::uint64_t seq) const {
  const auto& words = line(rank).signature[seq % signature_ring];
  const std::uint64_t call = words[1].load(std::memory_order_relaxed);
  OpDescriptor op;
  op.seq = seq;
  op.count = words[0].load(std::memory_order_relaxed);
  if ((call & 0xff) >= dtype_count || (call >> 8 & 0xff) >= reduce_op_count) {  // tables are indexed by these
    op.kind = static_cast<OpKind>(op_kind_count);  // which has no name
    return op;
  }
  op.kind = static_cast<OpKind>(call >> 16 & 0xffff);
  op.reduce = static_cast<ReduceOp>(call >> 8 & 0xff);
  op.dtype = static_cast<DType>(call & 0xff);
  op.root = static_cast<std::int32_t>(static_cast<std::uint32_t>(call >> 32));
  return op;
}

bool Window::fail(const Failure& failure) const {
  const std::int64_t give_up_ns = monotonic_ns() + 100'000'000;
  for (std::uint32_t well = 0; !control_->failed.compare_exchange_strong(well, 1); well = 0) {
    if (well == 2) return false;
    if (monotonic_ns() > give_up_ns) break;  // whoever claimed it was killed before it could say why
  }
  control_->failure_kind.store(static_cast<std::uint32_t>(failure.kind));
  control_->failure_culprit.store(failure.culprit);
  control_->failure_seq.store(failure.seq);
  const std::string text = one_line(failure.text);
  std::memcpy(control_->failure_text, text.data(), text.size());
  control_->failure_text[text.size()] = '\0';
  control_->failed.store(2, std::memory_order_release);
  for (int index = 0; index <= ranks(); ++index) ring(index);
  return true;
}

Failure Window::failure() const {
  Failure failure;
  const std::uint32_t kind = control_->failure_kind.load();
  const bool known = kind >= static_cast<std::uint32_t>(FailureKind::peer_failed) && kind <= static_cast<std::uint32_t>(FailureKind::corruption);
  failure.kind = known ? static_cast<FailureKind>(kind) : FailureKind::peer_failed;
  failure.culprit = std::max(control_->failure_culprit.load(), nobody);
  failure.seq = control_->failure_seq.load();
  failure.text = one_line(std::string(control_->failure_text, strnlen(control_->failure_text, max_failure_text)));
  return failure;
}

std::uint64_t Window::fingerprint() const {
  std::uint64_t sum = 0;
  for (int index = 0; index <= ranks(); ++index) {
    for (const auto& count : line(index).count) sum += count.load(std::memory_order_relaxed);
    sum += line(index).entered.load(std::memory_order_relaxed) + line(index).moved.load(std::memory_order_relaxed);
  }
  return sum;
}

}  // namespace ff
